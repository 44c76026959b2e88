//! What changed between two plans: figures, and the bytes that labels gained and lost.
//!
//! Buffers have no identity across profiles, so the k-th buffer of a label in one plan answers to the k-th of that label in
//! the other. A buffer counts the storage it opened, rounded up; an alias counts nothing.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;
use terrace_profiles::units::Bytes;

use super::json::write_line;
use super::summary::{LabelFigures, Summary, by_label};
use super::text::printable;
use crate::plan::Plan;

/// Rows of each table of the text.
const MOST_ROWS: usize = 20;

/// A number before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Change {
    /// In the old plan.
    pub old: u64,
    /// In the new plan.
    pub new: u64,
}

/// What changed; see the module's page. Prints as JSON in this order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// Name of the old plan.
    pub old_name: String,
    /// Name of the new plan.
    pub new_name: String,
    /// Whether anything below differs.
    pub changed: bool,
    /// Bytes of the arena.
    pub makespan: Change,
    /// The floors under it.
    pub lower_bound: Change,
    /// All rounded sizes together.
    pub total_bytes: Change,
    /// Buffers of the profiles.
    pub buffers: Change,
    /// The tick of the peak.
    pub peak_tick: Change,
    /// Bytes of buffers that appeared, and by which others grew.
    pub gained_bytes: u64,
    /// Bytes of buffers that vanished, and by which others shrank.
    pub lost_bytes: u64,
    /// The labels whose bytes differ, the largest change first: at the peak, then overall.
    pub labels: Vec<LabelChange>,
}

/// What changed for the buffers of one label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LabelChange {
    /// The label.
    pub label: String,
    /// Its bytes at the peak.
    pub peak_bytes: Change,
    /// The bytes of all its buffers.
    pub total_bytes: Change,
    /// How many buffers it has.
    pub buffers: Change,
    /// Buffers larger than their counterpart.
    pub grown: u64,
    /// Buffers smaller than their counterpart.
    pub shrunk: u64,
    /// Buffers without a counterpart in the old plan.
    pub appeared: u64,
    /// Buffers without a counterpart in the new plan.
    pub vanished: u64,
    /// By how much buffers grew or appeared.
    pub gained_bytes: u64,
    /// By how much buffers shrank or vanished.
    pub lost_bytes: u64,
}

/// Compares two plans.
pub fn diff(old: &Plan, new: &Plan) -> Diff {
    let mut labels: BTreeMap<&str, LabelChange> = BTreeMap::new();
    let (old_figures, new_figures) = (figures(old), figures(new));
    let (old_sizes, new_sizes) = (sizes(old), sizes(new));
    let all = old_sizes.keys().chain(new_sizes.keys());
    for label in all {
        let change = || {
            let (before, after) = (old_figures.get(label), new_figures.get(label));
            let (before, after) = (before.copied().unwrap_or_default(), after.copied().unwrap_or_default());
            let mut change = LabelChange {
                label: (*label).to_owned(),
                peak_bytes: Change { old: before.peak, new: after.peak },
                total_bytes: Change { old: before.total, new: after.total },
                buffers: Change { old: before.buffers, new: after.buffers },
                ..LabelChange::default()
            };
            let (none, none_too) = (Vec::new(), Vec::new());
            change.match_buffers(old_sizes.get(label).unwrap_or(&none), new_sizes.get(label).unwrap_or(&none_too));
            change
        };
        labels.entry(label).or_insert_with(change);
    }
    let mut labels: Vec<LabelChange> = labels.into_values().filter(LabelChange::changed).collect();
    labels.sort_by(|a, b| a.rank().cmp(&b.rank()));
    let (before, after) = (Summary::of(old), Summary::of(new));
    let bytes = |of: fn(&Summary) -> Bytes| Change { old: of(&before).get(), new: of(&after).get() };
    let mut diff = Diff {
        old_name: before.name.clone(),
        new_name: after.name.clone(),
        changed: false,
        makespan: bytes(|summary| summary.makespan),
        lower_bound: bytes(|summary| summary.lower_bound),
        total_bytes: bytes(|summary| summary.total_bytes),
        buffers: Change { old: before.buffers as u64, new: after.buffers as u64 },
        peak_tick: Change { old: before.peak_tick.0, new: after.peak_tick.0 },
        gained_bytes: labels.iter().map(|label| label.gained_bytes).sum(),
        lost_bytes: labels.iter().map(|label| label.lost_bytes).sum(),
        labels,
    };
    let figures = [diff.makespan, diff.lower_bound, diff.total_bytes, diff.buffers, diff.peak_tick];
    diff.changed = figures.iter().any(Change::is_some) || !diff.labels.is_empty();
    diff
}

/// Two labels of one plan may have the same text.
fn figures(plan: &Plan) -> BTreeMap<&str, LabelFigures> {
    let mut figures: BTreeMap<&str, LabelFigures> = BTreeMap::new();
    for (label, part) in plan.labels().iter().zip(by_label(plan)) {
        let sum = figures.entry(label).or_default();
        sum.buffers += part.buffers;
        sum.total += part.total;
        sum.peak += part.peak;
    }
    figures
}

/// For each label the bytes of its buffers, in order of allocation.
fn sizes(plan: &Plan) -> BTreeMap<&str, Vec<u64>> {
    let mut opened = vec![false; plan.problem().buffers.len()];
    let mut sizes: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for slot in plan.slots() {
        let alias = std::mem::replace(&mut opened[slot.storage as usize], true);
        let bytes = if alias { 0 } else { plan.size(slot).get() };
        sizes.entry(plan.label(slot)).or_default().push(bytes);
    }
    sizes
}

impl Change {
    /// New less old. Both are below 2^63, so nothing is lost.
    pub fn difference(&self) -> i64 {
        self.new as i64 - self.old as i64
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        self.old != self.new
    }
}

impl LabelChange {
    fn match_buffers(&mut self, old: &[u64], new: &[u64]) {
        for (&before, &after) in old.iter().zip(new) {
            self.grown += u64::from(after > before);
            self.shrunk += u64::from(after < before);
            self.gained_bytes += after.saturating_sub(before);
            self.lost_bytes += before.saturating_sub(after);
        }
        let (gone, come) = (old.get(new.len()..).unwrap_or_default(), new.get(old.len()..).unwrap_or_default());
        self.vanished = gone.len() as u64;
        self.appeared = come.len() as u64;
        self.lost_bytes += gone.iter().sum::<u64>();
        self.gained_bytes += come.iter().sum::<u64>();
    }

    fn changed(&self) -> bool {
        self.peak_bytes.is_some() || self.grown + self.shrunk + self.appeared + self.vanished > 0
    }

    fn rank(&self) -> (std::cmp::Reverse<[u64; 3]>, &str) {
        let by = |change: Change| change.difference().unsigned_abs();
        let moved = self.gained_bytes.saturating_add(self.lost_bytes);
        (std::cmp::Reverse([by(self.peak_bytes), by(self.total_bytes), moved]), &self.label)
    }

    /// `2 appeared, 1 grown`.
    fn deeds(&self) -> String {
        let deeds =
            [(self.appeared, "appeared"), (self.vanished, "vanished"), (self.grown, "grew"), (self.shrunk, "shrank")];
        let told: Vec<String> =
            deeds.iter().filter(|(count, _)| *count > 0).map(|(count, deed)| format!("{count} {deed}")).collect();
        told.join(", ")
    }
}

impl Diff {
    /// Whether the plans differ in size, in load or in any buffer's bytes: what a gate may fail on. Where buffers lie and
    /// when they live does not count by itself.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// One JSON object on one line.
    ///
    /// # Errors
    ///
    /// What `out` reports.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        write_line(self, out)
    }

    /// The report for a terminal.
    ///
    /// # Errors
    ///
    /// What `out` reports.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{} -> {}", printable(&self.old_name), printable(&self.new_name))?;
        if !self.changed {
            return writeln!(out, "  no change: {} ({} B)", show(self.makespan.new), self.makespan.new);
        }
        for (key, change) in
            [("makespan", self.makespan), ("lower bound", self.lower_bound), ("total", self.total_bytes)]
        {
            let Change { old, new } = change;
            let by = if change.is_some() { by(change) } else { "no change".to_owned() };
            writeln!(out, "  {key:<12} {:>10} -> {:>10}  {by}  ({old} -> {new} B)", show(old), show(new))?;
        }
        for (key, Change { old, new }) in [("buffers", self.buffers), ("peak tick", self.peak_tick)] {
            writeln!(out, "  {key:<12} {old:>10} -> {new:>10}")?;
        }
        let (gained, lost) = (self.gained_bytes, self.lost_bytes);
        writeln!(out, "  {:<12} {gained} B gained, {lost} B lost", "all buffers")?;
        let mut rows: Vec<&LabelChange> = self.labels.iter().filter(|label| label.peak_bytes.is_some()).collect();
        self.table("at the peak", &rows, |label| label.peak_bytes, out)?;
        rows = self.labels.iter().filter(|label| label.gained_bytes + label.lost_bytes > 0).collect();
        rows.sort_by_key(|label| std::cmp::Reverse(label.total_bytes.difference().unsigned_abs()));
        self.table("overall", &rows, |label| label.total_bytes, out)
    }

    fn table(
        &self,
        head: &str,
        rows: &[&LabelChange],
        bytes: fn(&LabelChange) -> Change,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let exact = |label: &&LabelChange| format!("{:+}", bytes(label).difference()).len();
        let width = rows.iter().take(MOST_ROWS).map(exact).max().unwrap_or(0);
        writeln!(out, "\n{head}")?;
        for row in rows.iter().take(MOST_ROWS) {
            let change = bytes(row);
            let (deeds, label) = (row.deeds(), printable(&row.label));
            let remark = if deeds.is_empty() { String::new() } else { format!("  ({deeds})") };
            let difference = change.difference();
            writeln!(out, "  {}  {difference:>+width$} B  {label}{remark}", by(change))?;
        }
        if let Some(rest) = rows.get(MOST_ROWS..).filter(|rest| !rest.is_empty()) {
            let sum: i128 = rest.iter().map(|row| i128::from(bytes(row).difference())).sum();
            writeln!(out, "  … and {} more labels, {sum:+} B together", rest.len())?;
        }
        Ok(())
    }
}

/// The difference with its sign, as wide as any size.
fn by(change: Change) -> String {
    let difference = change.difference();
    let sign = if difference < 0 { '-' } else { '+' };
    format!("{:>11}", format!("{sign}{}", show(difference.unsigned_abs())))
}

fn show(bytes: u64) -> String {
    Bytes::new(bytes).map_or_else(|| bytes.to_string(), |bytes| bytes.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Row, SMALL, odd_plan, plan};
    use super::*;

    /// `a` of [`SMALL`] doubled, a second `b` beside it at the peak, `c` gone.
    const OTHER: &[Row] =
        &[(2048, "net.py:1:a", 0, 6, 0), (2048, "net.py:2:b", 4, 12, 2048), (512, "net.py:2:b", 5, 7, 4096)];

    fn text(diff: &Diff) -> String {
        let mut out = Vec::new();
        diff.write_text(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn buffers_answer_to_each_other_by_label_and_occurrence() {
        let diff = diff(&plan(SMALL), &plan(OTHER));
        assert!(diff.changed());
        assert_eq!(diff.makespan, Change { old: 3072, new: 4608 });
        assert_eq!((diff.gained_bytes, diff.lost_bytes), (1024 + 512, 1024));
        let labels: Vec<&str> = diff.labels.iter().map(|label| label.label.as_str()).collect();
        assert_eq!(labels, ["net.py:1:a", "net.py:2:b", "net.py:3:c"], "by change at the peak, then overall");
        let [a, b, c] = &diff.labels[..] else { panic!() };
        assert_eq!((a.grown, a.gained_bytes, a.peak_bytes), (1, 1024, Change { old: 1024, new: 2048 }));
        assert_eq!(
            (b.appeared, b.buffers, b.peak_bytes),
            (1, Change { old: 1, new: 2 }, Change { old: 2048, new: 2560 })
        );
        assert_eq!((c.vanished, c.lost_bytes, c.total_bytes), (1, 1024, Change { old: 1024, new: 0 }));
    }

    #[test]
    fn the_way_back_has_the_signs_reversed() {
        let (there, back) = (diff(&plan(SMALL), &plan(OTHER)), diff(&plan(OTHER), &plan(SMALL)));
        assert_eq!((there.gained_bytes, there.lost_bytes), (back.lost_bytes, back.gained_bytes));
        assert_eq!(there.makespan.difference(), -back.makespan.difference());
        assert_eq!(back.labels[0].shrunk, 1);
    }

    #[test]
    fn a_plan_does_not_differ_from_itself() {
        for plan in [plan(SMALL), odd_plan(), plan(&[])] {
            let diff = diff(&plan, &plan);
            assert!(!diff.changed() && diff.labels.is_empty());
        }
        assert_eq!(text(&diff(&plan(SMALL), &plan(SMALL))), "small -> small\n  no change: 3.0 KiB (3072 B)\n");
    }

    #[test]
    fn the_text_lists_the_peak_and_the_whole() {
        let text = text(&diff(&plan(SMALL), &plan(OTHER)));
        for line in [
            "  makespan        3.0 KiB ->    4.5 KiB     +1.5 KiB  (3072 -> 4608 B)\n",
            "  all buffers  1536 B gained, 1024 B lost\n",
            "at the peak\n     +1.0 KiB  +1024 B  net.py:1:a  (1 grew)\n       +512 B   +512 B  net.py:2:b  (1 appeared)\n",
            "     -1.0 KiB  -1024 B  net.py:3:c  (1 vanished)\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
    }

    #[test]
    fn the_json_is_one_line_with_the_same_numbers() {
        let mut out = Vec::new();
        diff(&plan(SMALL), &plan(OTHER)).write_json(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("{\"old_name\":\"small\",\"new_name\":\"small\",\"changed\":true,"), "{text}");
        assert!(text.contains("\"makespan\":{\"old\":3072,\"new\":4608}"), "{text}");
        assert!(text.ends_with("}\n") && text.matches('\n').count() == 1);
    }
}
