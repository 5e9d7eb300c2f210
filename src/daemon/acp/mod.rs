//! The Agent Collaboration Protocol at work: owners with their stores, relays and runs, inside the
//! daemon or as programs of their own (`commsd acp worker --key`, `delegate --key`, `demo`).
//!
//! `office` is the task that owns one owner, `transports` the ways to others, `outbox` what leaves,
//! `audit` the files, `tools` what workers may be granted. What a command does with an office stands
//! in `worker`, `delegate` and `demo`.

mod audit;
mod office;
mod outbox;
mod tools;
mod transports;

use std::path::PathBuf;

use crate::acp::code::Error;
use crate::daemon::logging::{emit, event};
use crate::identity::entropy::EntropyError;
use crate::store::StoreError;

pub use audit::{AuditFiles, AuditPlan};
pub use office::{Furnishing, Office, Told, open};
pub use tools::{Tool, Toolbox};
pub use transports::{Local, Transports};

/// Why an owner's side cannot work.
#[derive(Debug, thiserror::Error)]
pub enum OfficeError {
    /// Something of the protocol.
    #[error(transparent)]
    Protocol(#[from] Error),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An audit file.
    #[error("the audit file {path} cannot be written: {reason}", path = path.display())]
    Audit {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// No randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// A part of this program ended unexpectedly.
    #[error("a part of commsd ended unexpectedly: {0}")]
    Task(#[from] tokio::task::JoinError),
    /// The store was lost in an earlier failure.
    #[error("nothing can be stored any more")]
    Closed,
}

impl OfficeError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Protocol(error) => error.code().as_str(),
            Self::Store(error) => error.code(),
            Self::Audit { .. } => "acp_audit_file",
            Self::Entropy(error) => error.code(),
            Self::Task(_) => "acp_task",
            Self::Closed => "acp_closed",
        }
    }
}

/// Something that the operator should know and that stops nothing.
fn complain(error: &OfficeError) {
    emit(&event("acp_problem").with("code", error.code()).with("message", error.to_string()));
}
