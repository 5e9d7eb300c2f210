//! What a log says so far: the state of its task and the objects that count, folded entry by entry.
//! Both the live log and the audit judge an entry here, so that they cannot differ.

use std::collections::BTreeSet;

use serde_json::Value;

use super::rules::{
    self, MAX_APPROVALS, MAX_ENTRIES, MAX_PROGRESS, PROGRESS_EVERY_MS, RESERVED_ENTRIES,
    TOLERANCE_MS,
};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::objects::{
    ApprovalReceipt, AuditEntry, AuditGenesis, CancelNotice, CapabilityToken, Cause, Decision,
    Deliverable, Event, EvidenceNotice, ExecutionAttestation, FailNotice, Gate, Mode, Party,
    ProgressUpdate, RejectNotice, SettlementReceipt, State, Target, TaskContract, Usage,
    UsageReceipt, VerificationReport,
};
use crate::acp::sign::{self, Signed as _};
use crate::acp::value::{Count, Digest, Read, TaskId, Time};
use crate::codec::time::UnixMillis;

/// The step of design 8.4 at which an entry was found wanting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// Position, signatures, transition, time.
    Chain = 3,
    /// The list of payload objects.
    Payload = 4,
    /// The objects themselves.
    Objects = 5,
    /// Both signatures on the contract.
    Contract = 6,
    /// Approvals.
    Approvals = 7,
    /// Usage receipts.
    Usage = 8,
    /// Granted tokens.
    Capabilities = 9,
    /// The deliverable against what was ordered.
    Deliverable = 10,
}

/// An error with the stage at which it came.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// When.
    pub stage: Stage,
    /// What.
    pub error: Error,
}

fn at<T>(stage: Stage, result: Result<T>) -> Result<T, Fault> {
    result.map_err(|error| Fault { stage, error })
}

fn need(stage: Stage, yes: bool, code: Code, message: &str) -> Result<(), Fault> {
    if yes { Ok(()) } else { Err(Fault { stage, error: Error::new(code, message) }) }
}

/// An object with its digest.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept<T> {
    /// Object digest.
    pub digest: Digest,
    /// The object.
    pub object: T,
}

/// A budget raised by both owners.
#[derive(Clone, Debug, PartialEq)]
struct Overrun {
    by: Party,
    digest: Digest,
    metric: String,
    to: u64,
}

/// Where objects are looked up.
pub type Find<'a> = &'a dyn Fn(&Digest) -> Option<&'a Value>;

/// What an entry that was found good brings.
#[derive(Clone, Debug, Default)]
pub struct Step {
    contract: Option<(Kept<TaskContract>, Digest)>,
    grants: Vec<Kept<CapabilityToken>>,
    receipt: Option<Kept<ApprovalReceipt>>,
    overrun: Option<Overrun>,
    progress: Option<ProgressUpdate>,
    usage: Option<Kept<UsageReceipt>>,
    attestation: Option<Kept<ExecutionAttestation>>,
    deliverable: Option<Kept<Deliverable>>,
    report: Option<Kept<VerificationReport>>,
    cancel: Option<CancelNotice>,
    /// Listed objects of user data that were not found.
    missing: usize,
}

/// A log as far as it has come.
#[derive(Clone, Debug)]
pub struct View {
    genesis: AuditGenesis,
    state: Option<State>,
    next_seq: u64,
    head: Digest,
    last_at: Time,
    contract: Option<Kept<TaskContract>>,
    contract_digest: Option<Digest>,
    countersigned: bool,
    grants: Vec<Kept<CapabilityToken>>,
    used_receipts: BTreeSet<Digest>,
    approvals: [usize; 2],
    overruns: Vec<Overrun>,
    progress: u64,
    last_progress: Option<(Time, ProgressUpdate)>,
    usage: Option<Kept<UsageReceipt>>,
    attestation: Option<Kept<ExecutionAttestation>>,
    deliverable: Option<Kept<Deliverable>>,
    report: Option<Kept<VerificationReport>>,
    revision: u64,
    delivered_at: Time,
    verified_at: Time,
    cancel: Option<(Time, u64)>,
    missing: usize,
}

impl View {
    /// A log without an entry.
    ///
    /// # Errors
    /// `BAD_FIELD` for a genesis with one did twice.
    pub fn new(genesis: AuditGenesis) -> Result<Self> {
        genesis.check()?;
        let head = genesis.digest()?;
        let zero = Time::from(UnixMillis(0));
        Ok(Self {
            genesis,
            state: None,
            next_seq: 0,
            head,
            last_at: zero,
            contract: None,
            contract_digest: None,
            countersigned: false,
            grants: Vec::new(),
            used_receipts: BTreeSet::new(),
            approvals: [0; 2],
            overruns: Vec::new(),
            progress: 0,
            last_progress: None,
            usage: None,
            attestation: None,
            deliverable: None,
            report: None,
            revision: 0,
            delivered_at: zero,
            verified_at: zero,
            cancel: None,
            missing: 0,
        })
    }

    /// Where the log begins.
    #[must_use]
    pub const fn genesis(&self) -> &AuditGenesis {
        &self.genesis
    }

    /// Its task.
    #[must_use]
    pub const fn task_id(&self) -> &TaskId {
        &self.genesis.task_id
    }

    /// The state of the task; `None` before it was proposed.
    #[must_use]
    pub const fn state(&self) -> Option<State> {
        self.state
    }

    /// Whether nothing follows.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.state.is_some_and(rules::is_terminal)
    }

    /// The number of the next entry.
    #[must_use]
    pub const fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Digest of the last entry, of the genesis before the first.
    #[must_use]
    pub const fn head(&self) -> Digest {
        self.head
    }

    /// Time of the last entry.
    #[must_use]
    pub const fn last_at(&self) -> Time {
        self.last_at
    }

    /// The contract, as it was last written.
    #[must_use]
    pub fn contract(&self) -> Option<&TaskContract> {
        self.contract.as_ref().map(|kept| &kept.object)
    }

    /// What everything names the contract by: its body digest.
    #[must_use]
    pub const fn contract_digest(&self) -> Option<Digest> {
        self.contract_digest
    }

    /// Tokens granted with the proposal.
    #[must_use]
    pub fn grants(&self) -> &[Kept<CapabilityToken>] {
        &self.grants
    }

    /// The newest progress.
    #[must_use]
    pub fn last_progress(&self) -> Option<&ProgressUpdate> {
        self.last_progress.as_ref().map(|(_, progress)| progress)
    }

    /// The number of the next PROGRESS.
    #[must_use]
    pub const fn next_progress(&self) -> u64 {
        self.progress
    }

    /// From when on the next PROGRESS may be written.
    #[must_use]
    pub fn progress_from(&self) -> UnixMillis {
        let last = self.last_progress.as_ref().map(|(at, _)| at.millis());
        last.map_or(UnixMillis(0), |at| at.plus(PROGRESS_EVERY_MS))
    }

    /// The newest usage receipt.
    #[must_use]
    pub const fn usage(&self) -> Option<&Kept<UsageReceipt>> {
        self.usage.as_ref()
    }

    /// The attestation of the newest run.
    #[must_use]
    pub const fn attestation(&self) -> Option<&Kept<ExecutionAttestation>> {
        self.attestation.as_ref()
    }

    /// The newest deliverable.
    #[must_use]
    pub const fn deliverable(&self) -> Option<&Kept<Deliverable>> {
        self.deliverable.as_ref()
    }

    /// The newest report.
    #[must_use]
    pub const fn report(&self) -> Option<&Kept<VerificationReport>> {
        self.report.as_ref()
    }

    /// How often work went back.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// User data that the log names but does not hold.
    #[must_use]
    pub const fn missing(&self) -> usize {
        self.missing
    }

    /// The limit of `metric` (a member of the budget) with what both owners have raised.
    #[must_use]
    pub fn limit(&self, metric: &str, ordered: Option<Count>) -> Option<u64> {
        let ordered = ordered?.get();
        let by = |party: Party| {
            self.overruns.iter().filter(move |o| o.by == party && o.metric == metric)
        };
        by(Party::Requester)
            .filter(|mine| by(Party::Worker).any(|theirs| theirs.digest == mine.digest))
            .map(|overrun| overrun.to)
            .chain([ordered])
            .max()
    }

    /// When the task expires in its state, tolerance included.
    #[must_use]
    pub fn expires_at(&self) -> Option<(UnixMillis, Cause)> {
        let contract = self.contract()?;
        let within = contract.manifest.verify_within_ms.get();
        let (limit, cause) = match self.state? {
            State::Proposed => (contract.offer_expires_at, Cause::OfferExpired),
            State::Accepted | State::InProgress | State::Cancelling => {
                (contract.manifest.deadline_at, Cause::Deadline)
            }
            State::Delivered => (self.delivered_at.plus(within), Cause::VerifyTimeout),
            State::Verified => (self.verified_at.plus(within), Cause::VerifyTimeout),
            _ => return None,
        };
        Some((limit.millis().plus(TOLERANCE_MS), cause))
    }

    /// When a cancellation may be given up waiting for.
    #[must_use]
    pub fn abandon_at(&self) -> Option<UnixMillis> {
        let (at, grace) = self.cancel.filter(|_| self.state == Some(State::Cancelling))?;
        Some(at.millis().plus(grace).plus(TOLERANCE_MS))
    }

    /// Stage 3 for one entry: its place, its signatures, its transition, its time. `now` is the
    /// reader's clock.
    ///
    /// # Errors
    /// A fault of [`Stage::Chain`].
    pub fn check_chain(&self, entry: &AuditEntry, now: UnixMillis) -> Result<(), Fault> {
        self.check_place(entry)?;
        self.check_chain_signed(entry, entry.verify(&self.genesis), now)
    }

    /// As [`Self::check_chain`], with signatures that were checked elsewhere.
    ///
    /// # Errors
    /// A fault of [`Stage::Chain`].
    pub fn check_chain_signed(
        &self,
        entry: &AuditEntry,
        signatures: Result<()>,
        now: UnixMillis,
    ) -> Result<(), Fault> {
        self.check_place(entry)?;
        at(Stage::Chain, signatures)?;
        self.check_transition(entry, now)
    }

    /// Whether an entry is the next of this log.
    fn check_place(&self, entry: &AuditEntry) -> Result<(), Fault> {
        let stage = Stage::Chain;
        need(stage, entry.seq.get() == self.next_seq, Code::SeqGap, "not the next number")?;
        need(
            stage,
            entry.prev == self.head,
            Code::DigestMismatch,
            "does not follow the entry before",
        )?;
        need(stage, entry.task_id == self.genesis.task_id, Code::WrongSigner, "of another task")
    }

    /// The part of [`Self::check_chain`] that needs the objects before this entry: for the audit,
    /// which judges the chain first, without them.
    ///
    /// # Errors
    /// A fault of [`Stage::Chain`].
    pub fn check_due_at(&self, entry: &AuditEntry, now: UnixMillis) -> Result<(), Fault> {
        self.check_transition(entry, now)?;
        // Written in time by its own word; the peer's signature says that it came in time.
        self.check_arrival(entry.event, entry.at.millis())
    }

    /// The part of [`Self::check_chain`] after place and signatures.
    fn check_transition(&self, entry: &AuditEntry, now: UnixMillis) -> Result<(), Fault> {
        let stage = Stage::Chain;
        let illegal = |yes, message: &str| need(stage, yes, Code::IllegalTransition, message);
        illegal(entry.from_state == self.state, "from another state than the log is in")?;
        let to = rules::transition(self.state, entry.event);
        illegal(to == Some(entry.to_state), "this does not happen in this state")?;
        let by = rules::author(entry.event);
        illegal(by.is_none_or(|by| by == entry.actor_role), "not this side's to write")?;
        let flag = entry.unilateral == rules::is_unilateral(entry.event);
        need(stage, flag, Code::BadField, "unilateral does not fit the event")?;
        let time = |yes, message: &str| need(stage, yes, Code::BadTime, message);
        time(entry.at.plus(TOLERANCE_MS) >= self.last_at, "long before the entry before")?;
        time(entry.at.millis() <= now.plus(TOLERANCE_MS), "in the future")?;
        let place = self.next_seq < MAX_ENTRIES - RESERVED_ENTRIES
            || (self.next_seq < MAX_ENTRIES && rules::may_take_reserved(entry.event));
        illegal(place, "the log is full")?;
        self.check_due(entry)
    }

    /// What an event asks of the time in its entry.
    fn check_due(&self, entry: &AuditEntry) -> Result<(), Fault> {
        let late = |code, message: &str| need(Stage::Chain, false, code, message);
        let when = entry.at.millis();
        match entry.event {
            Event::Expire => match self.expires_at() {
                Some((limit, _)) if when < limit => {
                    late(Code::IllegalTransition, "the time has not run out")
                }
                _ => Ok(()),
            },
            Event::Abandon => match self.abandon_at() {
                Some(limit) if when < limit => {
                    late(Code::IllegalTransition, "the worker still has time to confirm")
                }
                _ => Ok(()),
            },
            Event::Progress if self.progress >= MAX_PROGRESS || when < self.progress_from() => {
                late(Code::RateLimited, "progress comes at most once a second, 5,000 times")
            }
            Event::Approval
                if self.approvals.get(side(entry.actor_role)) >= Some(&MAX_APPROVALS) =>
            {
                late(Code::RateLimited, "at most 64 approvals a side")
            }
            _ => Ok(()),
        }
    }

    /// Whether `entry` arrives in time, by the reader's own clock (decision 43); the audit, which
    /// was not there, goes by the entry's.
    ///
    /// # Errors
    /// A fault of [`Stage::Chain`]: `OFFER_EXPIRED`, `DEADLINE_PASSED`.
    pub fn check_arrival(&self, event: Event, now: UnixMillis) -> Result<(), Fault> {
        let Some(contract) = self.contract() else { return Ok(()) };
        let over = |limit: Time| now >= limit.millis().plus(TOLERANCE_MS);
        let deadline = over(contract.manifest.deadline_at);
        match event {
            Event::Accept => {
                let offer = over(contract.offer_expires_at);
                need(Stage::Chain, !offer, Code::OfferExpired, "the offer is over")?;
                need(Stage::Chain, !deadline, Code::DeadlinePassed, "the deadline has passed")
            }
            Event::Deliver | Event::Rework => {
                need(Stage::Chain, !deadline, Code::DeadlinePassed, "the deadline has passed")
            }
            _ => Ok(()),
        }
    }

    /// Stages 4 to 9 for one entry that passed [`Self::check_chain`].
    ///
    /// # Errors
    /// The first fault.
    pub fn check_payload<'a>(
        &self,
        entry: &AuditEntry,
        payload: &[Digest],
        find: Find<'a>,
    ) -> Result<Step, Fault> {
        let listed = at(Stage::Payload, Digest::of(payload))?;
        let fits = listed == entry.payload_digest;
        need(Stage::Payload, fits, Code::DigestMismatch, "not the payload that was signed")?;
        let mut reader = Payload { view: self, entry, digests: payload, next: 0, find, missing: 0 };
        let mut step = match entry.event {
            Event::Propose => reader.propose()?,
            Event::Accept => reader.accept()?,
            Event::Reject => reader.notice(|n: &RejectNotice| &n.task_id)?,
            Event::Withdraw | Event::Start => Step::default(),
            Event::Progress => reader.progress()?,
            Event::Approval => reader.approval()?,
            Event::Deliver => reader.deliver()?,
            Event::VerifyPass | Event::VerifyFail | Event::Rework => reader.verdict()?,
            Event::Settle => reader.settle()?,
            Event::Decline => reader.decline()?,
            Event::Supersede | Event::Abandon | Event::Expire => reader.evidence()?,
            Event::Cancel => reader.cancel()?,
            Event::Cancelled => reader.cancelled()?,
            Event::Fail => reader.fail()?,
        };
        let all = reader.next == payload.len();
        need(Stage::Payload, all, Code::AuditInvalid, "more objects than the event has")?;
        step.missing = reader.missing;
        Ok(step)
    }

    /// Takes an entry that was found good.
    pub fn apply(&mut self, entry: &AuditEntry, digest: Digest, step: Step) {
        self.state = Some(entry.to_state);
        self.next_seq = entry.seq.get() + 1;
        self.head = digest;
        self.last_at = self.last_at.max(entry.at);
        self.missing += step.missing;
        if let Some((contract, digest)) = step.contract {
            self.contract_digest = Some(digest);
            self.countersigned |= contract.object.signatures.len() == 2;
            self.contract = Some(contract);
        }
        self.grants.extend(step.grants);
        if let Some(receipt) = step.receipt {
            self.used_receipts.insert(receipt.digest);
        }
        self.overruns.extend(step.overrun);
        if entry.event == Event::Approval
            && let Some(count) = self.approvals.get_mut(side(entry.actor_role))
        {
            *count += 1;
        }
        if entry.event == Event::Progress {
            self.progress += 1;
            // A redacted one leaves its time.
            let update =
                step.progress.or_else(|| self.last_progress.take().map(|(_, update)| update));
            self.last_progress = update.map(|update| (entry.at, update));
        }
        if step.usage.is_some() {
            self.usage = step.usage;
        }
        match entry.event {
            Event::Deliver => {
                let said = step.deliverable.as_ref().map_or(entry.at, |d| d.object.delivered_at);
                self.delivered_at = said.max(entry.at);
                self.deliverable = step.deliverable;
                self.attestation = step.attestation;
                self.report = None;
            }
            Event::VerifyPass | Event::VerifyFail | Event::Rework => {
                let said = step.report.as_ref().map_or(entry.at, |r| r.object.verified_at);
                self.verified_at = said.max(entry.at);
                self.report = step.report;
                self.revision += u64::from(entry.event == Event::Rework);
            }
            Event::Cancelled => self.attestation = step.attestation.or(self.attestation.take()),
            Event::Cancel => {
                let grace = step.cancel.map_or(0, |notice| notice.grace_ms.get());
                self.cancel = Some((entry.at, grace));
            }
            _ => {}
        }
    }
}

const fn side(party: Party) -> usize {
    match party {
        Party::Requester => 0,
        Party::Worker => 1,
    }
}

/// Whether `now` uses at least as much as `before` everywhere.
fn grows(before: &Usage, now: &Usage) -> bool {
    let pairs = [
        (before.input_tokens, now.input_tokens),
        (before.output_tokens, now.output_tokens),
        (before.total_tokens, now.total_tokens),
        (before.tool_calls, now.tool_calls),
        (before.wall_time_ms, now.wall_time_ms),
        (before.cpu_time_ms, now.cpu_time_ms),
        (before.output_bytes, now.output_bytes),
    ];
    // Nothing is below any number, so a count is never taken back to unknown either.
    pairs.iter().all(|(before, now)| before <= now)
}

/// Reads the objects of one entry in their order.
struct Payload<'v, 'f> {
    view: &'v View,
    entry: &'v AuditEntry,
    digests: &'v [Digest],
    next: usize,
    find: Find<'f>,
    missing: usize,
}

impl<'f> Payload<'_, 'f> {
    fn more(&self) -> bool {
        self.next < self.digests.len()
    }

    /// The next object. `user` data may be missing: it can be left out of a file.
    fn value(&mut self, user: bool) -> Result<Option<(Digest, &'f Value)>, Fault> {
        let Some(digest) = self.digests.get(self.next).copied() else {
            let error = Error::new(Code::AuditInvalid, "fewer objects than the event has");
            return Err(Fault { stage: Stage::Payload, error });
        };
        self.next += 1;
        let Some(value) = (self.find)(&digest) else {
            self.missing += 1;
            need(Stage::Payload, user, Code::AuditInvalid, "an object is missing")?;
            return Ok(None);
        };
        Ok(Some((digest, value)))
    }

    fn object<T: Read>(&mut self) -> Result<Kept<T>, Fault> {
        match self.optional(false)? {
            Some(kept) => Ok(kept),
            None => {
                let error = Error::new(Code::AuditInvalid, "an object is missing");
                Err(Fault { stage: Stage::Payload, error })
            }
        }
    }

    fn optional<T: Read>(&mut self, user: bool) -> Result<Option<Kept<T>>, Fault> {
        let Some((digest, value)) = self.value(user)? else { return Ok(None) };
        let object = at(Stage::Objects, T::read(value.clone()))?;
        Ok(Some(Kept { digest, object }))
    }

    /// That an object belongs to this task and contract and was made by the right side.
    fn belongs(
        &self,
        task: &TaskId,
        contract: Option<Digest>,
        who: Option<(Did, Party)>,
    ) -> Result<(), Fault> {
        let stage = Stage::Objects;
        need(
            stage,
            *task == self.view.genesis.task_id,
            Code::DigestMismatch,
            "an object of another task",
        )?;
        let fits = contract.is_none() || contract == self.view.contract_digest;
        need(stage, fits, Code::DigestMismatch, "an object of another contract")?;
        let right = who.is_none_or(|(did, party)| did == self.view.genesis.actor(party));
        need(stage, right, Code::WrongSigner, "an object by somebody else than the task's side")
    }

    fn notice<T: Read>(&mut self, task: impl Fn(&T) -> &TaskId) -> Result<Step, Fault> {
        let notice: Kept<T> = self.object()?;
        self.belongs(task(&notice.object), None, None)?;
        Ok(Step::default())
    }

    fn evidence(&mut self) -> Result<Step, Fault> {
        let notice: Kept<EvidenceNotice> = self.object()?;
        self.belongs(&notice.object.task_id, None, None)?;
        let cause = notice.object.cause;
        let fits = match self.entry.event {
            Event::Expire => self.view.expires_at().is_none_or(|(_, why)| why == cause),
            Event::Abandon => cause == Cause::CancelGrace,
            _ => matches!(cause, Cause::RaceLost | Cause::QuorumDone),
        };
        need(Stage::Objects, fits, Code::BadField, "the cause does not fit the event")?;
        Ok(Step::default())
    }

    fn cancel(&mut self) -> Result<Step, Fault> {
        let notice: Kept<CancelNotice> = self.object()?;
        self.belongs(&notice.object.task_id, None, None)?;
        Ok(Step { cancel: Some(notice.object), ..Step::default() })
    }

    fn propose(&mut self) -> Result<Step, Fault> {
        let contract: Kept<TaskContract> = self.object()?;
        let body = self.contract(&contract.object, 1)?;
        // The input is any JSON; it hashes to the name that the manifest gives.
        let named = self.digests.get(self.next) == Some(&contract.object.manifest.input_digest);
        need(Stage::Objects, named, Code::DigestMismatch, "not the input of the manifest")?;
        self.value(true)?;
        let mut grants = Vec::new();
        let rest = self.digests.get(self.next..).unwrap_or_default();
        let fits = *rest == *contract.object.capability_digests;
        need(Stage::Objects, fits, Code::DigestMismatch, "not the tokens of the contract")?;
        while self.more() {
            grants.push(self.object::<CapabilityToken>()?);
        }
        for token in &grants {
            self.grant(&token.object)?;
        }
        Ok(Step { contract: Some((contract, body)), grants, ..Step::default() })
    }

    fn contract(&self, contract: &TaskContract, signatures: usize) -> Result<Digest, Fault> {
        let stage = Stage::Objects;
        let (genesis, manifest) = (&self.view.genesis, &contract.manifest);
        let requester = genesis.actor(Party::Requester);
        self.belongs(&contract.task_id, None, Some((contract.worker_did, Party::Worker)))?;
        self.belongs(&manifest.task_id, None, Some((manifest.requester_did, Party::Requester)))?;
        at(stage, manifest.verify())?;
        let named = at(stage, Digest::of(&contract.manifest))? == contract.manifest_digest;
        need(stage, named, Code::DigestMismatch, "the contract names another manifest")?;
        let count = contract.signatures.len() == signatures;
        need(
            Stage::Contract,
            count,
            Code::ContractNotCountersigned,
            "not the signatures that belong here",
        )?;
        let signers = [requester, genesis.actor(Party::Worker)];
        for ((signature, signer), party) in
            contract.signatures.iter().zip(signers).zip([Party::Requester, Party::Worker])
        {
            at(Stage::Contract, sign::verify(contract, signature, signer, party.role()))?;
        }
        at(stage, sign::body_digest(contract))
    }

    /// A granted token (decision 45): issued by the requester to the worker for this task.
    fn grant(&self, token: &CapabilityToken) -> Result<(), Fault> {
        let stage = Stage::Capabilities;
        at(stage, token.verify())?;
        let genesis = &self.view.genesis;
        let issuer = token.issuer_did == genesis.actor(Party::Requester);
        need(stage, issuer, Code::UntrustedIssuer, "a token that the requester has not issued")?;
        let root = token.depth.get() == 0 && token.parent_digest.is_none();
        need(stage, root, Code::ChainBroken, "a granted token is a root")?;
        let audience = token.audience_did == genesis.actor(Party::Worker);
        need(stage, audience, Code::WrongAudience, "a token for somebody else")?;
        need(
            stage,
            token.task_id == genesis.task_id,
            Code::ChainBroken,
            "a token for another task",
        )?;
        let limits = token.limits.not_before < token.limits.expires_at;
        need(stage, limits, Code::TokenExpired, "a token that is never valid")
    }

    fn accept(&mut self) -> Result<Step, Fault> {
        let contract: Kept<TaskContract> = self.object()?;
        let body = self.contract(&contract.object, 2)?;
        let same = Some(body) == self.view.contract_digest;
        need(Stage::Contract, same, Code::DigestMismatch, "another contract than was proposed")?;
        let target = Target::ContractAcceptance { contract_digest: body };
        let receipt = self.receipt(Some(&target), Decision::Approved)?;
        Ok(Step { contract: Some((contract, body)), receipt: Some(receipt), ..Step::default() })
    }

    /// An approval by the author's owner, for `target` where it is known, not used before.
    fn receipt(
        &mut self,
        target: Option<&Target>,
        decision: Decision,
    ) -> Result<Kept<ApprovalReceipt>, Fault> {
        let kept: Kept<ApprovalReceipt> = self.object()?;
        let receipt = &kept.object;
        at(Stage::Objects, receipt.verify())?;
        self.belongs(&receipt.task_id, None, Some((receipt.approver_did, self.entry.actor_role)))?;
        let stage = Stage::Approvals;
        let mismatch = |yes, message: &str| need(stage, yes, Code::ApprovalMismatch, message);
        if let Some(target) = target {
            mismatch(receipt.gate == target.gate(), "an approval of another gate")?;
            let digest = at(stage, target.digest())?;
            mismatch(receipt.target_digest == digest, "an approval of another action")?;
            need(stage, receipt.decision == decision, Code::ApprovalDenied, "not this decision")?;
        }
        let mode = (receipt.mode == Mode::Policy) == receipt.policy_digest.is_some();
        mismatch(mode, "a policy's approval names the policy, a human's none")?;
        let over = receipt.expires_at.is_over(self.entry.at.millis());
        need(stage, !over, Code::ApprovalExpired, "an approval that was over")?;
        let used = self.view.used_receipts.contains(&kept.digest);
        need(stage, !used, Code::ApprovalUsed, "an approval that was used before")?;
        Ok(kept)
    }

    fn approval(&mut self) -> Result<Step, Fault> {
        let receipt = self.receipt(None, Decision::Approved)?;
        let mut overrun = None;
        if receipt.object.gate == Gate::BudgetOverrun {
            let stage = Stage::Approvals;
            let Some((digest, value)) = self.value(false)? else {
                return Ok(Step::default());
            };
            let target = at(Stage::Objects, Target::read_budget_overrun(value.clone()))?;
            let fits = receipt.object.target_digest == digest;
            need(stage, fits, Code::ApprovalMismatch, "not the action of the approval")?;
            if let Target::BudgetOverrun { contract_digest, metric, to, .. } = target {
                let ours = Some(contract_digest) == self.view.contract_digest;
                need(stage, ours, Code::ApprovalMismatch, "an approval for another contract")?;
                if receipt.object.decision == Decision::Approved {
                    overrun = Some(Overrun { by: self.entry.actor_role, digest, metric, to });
                }
            }
        }
        Ok(Step { receipt: Some(receipt), overrun, ..Step::default() })
    }

    fn progress(&mut self) -> Result<Step, Fault> {
        let progress: Option<Kept<ProgressUpdate>> = self.optional(true)?;
        if let Some(progress) = &progress {
            self.belongs(&progress.object.task_id, None, None)?;
            let next = progress.object.progress_seq.get() == self.view.progress;
            need(Stage::Objects, next, Code::BadField, "not the next number of progress")?;
        }
        let usage = if self.more() { Some(self.usage(false)?) } else { None };
        Ok(Step { progress: progress.map(|kept| kept.object), usage, ..Step::default() })
    }

    fn usage(&mut self, is_final: bool) -> Result<Kept<UsageReceipt>, Fault> {
        let kept: Kept<UsageReceipt> = self.object()?;
        let receipt = &kept.object;
        let who = (receipt.worker_did, Party::Worker);
        self.belongs(&receipt.task_id, Some(receipt.contract_digest), Some(who))?;
        at(Stage::Objects, receipt.verify())?;
        let stage = Stage::Usage;
        let bad = |yes, message: &str| need(stage, yes, Code::AuditInvalid, message);
        bad(receipt.is_final == is_final, "a receipt is final with the result, and only then")?;
        let before = self.view.usage.as_ref();
        bad(
            receipt.previous_digest == before.map(|b| b.digest),
            "does not follow the receipt before",
        )?;
        let next = before.map_or(0, |b| b.object.sequence.get() + 1);
        bad(receipt.sequence.get() == next, "not the next receipt")?;
        bad(
            before.is_none_or(|b| grows(&b.object.usage, &receipt.usage)),
            "less than the receipt before",
        )?;
        Ok(kept)
    }

    fn attestation(&mut self) -> Result<Option<Kept<ExecutionAttestation>>, Fault> {
        if !self.more() {
            return Ok(None);
        }
        let kept: Kept<ExecutionAttestation> = self.object()?;
        let who = (kept.object.worker_did, Party::Worker);
        self.belongs(&kept.object.task_id, Some(kept.object.contract_digest), Some(who))?;
        at(Stage::Objects, kept.object.verify())?;
        Ok(Some(kept))
    }

    fn deliver(&mut self) -> Result<Step, Fault> {
        let deliverable: Option<Kept<Deliverable>> = self.optional(true)?;
        let usage = self.usage(true)?;
        let attestation = self.attestation()?;
        if let Some(kept) = &deliverable {
            let object = &kept.object;
            let who = (object.worker_did, Party::Worker);
            self.belongs(&object.task_id, Some(object.contract_digest), Some(who))?;
            at(Stage::Objects, object.verify())?;
            let stage = Stage::Objects;
            let names = object.usage_receipt_digest == usage.digest
                && object.attestation_digest == attestation.as_ref().map(|a| a.digest);
            need(stage, names, Code::DigestMismatch, "the deliverable names other receipts")?;
            let revision = object.revision.get() == self.view.revision;
            need(stage, revision, Code::BadField, "not this revision")?;
        }
        Ok(Step { deliverable, usage: Some(usage), attestation, ..Step::default() })
    }

    fn verdict(&mut self) -> Result<Step, Fault> {
        let kept: Kept<VerificationReport> = self.object()?;
        let report = &kept.object;
        let who = (report.requester_did, Party::Requester);
        self.belongs(&report.task_id, Some(report.contract_digest), Some(who))?;
        let stage = Stage::Objects;
        at(stage, report.verify())?;
        let about =
            self.view.deliverable.as_ref().is_none_or(|d| d.digest == report.deliverable_digest);
        need(stage, about, Code::DigestMismatch, "a report on another deliverable")?;
        let sums = report.passed == report.checks.iter().all(|check| check.passed);
        need(stage, sums, Code::BadField, "passed is not what the checks say")?;
        if let Some(contract) = self.view.contract() {
            let names = super::super::verify::check_names(&contract.manifest);
            let fits = report.checks.iter().map(|check| &*check.name).eq(names);
            need(stage, fits, Code::BadField, "not the checks of this manifest, in order")?;
            let more = self.view.revision < contract.manifest.max_revisions.get();
            let again = self.entry.event != Event::Rework || more;
            need(stage, again, Code::IllegalTransition, "no revision is left")?;
        }
        let fits = report.passed == (self.entry.event == Event::VerifyPass);
        need(stage, fits, Code::IllegalTransition, "the report says otherwise")?;
        Ok(Step { report: Some(kept), ..Step::default() })
    }

    /// What a final acceptance, or its refusal, is about.
    fn final_target(&self) -> Result<Option<Target>, Fault> {
        let (Some(contract_digest), Some(report)) = (self.view.contract_digest, &self.view.report)
        else {
            let error = Error::new(Code::AuditInvalid, "nothing was verified");
            return Err(Fault { stage: Stage::Objects, error });
        };
        Ok(Some(Target::FinalAcceptance {
            contract_digest,
            deliverable_digest: report.object.deliverable_digest,
            report_digest: report.digest,
        }))
    }

    fn settle(&mut self) -> Result<Step, Fault> {
        let target = self.final_target()?;
        let receipt = self.receipt(target.as_ref(), Decision::Approved)?;
        let kept: Kept<SettlementReceipt> = self.object()?;
        let settlement = &kept.object;
        let who = (settlement.requester_did, Party::Requester);
        self.belongs(&settlement.task_id, Some(settlement.contract_digest), Some(who))?;
        at(Stage::Objects, settlement.verify())?;
        let report = self.view.report.as_ref();
        let fits = settlement.final_approval_digest == receipt.digest
            && report.is_some_and(|report| {
                settlement.report_digest == report.digest
                    && settlement.deliverable_digest == report.object.deliverable_digest
            })
            && self
                .view
                .usage
                .as_ref()
                .is_some_and(|u| u.digest == settlement.usage_receipt_digest);
        need(Stage::Objects, fits, Code::DigestMismatch, "a settlement of something else")?;
        Ok(Step { receipt: Some(receipt), ..Step::default() })
    }

    fn decline(&mut self) -> Result<Step, Fault> {
        let target = self.final_target()?;
        let receipt = self.receipt(target.as_ref(), Decision::Denied)?;
        Ok(Step { receipt: Some(receipt), ..Step::default() })
    }

    fn cancelled(&mut self) -> Result<Step, Fault> {
        let usage = self.usage(true)?;
        let attestation = self.attestation()?;
        Ok(Step { usage: Some(usage), attestation, ..Step::default() })
    }

    fn fail(&mut self) -> Result<Step, Fault> {
        let notice: Kept<FailNotice> = self.object()?;
        self.belongs(&notice.object.task_id, None, None)?;
        let usage = self.usage(true)?;
        Ok(Step { usage: Some(usage), ..Step::default() })
    }
}
