//! Our allocator through its C face, as a C program calls it.

use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};

use terrace_allocator::ffi::{
    Handle, Status, terrace_alloc, terrace_begin_step, terrace_create_host, terrace_destroy, terrace_end_step,
    terrace_free,
};

use crate::{Forward, KEY, Peer, budget, run};

/// A device that was created, and is called, through C.
pub struct ThroughC(*mut Handle);

impl ThroughC {
    /// As [`crate::Single::ready`], through the C face.
    pub fn ready(forward: &Forward) -> Self {
        let mut device = null_mut();
        // SAFETY: the out-pointer lives through the call.
        let status = unsafe { terrace_create_host(budget(forward).get(), &raw mut device) };
        assert!(status == Status::Ok, "host memory is reserved");
        let mut own = Self(device);
        for _ in 0..2 {
            run(&mut own, forward, &mut Vec::new());
        }
        own
    }
}

impl Peer for ThroughC {
    fn alloc(&mut self, bytes: u64) -> u64 {
        let mut out: *mut c_void = null_mut();
        // SAFETY: the device lives until `drop`, the label is a C string, the out-pointer lives through the call.
        let status = unsafe { terrace_alloc(self.0, bytes, null_mut(), c"bench".as_ptr(), &raw mut out) };
        debug_assert!(status == Status::Ok, "the budget holds the forward");
        out.expose_provenance() as u64
    }
    fn free(&mut self, address: u64) {
        // SAFETY: the device lives until `drop`; the address is given back as it came.
        unsafe { terrace_free(self.0, with_exposed_provenance_mut(address as usize)) };
    }
    fn begin(&mut self) {
        // SAFETY: the key is readable for its length.
        unsafe { terrace_begin_step(self.0, KEY.as_ptr().cast(), KEY.len(), null_mut()) };
    }
    fn end(&mut self) {
        // SAFETY: the device lives until `drop`.
        unsafe { terrace_end_step(self.0) };
    }
}

impl Drop for ThroughC {
    fn drop(&mut self) {
        // SAFETY: created in `ready`, destroyed once.
        unsafe { terrace_destroy(self.0) };
    }
}
