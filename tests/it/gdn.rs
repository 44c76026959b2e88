//! Gated DeltaNet: the same cases on the CPU and, where there is one, on a CUDA device.

mod bitwise;
mod cuda;
mod decode;
mod file;
mod grids;
mod long;
mod mutants;
mod refusals;
mod small;
mod windows;
