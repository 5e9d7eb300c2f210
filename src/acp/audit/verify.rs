//! Verification of a log in the order of design 8.4; the first failure decides.

use serde::Serialize;

use super::AuditLog;
use crate::acp::code::{Code, Error};
use crate::acp::log::{Committed, Fault, Stage, View, rules};
use crate::acp::objects::{Actors, AuditCheckpoint, Event, State, TrustAnchor};
use crate::acp::sign::Signed as _;
use crate::acp::value::{Digest, TaskId};
use crate::acp::verify::examine;
use crate::codec::time::UnixMillis;

/// What a log is found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    /// All is good, and the task has ended.
    Valid,
    /// All is good, and the task goes on.
    Open,
    /// An anchor or checkpoint knows a later head.
    Truncated,
    /// An anchor or checkpoint knows another entry at the same place.
    Forked,
    /// Something is wrong; the failure says what.
    Invalid,
}

/// What was wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Number of the entry; `None` for the file or an anchor.
    pub seq: Option<u64>,
    /// Its code.
    pub code: Code,
    /// For people.
    pub detail: String,
}

/// What verification found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The outcome.
    pub status: Status,
    /// The task.
    pub task_id: TaskId,
    /// How many entries there are.
    pub entries: usize,
    /// Digest of the last one.
    pub head: Option<Digest>,
    /// State of the task.
    pub state: Option<State>,
    /// Entries that stand with one signature.
    pub unilateral: usize,
    /// User data that is named but not there.
    pub objects_missing: usize,
    /// Whether a torn last line was left out.
    pub torn: bool,
    /// Empty when the status is VALID or OPEN.
    pub failures: Vec<Failure>,
}

/// What somebody knows of the log by another way.
#[derive(Clone, Debug, PartialEq)]
pub enum Anchor {
    /// A head.
    Trust(TrustAnchor),
    /// A head with its place, signed.
    Checkpoint(AuditCheckpoint),
}

/// Verifies a log that was read, against `anchor` if there is one. `now` is the reader's clock.
#[must_use]
pub fn verify(log: &AuditLog, anchor: Option<&Anchor>, now: UnixMillis) -> Report {
    let alone = log.entries.iter().filter(|c| c.entry.countersignature().is_none()).count();
    let mut report = Report {
        status: Status::Invalid,
        task_id: log.genesis.task_id.clone(),
        entries: log.entries.len(),
        head: log.head().ok(),
        state: log.entries.last().map(|committed| committed.entry.to_state),
        unilateral: alone,
        objects_missing: 0,
        torn: log.torn,
        failures: Vec::new(),
    };
    match judge(log, now) {
        Ok(missing) => report.objects_missing = missing,
        Err((seq, error)) => {
            report.failures.push(Failure { seq, code: error.code(), detail: error.to_string() });
            return report;
        }
    }
    let sealed = report.state.is_some_and(rules::is_terminal);
    report.status = if sealed { Status::Valid } else { Status::Open };
    let checkpoints = log.checkpoints.iter().cloned().map(Anchor::Checkpoint);
    for anchor in checkpoints.chain(anchor.cloned()) {
        if let Err((status, error)) = hold_against(log, &anchor) {
            report.status = status;
            let failure = Failure { seq: None, code: error.code(), detail: error.to_string() };
            report.failures.push(failure);
            break;
        }
    }
    report
}

/// Threads that check what entries can be checked for by themselves; more gain nothing beside the
/// part that goes from entry to entry.
const MAX_THREADS: usize = 8;

/// Entries below which another thread costs more than it saves.
const WORTH_A_THREAD: usize = 64;

/// What an entry can be checked for without those before it.
struct Checked {
    /// Its digest.
    digest: Result<Digest, Error>,
    /// Its signatures.
    signatures: Result<(), Error>,
    /// The list of its payload, and the objects that are there.
    payload: Result<(), Error>,
}

impl Checked {
    fn of(committed: &Committed, log: &AuditLog) -> Self {
        Self {
            digest: committed.entry.digest(),
            signatures: committed.entry.verify(&log.genesis),
            payload: check_payload_digests(committed, log),
        }
    }

    /// All entries, by all cores.
    fn all(log: &AuditLog) -> Vec<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = cores.min(MAX_THREADS).min(log.entries.len() / WORTH_A_THREAD).max(1);
        let part = log.entries.len().div_ceil(threads).max(1);
        let check = |part: &[Committed]| part.iter().map(|c| Self::of(c, log)).collect::<Vec<_>>();
        let mut parts = log.entries.chunks(part);
        let first = parts.next().unwrap_or_default();
        std::thread::scope(|scope| {
            let others: Vec<_> =
                parts.map(|part| (part, scope.spawn(move || check(part)))).collect();
            let mut all = check(first);
            for (part, other) in others {
                // A thread that could not do it leaves it to this one.
                all.extend(other.join().unwrap_or_else(|_| check(part)));
            }
            all
        })
    }
}

/// Step 4 for one entry.
fn check_payload_digests(committed: &Committed, log: &AuditLog) -> Result<(), Error> {
    if Digest::of(&committed.payload)? != committed.entry.payload_digest {
        return Err(Error::new(Code::DigestMismatch, "not the payload that was signed"));
    }
    for digest in &committed.payload {
        if let Some(object) = log.objects.get(digest)
            && Digest::of(object)? != *digest
        {
            return Err(Error::new(Code::DigestMismatch, "an object is not what its name says"));
        }
    }
    Ok(())
}

/// Steps 2 to 10; the number of objects that are missing.
fn judge(log: &AuditLog, now: UnixMillis) -> Result<usize, (Option<u64>, Error)> {
    let genesis = log.genesis.clone();
    let mut chain = View::new(genesis.clone()).map_err(|error| (None, error))?;
    let mut payloads = Vec::new();
    let mut digests = Vec::new();
    for ((at, committed), checked) in log.entries.iter().enumerate().zip(Checked::all(log)) {
        let blame = |error| (u64::try_from(at).ok(), error);
        let entry = &committed.entry;
        let Checked { digest, signatures, payload } = checked;
        chain.check_chain_signed(entry, signatures, now).map_err(|fault| blame(fault.error))?;
        if entry.countersignature().is_none() && !may_stand(&log.entries, at) {
            let error = Error::new(Code::BadSignature, "the second signature is missing");
            return Err(blame(error));
        }
        let digest = digest.map_err(blame)?;
        chain.apply(entry, digest, Default::default());
        digests.push(digest);
        payloads.push(payload);
    }
    for (at, payload) in payloads.into_iter().enumerate() {
        payload.map_err(|error| (u64::try_from(at).ok(), error))?;
    }
    let mut view = View::new(genesis).map_err(|error| (None, error))?;
    for ((at, committed), digest) in log.entries.iter().enumerate().zip(digests) {
        let blame = |error| (u64::try_from(at).ok(), error);
        judge_content(log, &mut view, committed, digest, now).map_err(|f| blame(f.error))?;
    }
    Ok(view.missing())
}

/// Steps 5 to 10 for one entry, on top of those before it.
fn judge_content(
    log: &AuditLog,
    view: &mut View,
    committed: &Committed,
    digest: Digest,
    now: UnixMillis,
) -> Result<(), Fault> {
    let Committed { entry, payload } = committed;
    let fault = |stage, error| Fault { stage, error };
    view.check_due_at(entry, now)?;
    let find = |digest: &Digest| log.objects.get(digest);
    let step = view.check_payload(entry, payload, &find)?;
    // What the requester found good must be good; what it refused may be anything.
    if entry.event == Event::VerifyPass && view.deliverable().is_some() {
        let checks = examine(view, 0).map_err(|error| fault(Stage::Deliverable, error))?;
        if let Some(failed) = checks.iter().find(|check| !check.passed) {
            let stage = if &*failed.name == "budget" { Stage::Usage } else { Stage::Deliverable };
            let code = failed.code.unwrap_or(Code::CheckFailed);
            let text = format!("passed, though {} fails: {}", &*failed.name, &*failed.detail);
            return Err(fault(stage, Error::new(code, text)));
        }
    }
    view.apply(entry, digest, step);
    Ok(())
}

/// Whether the entry at `at` may stand with one signature: the last one, if it is such an ending;
/// and the one right before a unilateral ending by the same author (decision 36).
fn may_stand(entries: &[Committed], at: usize) -> bool {
    let Some(last) = entries.last().map(|committed| &committed.entry) else { return false };
    match entries.len().saturating_sub(at) {
        1 => rules::may_be_last_alone(last.event),
        2 => {
            let author = entries.get(at).map(|committed| committed.entry.actor_role);
            rules::is_unilateral(last.event) && author == Some(last.actor_role)
        }
        _ => false,
    }
}

/// Step 12 (decision 45).
fn hold_against(log: &AuditLog, anchor: &Anchor) -> Result<(), (Status, Error)> {
    let (task, actors, head, place): (&TaskId, &Actors, &Digest, Option<u64>) = match anchor {
        Anchor::Trust(anchor) => (&anchor.task_id, &anchor.actors, &anchor.head, None),
        Anchor::Checkpoint(point) => {
            (&point.task_id, &point.actors, &point.head, Some(point.seq.get()))
        }
    };
    let mismatch = |text: &str| Err((Status::Invalid, Error::new(Code::AnchorMismatch, text)));
    if *task != log.genesis.task_id || *actors != log.genesis.actors {
        return mismatch("an anchor of another task");
    }
    if let Anchor::Checkpoint(point) = anchor {
        let signer = point.signature.signer_did;
        if log.genesis.party(signer).is_none() {
            return mismatch("a checkpoint by somebody who has no part in the task");
        }
        point.verify().map_err(|error| (Status::Invalid, error))?;
    }
    let digest_at = |at: usize| log.entries.get(at).and_then(|c| c.entry.digest().ok());
    match place {
        Some(seq) => match digest_at(usize::try_from(seq).unwrap_or(usize::MAX)) {
            Some(ours) if ours == *head => Ok(()),
            Some(_) => {
                let text = "a checkpoint knows another entry at this place";
                Err((Status::Forked, Error::new(Code::AuditFork, text)))
            }
            None => {
                let text = "a checkpoint knows a later entry";
                Err((Status::Truncated, Error::new(Code::AuditTruncated, text)))
            }
        },
        None if (0..log.entries.len()).any(|at| digest_at(at) == Some(*head)) => Ok(()),
        None => mismatch("the anchor's head is not in this log"),
    }
}
