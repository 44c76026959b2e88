//! Copies between files and memory of either device, and a memory that measures.

use std::error::Error;

use terrace_allocator::Stream;
use terrace_kernels::Device;
use terrace_profiles::Memory;
use terrace_profiles::units::{Align, Bytes, DeviceSpan};

use super::{Failure, wrong};

/// The stream that everything runs on: the default one.
pub const STREAM: Stream = Stream(0);

/// Copies into a span, and waits.
///
/// # Safety
/// The span is memory of the device that nobody else uses.
pub unsafe fn copy_in(device: &Device, to: DeviceSpan, bytes: &[u8]) -> Result<(), Failure> {
    assert!(bytes.len() as u64 <= to.bytes.get(), "what is copied fits");
    match device {
        Device::Cuda(cuda) => {
            // SAFETY: the caller's promise, and there is room.
            unsafe { cuda.upload(to.address, bytes) }.map_err(wrong)
        }
        _ => {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to.address as usize);
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            Ok(())
        }
    }
}

/// Copies a part of a span out, once the device is done.
///
/// # Safety
/// The span is memory of the device that holds something.
pub unsafe fn copy_out(device: &Device, from: DeviceSpan, skip: u64, len: u64) -> Result<Vec<u8>, Failure> {
    assert!(skip + len <= from.bytes.get(), "what is copied is there");
    let mut bytes = vec![0; len as usize];
    match device {
        // SAFETY: the caller's promise, and it is there.
        Device::Cuda(cuda) => unsafe { cuda.download(from.address + skip, &mut bytes) }.map_err(wrong)?,
        _ => {
            let from = std::ptr::with_exposed_provenance::<u8>((from.address + skip) as usize);
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        }
    }
    Ok(bytes)
}

/// Waits for what was queued.
pub fn wait(device: &Device) -> Result<(), Failure> {
    match device {
        Device::Cuda(cuda) => cuda.synchronize().map_err(wrong),
        _ => Ok(()),
    }
}

/// Passes requests on and counts what lives, each rounded as an arena does.
pub struct Meter<'m> {
    memory: &'m mut dyn Memory,
    live: u64,
    /// The most bytes alive at once.
    pub peak: u64,
}

impl<'m> Meter<'m> {
    /// Nothing lives yet.
    pub fn over(memory: &'m mut dyn Memory) -> Self {
        Self { memory, live: 0, peak: 0 }
    }
}

fn rounded(bytes: Bytes) -> u64 {
    bytes.get().next_multiple_of(Align::DEFAULT.get())
}

impl Memory for Meter<'_> {
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn Error + Send + Sync>> {
        let span = self.memory.alloc(bytes, label)?;
        self.live += rounded(span.bytes);
        self.peak = self.peak.max(self.live);
        Ok(span)
    }

    fn free(&mut self, span: DeviceSpan) {
        self.live -= rounded(span.bytes);
        self.memory.free(span);
    }
}
