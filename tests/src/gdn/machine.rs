//! Where cases run: this process's memory, or a CUDA device's. What is uploaded lies between guards that are checked.

use cudarc::driver::result;
use terrace_kernels::{Block, Cpu, Device, Dtype, Place, cuda};

use super::Case;

/// Bytes of a guard on each side.
const GUARD: usize = 256;
/// What a guard holds.
const MARK: u8 = 0x5A;

/// A place to run cases in.
pub trait Machine {
    /// What calls are given.
    fn device(&self) -> Device;
    /// Where its memory is.
    fn place(&self) -> Place;
    /// Copies bytes to its memory, aligned to 256.
    fn upload(&mut self, bytes: &[u8]) -> u64;
    /// Copies bytes back, after all work is done.
    fn download(&mut self, address: u64, bytes: usize) -> Vec<u8>;
    /// What was uploaded since the last `clear`, with its size.
    fn spans(&self) -> Vec<(u64, usize)>;
    /// Frees everything that was uploaded.
    fn clear(&mut self);
    /// Largest errors of o and ht of a case.
    fn limits(&self, case: &Case) -> (f64, f64);

    /// Whether every guard is as it was.
    ///
    /// # Panics
    /// One is not.
    fn check_guards(&mut self, name: &str) {
        for (address, bytes) in self.spans() {
            for guard in [address - GUARD as u64, address + bytes as u64] {
                let held = self.download(guard, GUARD);
                assert!(held.iter().all(|byte| *byte == MARK), "{name}: something wrote beside {bytes} bytes");
            }
        }
    }
}

/// Bytes between two guards.
fn guarded(bytes: &[u8]) -> Vec<u8> {
    [&[MARK; GUARD], bytes, &[MARK; GUARD]].concat()
}

/// The host.
pub struct Host {
    cpu: Cpu,
    memory: Vec<(Vec<Block>, usize)>,
}

impl Host {
    /// With that many threads.
    pub fn new(threads: u32) -> Self {
        Self::with(Cpu::new(threads))
    }

    /// With a device of one's own.
    pub fn with(cpu: Cpu) -> Self {
        Self { cpu, memory: Vec::new() }
    }
}

impl Machine for Host {
    fn device(&self) -> Device {
        Device::Cpu(self.cpu.clone())
    }

    fn place(&self) -> Place {
        Place::Host
    }

    fn upload(&mut self, bytes: &[u8]) -> u64 {
        let all = guarded(bytes);
        let mut blocks = vec![Block::ZERO; all.len().div_ceil(256)];
        for (block, bytes) in blocks.iter_mut().zip(all.chunks(256)) {
            block.bytes()[..bytes.len()].copy_from_slice(bytes);
        }
        let address = blocks.as_mut_ptr().expose_provenance() + GUARD;
        self.memory.push((blocks, bytes.len()));
        address as u64
    }

    fn download(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: callers pass what `upload` gave them, with its guards, and no call runs.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address as usize), bytes) }.to_vec()
    }

    fn spans(&self) -> Vec<(u64, usize)> {
        let span = |(blocks, bytes): &(Vec<Block>, usize)| (blocks.as_ptr().addr() as u64 + GUARD as u64, *bytes);
        self.memory.iter().map(span).collect()
    }

    fn clear(&mut self) {
        self.memory.clear();
    }

    /// In fp32 little is lost but the rounding of o: 2^-9 / sqrt(3) for bf16.
    fn limits(&self, case: &Case) -> (f64, f64) {
        let o = match case.dtype {
            Dtype::Bf16 => 2e-3,
            Dtype::F16 => 4e-4,
            Dtype::F32 => 2e-5,
        };
        (o, 2e-5)
    }
}

/// CUDA device 0, on its default stream.
pub struct Cuda {
    device: cuda::Device,
    context: cudarc::driver::sys::CUcontext,
    memory: Vec<(u64, usize)>,
}

impl Cuda {
    /// Opens it. `tests/src/gpu.rs` says whether there is one, and whose turn it is.
    ///
    /// # Panics
    /// The driver refuses.
    pub fn open() -> Self {
        Self::with(cuda::Device::open(0).expect("the device opens"))
    }

    /// With a device 0 of one's own.
    ///
    /// # Panics
    /// The driver refuses.
    pub fn with(device: cuda::Device) -> Self {
        let ordinal = result::device::get(0).expect("there is a device");
        // SAFETY: the device is there; the reference is kept until the process ends.
        let context = unsafe { result::primary_ctx::retain(ordinal) }.expect("it has a context");
        Self { device, context, memory: Vec::new() }
    }

    fn enter(&self) {
        // SAFETY: the context is retained. The tests of a turn run on one thread, which has no other context.
        unsafe { result::ctx::set_current(self.context) }.expect("the context can be current");
    }
}

impl Machine for Cuda {
    fn device(&self) -> Device {
        Device::Cuda(self.device.clone())
    }

    fn place(&self) -> Place {
        Place::Device
    }

    fn upload(&mut self, bytes: &[u8]) -> u64 {
        self.enter();
        let all = guarded(bytes);
        // SAFETY: the memory is as large as what is copied, and freed in `clear`.
        let address = unsafe {
            let address = result::malloc_sync(all.len()).expect("the device has room");
            result::memcpy_htod_sync(address, &all).expect("a copy to the device");
            address
        };
        self.memory.push((address + GUARD as u64, bytes.len()));
        address + GUARD as u64
    }

    fn download(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        self.enter();
        let mut held = vec![0; bytes];
        result::ctx::synchronize().expect("the work is done");
        // SAFETY: callers pass what `upload` gave them, with its guards.
        unsafe { result::memcpy_dtoh_sync(&mut held, address) }.expect("a copy from the device");
        held
    }

    fn spans(&self) -> Vec<(u64, usize)> {
        self.memory.clone()
    }

    fn clear(&mut self) {
        self.enter();
        for (address, _) in self.memory.drain(..) {
            // SAFETY: it came from `malloc_sync`, and everything queued was waited for by `download`.
            unsafe { result::free_sync(address - GUARD as u64) }.expect("the memory was allocated");
        }
    }

    /// 6e-3, and for correlated keys 1.5e-2: there operands of 16 bits alone cost o 7e-3, in this order of products and in
    /// flash-linear-attention's alike (emulated, 300 tokens, decay 0.026).
    fn limits(&self, case: &Case) -> (f64, f64) {
        (case.state_limit, case.state_limit)
    }
}
