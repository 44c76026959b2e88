//! `plan check`: plans what budget files name, and fails if it grew.

use std::fmt::Write as _;
use std::path::Path;

use terrace_profiles::budget::{Budgets, Measured};

use super::args::Check;
use super::output::Output;
use super::{Console, DONE, FINDING, Failure, complain, failed_write};
use crate::fitting::Fitter;
use crate::report::Checked;

pub fn run(args: &Check, colour: bool, console: &mut Console<'_>) -> Result<u8, Failure> {
    let (mut status, mut grown, mut by, mut budgets) = (DONE, 0, 0_u64, 0);
    for path in &args.budgets {
        let (read, measured) = match measure(path) {
            Ok(both) => both,
            // The other files are still worth checking; the status remembers.
            Err(failure) => {
                status = complain(&failure, console);
                continue;
            }
        };
        let rows: Vec<Checked<'_>> =
            read.budgets.iter().zip(&measured).map(|(budget, measured)| Checked { budget, measured }).collect();
        budgets += rows.len();
        for row in rows.iter().filter(|row| row.grew()) {
            grown += 1;
            by = by.saturating_add(row.measured.peak.get() - row.budget.most.get());
        }
        let mut bytes = Vec::new();
        let written = if args.update { rewritten(&rows, colour, &mut bytes) } else { table(&rows, colour, &mut bytes) };
        written.map_err(|source| failed_write(Path::new("-"), source))?;
        if args.update {
            let text = read.rewritten(&measured);
            if text != read.text() {
                Output::to(path, console.out).write(text.as_bytes())?;
            }
        }
        let mut head = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(head, "{}", path.display().to_string().escape_debug());
        Output::to(Path::new("-"), console.out).write(&[head.as_bytes(), &bytes].concat())?;
    }
    if !args.update && budgets > 0 {
        Output::to(Path::new("-"), console.out).write(total(budgets, grown, by).as_bytes())?;
        if grown > 0 && status == DONE {
            status = FINDING;
        }
    }
    Ok(status)
}

/// The last line: how many budgets, and how many grew.
fn total(budgets: usize, grown: usize, by: u64) -> String {
    let things = if budgets == 1 { "budget" } else { "budgets" };
    match grown {
        0 => format!("{budgets} {things}, none is exceeded\n"),
        _ => format!("{budgets} {things}, {grown} exceeded, by {by} B together\n"),
    }
}

/// A file and what is planned for each of its budgets.
fn measure(path: &Path) -> Result<(Budgets, Vec<Measured>), Failure> {
    let read = Budgets::read(path)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut measured = Vec::new();
    for budget in &read.budgets {
        let planned = Fitter::new(&budget.open_model()?, threads).planned(&budget.workload)?;
        measured.push(Measured { peak: planned.bytes, at_peak: planned.at_peak });
    }
    Ok((read, measured))
}

fn table(rows: &[Checked<'_>], colour: bool, out: &mut Vec<u8>) -> std::io::Result<()> {
    rows.iter().try_for_each(|row| row.write(colour, out))
}

fn rewritten(rows: &[Checked<'_>], colour: bool, out: &mut Vec<u8>) -> std::io::Result<()> {
    let changed: Vec<&Checked<'_>> = rows.iter().filter(|row| row.differs()).collect();
    changed.iter().try_for_each(|row| row.write_rewrite(colour, out))?;
    if changed.is_empty() {
        out.extend_from_slice(b"  nothing changes\n");
    }
    Ok(())
}
