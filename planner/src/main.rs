//! The `plan` command; everything it does is [`terrace_planner::cli::run`].

use std::io::IsTerminal;
use std::process::ExitCode;

use terrace_planner::cli::{Console, run};

fn main() -> ExitCode {
    // Not locked: the progress of a long solve is drawn by another thread.
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    let (out_is_terminal, err_is_terminal) = (out.is_terminal(), err.is_terminal());
    let mut console = Console { out: &mut out, err: &mut err, out_is_terminal, err_is_terminal };
    ExitCode::from(run(std::env::args_os(), &mut console))
}
