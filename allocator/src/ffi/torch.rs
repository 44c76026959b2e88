//! The devices of this process by CUDA ordinal, and the functions that PyTorch's `CUDAPluggableAllocator` calls on them.
//!
//! ```text
//!   terrace_torch_malloc(size, 0, stream)
//!     device 0 registered before?       yes -> that one
//!     TERRACE_BACKING, TERRACE_BUDGET       -> opened now, and never closed: frees come until the process is gone
//! ```
//!
//! What may fail throws (`throw.rs`): `malloc`, `init`, `memory_fraction` and `begin_allocate_to_pool`. `free` and the rest
//! come from destructors, where an exception ends the process: they take anything and say nothing.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{env, ptr};

use terrace_profiles::units::Bytes;

use crate::backing::Backing;
use crate::device::Config;
use crate::ffi::failure::{Failure, Status, caught, guarded, keep, pointer};
use crate::ffi::handle::Handle;
use crate::ffi::throw::{OutOfMemoryThrower, on_out_of_memory, throw};
use crate::ffi::{BACKING_CUDA, BACKING_HOST, Pool, address, backing, handle, stream};
use crate::pool::PoolId;

/// As many devices as PyTorch is built for.
const MOST_DEVICES: usize = 64;

/// The devices by ordinal. What is in here stays until the process ends.
static DEVICES: [AtomicPtr<Handle>; MOST_DEVICES] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST_DEVICES];

/// What is known beside the devices.
static TORCH: Mutex<Torch> = Mutex::new(Torch { fractions: BTreeMap::new(), captures: BTreeMap::new() });

struct Torch {
    /// By ordinal: the share of the device's memory that a device opened later may have.
    fractions: BTreeMap<usize, f64>,
    /// By ordinal and pool: captures begun and not yet released. Graphs that share a pool each release it.
    captures: BTreeMap<(usize, PoolId), u32>,
}

fn torch() -> MutexGuard<'static, Torch> {
    // Nothing is ever left half changed in it.
    TORCH.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `device` the one that PyTorch's requests for this ordinal go to. It stays so until the process ends; destroying it
/// gives up the caller's own hold only.
///
/// # Safety
/// `device` is null or came from a `terrace_create` and was not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_register(ordinal: c_int, device: *mut Handle) -> Status {
    guarded(|| {
        slot(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { handle(device) }?;
        // SAFETY: the pointer came from `Arc::into_raw`, and the caller holds it: this adds a hold, which `register` takes or gives up.
        let held = unsafe {
            Arc::increment_strong_count(device.cast_const());
            Arc::from_raw(device.cast_const())
        };
        register(ordinal, held)
    })
}

/// As [`terrace_torch_register`], for a Rust program that shares its device with PyTorch.
///
/// # Errors
/// No such ordinal, one that has a device, a device of the parent of this process.
pub fn register(ordinal: c_int, device: Arc<Handle>) -> Result<(), Failure> {
    let slot = slot(ordinal)?;
    device.not_forked()?;
    let _one_at_a_time = torch();
    match slot.load(Ordering::Acquire) {
        known if known.is_null() => {}
        known if ptr::eq(known, Arc::as_ptr(&device)) => return Ok(()),
        _ => return Err(Failure::argument("ordinal", &format!("{ordinal} has a device already"))),
    }
    slot.store(Arc::into_raw(device).cast_mut(), Ordering::Release);
    Ok(())
}

/// The device of an ordinal, opened as the environment says if there is none yet. It is not the caller's to destroy.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_device(ordinal: c_int, out: *mut *mut Handle) -> Status {
    guarded(|| {
        let out = pointer(out, "out")?;
        // SAFETY: checked; the caller lets it be written.
        unsafe { out.write(ptr::null_mut()) };
        let device = device(ordinal)?;
        // SAFETY: as above.
        unsafe { out.write(ptr::from_ref(device).cast_mut()) };
        Ok(())
    })
}

/// `alloc_fn`. No bytes: null. Throws `std::runtime_error` if it cannot serve.
///
/// # Safety
/// Called from C++, or from what an exception may pass.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn terrace_torch_malloc(size: usize, ordinal: c_int, on: *mut c_void) -> *mut c_void {
    match serve(size, ordinal, on) {
        Ok(address) => ptr::with_exposed_provenance_mut(address as usize),
        Err(failure) => throw(failure),
    }
}

/// `alloc_fn` of a `torch.cuda.MemPool`, where PyTorch's own allocator asks for segments, takes null for a refusal and raises that as its
/// own. The text of a refusal is in `terrace_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_torch_try_malloc(size: usize, ordinal: c_int, on: *mut c_void) -> *mut c_void {
    match serve(size, ordinal, on) {
        Ok(address) => ptr::with_exposed_provenance_mut(address as usize),
        Err(failure) => {
            keep(&failure.text);
            ptr::null_mut()
        }
    }
}

fn serve(size: usize, ordinal: c_int, on: *mut c_void) -> Result<u64, Failure> {
    caught(|| {
        if size == 0 {
            return Ok(0);
        }
        let device = device(ordinal)?;
        let too_large =
            || Failure::new(Status::OutOfMemory, format!("{size} bytes were asked for, more than there can be"));
        device.alloc(Bytes::new(size as u64).ok_or_else(too_large)?, stream(on), "torch")
    })
}

/// Sets who throws when a budget is spent; null for nobody, and `std::runtime_error`.
///
/// # Safety
/// The function throws, or returns, on whatever thread it is called, as long as it is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_on_out_of_memory(thrower: Option<OutOfMemoryThrower>) {
    on_out_of_memory(thrower);
}

/// `free_fn`. Takes anything, from any thread, at any time, and never throws: what is not live is counted.
///
/// # Safety
/// Nobody uses the buffer any more, but for work queued on the stream that it was asked for on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_free(at: *mut c_void, _size: usize, ordinal: c_int, _stream: *mut c_void) {
    if !at.is_null() {
        quietly(|| holder(ordinal, address(at)).map_or(Ok(()), |device| device.free(address(at))));
    }
}

/// `init_fn`. Opens nothing, but throws if the environment could not be used later.
///
/// # Safety
/// As [`terrace_torch_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn terrace_torch_init(_devices: c_int) {
    if let Err(failure) = caught(|| Environment::read().map(drop)) {
        throw(failure);
    }
}

/// `reset_fn`, which `empty_cache` calls: what was freed on several streams and is done by now becomes free.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_torch_reset() {
    for device in devices() {
        quietly(|| device.locked(|device| device.drain(false)));
    }
}

/// `memory_fraction_fn`: limits the budget of a device that is opened later. One that is open keeps its reservation: then this
/// throws if that is larger.
///
/// # Safety
/// As [`terrace_torch_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn terrace_torch_memory_fraction(fraction: f64, ordinal: c_int) {
    if let Err(failure) = caught(|| limit(fraction, ordinal)) {
        throw(failure);
    }
}

/// `base_alloc_fn`: where the reservation that an address lies in begins, and its size; null and 0 for other addresses.
///
/// # Safety
/// `size` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_base_alloc(at: *mut c_void, size: *mut usize) -> *mut c_void {
    let (base, bytes) = devices().find(|device| device.holds(address(at))).map(Handle::span).unwrap_or_default();
    if let Ok(size) = pointer(size, "size") {
        // SAFETY: checked; the caller lets it be written.
        unsafe { size.write(bytes as usize) };
    }
    ptr::with_exposed_provenance_mut(base as usize)
}

/// `record_stream_fn`. Never throws.
///
/// # Safety
/// The stream lives until the buffer is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_torch_record_stream(at: *mut c_void, on: *mut c_void) {
    if !at.is_null() {
        quietly(|| holder(-1, address(at)).map_or(Ok(()), |device| device.record_stream(address(at), stream(on))));
    }
}

/// `begin_allocate_to_pool`. The filter, a `std::function<bool(cudaStream_t)>` by value and so a pointer to one, is not asked:
/// until the end, requests on all streams of the device go to the pool. That pins more than needed, never less.
///
/// # Safety
/// As [`terrace_torch_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn terrace_torch_begin_allocate_to_pool(
    ordinal: c_int,
    pool: Pool,
    _filter: *const c_void,
) {
    let begun = caught(|| {
        device(ordinal)?.locked(|device| device.begin_pool(pool.id(), &[]))?;
        *torch().captures.entry((ordinal as usize, pool.id())).or_default() += 1;
        Ok(())
    });
    if let Err(failure) = begun {
        throw(failure);
    }
}

/// `end_allocate_to_pool_fn`. Never throws.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_torch_end_allocate_to_pool(ordinal: c_int, pool: Pool) {
    quietly(|| match known(ordinal) {
        Some(device) => Ok(device.locked(|device| device.end_pool(pool.id()))??),
        None => Ok(()),
    });
}

/// `release_pool`. Never throws. The pool is released with the last of the captures that began it.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_torch_release_pool(ordinal: c_int, pool: Pool) {
    quietly(|| {
        let Some(device) = known(ordinal) else { return Ok(()) };
        device.not_forked()?;
        let mut torch = torch();
        let key = (ordinal as usize, pool.id());
        if let Some(captures) = torch.captures.get_mut(&key) {
            *captures -= 1;
            if *captures > 0 {
                return Ok(());
            }
            torch.captures.remove(&key);
        }
        drop(torch);
        Ok(device.locked(|device| device.release_pool(pool.id()))??)
    });
}

/// For what must not fail: traces what went wrong.
fn quietly(call: impl FnOnce() -> Result<(), Failure>) {
    if let Err(failure) = caught(call) {
        // A subscriber may panic too.
        let _ = caught(|| {
            tracing::debug!(target: "terrace::torch", status = ?failure.status, "{}", failure.text);
            Ok(())
        });
    }
}

fn slot(ordinal: c_int) -> Result<&'static AtomicPtr<Handle>, Failure> {
    let slot = usize::try_from(ordinal).ok().and_then(|ordinal| DEVICES.get(ordinal));
    slot.ok_or_else(|| Failure::argument("ordinal", &format!("is {ordinal}, not one of 0 to {}", MOST_DEVICES - 1)))
}

/// The devices there are.
fn devices() -> impl Iterator<Item = &'static Handle> {
    // SAFETY: what is in a slot is kept until the process ends.
    DEVICES.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

fn known(ordinal: c_int) -> Option<&'static Handle> {
    // SAFETY: as in `devices`.
    slot(ordinal).ok().and_then(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

/// The device whose memory the address is, whatever ordinal was named; else the named one, which will count it.
fn holder(ordinal: c_int, address: u64) -> Option<&'static Handle> {
    let named = known(ordinal);
    named.filter(|device| device.holds(address)).or_else(|| devices().find(|device| device.holds(address))).or(named)
}

#[inline]
fn device(ordinal: c_int) -> Result<&'static Handle, Failure> {
    match known(ordinal) {
        Some(device) => Ok(device),
        None => open(ordinal),
    }
}

/// Opens the device of an ordinal as the environment says.
#[cold]
fn open(ordinal: c_int) -> Result<&'static Handle, Failure> {
    let slot = slot(ordinal)?;
    let torch = torch();
    if let Some(device) = known(ordinal) {
        return Ok(device);
    }
    let environment = Environment::read()?;
    let backing = backing(environment.backing, ordinal.cast_unsigned())?;
    let share = match torch.fractions.get(&(ordinal as usize)) {
        Some(fraction) => Some(share(&*backing, *fraction)?),
        None => None,
    };
    let budget = environment.budget.into_iter().chain(share).min().ok_or_else(|| {
        let text = format!(
            "device {ordinal} has no budget: set TERRACE_BUDGET (such as 20GiB) or a memory fraction, or register a device (in Python: \
             name it in terrace.install)"
        );
        Failure::new(Status::BadArgument, text)
    })?;
    let handle = Arc::into_raw(Handle::open(backing, Config::new(budget))?).cast_mut();
    slot.store(handle, Ordering::Release);
    // SAFETY: just made, and kept until the process ends.
    Ok(unsafe { &*handle })
}

fn limit(fraction: f64, ordinal: c_int) -> Result<(), Failure> {
    slot(ordinal)?;
    if !(fraction > 0.0 && fraction <= 1.0) {
        return Err(Failure::argument("fraction", &format!("is {fraction}, not above 0 and at most 1")));
    }
    let mut torch = torch();
    if let Some(device) = known(ordinal) {
        let allowed = device.locked(|device| share(device.backing(), fraction))??;
        let (_, held) = device.span();
        if held > allowed.get() {
            let why = format!(
                "{fraction} is {allowed}, but device {ordinal} has reserved {held} bytes; set it before first use"
            );
            return Err(Failure::argument("fraction", &why));
        }
    }
    torch.fractions.insert(ordinal as usize, fraction);
    Ok(())
}

/// That share of a device's memory.
fn share(backing: &dyn Backing, fraction: f64) -> Result<Bytes, Failure> {
    let unknown = || Failure::new(Status::Other, "a memory fraction needs a device that tells its size");
    let (total, _) = backing.memory().ok_or_else(unknown)?;
    Bytes::new((total.get() as f64 * fraction) as u64).ok_or_else(unknown)
}

/// What the environment says about devices that nobody registered.
#[derive(Debug, PartialEq, Eq)]
struct Environment {
    backing: u32,
    budget: Option<Bytes>,
}

impl Environment {
    fn read() -> Result<Self, Failure> {
        let value = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::of(value("TERRACE_BACKING").as_deref(), value("TERRACE_BUDGET").as_deref())
    }

    fn of(backing: Option<&str>, budget: Option<&str>) -> Result<Self, Failure> {
        let backing = match backing {
            None | Some("" | "cuda") => BACKING_CUDA,
            Some("host") => BACKING_HOST,
            Some(other) => {
                return Err(Failure::argument("TERRACE_BACKING", &format!("is '{other}', not host or cuda")));
            }
        };
        let budget = match budget {
            None | Some("") => None,
            Some(text) => Some(size(text).ok_or_else(|| {
                Failure::argument("TERRACE_BUDGET", &format!("is '{text}', not a size such as 21474836480 or 20GiB"))
            })?),
        };
        Ok(Self { backing, budget })
    }
}

/// A size: a whole number, in bytes or with a unit of KiB, MiB, GiB or TiB.
fn size(text: &str) -> Option<Bytes> {
    let text = text.trim();
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let with_unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (number, shift) = with_unit.unwrap_or((text, 0));
    let number: u64 = number.trim_end().parse().ok()?;
    Bytes::new(number.checked_mul(1 << shift)?).filter(|bytes| !bytes.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_whole_number_with_or_without_a_binary_unit() {
        let check = |text, expect: Option<u64>| assert_eq!(size(text).map(Bytes::get), expect, "{text}");
        check("512", Some(512));
        check("20GiB", Some(20 << 30));
        check(" 3 MiB ", Some(3 << 20));
        check("1TiB", Some(1 << 40));
        for wrong in ["", "0", "GiB", "1.5GiB", "20GB", "20gib", "-1", "9223372036854775808", "9999999999TiB"] {
            check(wrong, None);
        }
    }

    #[test]
    fn the_environment_is_named_where_it_is_wrong() {
        let check = |backing, budget, expect: &str| {
            let found = Environment::of(backing, budget);
            assert_eq!(found.map_or_else(|failure| failure.text, |found| format!("{found:?}")), expect);
        };
        check(None, None, "Environment { backing: 2, budget: None }");
        check(Some("host"), Some("1KiB"), "Environment { backing: 1, budget: Some(Bytes(1024)) }");
        check(Some("tpu"), None, "TERRACE_BACKING is 'tpu', not host or cuda");
        check(None, Some("lots"), "TERRACE_BUDGET is 'lots', not a size such as 21474836480 or 20GiB");
    }
}
