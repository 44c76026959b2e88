//! The memory map as a still picture: address up, time right, a tooltip for each buffer.
//!
//! The picture needs nothing outside itself and follows the reader's light or dark setting. Buffers are grouped by label,
//! so that a colour is named once; the legend lists the labels with the most bytes at the peak.

use std::io::{self, Write};

use terrace_profiles::units::Bytes;

use super::picture::{Rect, address, address_marks, aliases, colours, rects, tick_marks, ticks};
use super::summary::{Summary, by_label};
use super::{elide, escape};
use crate::plan::Plan;

const WIDTH: f64 = 1400.0;
const HEIGHT: f64 = 840.0;
/// The plot: left, top, width, height.
const PLOT: (f64, f64, f64, f64) = (84.0, 86.0, 960.0, 700.0);
/// Labels in the legend.
const MOST_LABELS: usize = 24;
/// Thinner rectangles are drawn this thin: in a long record a short life would vanish otherwise.
const THINNEST: f64 = 0.6;
/// From this size on a rectangle has a border, which keeps equal neighbours apart.
const BORDERED: f64 = 3.0;

const STYLE: &str = "\
svg{--ground:#fff;--ink:#1c2128;--soft:#59636e;--line:#d1d9e0;--plot:#f6f8fa;--peak:#c4122f}\
@media(prefers-color-scheme:dark){svg{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--plot:#151b23;--peak:#ff7b72}}\
text{font:12px system-ui,sans-serif;fill:var(--ink)}.soft{fill:var(--soft)}.name{font-size:18px;font-weight:600}\
.end{text-anchor:end}.mid{text-anchor:middle}.ground{fill:var(--ground)}.plot{fill:var(--plot);stroke:var(--line)}\
.grid{stroke:var(--line);stroke-width:1}.peak{stroke:var(--peak);stroke-width:1.5;stroke-dasharray:6 4}\
.peaktext{fill:var(--peak);font-weight:600}.map .b{stroke:var(--plot);stroke-width:.5}\
.map rect:hover{stroke:var(--ink);stroke-width:2}.also{fill:none;stroke-dasharray:4 3;stroke-width:1.2}";

/// Writes the picture; see the module's page.
pub(super) fn write(plan: &Plan, summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let scale = Scale::of(plan);
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>",
        escape(&summary.name)
    )?;
    head(summary, out)?;
    axes(plan, &scale, out)?;
    map(plan, &scale, out)?;
    if !summary.makespan.is_zero() {
        peak(summary, &scale, out)?;
        legend(plan, summary, out)?;
    }
    out.write_all(b"</svg>\n")
}

/// From ticks and addresses to the picture.
struct Scale {
    first: u64,
    last: u64,
    top: u64,
}

impl Scale {
    fn of(plan: &Plan) -> Self {
        let (first, last) = ticks(plan);
        Self { first, last, top: plan.makespan().get().max(1) }
    }
    fn x(&self, tick: u64) -> f64 {
        PLOT.0 + PLOT.2 * (tick - self.first) as f64 / (self.last - self.first) as f64
    }
    fn y(&self, address: u64) -> f64 {
        PLOT.1 + PLOT.3 * (1.0 - address as f64 / self.top as f64)
    }
}

fn head(summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let verdict = match (summary.optimal, summary.gap_bytes) {
        (true, _) => "proven optimal".to_owned(),
        (false, gap) => format!("at most {gap} above the optimum"),
    };
    let short = summary.capacity.filter(|_| !summary.fits);
    let short = short.map_or_else(String::new, |capacity| format!(" · does not fit in {capacity}"));
    let line = format!(
        "arena {} ({} B), {verdict}{short} · lower bound {} · {} buffers, {} together · peak at tick {}",
        summary.makespan,
        summary.makespan.get(),
        summary.lower_bound,
        summary.buffers,
        summary.total_bytes,
        summary.peak_tick,
    );
    let left = PLOT.0;
    writeln!(out, "<text class=\"name\" x=\"{left}\" y=\"34\">{}</text>", escape(&elide(&summary.name, 110)))?;
    writeln!(out, "<text class=\"soft\" x=\"{left}\" y=\"56\">{}</text>", escape(&line))
}

fn axes(plan: &Plan, scale: &Scale, out: &mut dyn Write) -> io::Result<()> {
    let (left, top, width, height) = PLOT;
    let (right, bottom) = (left + width, top + height);
    writeln!(out, "<rect class=\"plot\" x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\"/>")?;
    for mark in address_marks(plan.makespan().get(), 10) {
        let y = scale.y(mark);
        writeln!(out, "<path class=\"grid\" d=\"M{left} {}H{right}\"/>", Short(y))?;
        let text = address(mark);
        writeln!(out, "<text class=\"soft end\" x=\"{}\" y=\"{}\">{text}</text>", left - 8.0, Short(y + 4.0))?;
    }
    for mark in tick_marks(scale.first, scale.last, 12) {
        let x = Short(scale.x(mark));
        writeln!(out, "<path class=\"grid\" d=\"M{x} {bottom}v5\"/>")?;
        writeln!(out, "<text class=\"soft mid\" x=\"{x}\" y=\"{}\">{mark}</text>", bottom + 20.0)?;
    }
    let middle = left + width / 2.0;
    writeln!(out, "<text class=\"soft mid\" x=\"{middle}\" y=\"{}\">tick</text>", bottom + 38.0)
}

fn map(plan: &Plan, scale: &Scale, out: &mut dyn Write) -> io::Result<()> {
    let colours = colours(plan);
    let label_of = |rect: &Rect| plan.slots()[rect.slot as usize].label;
    for (class, property, mut rects) in [("map", "fill", rects(plan)), ("map also", "stroke", aliases(plan))] {
        rects.sort_by_key(label_of);
        for group in rects.chunk_by(|a, b| label_of(a) == label_of(b)) {
            let label = label_of(&group[0]);
            let text = escape(&plan.labels()[label as usize]);
            writeln!(out, "<g class=\"{class}\" {property}=\"#{}\">", colours[label as usize])?;
            for rect in group {
                shape(plan, scale, rect, &text, property == "stroke", out)?;
            }
            writeln!(out, "</g>")?;
        }
    }
    Ok(())
}

fn shape(plan: &Plan, scale: &Scale, rect: &Rect, label: &str, outline: bool, out: &mut dyn Write) -> io::Result<()> {
    let (x, y) = (scale.x(rect.birth), scale.y(rect.to));
    let (width, height) = ((scale.x(rect.death) - x).max(THINNEST), (scale.y(rect.from) - y).max(THINNEST));
    let bytes = rect.to - rect.from;
    let size = Bytes::new(bytes).expect("a part of the arena");
    let border = if !outline && width.min(height) >= BORDERED { " class=\"b\"" } else { "" };
    let slot = &plan.slots()[rect.slot as usize];
    let lane = match plan.lanes().len() {
        0 | 1 => String::new(),
        _ => format!("\nlane {}", escape(&plan.lanes()[slot.lane as usize])),
    };
    writeln!(
        out,
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"{border}><title>{label}\n{size} ({bytes} B) at {}\n\
         ticks {} to {}{lane}</title></rect>",
        Short(x),
        Short(y),
        Short(width),
        Short(height),
        rect.from,
        rect.birth,
        rect.death,
    )
}

fn peak(summary: &Summary, scale: &Scale, out: &mut dyn Write) -> io::Result<()> {
    let (left, top, width, height) = PLOT;
    let x = scale.x(summary.peak_tick.0);
    writeln!(out, "<path class=\"peak\" d=\"M{} {top}V{}\"/>", Short(x), top + height)?;
    // Near an end the text leans inwards.
    let anchor = if x > left + width - 60.0 { "end" } else { "mid" };
    let text = format!("peak {}", summary.peak_bytes);
    writeln!(
        out,
        "<text class=\"peaktext {anchor}\" x=\"{}\" y=\"{}\">{text}</text>",
        Short(x.max(left + 40.0)),
        top - 8.0
    )
}

fn legend(plan: &Plan, summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let left = PLOT.0 + PLOT.2 + 24.0;
    let (right, mut y) = (WIDTH - 16.0, PLOT.1 + 4.0);
    let head = format!("at the peak: {} buffers", summary.peak.len());
    writeln!(out, "<text class=\"soft\" x=\"{left}\" y=\"{y}\">{head}</text>")?;
    let colours = colours(plan);
    let figures = by_label(plan);
    let mut order: Vec<usize> = (0..figures.len()).filter(|label| figures[*label].peak > 0).collect();
    order.sort_by_key(|label| (std::cmp::Reverse(figures[*label].peak), *label));
    for &label in order.iter().take(MOST_LABELS) {
        y += 27.0;
        let (text, bytes) = (&plan.labels()[label], Bytes::new(figures[label].peak).expect("a part of the peak"));
        let (swatch, short) = (y - 10.0, escape(&elide(text, 31)));
        writeln!(
            out,
            "<g><title>{}</title><rect x=\"{left}\" y=\"{swatch}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"#{}\"/>\
             <text x=\"{}\" y=\"{y}\">{short}</text><text class=\"soft end\" x=\"{right}\" y=\"{y}\">{bytes}</text></g>",
            escape(text),
            colours[label],
            left + 20.0,
        )?;
    }
    if let Some(rest) = order.get(MOST_LABELS..).filter(|rest| !rest.is_empty()) {
        let bytes = rest.iter().map(|label| figures[*label].peak).sum();
        let bytes = Bytes::new(bytes).expect("a part of the peak");
        let count = rest.len();
        y += 27.0;
        writeln!(out, "<text class=\"soft\" x=\"{}\" y=\"{y}\">and {count} more labels</text>", left + 20.0)?;
        writeln!(out, "<text class=\"soft end\" x=\"{right}\" y=\"{y}\">{bytes}</text>")?;
    }
    Ok(())
}

/// A coordinate with at most two decimals and no zero that says nothing.
struct Short(f64);

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:.2}", self.0);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReportFormat;
    use super::super::tests::{SMALL, body, odd_plan, plan, refusal, show, show_verdict};
    use super::*;

    fn svg(plan: &Plan) -> String {
        show(plan, ReportFormat::Svg)
    }

    #[test]
    fn a_rectangle_lies_where_its_buffer_does() {
        let svg = svg(&plan(SMALL));
        // b: 8 of 12 ticks from the 4th, the upper two thirds of the arena.
        let (x, width, height) = (84.0 + 960.0 / 3.0, 640.0, Short(700.0 * 2.0 / 3.0));
        let rect =
            format!("<rect x=\"{x}\" y=\"86\" width=\"{width}\" height=\"{height}\" class=\"b\"><title>net.py:2:b\n");
        assert!(svg.contains(&rect), "{rect} is not in {svg}");
        assert!(svg.contains("2.0 KiB (2048 B) at 1024\nticks 4 to 12</title>"));
        assert!(svg.contains(&format!("<path class=\"peak\" d=\"M{x} 86V786\"/>")));
        assert_eq!(svg.matches("<g class=\"map\"").count(), 3);
        assert!(svg.contains(">1 KiB</text>") && svg.contains(">3 KiB</text>") && svg.contains(">0</text>"));
    }

    #[test]
    fn gaps_aliases_and_lanes_are_drawn() {
        let svg = svg(&odd_plan());
        assert_eq!(svg.matches("<title>net.py:1:a\n").count(), 2);
        assert_eq!(svg.matches("<g class=\"map also\"").count(), 1);
        assert!(svg.contains("ticks 6 to 10\nlane copy</title>"));
    }

    #[test]
    fn a_refusal_is_told() {
        assert!(
            show_verdict(&refusal(2048, true), ReportFormat::Svg)
                .contains("proven optimal · does not fit in 2.0 KiB ·")
        );
    }

    #[test]
    fn markup_in_texts_is_inert() {
        let mut body = body(&[(512, "</title><script>alert(1)</script>", 0, 1, 0)]);
        body.name = "<b>&\u{0}".to_owned();
        let svg = svg(&Plan::new(body).unwrap());
        assert!(!svg.contains("<script") && !svg.contains("<b>") && !svg.contains('\u{0}'));
        assert!(svg.contains("&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;"));
    }

    #[test]
    fn an_empty_plan_is_an_empty_picture() {
        let svg = svg(&plan(&[]));
        assert!(svg.ends_with("</svg>\n") && !svg.contains("class=\"peak\"") && !svg.contains("NaN"));
    }
}
