//! The arena report for a terminal: figures, a small memory map, and what fills the arena at the peak.
//!
//! Exact bytes stand beside sizes for people. With colour, ANSI codes mark the name, the verdict and the peak; the words are
//! the same without. Control characters in names and labels are replaced, so a profile cannot drive a terminal.

use std::collections::HashMap;
use std::io::{self, Write};

use terrace_profiles::units::Bytes;

use super::elide;
use super::picture::{Rect, rects, ticks};
use super::summary::{InUse, Summary};
use crate::plan::Plan;

/// Rows of the table at the peak.
const MOST_ROWS: usize = 20;
/// Columns and rows of the memory map.
const MAP: (usize, usize) = (72, 16);
/// Up to this many rectangles each gets a letter in the map; beyond, shades show how full a cell is.
const MOST_LETTERS: usize = 26;
/// Lines of notes, and characters in each.
const MOST_NOTE_LINES: usize = 3;
const NOTE_LINE: usize = 96;
/// Characters of a label or a note that are printed.
const MOST_CHARS: usize = 72;

/// ANSI codes, or nothing.
pub(super) struct Paint(pub(super) bool);

impl Paint {
    fn with(&self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
    pub(super) fn bold(&self, text: &str) -> String {
        self.with("1", text)
    }
    pub(super) fn dim(&self, text: &str) -> String {
        self.with("2", text)
    }
    pub(super) fn good(&self, text: &str) -> String {
        self.with("32", text)
    }
    pub(super) fn warn(&self, text: &str) -> String {
        self.with("33", text)
    }
    pub(super) fn bad(&self, text: &str) -> String {
        self.with("31", text)
    }
}

/// Writes the report; see the module's page.
pub(super) fn write(plan: &Plan, summary: &Summary, colour: bool, out: &mut dyn Write) -> io::Result<()> {
    let paint = Paint(colour);
    figures(summary, &paint, out)?;
    if !summary.culprits.is_empty() {
        culprits(summary, &paint, out)?;
    }
    if !summary.spaces.is_empty() {
        spaces(summary, &paint, out)?;
    }
    if summary.lanes.len() > 1 {
        lanes(summary, &paint, out)?;
    }
    if !summary.makespan.is_zero() {
        map(plan, summary, &paint, out)?;
        peak(summary, &paint, out)?;
    }
    Ok(())
}

fn figures(summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", paint.bold(&printable(&summary.name)))?;
    for line in notes(&summary.notes) {
        writeln!(out, "  {}", paint.dim(&line))?;
    }
    let mut row = |key: &str, bytes: Bytes, remark: &str| {
        let line = format!("  {key:<12} {bytes:>10}  {:>15} B  {remark}", bytes.get());
        writeln!(out, "{}", line.trim_end())
    };
    let count = summary.buffers;
    let total = format!("all {count} buffers, sizes rounded up to {}", summary.alignment);
    row("total", summary.total_bytes, &total)?;
    let bound = match summary.bound_by_buffer {
        Some(buffer) => format!("where buffer {buffer} alone ends"),
        None if summary.lanes.len() > 1 => "the peak loads of the lanes together".to_owned(),
        None => format!("the load at tick {}", summary.peak_tick),
    };
    row("lower bound", summary.lower_bound, &bound)?;
    row("makespan", summary.makespan, &verdict(summary, paint))?;
    if let Some(capacity) = summary.capacity {
        row("capacity", capacity, &room(summary, paint))?;
    }
    writeln!(out, "  {:<12} {:.6}", "ratio", summary.ratio)?;
    let (strategy, nodes) = (printable(&summary.strategy), summary.nodes);
    writeln!(out, "  {:<12} {strategy}, {nodes} search {}", "strategy", plural(nodes, "node"))?;
    writeln!(out, "  {:<12} {}", "fingerprint", summary.fingerprint)?;
    if summary.interrupted {
        let remark = "the time limit cut the search short: the makespan may differ between runs";
        writeln!(out, "  {}", paint.warn(remark))?;
    }
    Ok(())
}

/// Where the profile comes from, in at most [`MOST_NOTE_LINES`] lines.
fn notes(notes: &[(String, String)]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for (key, text) in notes {
        let note = format!("{}: {}", printable(key), printable(text));
        let full = lines.len() == MOST_NOTE_LINES;
        match lines.last_mut() {
            Some(line) if line.chars().count() + note.chars().count() < NOTE_LINE => {
                line.push_str(" · ");
                line.push_str(&note);
            }
            Some(line) if full => {
                line.push_str(" …");
                break;
            }
            _ => lines.push(note),
        }
    }
    lines
}

fn room(summary: &Summary, paint: &Paint) -> String {
    if let Some(room) = summary.headroom {
        return format!("headroom {room} ({} B)", room.get());
    }
    let short = summary.short_bytes.unwrap_or(Bytes::ZERO);
    let short = format!("does not fit: {short} ({} B) short", short.get());
    if summary.proven_not_to_fit {
        paint.bad(&format!("{short}, and no plan can fit"))
    } else {
        paint.bad(&format!("{short}; a larger budget may find a plan that fits"))
    }
}

fn verdict(summary: &Summary, paint: &Paint) -> String {
    let gap = summary.gap_bytes;
    let percent = match summary.lower_bound.get() {
        0 => 0.0,
        floor => gap.get() as f64 / floor as f64 * 100.0,
    };
    match (summary.optimal, gap.is_zero()) {
        (true, true) => paint.good("proven optimal"),
        (true, false) => paint.good(&format!("proven optimal by search, {gap} above the lower bound")),
        (false, _) => paint.warn(&format!("not proven optimal: gap {gap} ({} B, {percent:.3} %)", gap.get())),
    }
}

fn spaces(summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    let count = summary.spaces.len();
    writeln!(out, "\n{}", paint.bold(&format!("{count} {}, filled in this order", plural(count as u64, "space"))))?;
    for space in &summary.spaces {
        let (bytes, exact, capacity, offset) = (space.bytes, space.bytes.get(), space.capacity, space.offset);
        let things = plural(space.storages as u64, "storage");
        let from = format!("{} {things}, offsets from {offset}", space.storages);
        writeln!(out, "  {bytes:>10}  {exact:>15} B  of {capacity}: {from}")?;
    }
    Ok(())
}

/// Who cannot be in one arena of the size asked for.
fn culprits(summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    let (count, capacity) = (summary.culprits.len(), summary.capacity.unwrap_or(Bytes::ZERO));
    let needed = if summary.culprits_minimal { ", and without any of them the rest would" } else { "" };
    let things = plural(count as u64, "buffer");
    let does = if count == 1 { "does" } else { "do" };
    writeln!(out, "\n{}", paint.bold(&format!("{count} {things} that alone {does} not fit into {capacity}{needed}")))?;
    for culprit in summary.culprits.iter().take(MOST_ROWS) {
        let (bytes, exact) = (culprit.bytes, culprit.bytes.get());
        let life = format!("ticks {} to {}", culprit.birth, culprit.death);
        writeln!(out, "  {bytes:>10}  {exact:>15} B  {life}  {}", printable(&culprit.label))?;
    }
    if let Some(more) = count.checked_sub(MOST_ROWS + 1) {
        writeln!(out, "  … and {} more", more + 1)?;
    }
    Ok(())
}

fn lanes(summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\n{}", paint.bold(&format!("{} lanes, which share no bytes", summary.lanes.len())))?;
    for lane in &summary.lanes {
        let (bytes, count, load, tick) = (lane.bytes, lane.storages, lane.load, lane.tick);
        let name = printable(&lane.name);
        let things = plural(count as u64, "storage");
        let exact = bytes.get();
        writeln!(out, "  {bytes:>10}  {exact:>15} B  {count} {things}, load {load} at tick {tick}  {name}")?;
    }
    Ok(())
}

/// The map: address up, time right.
fn map(plan: &Plan, summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    let rects = rects(plan);
    let (first, last) = ticks(plan);
    let cells = if rects.len() <= MOST_LETTERS {
        letters(&rects, (first, last), summary.makespan.get())
    } else {
        shades(&rects, (first, last), summary.makespan.get())
    };
    let (columns, rows) = MAP;
    let column = |tick: u64| ((tick - first) as u128 * columns as u128 / (last - first) as u128) as usize;
    writeln!(out)?;
    for (index, line) in cells.iter().rev().enumerate() {
        let mark = match index {
            0 => summary.makespan.to_string(),
            _ if index == rows - 1 => "0".to_owned(),
            _ => String::new(),
        };
        writeln!(out, "  {mark:>10} │{}│", line.iter().collect::<String>())?;
    }
    let at = column(summary.peak_tick.0).min(columns - 1);
    let rule: String = (0..columns).map(|k| if k == at { '┴' } else { '─' }).collect();
    writeln!(out, "  {:>10} └{rule}┘", "")?;
    let (from, to) = (format!("tick {first}"), last.to_string());
    let peak = format!("peak {}", summary.peak_tick);
    // The peak's mark under its column, or as near as the ends allow.
    let mut line: Vec<char> = vec![' '; columns];
    let mut put = |at: usize, text: &str| {
        for (place, c) in line.iter_mut().skip(at).zip(text.chars()) {
            *place = c;
        }
    };
    put(0, &from);
    put(columns.saturating_sub(to.len()), &to);
    let (low, high) = (from.len() + 2, columns.saturating_sub(to.len() + peak.len() + 2));
    if low <= high {
        put(at.saturating_sub(peak.len() / 2).clamp(low, high), &peak);
    }
    writeln!(out, "  {:>10}  {}", "", paint.dim(line.iter().collect::<String>().trim_end()))?;
    if rects.len() <= MOST_LETTERS {
        for (index, rect) in rects.iter().enumerate() {
            let label = printable(plan.label(&plan.slots()[rect.slot as usize]));
            let bytes = Bytes::new(rect.to - rect.from).expect("a part of the arena").to_string();
            writeln!(out, "  {:>10}  {} {bytes:>10}  {label}", "", letter(index))?;
        }
    }
    Ok(())
}

fn letter(index: usize) -> char {
    char::from(b'a' + (index % MOST_LETTERS) as u8)
}

/// Share of each cell, in `[0, 1]`, that each rectangle covers: `visit(row, column, rectangle, share)`.
fn cover(rects: &[Rect], (first, last): (u64, u64), top: u64, mut visit: impl FnMut(usize, usize, usize, f64)) {
    let (columns, rows) = MAP;
    let wide = (last - first) as f64 / columns as f64;
    let high = top as f64 / rows as f64;
    for (index, rect) in rects.iter().enumerate() {
        let (x0, x1) = ((rect.birth - first) as f64 / wide, (rect.death - first) as f64 / wide);
        let (y0, y1) = (rect.from as f64 / high, rect.to as f64 / high);
        for row in y0 as usize..(y1.ceil() as usize).min(rows) {
            let tall = y1.min((row + 1) as f64) - y0.max(row as f64);
            for column in x0 as usize..(x1.ceil() as usize).min(columns) {
                let long = x1.min((column + 1) as f64) - x0.max(column as f64);
                visit(row, column, index, tall * long);
            }
        }
    }
}

fn shades(rects: &[Rect], ticks: (u64, u64), top: u64) -> Vec<Vec<char>> {
    let (columns, rows) = MAP;
    let mut full = vec![vec![0.0; columns]; rows];
    cover(rects, ticks, top, |row, column, _, share| full[row][column] += share);
    let shade = |share: f64| match share {
        s if s >= 0.95 => '█',
        s if s >= 0.60 => '▓',
        s if s >= 0.25 => '▒',
        s if s > 0.01 => '░',
        _ => ' ',
    };
    full.iter().map(|row| row.iter().map(|share| shade(*share)).collect()).collect()
}

fn letters(rects: &[Rect], ticks: (u64, u64), top: u64) -> Vec<Vec<char>> {
    let (columns, rows) = MAP;
    // Who covers most of a cell names it.
    let mut most = vec![vec![(0.0, ' '); columns]; rows];
    cover(rects, ticks, top, |row, column, index, share| {
        if share > most[row][column].0 {
            most[row][column] = (share, letter(index));
        }
    });
    most.iter().map(|row| row.iter().map(|(_, letter)| *letter).collect()).collect()
}

/// Buffers of one label and size at the peak.
struct Group<'a> {
    first: &'a InUse,
    count: u64,
    bytes: Bytes,
}

fn peak(summary: &Summary, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
    let (count, bytes) = (summary.peak.len(), summary.peak_bytes);
    let when =
        if summary.lanes.len() > 1 { "the lanes' peaks".to_owned() } else { format!("tick {}", summary.peak_tick) };
    let head = format!("peak at {when}: {bytes} in {count} {}", plural(count as u64, "buffer"));
    writeln!(out, "\n{} ({} B)", paint.bold(&head), bytes.get())?;
    let groups = groups(&summary.peak);
    let shown = &groups[..groups.len().min(MOST_ROWS)];
    let widest = |texts: &mut dyn Iterator<Item = usize>, least: usize| texts.max().unwrap_or(0).max(least);
    let exact = widest(&mut shown.iter().map(|group| group.bytes.get().to_string().len()), 5);
    let wide = widest(&mut shown.iter().map(|group| times(group.count).chars().count()), 0);
    let offset = widest(&mut shown.iter().map(|group| group.first.offset.to_string().len()), 6);
    let birth = widest(&mut shown.iter().map(|group| group.first.birth.to_string().len()), 5);
    let death = widest(&mut shown.iter().map(|group| group.first.death.to_string().len()), 5);
    let head = format!(
        "  {:>10}  {:>exact$} {:wide$}  {:>offset$}  {:>birth$}  {:>death$}  label",
        "size", "bytes", "", "offset", "birth", "death"
    );
    writeln!(out, "{}", paint.dim(&head))?;
    for Group { first, count, bytes } in shown {
        let InUse { offset: at, birth: born, death: dies, .. } = first;
        let also = match first.aliases {
            0 => String::new(),
            aliases => format!(" (and {aliases} {} of it)", if aliases == 1 { "alias" } else { "aliases" }),
        };
        let (size, exact_bytes, label) = (bytes.to_string(), bytes.get(), printable(&first.label));
        let repeat = times(*count);
        writeln!(
            out,
            "  {size:>10}  {exact_bytes:>exact$} {repeat:wide$}  {at:>offset$}  {born:>birth$}  {dies:>death$}  {label}{also}"
        )?;
    }
    if let Some(rest) = groups.get(MOST_ROWS..).filter(|rest| !rest.is_empty()) {
        let more: u64 = rest.iter().map(|group| group.count).sum();
        let bytes: u64 = rest.iter().map(|group| group.bytes.get()).sum();
        let size = Bytes::new(bytes).expect("a part of the peak").to_string();
        writeln!(out, "  {size:>10}  {bytes:>exact$} … and {more} more")?;
    }
    if shown.iter().any(|group| group.count > 1) {
        let remark = "×N: N buffers of one label and size, their bytes together; offset, birth and death of the lowest";
        writeln!(out, "  {}", paint.dim(remark))?;
    }
    Ok(())
}

fn groups(peak: &[InUse]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut known: HashMap<(&str, Bytes, usize), usize> = HashMap::new();
    for row in peak {
        let group = *known.entry((&row.label, row.bytes, row.aliases)).or_insert(groups.len());
        match groups.get_mut(group) {
            // The peak is sorted by size, then offset: the first of a group is its lowest.
            None => groups.push(Group { first: row, count: 1, bytes: row.bytes }),
            Some(group) => {
                group.count += 1;
                group.bytes = group.bytes.checked_add(row.bytes).expect("a part of the peak");
            }
        }
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
    groups
}

fn times(count: u64) -> String {
    if count > 1 { format!("×{count}") } else { String::new() }
}

fn plural(count: u64, noun: &str) -> String {
    if count == 1 { noun.to_owned() } else { format!("{noun}s") }
}

/// A text as one short line without control characters.
pub(super) fn printable(text: &str) -> String {
    elide(&clean(text), MOST_CHARS)
}

/// A text as one line without control characters.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::ReportFormat;
    use super::super::tests::{SMALL, body, odd_plan, plan, refusal, show, show_verdict};
    use super::*;
    use crate::plan::Body;

    fn text(plan: &Plan) -> String {
        show(plan, ReportFormat::Text)
    }

    fn text_of(change: impl FnOnce(&mut Body)) -> String {
        let mut body = body(SMALL);
        change(&mut body);
        text(&Plan::new(body).unwrap())
    }

    #[track_caller]
    fn says(text: &str, line: &str) {
        assert!(text.contains(line), "{line:?} is not in:\n{text}");
    }

    #[test]
    fn the_figures_stand_beside_exact_bytes() {
        let text = text(&plan(SMALL));
        says(&text, "small\n  gpu: none\n");
        says(&text, "  total           4.0 KiB             4096 B  all 3 buffers, sizes rounded up to 512\n");
        says(&text, "  lower bound     3.0 KiB             3072 B  the load at tick 4\n");
        says(&text, "  makespan        3.0 KiB             3072 B  proven optimal\n");
        says(&text, "  strategy     by hand, 7 search nodes\n");
        says(&text, "peak at tick 4: 3.0 KiB in 2 buffers (3072 B)\n");
        says(&text, "     2.0 KiB   2048     1024      4     12  net.py:2:b\n");
        assert!(!text.contains("capacity") && !text.contains("lanes") && !text.contains("time limit"));
    }

    #[test]
    fn notes_are_brief() {
        let pairs: Vec<(String, String)> = (0..40).map(|k| (format!("key {k}"), "a text".to_owned())).collect();
        let lines = notes(&pairs);
        assert_eq!(lines.len(), MOST_NOTE_LINES);
        assert!(lines[0].starts_with("key 0: a text · key 1: a text · ") && lines[2].ends_with(" …"), "{lines:?}");
    }

    #[test]
    fn the_map_names_the_buffers_of_a_small_plan() {
        let text = text(&plan(SMALL));
        says(&text, &format!("     3.0 KiB │{}{}│\n", " ".repeat(24), "b".repeat(48)));
        says(&text, &format!("           0 │{}{}{}│\n", "a".repeat(36), "c".repeat(24), " ".repeat(12)));
        says(&text, &format!("└{}┴{}┘\n", "─".repeat(24), "─".repeat(47)));
        says(&text, "c    1.0 KiB  net.py:3:c\n");
    }

    #[test]
    fn the_map_of_a_large_plan_is_shaded() {
        let rows: Vec<_> = (0..100).map(|k| (512, "x", k, k + 50, (k % 50) * 512)).collect();
        let text = text(&plan(&rows));
        says(&text, "██████");
        says(&text, "░");
    }

    #[test]
    fn a_gap_an_interruption_and_a_capacity_are_told() {
        let text = text_of(|body| {
            body.placement.offsets[2] = terrace_profiles::units::Offset::new(3072).unwrap();
            body.proof.optimal = false;
            body.proof.interrupted = true;
            body.options.capacity = Bytes::new(5000);
        });
        says(
            &text,
            "  makespan        4.0 KiB             4096 B  not proven optimal: gap 1.0 KiB (1024 B, 33.333 %)\n",
        );
        says(&text, "  capacity        4.9 KiB             5000 B  headroom 904 B (904 B)\n");
        says(&text, "the time limit cut the search short: the makespan may differ between runs\n");
    }

    #[test]
    fn a_refusal_says_whether_more_search_can_help() {
        let refused = |proven| show_verdict(&refusal(2048, proven), ReportFormat::Text);
        let line = "  capacity        2.0 KiB             2048 B  does not fit: 1.0 KiB (1024 B) short";
        says(&refused(true), &format!("{line}, and no plan can fit\n"));
        says(&refused(false), &format!("{line}; a larger budget may find a plan that fits\n"));
        says(
            &refused(true),
            "2 buffers that alone do not fit into 2.0 KiB, and without any of them the rest would\n\
             \x20    2.0 KiB             2048 B  ticks 4 to 12  net.py:2:b\n\
             \x20    1.0 KiB             1024 B  ticks 0 to 6  net.py:1:a\n",
        );
        assert!(!refused(false).contains("alone"));
    }

    #[test]
    fn equal_buffers_are_one_row_and_the_tail_is_summed() {
        let mut rows: Vec<super::super::tests::Row> = (0..4).map(|k| (512, "same", 0, 9, 512 * k)).collect();
        let labels: Vec<&'static str> = (0..25).map(|k| &*format!("l{k}").leak()).collect();
        rows.extend((0..25).map(|k| (512, labels[k], 0, 9, 2048 + 512 * k as u64)));
        let text = text(&plan(&rows));
        says(&text, "     2.0 KiB   2048 ×4       0      0      9  same\n");
        says(&text, "     3.0 KiB   3072 … and 6 more\n");
        says(&text, "×N: N buffers");
    }

    #[test]
    fn lanes_have_a_line_each() {
        let text = text(&odd_plan());
        says(&text, "2 lanes, which share no bytes\n");
        says(&text, "     3.0 KiB             3072 B  2 storages, load 2.5 KiB at tick 4  main\n");
        says(&text, "     1.0 KiB             1024 B  1 storage, load 1.0 KiB at tick 6  copy\n");
    }

    #[test]
    fn a_label_cannot_drive_the_terminal_and_colour_is_asked_for() {
        let plan = plan(&[(512, "\x1b[2Jboo", 0, 1, 0)]);
        assert!(!text(&plan).contains('\x1b'));
        let mut out = Vec::new();
        write(&plan, &Summary::of(&plan), true, &mut out).unwrap();
        says(&String::from_utf8(out).unwrap(), "\x1b[32mproven optimal\x1b[0m");
    }

    #[test]
    fn an_empty_plan_has_figures_only() {
        let text = text(&plan(&[]));
        says(&text, "  makespan            0 B                0 B  proven optimal\n");
        assert!(!text.contains("peak at"));
    }
}
