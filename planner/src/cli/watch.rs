//! Time, which the planner itself never reads: a limit that cancels a solve, and a spinner for whoever waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A solve shorter than this shows nothing.
const QUIET: Duration = Duration::from_millis(400);
const TICK: Duration = Duration::from_millis(100);

/// Runs `solve` with a flag that is set once `limit` has passed, and a function that shows what it is told if a person
/// watches and it lasts.
pub fn watched<T>(
    limit: Option<Duration>,
    terminal: bool,
    name: &str,
    solve: impl FnOnce(&AtomicBool, &(dyn Fn(&str) + Sync)) -> T,
) -> T {
    let cancel = AtomicBool::new(false);
    let spinner = if terminal { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {msg}");
    spinner.set_style(style.expect("the template is a constant"));
    spinner.set_prefix(name.to_owned());
    let say = |what: &str| spinner.set_message(what.to_owned());
    std::thread::scope(|scope| {
        // The channel closes when the solve ends, so nothing waits longer than that.
        let (done, wait) = mpsc::channel::<()>();
        let still_running_after = move |time| wait.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
        let (cancel, bar) = (&cancel, spinner.clone());
        scope.spawn(move || {
            let quiet = limit.map_or(QUIET, |limit| limit.min(QUIET));
            if !still_running_after(quiet) {
                return;
            }
            bar.enable_steady_tick(TICK);
            if let Some(limit) = limit
                && still_running_after(limit - quiet)
            {
                cancel.store(true, Ordering::Relaxed);
            }
        });
        let answer = solve(cancel, &say);
        drop(done);
        spinner.finish_and_clear();
        answer
    })
}
