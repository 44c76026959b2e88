//! Threads that race without deciding: tasks have numbers, and the lowest number that is done wins.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Whether a running task should give up.
pub struct Stop<'a> {
    cancel: Option<&'a AtomicBool>,
    first_done: Option<&'a AtomicUsize>,
    index: usize,
}

impl<'a> Stop<'a> {
    /// Never.
    pub fn never() -> Self {
        Self { cancel: None, first_done: None, index: 0 }
    }

    /// Once the caller cancels.
    pub fn when(cancel: Option<&'a AtomicBool>) -> Self {
        Self { cancel, ..Self::never() }
    }

    /// Whether to give up now: the caller cancelled, or a task with a lower number is done.
    pub fn now(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
            || self.first_done.is_some_and(|first| first.load(Ordering::Relaxed) < self.index)
    }
}

/// Runs tasks `0..count` on so many threads. Returns the results up to the first that is `done`; tasks after it are stopped
/// or never begun, those before it always finish, so the answer does not depend on time.
pub fn race<T: Send + Sync>(
    threads: usize,
    cancel: Option<&AtomicBool>,
    count: usize,
    task: impl Fn(usize, &Stop<'_>) -> T + Sync,
    done: impl Fn(&T) -> bool + Sync,
) -> Vec<T> {
    let (next, first_done) = (AtomicUsize::new(0), AtomicUsize::new(count));
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count || index > first_done.load(Ordering::Acquire) {
                return;
            }
            let result = task(index, &Stop { cancel, first_done: Some(&first_done), index });
            if done(&result) {
                first_done.fetch_min(index, Ordering::AcqRel);
            }
            let fresh = results[index].set(result).is_ok();
            assert!(fresh, "each task runs once");
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
        work();
    });
    let kept = first_done.into_inner().saturating_add(1).min(count);
    let finished = results.into_iter().take(kept);
    finished.map(|result| result.into_inner().expect("tasks up to the first done ran")).collect()
}
