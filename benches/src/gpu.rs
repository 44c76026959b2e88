//! The peer on a GPU: the driver's stream-ordered allocator, `cuMemAllocAsync`, on a stream of its own. The only file of the
//! benches that names cudarc.

use cudarc::driver::{result, sys};

use crate::Peer;

/// `cuMemAllocAsync` and `cuMemFreeAsync` on the device's default pool, which keeps what is freed: its best case.
pub struct AsyncPool {
    stream: sys::CUstream,
}

impl AsyncPool {
    /// On device 0, whose primary context becomes current.
    ///
    /// # Errors
    /// What the driver says, as a sentence.
    pub fn new() -> Result<Self, String> {
        enter()?;
        let device = result::device::get(0).map_err(|error| format!("the CUDA driver refused: {error}"))?;
        let said = |error: result::DriverError| format!("the CUDA driver refused: {error}");
        let mut pool = std::ptr::null_mut();
        let mut keep_all = u64::MAX;
        // SAFETY: both out-pointers live through the calls, and the attribute takes a u64.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&raw mut pool, device).result().map_err(said)?;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep_all).cast()).result().map_err(said)?;
        }
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(said)?;
        Ok(Self { stream })
    }

    /// Waits for the stream.
    pub fn synchronize(&self) {
        // SAFETY: the stream is ours and lives as long as we do.
        unsafe { result::stream::synchronize(self.stream) }.expect("the stream finishes");
    }
}

impl Peer for AsyncPool {
    fn alloc(&mut self, bytes: u64) -> u64 {
        // SAFETY: nothing reads the memory.
        unsafe { result::malloc_async(self.stream, bytes as usize) }.expect("the device has room")
    }

    fn free(&mut self, address: u64) {
        // SAFETY: the address came from `alloc` and is freed once.
        unsafe { result::free_async(address, self.stream) }.expect("the free is queued");
    }

    fn end(&mut self) {
        self.synchronize();
    }
}

/// Makes the primary context of device 0 current on this thread, for the life of the process.
///
/// # Errors
/// What the driver says, as a sentence.
pub fn enter() -> Result<(), String> {
    let said = |error: result::DriverError| format!("the CUDA driver refused: {error}");
    result::init().map_err(said)?;
    let device = result::device::get(0).map_err(said)?;
    // SAFETY: the device came from the driver; the context is kept for the life of the process, which is a benchmark's.
    let context = unsafe { result::primary_ctx::retain(device) }.map_err(said)?;
    // SAFETY: the context was just retained.
    unsafe { result::ctx::set_current(context) }.map_err(said)
}

/// Copies to device memory, and waits.
///
/// # Errors
/// What the driver says, as a sentence.
///
/// # Safety
/// `address` has room for the bytes, in the current context, and nobody else uses it.
pub unsafe fn upload(address: u64, bytes: &[u8]) -> Result<(), String> {
    // SAFETY: as above.
    unsafe { result::memcpy_htod_sync(address, bytes) }.map_err(|error| format!("a copy to the device failed: {error}"))
}

/// Copies from device memory, once everything queued is done.
///
/// # Errors
/// What the driver says, as a sentence; also of work that was queued.
///
/// # Safety
/// `address` holds so many bytes, in the current context.
pub unsafe fn download(address: u64, into: &mut [u8]) -> Result<(), String> {
    result::ctx::synchronize().map_err(|error| format!("queued work failed: {error}"))?;
    // SAFETY: as above.
    unsafe { result::memcpy_dtoh_sync(into, address) }
        .map_err(|error| format!("a copy from the device failed: {error}"))
}
