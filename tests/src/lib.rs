//! The kit that tests and benches share: generators by seed, oracles that know the right answer the slow way, and the corpus
//! of real inputs.

pub mod corpus;
pub mod gdn;
pub mod generate;
pub mod gpu;
pub mod oracle;
pub mod peers;
