//! Memory of this process as a backing: the default where there is no GPU.
//!
//! It is real memory: what a plan places is read and written, so an overlap corrupts data here as it would on a device. It
//! comes zeroed from the system and costs nothing until touched: a reservation of 20 GiB is address space, and pages appear as
//! they are written.
//!
//! There is no queue. A caller has done its work before it frees, so every event is done when it is recorded, and streams
//! are only names.
//!
//! Refused: a second reservation, and `fill` and `read` outside the one that is held.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::{Backing, BackingError, Event, Stream, head, known, may_release, may_reserve, offset_in};

/// Small reservations begin on a page, large ones where a huge page may begin.
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Memory of this process, reserved once.
#[derive(Debug, Default)]
pub struct HostBacking {
    memory: Option<Memory>,
    reservations: u64,
    newest_event: u64,
}

/// One allocation, and the aligned span inside it. Given back when dropped.
#[derive(Debug)]
struct Memory {
    block: NonNull<u8>,
    layout: Layout,
    /// First byte of the span, inside `block`.
    base: NonNull<u8>,
    span: DeviceSpan,
}

// SAFETY: `Memory` is the only owner of its block, and the system's allocator lets any thread use and free a block.
unsafe impl Send for Memory {}

impl HostBacking {
    /// A backing that holds nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn held(&self) -> Option<DeviceSpan> {
        self.memory.as_ref().map(|memory| memory.span)
    }

    /// The first byte of `span`, which is checked to lie inside the reservation.
    fn at(&self, span: DeviceSpan, call: &'static str) -> Result<*mut u8, BackingError> {
        let offset = offset_in(self.held(), span, call)?;
        let memory =
            self.memory.as_ref().ok_or(BackingError::Call { call, reason: "nothing is reserved".to_owned() })?;
        // SAFETY: `offset_in` held the span against the reservation, so the sum stays inside its block.
        Ok(unsafe { memory.base.as_ptr().add(offset as usize) })
    }
}

impl Memory {
    /// Asks the system for zeroed memory around an aligned span; the error says why there is none.
    fn new(bytes: Bytes) -> Result<Self, String> {
        let size =
            usize::try_from(bytes.get()).map_err(|_| "it does not fit this machine's address space".to_owned())?;
        let align = if size >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        // The alignment is made here and not asked for: for a large one, `alloc_zeroed` writes the zeros itself, and would
        // touch all 20 GiB. At 16 it is calloc, whose large blocks are fresh pages of the system.
        let layout = size.checked_add(align).and_then(|padded| Layout::from_size_align(padded, 16).ok());
        let layout = layout.ok_or_else(|| "it does not fit this machine's address space".to_owned())?;
        // SAFETY: the layout's size is at least `align`, so it is not zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or("the system has no block of that size")?;
        let padding = block.as_ptr().align_offset(align);
        // SAFETY: the padding is below `align`, and the block is `align` bytes larger than the span.
        let base = unsafe { block.add(padding) };
        // Exposed because callers get the address as a number and make pointers of it.
        let address = base.as_ptr().expose_provenance() as u64;
        Ok(Self { block, layout, base, span: DeviceSpan { address, bytes } })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the block came from `alloc_zeroed` with this layout, and `Memory` frees it only here.
        unsafe { dealloc(self.block.as_ptr(), self.layout) }
    }
}

impl Backing for HostBacking {
    fn name(&self) -> String {
        "host".to_owned()
    }

    /// What Linux reports in `/proc/meminfo`; nothing elsewhere.
    fn memory(&self) -> Option<(Bytes, Bytes)> {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = |name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
            Bytes::new(kib.checked_mul(1024)?)
        };
        Some((line("MemTotal:")?, line("MemAvailable:")?))
    }

    fn reserve(&mut self, bytes: Bytes) -> Result<DeviceSpan, BackingError> {
        may_reserve(self.held(), bytes)?;
        let memory = Memory::new(bytes).map_err(|reason| BackingError::Reserve { asked: bytes, reason })?;
        let span = memory.span;
        self.memory = Some(memory);
        self.reservations += 1;
        Ok(span)
    }

    fn release(&mut self, span: DeviceSpan) -> Result<(), BackingError> {
        may_release(self.held(), span)?;
        self.memory = None;
        Ok(())
    }

    fn reservations(&self) -> u64 {
        self.reservations
    }

    fn record(&mut self, _stream: Stream) -> Result<Event, BackingError> {
        self.newest_event += 1;
        Ok(Event(self.newest_event))
    }

    fn is_done(&mut self, event: Event) -> Result<bool, BackingError> {
        known(event, self.newest_event, "is_done").map(|()| true)
    }

    fn wait(&mut self, _stream: Stream, event: Event) -> Result<(), BackingError> {
        known(event, self.newest_event, "wait")
    }

    fn synchronize(&mut self, event: Event) -> Result<(), BackingError> {
        known(event, self.newest_event, "synchronize")
    }

    fn forget(&mut self, _event: Event) {}

    fn is_capturing(&mut self, _stream: Stream) -> bool {
        false
    }

    fn fill(&mut self, span: DeviceSpan, byte: u8, _stream: Stream) -> Result<(), BackingError> {
        let at = self.at(span, "fill")?;
        // SAFETY: the span lies inside the reservation, which is writable; the caller fills only bytes that nobody uses.
        unsafe { at.write_bytes(byte, span.bytes.get() as usize) };
        Ok(())
    }

    fn read(&mut self, span: DeviceSpan, into: &mut [u8], _stream: Stream) -> Result<(), BackingError> {
        let at = self.at(head(span, into, "read")?, "read")?;
        // SAFETY: `into.len()` bytes from `at` lie inside the reservation, which is initialised, and `into` is memory of
        // the caller, which the reservation is not.
        unsafe { at.copy_to(into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}
