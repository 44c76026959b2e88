//! What a layer refuses, each as one sentence.

use terrace_profiles::units::Bytes;

use crate::view::Dtype;

/// Why a layer was not loaded or did not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// A model whose layers are not served.
    #[error("{model}: {reason}")]
    Model {
        /// Its id.
        model: String,
        /// What is not served, and what is.
        reason: String,
    },
    /// Numbers that the device does not run a layer in.
    #[error("a layer in {given} does not run on this device; expected {expected}")]
    Element {
        /// What was asked for.
        given: Dtype,
        /// What would run.
        expected: &'static str,
    },
    /// A window that would cut a chunk.
    #[error("a window of {given} tokens is not served: it must be a multiple of {chunk}")]
    Window {
        /// What was asked for.
        given: u64,
        /// Tokens of a chunk.
        chunk: u64,
    },
    /// No tokens, or more than one call takes.
    #[error("{given} tokens cannot be run in one call; expected 1 to {most}")]
    Tokens {
        /// What came.
        given: u64,
        /// The most.
        most: u64,
    },
    /// A decode step of a sequence that has not begun.
    #[error("a decode step continues a sequence, and this one has not begun; expected a prefill of its first tokens")]
    Fresh,
    /// A span of the caller's that is too small.
    #[error("{} bytes were given for {what}; expected at least {}", given.get(), needed.get())]
    Span {
        /// What lies there.
        what: &'static str,
        /// Its bytes.
        given: Bytes,
        /// What the geometry needs.
        needed: Bytes,
    },
    /// The memory has no room.
    #[error("{label} of {} bytes finds no room: {reason}", bytes.get())]
    Memory {
        /// Who asked.
        label: String,
        /// For how much.
        bytes: Bytes,
        /// What the memory says.
        reason: String,
    },
    /// A checkpoint that cannot be read.
    #[error("{file}: {reason}")]
    File {
        /// Which file or folder.
        file: String,
        /// Why.
        reason: String,
    },
    /// A weight that the checkpoint does not have.
    #[error("{file} holds no layers.{layer}.{name}; expected the weights of a Gated DeltaNet layer under that name")]
    NoWeight {
        /// Which file or folder.
        file: String,
        /// The layer.
        layer: u64,
        /// The weight.
        name: String,
    },
    /// A weight of another shape.
    #[error("{name} in {file} is {given:?}; expected {expected:?} for this model")]
    WeightShape {
        /// Its whole name.
        name: String,
        /// Where it is.
        file: String,
        /// What the geometry says.
        expected: Vec<u64>,
        /// What is there.
        given: Vec<usize>,
    },
    /// cuBLASLt is missing, or refuses.
    #[cfg(feature = "cuda")]
    #[error("cuBLASLt, which a layer on CUDA projects with, {reason}")]
    Lt {
        /// What is wrong, and what to do.
        reason: String,
    },
}
