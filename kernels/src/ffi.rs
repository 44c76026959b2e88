//! The C face: `include/terrace_gdn.h`, function by function. The header says what a caller needs to know; here is what each
//! function makes of it: views of raw pointers, then the same two calls as in Rust, with the same checks.
//!
//! No panic crosses: each function runs inside `guarded`. Pointers to structs are checked for null and alignment; whether they,
//! and the pointers in them, point at what they say is the caller's promise.

mod failure;
mod layout;
mod read;

use std::ffi::{c_char, c_int};

use terrace_profiles::units::DeviceSpan;

use crate::args::{Checkpoints, Decode, Initial, Last, Prefill, States};
use crate::device::{self, Device};
use crate::path::Path;
use crate::view::Workspace;

pub use failure::Status;
use failure::{Failure, guarded, last, pointer};
pub use layout::*;
use read::*;

/// The version: major, minor and patch, a byte each.
pub const VERSION: u32 = part(env!("CARGO_PKG_VERSION_MAJOR")) << 16
    | part(env!("CARGO_PKG_VERSION_MINOR")) << 8
    | part(env!("CARGO_PKG_VERSION_PATCH"));

const fn part(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) if number < 256 => number,
        _ => panic!("a part of the version does not fit a byte"),
    }
}

/// The version of the library, to hold against the header's `TERRACE_GDN_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_version() -> u32 {
    VERSION
}

/// The name of a status: `TERRACE_GDN_OK`. A number that is none is `TERRACE_GDN_OTHER`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_status_name(status: c_int) -> *const c_char {
    let known = usize::try_from(status).ok().and_then(|status| Status::ALL.get(status));
    known.unwrap_or(&Status::Other).name().as_ptr()
}

/// The text of this thread's last failure; empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_last_error() -> *const c_char {
    last()
}

/// Bytes that a prefill's workspace needs.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`; `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_workspace_bytes(
    device: *const CDevice,
    key_heads: u32,
    value_heads: u32,
    window: u32,
    design: u32,
    bytes: *mut u64,
) -> Status {
    guarded(|| {
        let (device, out) = (pointer(device, "device")?, pointer(bytes, "bytes")?);
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let host = unsafe { device.read() };
        let (shape, window, design) = (heads(key_heads, value_heads)?, read_window(window)?, read_design(design)?);
        let total = match host.kind {
            CPU => crate::workspace(&Device::Cpu(cpu(host)), shape, window, design).total(),
            CUDA => terrace_profiles::shape::gdn_workspace(shape, window, design).total(),
            other => return Err(no_such_kind(other)),
        };
        // SAFETY: as above; the caller lets it be written.
        unsafe { out.write(total.get()) };
        Ok(())
    })
}

/// The largest window whose workspace fits.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`; `window` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_choose_window(
    device: *const CDevice,
    key_heads: u32,
    value_heads: u32,
    budget: u64,
    design: u32,
    window: *mut u32,
) -> Status {
    guarded(|| {
        let (device, out) = (pointer(device, "device")?, pointer(window, "window")?);
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let device = unsafe { read_device(device.read()) }?;
        let chosen = crate::choose_window(
            &device,
            bytes(budget, "budget")?,
            heads(key_heads, value_heads)?,
            read_design(design)?,
        )?;
        // SAFETY: as above; the caller lets it be written.
        unsafe { out.write(chosen.tokens()) };
        Ok(())
    })
}

/// Compiles and loads the kernels for one type.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_prepare(device: *const CDevice, dtype: u32) -> Status {
    guarded(|| {
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let device = unsafe { read_device(pointer(device, "device")?.read()) }?;
        let dtype = read_dtype(dtype, "dtype")?;
        match device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => match dtype {
                crate::Dtype::Bf16 => Ok(device.prepare(crate::tile::Element::Bf16)?),
                crate::Dtype::F16 => Ok(device.prepare(crate::tile::Element::Fp16)?),
                crate::Dtype::F32 => Err(Failure::argument("dtype", "is fp32; expected bf16 or fp16 on CUDA")),
            },
        }
        .inspect(|()| tracing::debug!(target: "terrace::gdn", %dtype, "prepared"))
    })
}

/// A prefill.
///
/// # Safety
/// `args` is null or points at as many readable bytes as its `size` says, and what is in it is as the header says; `path` is
/// null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_prefill(args: *const PrefillArgs, path: *mut CPath) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let args = unsafe { read_args(args, "args") }?;
        // SAFETY: as above.
        let device = unsafe { read_device(args.device) }?;
        let place = place(&device);
        let Bounds { tokens, key_heads, value_heads } = bounds(args.tokens, args.key_heads, args.value_heads)?;
        let keys = [tokens, key_heads, 128];
        let values = [tokens, value_heads, 128];
        let gates = [tokens, value_heads, 1];
        // SAFETY: as above; so are the pointers in it, which the calls of `view` below rely on.
        let sequences = unsafe { read_sequences(&args) }?;
        let count = match sequences.cu_seqlens {
            Some(cu) => cu.len() - 1,
            None => 1,
        };
        // SAFETY: as above.
        let (initial_slots, last_slots, has_initial) = unsafe {
            (
                optional(args.host_initial_slots, count, "host_initial_slots")?,
                optional(args.host_last_slots, count, "host_last_slots")?,
                optional(args.host_has_initial, count, "host_has_initial")?,
            )
        };
        let has_initial: Option<Vec<bool>> = has_initial.map(|has| has.iter().map(|has| *has != 0).collect());
        let has_initial = has_initial.as_deref();
        let initial = pool(&args.initial, "initial", value_heads)?;
        let last = pool(&args.last, "last", value_heads)?;
        let checkpoints = pool(&args.checkpoints, "checkpoints", value_heads)?;
        if args.in_place != 0 && (initial.is_some() || !args.host_initial_slots.is_null()) {
            return Err(Failure::argument("initial", "is set, but in place states come from last; expected none"));
        }
        // SAFETY: as above, for each of these views.
        let call = unsafe {
            let states = match (args.in_place != 0, last) {
                (true, None) => return Err(Failure::argument("last.data", "is null; in place it is the pool")),
                (true, Some(last)) => States::InPlace { pool: last.writable(place), slots: last_slots, has_initial },
                (false, last) => States::Separate {
                    initial: initial.map(|it| Initial { pool: it.readable(place), slots: initial_slots, has_initial }),
                    last: last.map(|it| Last { pool: it.writable(place), slots: last_slots }),
                },
            };
            let checkpoints = match (args.checkpoint_every, checkpoints) {
                (0, _) => None,
                (_, None) => {
                    return Err(Failure::argument("checkpoints.data", "is null, but checkpoint_every is not 0"));
                }
                (every, Some(it)) => Some(Checkpoints { every, states: it.writable(place) }),
            };
            Prefill {
                q: view(&args.q, "q", place, keys)?.readable(),
                k: view(&args.k, "k", place, keys)?.readable(),
                v: view(&args.v, "v", place, values)?.readable(),
                g: view(&args.g, "g", place, gates)?.readable(),
                beta: view(&args.beta, "beta", place, gates)?.readable(),
                o: view(&args.o, "o", place, values)?.writable(),
                sequences,
                states,
                checkpoints,
                scale: scale(args.scale),
                l2norm: args.l2norm != 0,
                window: read_window(args.window)?,
                design: read_design(args.design)?,
            }
        };
        let span = DeviceSpan {
            address: args.workspace.expose_provenance() as u64,
            bytes: bytes(args.workspace_bytes, "workspace_bytes")?,
        };
        // SAFETY: as above.
        let workspace = unsafe { Workspace::from_raw(place, span) };
        let taken = device::prefill(&device, call, workspace)?;
        // SAFETY: as above.
        unsafe { tell(path, &taken) }
    })
}

/// A decode step.
///
/// # Safety
/// As [`terrace_gdn_prefill`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_decode(args: *const DecodeArgs, path: *mut CPath) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let args = unsafe { read_args(args, "args") }?;
        // SAFETY: as above.
        let device = unsafe { read_device(args.device) }?;
        let place = place(&device);
        let Bounds { tokens, key_heads, value_heads } = bounds(args.tokens, args.key_heads, args.value_heads)?;
        let keys = [tokens, key_heads, 128];
        let values = [tokens, value_heads, 128];
        let gates = [tokens, value_heads, 1];
        let sequences = length(args.sequences, "sequences")?;
        let states = pool(&args.pool, "pool", value_heads)?;
        let states = states.ok_or_else(|| Failure::argument("pool.data", "is null"))?;
        // SAFETY: as above, for each of these views.
        let call = unsafe {
            Decode {
                q: view(&args.q, "q", place, keys)?.readable(),
                k: view(&args.k, "k", place, keys)?.readable(),
                v: view(&args.v, "v", place, values)?.readable(),
                g: view(&args.g, "g", place, gates)?.readable(),
                beta: view(&args.beta, "beta", place, gates)?.readable(),
                o: view(&args.o, "o", place, values)?.writable(),
                cu_seqlens: indices(args.cu_seqlens, sequences.saturating_add(1), "cu_seqlens", place)?,
                slots: indices(args.slots, sequences, "slots", place)?,
                pool: states.writable(place),
                scale: scale(args.scale),
                l2norm: args.l2norm != 0,
            }
        };
        let taken = device::decode(&device, call)?;
        // SAFETY: as above.
        unsafe { tell(path, &taken) }
    })
}

/// # Safety
/// `to` is null or may be written.
unsafe fn tell(to: *mut CPath, path: &Path) -> Result<(), Failure> {
    if to.is_null() {
        return Ok(());
    }
    let told = CPath {
        windows: path.windows,
        chunks: path.chunks,
        launches: path.launches,
        table_bytes: path.table_bytes,
        route: text(path.route.name()),
        arch: text(path.arch.as_deref().unwrap_or_default()),
        why: text(&path.why),
    };
    // SAFETY: checked for null and alignment; the caller lets it be written.
    unsafe { pointer(to, "path")?.write(told) };
    Ok(())
}

/// As much of a text as fits, at the end of a character, and a null byte.
fn text<const N: usize>(from: &str) -> [c_char; N] {
    let end = (0..=from.len().min(N - 1)).rev().find(|end| from.is_char_boundary(*end)).unwrap_or(0);
    let mut into = [0; N];
    for (to, byte) in into.iter_mut().zip(from[..end].bytes()) {
        *to = byte as c_char;
    }
    into
}
