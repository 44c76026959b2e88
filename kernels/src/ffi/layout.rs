//! The structs and numbers of `include/terrace_gdn.h`, field by field; a C program and a test hold them against the header.

use std::ffi::{c_char, c_void};

/// `TERRACE_GDN_CPU`.
pub const CPU: u32 = 1;
/// `TERRACE_GDN_CUDA`.
pub const CUDA: u32 = 2;
/// `TERRACE_GDN_BF16`.
pub const BF16: u32 = 1;
/// `TERRACE_GDN_FP16`.
pub const FP16: u32 = 2;
/// `TERRACE_GDN_FP32`.
pub const FP32: u32 = 3;
/// `TERRACE_GDN_FUSED`.
pub const FUSED: u32 = 0;
/// `TERRACE_GDN_STAGED`.
pub const STAGED: u32 = 1;

/// `terrace_gdn_device`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CDevice {
    /// [`CPU`] or [`CUDA`].
    pub kind: u32,
    /// Which CUDA device.
    pub ordinal: u32,
    /// Its stream.
    pub stream: *mut c_void,
    /// Most threads on the CPU.
    pub threads: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CTensor {
    /// The first element.
    pub data: *mut c_void,
    /// In elements; 0 is contiguous.
    pub token_stride: i64,
    /// In elements; 0 is contiguous.
    pub head_stride: i64,
    /// [`BF16`], [`FP16`] or [`FP32`].
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_pool`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPool {
    /// The first element; null is no pool.
    pub data: *mut c_void,
    /// States of all value heads there are.
    pub slots: i64,
    /// In elements; 0 is contiguous.
    pub slot_stride: i64,
    /// [`BF16`] or [`FP32`].
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_prefill_args`. It only ever grows at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each field is that of the header, and described there")]
pub struct PrefillArgs {
    pub size: u64,
    pub device: CDevice,
    pub tokens: i64,
    pub key_heads: u32,
    pub value_heads: u32,
    pub q: CTensor,
    pub k: CTensor,
    pub v: CTensor,
    pub g: CTensor,
    pub beta: CTensor,
    pub o: CTensor,
    pub host_cu_seqlens: *const i64,
    pub sequences: i64,
    pub host_chunk_indices: *const [i64; 2],
    pub chunks: i64,
    pub host_chunk_offsets: *const i64,
    pub initial: CPool,
    pub host_initial_slots: *const i32,
    pub host_has_initial: *const u8,
    pub last: CPool,
    pub host_last_slots: *const i32,
    pub in_place: u32,
    pub checkpoint_every: u32,
    pub checkpoints: CPool,
    pub scale: f32,
    pub l2norm: u32,
    pub window: u32,
    pub design: u32,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
}

/// `terrace_gdn_decode_args`. It only ever grows at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each field is that of the header, and described there")]
pub struct DecodeArgs {
    pub size: u64,
    pub device: CDevice,
    pub tokens: i64,
    pub key_heads: u32,
    pub value_heads: u32,
    pub q: CTensor,
    pub k: CTensor,
    pub v: CTensor,
    pub g: CTensor,
    pub beta: CTensor,
    pub o: CTensor,
    pub cu_seqlens: *const i32,
    pub slots: *const i32,
    pub sequences: i64,
    pub pool: CPool,
    pub scale: f32,
    pub l2norm: u32,
}

/// `terrace_gdn_path`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPath {
    /// Windows of a prefill.
    pub windows: u64,
    /// Chunks of a prefill.
    pub chunks: u64,
    /// Kernel launches.
    pub launches: u64,
    /// Bytes of the host's tables at a time.
    pub table_bytes: u64,
    /// As [`crate::Route::name`].
    pub route: [c_char; 32],
    /// What the kernels were compiled for.
    pub arch: [c_char; 32],
    /// In words.
    pub why: [c_char; 192],
}
