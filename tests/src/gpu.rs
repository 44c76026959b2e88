//! The gate of tests that need a GPU: without one they say so, and where `REQUIRE_GPU=1` promises one they fail.

use std::sync::{Mutex, MutexGuard, PoisonError};

use terrace_allocator::backing::BackingError;
use terrace_allocator::cuda::CudaBacking;

/// GPU tests take turns, each holding this while it runs: a device that is closed waits for everything queued in the process,
/// which breaks a graph capture in another test, and free memory is one number for all of them.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device 0, or `None` after a line that says why there is none.
///
/// # Panics
/// Where there is no device and `REQUIRE_GPU=1` is set: a machine that is there to test on a GPU must not skip.
pub fn require() -> Option<CudaBacking> {
    decide(CudaBacking::new(0), std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1"))
}

fn decide(opened: Result<CudaBacking, BackingError>, required: bool) -> Option<CudaBacking> {
    match opened {
        Ok(backing) => Some(backing),
        Err(reason) if required => panic!("REQUIRE_GPU=1, but no CUDA device: {reason}"),
        Err(reason) => {
            // Around the capture of the test harness: a skip that nobody reads is a silent one.
            let _ = std::io::Write::write_all(
                &mut std::io::stderr(),
                format!("SKIP no CUDA device: {reason}\n").as_bytes(),
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_a_test_skips() {
        assert!(decide(Err(BackingError::NoDevice("this line tests the gate itself".to_owned())), false).is_none());
    }

    #[test]
    #[should_panic(expected = "REQUIRE_GPU=1, but no CUDA device: this line tests the gate itself")]
    fn without_a_device_a_promised_one_fails() {
        decide(Err(BackingError::NoDevice("this line tests the gate itself".to_owned())), true);
    }
}
