//! The Agent Collaboration Protocol at work: owners with their stores, relays and runs, inside the
//! daemon or as programs of their own (`commsd acp worker --key`, `delegate --key`, `demo`).
//!
//! `resident` keeps the daemon's own. `setup` makes an office, `program` makes it a program of its own,
//! `office` is the task that owns one owner, `transports` the ways to others, `mesh` the one without
//! relays, `outbox` what leaves, `audit` the files, `tools` what workers may be granted. What a command
//! does with an office stands in `worker`, `delegation` and `demo`.

mod audit;
pub mod delegation;
pub mod demo;
pub(in crate::daemon) mod mesh;
mod office;
pub mod orders;
mod outbox;
pub mod program;
pub mod resident;
pub mod service;
mod setup;
pub mod socket;
mod tools;
mod transports;
pub mod worker;

use std::path::PathBuf;

use crate::acp::code::{Code, Error};
use crate::api::types::ApiError;
pub use crate::daemon::StartError;
use crate::daemon::logging::{emit, event};
use crate::identity::entropy::EntropyError;
use crate::runtime::adapter::AdapterError;
use crate::store::StoreError;

pub use audit::{AuditFiles, AuditPlan};
pub use mesh::Mesh;
pub use office::{Furnishing, Office, Told, open};
pub use setup::{OfficeOptions, owner_dir, read_key};
pub use tools::{MAX_TOOLS, Tool, Toolbox};
pub use transports::{Local, Transports};

/// The task of an open office.
pub type OfficeTask = tokio::task::JoinHandle<Result<(), OfficeError>>;

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
    /// A key file.
    #[error("the key {path} cannot be used: {reason}", path = path.display())]
    Key {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The state directory.
    #[error("the state directory {path} cannot be made: {reason}", path = path.display())]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The adapter.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
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
            Self::Key { .. } => "acp_key",
            Self::State { .. } => "acp_state",
            Self::Adapter(error) => error.code(),
            Self::Entropy(error) => error.code(),
            Self::Task(_) => "acp_task",
            Self::Closed => "acp_closed",
        }
    }

    /// Whether other arguments would mend it.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Key { .. } | Self::Adapter(_) => true,
            Self::Protocol(error) => error.code() == Code::EndpointBlocked,
            Self::Store(error) => error.is_configuration(),
            _ => false,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> String {
        let text = match self {
            Self::Protocol(error) => error.todo(),
            Self::Store(StoreError::Locked { .. }) => {
                "another process works with this key; end it, or ask it with acp tasks, task, cancel \
                 and approvals"
            }
            Self::Store(error) => error.todo(),
            Self::Audit { .. } => {
                "name a path where nothing is, in a directory that you may write to"
            }
            Self::State { .. } => "choose another directory with --state-dir",
            Self::Key { .. } => "make one with acp keygen FILE",
            Self::Adapter(_) => {
                "correct the options of the adapter (`commsd acp worker start --help`)"
            }
            Self::Entropy(_) | Self::Task(_) => {
                "look at what was said before, and start again; if that does not help, please report it"
            }
            Self::Closed => {
                "free space or mend the disk, then start again: tasks go on where they were"
            }
        };
        text.to_owned()
    }
}

impl From<OfficeError> for ApiError {
    fn from(error: OfficeError) -> Self {
        Self::new(error.code(), error.to_string(), error.todo())
    }
}

/// Something that the operator should know and that stops nothing.
fn complain(error: &OfficeError) {
    emit(&event("acp_problem").with("code", error.code()).with("message", error.to_string()));
}
