//! What must outlive a crash: the records that a node asks to keep, behind a small trait. A record
//! that another one ends is dropped, so that what is kept stays as small as what is still wanted.
//!
//! This module holds the trait, the engine that keeps everything in memory (`--ephemeral` and
//! tests) and, in `faulty`, the twin with which tests make storage slow, failing and forgetful.
//! Nothing here knows what a record is for.

mod faulty;
mod memory;

pub use faulty::{Faults, FaultyStore, Submission};
pub use memory::{MAX_MEMORY_BYTES, MemoryStore};

use crate::mesh::journal::Record;

/// Keeps records.
pub trait Store {
    /// Keeps a batch, all of it or nothing. Once this has returned, no crash undoes it (as far as
    /// the engine promises durability at all).
    ///
    /// # Errors
    /// [`StoreError`]; then nothing of the batch is kept.
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError>;

    /// Every record that is still wanted, in an order in which a node can take them back: what an
    /// agent has acknowledged comes before its remaining events, and those by their numbers.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`].
    fn live(&self) -> Result<Vec<Record>, StoreError>;
}

/// Why records could not be kept or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The bound on what is kept has been reached.
    #[error("the store is full ({limit} bytes); let agents take their events, or raise the limit")]
    Full {
        /// Bytes.
        limit: usize,
    },
    /// A record could not be encoded.
    #[error("a record could not be encoded for the store: {0}")]
    Encoding(String),
    /// What was stored cannot be read back.
    #[error(
        "a stored record cannot be read: {0}; the store was written by another version or is damaged"
    )]
    Corrupt(String),
    /// The medium refused.
    #[error("the store could not write: {0}; check the disk")]
    Unavailable(String),
}

impl StoreError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full { .. } => "store_full",
            Self::Encoding(_) => "store_encoding",
            Self::Corrupt(_) => "store_corrupt",
            Self::Unavailable(_) => "store_unavailable",
        }
    }
}
