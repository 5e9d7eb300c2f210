//! A task's log as a record for others (design 8): the JSONL file and the bundle, their
//! verification, checkpoints and anchors, the comparison of two copies, and a gateway's own journal.
//! Bytes in, bytes out; files are somebody else's.

mod bundle;
mod compare;
mod journal;
mod jsonl;
mod verify;

use std::collections::BTreeMap;

use serde_json::Value;

use super::code::{Code, Error, Result};
use super::did::Secret;
use super::log::{Committed, TaskLog};
use super::objects::{AuditCheckpoint, AuditGenesis, TrustAnchor};
use super::sign::{Role, Signature, Signed as _};
use super::value::{Count, Digest, Read as _, Time};
use crate::codec::time::UnixMillis;

pub use bundle::{from_bundle, to_bundle};
pub use compare::{Comparison, compare};
pub use journal::{journal_entry, verify_journal};
pub use jsonl::{Completion, JsonlWriter, MAX_AUDIT_FILE, complete, read_header, read_jsonl};
pub use verify::{Anchor, Failure, Report, Status, verify};

/// A log with what it names, out of a file or a bundle; not verified.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditLog {
    /// Where it begins.
    pub genesis: AuditGenesis,
    /// Its entries.
    pub entries: Vec<Committed>,
    /// Objects by the digest that the file gives them.
    pub objects: BTreeMap<Digest, Value>,
    /// Checkpoints in the file.
    pub checkpoints: Vec<AuditCheckpoint>,
    /// Whether a last line without an end was cut off.
    pub torn: bool,
}

impl AuditLog {
    /// The log of a live task, with the objects that it names.
    #[must_use]
    pub fn of(log: &TaskLog) -> Self {
        let entries = log.entries().to_vec();
        let objects = entries
            .iter()
            .flat_map(|committed| &committed.payload)
            .filter_map(|digest| log.object(digest).map(|object| (*digest, object.clone())))
            .collect();
        let genesis = log.view().genesis().clone();
        Self { genesis, entries, objects, checkpoints: Vec::new(), torn: false }
    }

    /// Leaves out user data: input, progress and deliverables.
    pub fn redact(&mut self) {
        for Committed { entry, payload } in &self.entries {
            for (_, digest) in payload
                .iter()
                .enumerate()
                .filter(|(place, _)| jsonl::is_user_data(entry.event, *place))
            {
                self.objects.remove(digest);
            }
        }
    }

    /// Digest of the last entry, of the genesis when there is none.
    ///
    /// # Errors
    /// As [`Digest::of`].
    pub fn head(&self) -> Result<Digest> {
        match self.entries.last() {
            Some(committed) => committed.entry.digest(),
            None => self.genesis.digest(),
        }
    }
}

/// The owner's note of where a log is now.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before the first entry, `WRONG_SIGNER` for a key that has no part in it.
pub fn checkpoint(log: &TaskLog, key: &Secret, now: UnixMillis) -> Result<AuditCheckpoint> {
    let view = log.view();
    sign_checkpoint(view.genesis(), view.next_seq(), view.head(), key, now)
}

/// As [`checkpoint`], for a log that was read and verified.
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_of(log: &AuditLog, key: &Secret, now: UnixMillis) -> Result<AuditCheckpoint> {
    let entries = u64::try_from(log.entries.len()).unwrap_or(u64::MAX);
    sign_checkpoint(&log.genesis, entries, log.head()?, key, now)
}

fn sign_checkpoint(
    genesis: &AuditGenesis,
    entries: u64,
    head: Digest,
    key: &Secret,
    now: UnixMillis,
) -> Result<AuditCheckpoint> {
    if genesis.party(key.did()).is_none() {
        return Err(Error::new(Code::WrongSigner, "this did has no part in the task"));
    }
    let last = entries.checked_sub(1);
    let last = last.ok_or_else(|| Error::new(Code::IllegalTransition, "an empty log"))?;
    AuditCheckpoint {
        task_id: genesis.task_id.clone(),
        actors: genesis.actors,
        seq: Count::new(last)?,
        head,
        at: Time::from(now),
        signature: Signature::blank(Role::Owner, key.did()),
    }
    .signed(key, now)
}

/// Reads an anchor file: the seed's trust anchor, or a checkpoint.
///
/// # Errors
/// The codes of a closed object.
pub fn read_anchor(bytes: &[u8]) -> Result<Anchor> {
    /// Bytes of an anchor file; a checkpoint has below 1,000.
    const MAX_ANCHOR: usize = 64 * 1024;
    let value = super::json::parse(bytes, MAX_ANCHOR)?;
    if value.get("type").is_some() {
        AuditCheckpoint::read(value).map(Anchor::Checkpoint)
    } else {
        TrustAnchor::read(value).map(Anchor::Trust)
    }
}
