//! The integration tests: one binary, one module for each subject.

mod arrows;
mod block;
mod caching;
mod cli;
mod codec;
mod compile;
mod conformance;
mod ffi;
mod ffi_gdn;
mod gdn;
mod import;
mod large;
mod observe;
mod pages;
mod persist;
mod replay;
mod serving;
mod solve;
