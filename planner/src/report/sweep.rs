//! The largest context by KV format and prefill chunk: a table, a drawing for a terminal, a picture, and JSON.
//!
//! ```text
//!   fp8  │     b    a                                 the drawing: context to the right, one row for each format,
//!   tq3  │             ed   cb                        a letter for each chunk where its largest context lies
//!        └─────────────────────
//! ```
//!
//! Where several chunks lie in one cell, the largest is drawn.

use std::io::{self, Write};

use serde::Serialize;

use super::escape;
use super::json::write_line;
use super::text::{Paint, clean};
use crate::fitting::{Sweep, SweepCell};

/// Columns of the drawing.
const COLUMNS: u64 = 64;
/// A colour for each chunk; one more for one block.
const COLOURS: [&str; 8] = ["8b949e", "2f6fde", "1a9e77", "d97706", "c4122f", "8250df", "0e7490", "a16207"];

/// A sweep, ready to be shown.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    /// What it is about.
    pub title: &'a str,
    /// The context that is asked for.
    pub asked: u64,
    /// The numbers.
    pub sweep: &'a Sweep,
}

impl Picture<'_> {
    /// Writes table and drawing for a terminal.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_text(&self, colour: bool, out: &mut dyn Write) -> io::Result<()> {
        let paint = Paint(colour);
        writeln!(out, "{}", paint.bold(&clean(self.title)))?;
        self.table(&paint, out)?;
        self.drawing(&paint, out)
    }

    fn table(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "  the largest context that fits, in tokens; {} are asked for\n", self.asked)?;
        write!(out, "  {:<20}  {:>5}  {:>6}", "KV format", "slot", "block")?;
        for chunk in &self.sweep.chunks {
            write!(out, "  {:>9}", name(*chunk))?;
        }
        writeln!(out)?;
        for row in &self.sweep.rows {
            write!(out, "  {:<20}  {:>5}  {:>6}", row.kv, row.slot, row.block_size)?;
            for cell in &row.cells {
                let text = match cell {
                    SweepCell { allowed: false, .. } => format!("{:>9}", "refused"),
                    SweepCell { largest: 0, .. } => format!("{:>9}", "none"),
                    SweepCell { largest, .. } => format!("{largest:>9}"),
                };
                let text = if cell.largest >= self.asked { paint.good(&text) } else { paint.dim(&text) };
                write!(out, "  {text}")?;
            }
            writeln!(out)?;
        }
        if self.sweep.rows.iter().flat_map(|row| &row.cells).any(|cell| !cell.allowed) {
            writeln!(out, "  refused: in align mode a prefill step must hold a block")?;
        }
        Ok(())
    }

    fn drawing(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out)?;
        let asked = column(self.asked, self.sweep.most);
        for row in &self.sweep.rows {
            let mut line = vec![' '; COLUMNS as usize];
            line[asked] = '┊';
            // From the smallest chunk to the largest, which stays.
            let mut cells: Vec<(usize, &SweepCell)> = row.cells.iter().enumerate().collect();
            cells.sort_by_key(|(index, cell)| (cell.chunk, *index));
            for (index, cell) in cells.into_iter().filter(|(_, cell)| cell.largest > 0) {
                line[column(cell.largest, self.sweep.most)] = letter(index);
            }
            writeln!(out, "  {:<20} │{}", row.kv, line.iter().collect::<String>().trim_end())?;
        }
        let rule: String = (0..COLUMNS as usize).map(|k| if k == asked { '┴' } else { '─' }).collect();
        writeln!(out, "  {:<20} └{rule}", "")?;
        let (to, width) = (format!("{} tokens", self.sweep.most), COLUMNS as usize - 1);
        writeln!(out, "  {:<20}  0{}", "", paint.dim(&format!("{to:>width$}")))?;
        let chunks = self.sweep.chunks.iter().enumerate();
        let legend: Vec<String> = chunks.map(|(index, chunk)| format!("{} {}", letter(index), name(*chunk))).collect();
        writeln!(out, "  {:<20}  chunk: {} · ┊ asked for", "", legend.join(", "))
    }

    /// Writes one JSON object on one line.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        let cell = |cell: &SweepCell| JsonCell {
            prefill_chunk: cell.chunk,
            allowed: cell.allowed,
            largest_context: cell.largest,
            fits: cell.largest >= self.asked,
        };
        let rows = self.sweep.rows.iter().map(|row| JsonRow {
            kv: &row.kv,
            slot_bytes: row.slot,
            block_size: row.block_size,
            chunks: row.cells.iter().map(cell).collect(),
        });
        write_line(&Json { title: self.title, max_model_len: self.asked, sweep: rows.collect() }, out)
    }

    /// Writes the picture as SVG: one group of bars for each format, one bar for each chunk.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_svg(&self, out: &mut dyn Write) -> io::Result<()> {
        const BAR: usize = 11;
        let (left, top, width) = (190, 78, 880);
        let each = self.sweep.chunks.len() * BAR + 16;
        let bottom = top + self.sweep.rows.len() * each;
        let height = bottom + 46;
        let x = |tokens: u64| left as f64 + f64::from(width) * tokens as f64 / self.sweep.most.max(1) as f64;
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1160 {height}\" width=\"1160\" height=\"{height}\" \
             role=\"img\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
             <rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n\
             <text class=\"name\" x=\"16\" y=\"28\">{title}</text>",
            title = escape(self.title)
        )?;
        for (index, chunk) in self.sweep.chunks.iter().enumerate() {
            let at = left + index * 110;
            writeln!(
                out,
                "<rect x=\"{at}\" y=\"44\" width=\"12\" height=\"12\" fill=\"#{}\"/><text x=\"{}\" y=\"54\">{}</text>",
                colour(index),
                at + 18,
                name(*chunk)
            )?;
        }
        for quarter in 0..=4 {
            let tokens = self.sweep.most / 4 * quarter;
            let at = x(tokens);
            writeln!(
                out,
                "<path class=\"grid\" d=\"M{at:.1} {top}V{bottom}\"/><text class=\"soft mid\" x=\"{at:.1}\" y=\"{}\">{tokens}</text>",
                bottom + 18
            )?;
        }
        for (place, row) in self.sweep.rows.iter().enumerate() {
            let y = top + place * each + 8;
            let middle = y + (each - 16) / 2 + 4;
            writeln!(out, "<text class=\"end\" x=\"{}\" y=\"{middle}\">{}</text>", left - 10, escape(&row.kv))?;
            for (index, cell) in row.cells.iter().enumerate() {
                let y = y + index * BAR;
                let what = match cell.allowed {
                    true => format!("{} tokens", cell.largest),
                    false => "refused".to_owned(),
                };
                writeln!(
                    out,
                    "<rect x=\"{left}\" y=\"{y}\" width=\"{:.1}\" height=\"9\" fill=\"#{}\"><title>{}, chunk {}: {what}</title></rect>",
                    x(cell.largest) - left as f64,
                    colour(index),
                    escape(&row.kv),
                    cell.chunk
                )?;
            }
        }
        let at = x(self.asked);
        writeln!(
            out,
            "<path class=\"asked\" d=\"M{at:.1} {top}V{bottom}\"/>\n\
             <text class=\"soft mid\" x=\"{at:.1}\" y=\"{}\">{} asked for</text>\n</svg>",
            bottom + 36,
            self.asked
        )
    }
}

const STYLE: &str = "\
svg{--ground:#fff;--ink:#1c2128;--soft:#59636e;--line:#d1d9e0;--asked:#c4122f}\
@media(prefers-color-scheme:dark){svg{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--asked:#ff7b72}}\
text{font:12px system-ui,sans-serif;fill:var(--ink)}.soft{fill:var(--soft)}.name{font-size:18px;font-weight:600}\
.end{text-anchor:end}.mid{text-anchor:middle}.ground{fill:var(--ground)}.grid{stroke:var(--line)}\
.asked{stroke:var(--asked);stroke-width:1.5;stroke-dasharray:6 4}";

/// What a chunk is called: its tokens, or that it is one block, whatever that is for the format.
fn name(chunk: Option<u64>) -> String {
    chunk.map_or_else(|| "one block".to_owned(), |chunk| chunk.to_string())
}

fn letter(index: usize) -> char {
    char::from(b'a' + (index % 26) as u8)
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// The column of so many tokens where the last one stands for `most`.
fn column(tokens: u64, most: u64) -> usize {
    (u128::from(tokens.min(most)) * u128::from(COLUMNS - 1) / u128::from(most.max(1))) as usize
}

#[derive(Serialize)]
struct Json<'a> {
    title: &'a str,
    max_model_len: u64,
    sweep: Vec<JsonRow<'a>>,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    kv: &'a str,
    slot_bytes: u64,
    block_size: u64,
    chunks: Vec<JsonCell>,
}

#[derive(Serialize)]
struct JsonCell {
    prefill_chunk: u64,
    allowed: bool,
    largest_context: u64,
    fits: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fitting::SweepRow;

    fn sweep() -> Sweep {
        let cell = |chunk, allowed, largest| SweepCell { chunk, allowed, largest };
        let cells = vec![cell(800, true, 640), cell(512, false, 0), cell(1024, true, 320)];
        let row = SweepRow { kv: "fp8".to_owned(), slot: 512, block_size: 800, cells };
        Sweep { most: 640, chunks: vec![None, Some(512), Some(1024)], rows: vec![row] }
    }

    fn picture(sweep: &Sweep) -> Picture<'_> {
        Picture { title: "a <b>", asked: 100, sweep }
    }

    #[test]
    fn the_drawing_has_a_letter_where_the_largest_context_lies() {
        let (sweep, mut out) = (sweep(), Vec::new());
        picture(&sweep).write_text(false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("  fp8                     512     800        640    refused        320\n"), "{text}");
        let row = text.lines().find(|line| line.contains('│')).unwrap();
        let plot: Vec<char> = row.split('│').nth(1).unwrap().chars().collect();
        assert_eq!((plot.len(), plot[63], plot[31], plot[9]), (64, 'a', 'c', '┊'));
        assert!(text.contains("chunk: a one block, b 512, c 1024 · ┊ asked for\n"), "{text}");
    }

    #[test]
    fn the_picture_has_a_bar_for_each_cell_and_no_markup_of_others() {
        let (sweep, mut out) = (sweep(), Vec::new());
        picture(&sweep).write_svg(&mut out).unwrap();
        let svg = String::from_utf8(out).unwrap();
        assert!(svg.contains("width=\"880.0\" height=\"9\"") && svg.contains("width=\"440.0\" height=\"9\""));
        assert!(svg.contains("chunk 512: refused") && svg.contains("a &lt;b&gt;") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn nothing_at_all_is_drawn_too() {
        let sweep = Sweep { most: 0, chunks: Vec::new(), rows: Vec::new() };
        let mut out = Vec::new();
        picture(&sweep).write_text(false, &mut out).unwrap();
        picture(&sweep).write_svg(&mut out).unwrap();
        assert!(!String::from_utf8(out).unwrap().contains("NaN"));
    }
}
