//! What must outlive a crash: the records that a node asks to keep, behind a small trait. A record
//! that another one ends is dropped, so that what is kept stays as small as what is still wanted.
//!
//! This module holds the trait, the engine on disk (`disk`) with the thread that commits for
//! everybody at once (`committer`), the engine that keeps everything in memory (`--ephemeral` and
//! tests) and, in `faulty`, the twin with which tests make storage slow, failing and forgetful.
//! `change` alone knows what a record is found by; nothing here knows what it is for. `acp_relay`
//! and `owner` keep the records of a relay and of an owner of the Agent Collaboration Protocol, each
//! in a file of its own.

pub mod acp_relay;
mod change;
mod committer;
mod disk;
mod faulty;
mod memory;
mod owner;

use std::path::PathBuf;

pub use committer::{Committer, Report};
pub use disk::{DEFAULT_LIMIT, DiskStore, Found, Place};
pub use faulty::{Faults, FaultyStore, Submission};
pub use memory::{MAX_MEMORY_BYTES, MemoryStore};
pub use owner::{Commit, Kept, OwnerStore};

use crate::mesh::journal::Record;

/// Keeps records.
pub trait Store {
    /// Keeps a batch, all of it or nothing. Once this has returned, no crash undoes it (as far as
    /// the engine promises durability at all).
    ///
    /// # Errors
    /// [`StoreError`]; then the batch is not promised. (After a failure of the medium it may turn
    /// out to have been kept all the same: batches can be repeated.)
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError>;

    /// Keeps several batches with as few syncs as the engine can, each of them all or nothing.
    fn commit_all(&mut self, batches: &[&[Record]]) -> Vec<Result<(), StoreError>> {
        batches.iter().map(|batch| self.commit(batch)).collect()
    }

    /// Every record that is still wanted, in an order in which a node can take them back: what an
    /// agent has acknowledged comes before its remaining events, and those by their numbers.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`].
    fn live(&self) -> Result<Vec<Record>, StoreError>;

    /// Begins another run with what is [`Self::live`]: counts it, and stores that.
    ///
    /// # Errors
    /// [`StoreError`].
    fn begin(&mut self, live: Vec<Record>) -> Result<Vec<Record>, StoreError> {
        let runs = live.iter().find_map(|record| match record {
            Record::Start { number } => Some(*number),
            _ => None,
        });
        let start = Record::Start { number: runs.unwrap_or(0) + 1 };
        self.commit(std::slice::from_ref(&start))?;
        let rest = live.into_iter().filter(|record| !matches!(record, Record::Start { .. }));
        Ok(std::iter::once(start).chain(rest).collect())
    }
}

/// Why records could not be kept or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The bound on what is kept has been reached.
    #[error("the store is full ({limit} bytes)")]
    Full {
        /// Bytes.
        limit: usize,
    },
    /// The disk has no more room.
    #[error("no space is left on the disk of {path}", path = path.display())]
    NoSpace {
        /// The store.
        path: PathBuf,
    },
    /// A record could not be encoded.
    #[error("a record could not be encoded for the store: {0}")]
    Encoding(String),
    /// What was stored cannot be read back.
    #[error("the store cannot be read: {0}")]
    Corrupt(String),
    /// The store has lost what it had reported as kept.
    #[error(
        "the store {path} has gone back to an earlier state: it holds {found} commits, and {reported} \
         were reported as kept",
        path = path.display()
    )]
    RolledBack {
        /// The store.
        path: PathBuf,
        /// Commits in it.
        found: u64,
        /// Commits that were reported.
        reported: u64,
    },
    /// The file has been removed or replaced while it was open.
    #[error(
        "the store {path} was removed or replaced while the daemon runs: nothing is kept any more",
        path = path.display()
    )]
    Gone {
        /// Where it was.
        path: PathBuf,
    },
    /// There was a store, and its file is not there.
    #[error("the store {path} is missing, and its mark store.mark is there", path = path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// A newer commsd has written it.
    #[error(
        "the store {path} has format {found}, and this commsd knows formats up to {known}",
        path = path.display()
    )]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// Ours.
        known: u64,
    },
    /// Another process has it open.
    #[error("the store {path} is in use by another process", path = path.display())]
    Locked {
        /// The store.
        path: PathBuf,
    },
    /// The medium refused.
    #[error("the store {path} cannot be used: {reason}", path = path.display())]
    Unavailable {
        /// The store.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// More waits to be written than may.
    #[error("too much waits for the disk")]
    Busy,
}

impl StoreError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Full { .. } => "store_full",
            Self::NoSpace { .. } => "store_no_space",
            Self::Encoding(_) => "store_encoding",
            Self::Corrupt(_) => "store_corrupt",
            Self::RolledBack { .. } => "store_rolled_back",
            Self::Gone { .. } => "store_gone",
            Self::Missing { .. } => "store_missing",
            Self::Newer { .. } => "store_newer",
            Self::Locked { .. } => "store_locked",
            Self::Unavailable { .. } => "store_unavailable",
            Self::Busy => "store_busy",
        }
    }

    /// Whether another configuration would mend it, and not the disk or a copy.
    #[must_use]
    pub fn is_configuration(&self) -> bool {
        matches!(self, Self::Locked { .. } | Self::Newer { .. })
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> &'static str {
        match self {
            Self::Full { .. } => "let agents take their events, or raise store-mb",
            Self::NoSpace { .. } => "free space; what could not be written is tried again",
            Self::Encoding(_) => "report it with the text above",
            Self::Corrupt(_) => {
                "nothing was changed: put back a copy, or move store.redb and store.mark away to begin with an \
                 empty one (agents keep their keys and the tokens of their rooms)"
            }
            Self::RolledBack { .. } => {
                "put back the newest copy; to go on with what is there, remove the file store.mark \
                 beside it: events since then may be lost or shown again"
            }
            Self::Gone { .. } => {
                "move the very file back, if it was moved; else restart the daemon, which begins with \
                 what is there then: what it has in memory since, and all that was kept, is lost"
            }
            Self::Missing { .. } => {
                "put the store, or the newest copy, back; to begin with an empty one, remove the file \
                 store.mark as well (agents keep their keys and the tokens of their rooms)"
            }
            Self::Newer { .. } => {
                "run the newer commsd, or move store.redb and store.mark away to begin anew"
            }
            Self::Locked { .. } => {
                "end the other daemon, or give this one a --home (or a state directory) of its own"
            }
            Self::Unavailable { .. } => "check the disk and the permissions of the directory",
            Self::Busy => "wait; if it stays so, the disk is too slow or does not answer",
        }
    }
}
