//! The integration tests: one binary, one module for each subject.

mod arrows;
mod cli;
mod codec;
mod conformance;
mod ffi;
mod import;
mod observe;
mod persist;
mod replay;
mod solve;
