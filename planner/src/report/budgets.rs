//! Budgets and what is planned now: what grew, by how much, and because of which buffers.

use std::collections::BTreeMap;
use std::io::{self, Write};

use terrace_profiles::budget::{Budget, Measured};

use super::text::{Paint, printable};

/// Rows of buffers under a budget.
const MOST_ROWS: usize = 8;

/// A budget and what is planned now.
#[derive(Clone, Copy, Debug)]
pub struct Checked<'a> {
    /// The budget.
    pub budget: &'a Budget,
    /// What is planned now.
    pub measured: &'a Measured,
}

impl Checked<'_> {
    /// Whether more is planned than the budget allows.
    pub fn grew(&self) -> bool {
        self.measured.peak > self.budget.most
    }

    /// Whether the file would say something else after a rewrite.
    pub fn differs(&self) -> bool {
        self.measured.peak != self.budget.most || self.measured.at_peak != self.budget.at_peak
    }

    /// Writes its line of the table and, if it grew, the lines that say why.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write(&self, colour: bool, out: &mut dyn Write) -> io::Result<()> {
        let paint = Paint(colour);
        let (peak, most) = (self.measured.peak.get(), self.budget.most.get());
        let verdict = if self.grew() { paint.bad("GREW") } else { paint.good("ok  ") };
        let by = match most.abs_diff(peak) {
            0 => String::new(),
            by if peak > most => format!("  +{by} B, {:.2} %", percent(by, most)),
            by => format!("  {by} B below"),
        };
        let name = printable(&self.budget.name);
        writeln!(out, "  {verdict}  {peak:>14} of {most:>14} B  {name}{by}")?;
        if self.grew() { self.why(out) } else { Ok(()) }
    }

    /// Writes what a rewrite changes, as lines taken out and put in, and the buffers behind it.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_rewrite(&self, colour: bool, out: &mut dyn Write) -> io::Result<()> {
        let paint = Paint(colour);
        writeln!(out, "  {}", paint.bold(&printable(&self.budget.name)))?;
        if self.measured.peak != self.budget.most {
            writeln!(out, "{}", paint.bad(&format!("  - most_bytes = {}", self.budget.most.get())))?;
            writeln!(out, "{}", paint.good(&format!("  + most_bytes = {}", self.measured.peak.get())))?;
        }
        self.why(out)
    }

    /// The buffers at the peak whose bytes are not those of the budget, the largest change first; those that lie there now
    /// where the budget names none.
    fn why(&self, out: &mut dyn Write) -> io::Result<()> {
        let known = &self.budget.at_peak;
        let mut both: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for (label, bytes) in known {
            both.entry(label).or_default().0 += bytes.get();
        }
        for (label, bytes) in &self.measured.at_peak {
            both.entry(label).or_default().1 += bytes.get();
        }
        let mut rows: Vec<(&str, u64, u64)> = both.into_iter().map(|(label, (old, new))| (label, old, new)).collect();
        rows.retain(|(_, old, new)| old != new);
        rows.sort_by_key(|(_, old, new)| std::cmp::Reverse(old.abs_diff(*new)));
        if known.is_empty() {
            writeln!(out, "        the budget names no buffers; at the peak are now")?;
        }
        for (label, old, new) in rows.iter().take(MOST_ROWS) {
            let sign = if new > old { '+' } else { '-' };
            let change = format!("{sign}{} B", old.abs_diff(*new));
            let what = match (old, new) {
                _ if known.is_empty() => "now".to_owned(),
                (0, _) => format!("{new} B, not there before"),
                (_, 0) => format!("{old} B, no longer there"),
                _ => format!("from {old} to {new} B"),
            };
            writeln!(out, "        {change:>16}  {}  {what}", printable(label))?;
        }
        match rows.len().saturating_sub(MOST_ROWS) {
            0 => Ok(()),
            more => writeln!(out, "        {:>16}  and {more} more", ""),
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use terrace_profiles::budget::Budgets;
    use terrace_profiles::units::Bytes;

    use super::*;

    fn text(at_peak: &str, peak: u64, now: &[(&str, u64)]) -> String {
        let toml = format!(
            "schema = 1\n[[budget]]\nname = \"layer\"\nmodel = \"qwen3.6-27b\"\nengine = \"terrace\"\npart = \"layer\"\n\
             tokens = 64\nmost_bytes = 1000\n{at_peak}"
        );
        let read = Budgets::parse("b.toml", None, toml).unwrap();
        let size = |bytes| Bytes::new(bytes).unwrap();
        let at_peak = now.iter().map(|(label, bytes)| ((*label).to_owned(), size(*bytes))).collect();
        let measured = Measured { peak: size(peak), at_peak };
        let checked = Checked { budget: &read.budgets[0], measured: &measured };
        let mut out = Vec::new();
        checked.write(false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_grew_is_named_with_its_bytes() {
        let known = "at_peak = [[\"a\", 600], [\"b\", 300], [\"c\", 100]]";
        assert_eq!(
            text(known, 1500, &[("a", 1000), ("c", 100), ("d", 400)]),
            "  GREW            1500 of           1000 B  layer  +500 B, 50.00 %\n\
             \x20                 +400 B  a  from 600 to 1000 B\n\
             \x20                 +400 B  d  400 B, not there before\n\
             \x20                 -300 B  b  300 B, no longer there\n"
        );
    }

    #[test]
    fn what_did_not_grow_is_one_line() {
        assert_eq!(text("", 1000, &[("a", 1000)]), "  ok              1000 of           1000 B  layer\n");
        assert_eq!(text("", 900, &[("a", 900)]), "  ok               900 of           1000 B  layer  100 B below\n");
        assert!(text("", 1001, &[("a", 1001)]).contains("+1001 B  a  now\n"));
    }
}
