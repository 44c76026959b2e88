#![doc = include_str!("../README.md")]

mod args;
pub mod block;
#[cfg(feature = "cuda")]
pub mod cache;
#[cfg(feature = "cuda")]
pub mod compile;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod error;
pub mod ffi;
#[cfg(feature = "cuda")]
mod launch;
pub mod metadata;
pub mod path;
pub mod reference;
#[cfg(feature = "cuda")]
pub mod source;
#[cfg(feature = "cuda")]
pub mod tile;
mod view;
pub mod window;
mod workspace;

pub use args::{Checkpoints, Decode, Initial, Last, MAX_DECODE, Prefill, States};
pub use cpu::Cpu;
pub use device::{Device, decode, prefill};
pub use error::Error;
pub use metadata::Sequences;
pub use path::{Path, Route};
pub use terrace_profiles::shape::{Buffer, Design, Gdn, Layout, Window};
pub use view::{Block, Dtype, Elements, ElementsMut, Indices, Place, Pool, PoolMut, Tensor, TensorMut, Workspace};
pub use workspace::{choose_window, workspace};
