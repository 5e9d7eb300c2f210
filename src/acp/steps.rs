//! The steps of a task as their author takes them: the objects of each, signed, ready for
//! [`TaskLog::wish`](super::log::TaskLog::wish). Decides nothing; whether a step is legal is the
//! log's to say.

use serde::Serialize;
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::did::Did;
use super::log::{Cx, View, Wish};
use super::objects::{
    ApprovalReceipt, Budget, BudgetTarget, CancelNotice, Cause, Decision, Deliverable, Event,
    EvidenceNotice, ExecutionAttestation, FailNotice, Isolation, Metrics, Mode, Network,
    OverrunGate, ProgressUpdate, RejectNotice, SandboxPolicy, SettlementReceipt, Target,
    TaskContract, TaskManifest, Usage, UsageReceipt, UsageSource, VerificationReport,
};
use super::run::Ran;
use super::sign::{self, Role, Signature, Signed as _};
use super::value::{
    ApprovalId, AttestationId, ContractId, Count, DeliverableId, Digest, Int, InviteId, Name,
    Nonce, Note, Prose, Seq, SettlementId, TaskId, Time, UsageId, Word,
};

/// How long an approval is good, ms, unless its owner says otherwise.
pub const APPROVAL_LIFE_MS: u64 = 3_600_000;

fn value<T: Serialize>(object: &T) -> Result<Value> {
    serde_json::to_value(object).map_err(|_| Error::new(Code::BadField, "no JSON form"))
}

fn not_yet() -> Error {
    Error::new(Code::IllegalTransition, "the task has not come that far")
}

fn wish(event: Event, objects: Vec<Value>) -> Wish {
    Wish { event, objects }
}

/// The sandbox policy of `isolation` with the default bounds of design 17.
#[must_use]
pub fn sandbox(isolation: Isolation) -> SandboxPolicy {
    SandboxPolicy {
        isolation,
        allow_subprocess_fallback: false,
        network: Network::None,
        allow_hosts: Seq::default(),
        memory_max_bytes: Count::clamped(512 << 20),
        pids_max: Count::clamped(128),
        cpu_time_max_ms: Count::clamped(300_000),
        disk_max_bytes: Count::clamped(256 << 20),
    }
}

/// A budget without limits.
#[must_use]
pub const fn unlimited() -> Budget {
    Budget {
        max_input_tokens: None,
        max_output_tokens: None,
        max_total_tokens: None,
        max_tool_calls: None,
        max_wall_time_ms: None,
        max_output_bytes: None,
    }
}

/// A contract over a signed manifest, with the requester's signature.
///
/// # Errors
/// `WRONG_SIGNER` when the manifest is not this requester's.
pub fn contract(
    cx: &mut Cx<'_>,
    manifest: TaskManifest,
    worker: Did,
    invite: Option<InviteId>,
    tokens: Vec<Digest>,
    offer_expires_at: Time,
) -> Result<TaskContract> {
    if manifest.requester_did != cx.key.did() {
        return Err(Error::new(Code::WrongSigner, "the manifest is somebody else's"));
    }
    let mut contract = TaskContract {
        contract_id: ContractId::draw(cx.entropy),
        task_id: manifest.task_id.clone(),
        manifest_digest: Digest::of(&manifest)?,
        manifest: Box::new(manifest),
        worker_did: worker,
        capability_digests: Seq::new(tokens)?,
        invite_id: invite,
        offered_at: Time::from(cx.now),
        offer_expires_at,
        signatures: Seq::new(vec![Signature::blank(Role::Requester, cx.key.did())])?,
    };
    let signature = sign::sign(&contract, cx.key, Role::Requester, cx.now)?;
    contract.signatures = Seq::new(vec![signature])?;
    Ok(contract)
}

/// An owner's answer to the exact action `target`. `policy` is the digest of the policy that
/// answered, `None` when a human did.
///
/// # Errors
/// None in practice.
pub fn approval(
    cx: &mut Cx<'_>,
    task_id: &TaskId,
    target: &Target,
    decision: Decision,
    policy: Option<Digest>,
    reason: &str,
) -> Result<ApprovalReceipt> {
    ApprovalReceipt {
        receipt_id: ApprovalId::draw(cx.entropy),
        task_id: task_id.clone(),
        gate: target.gate(),
        decision,
        mode: if policy.is_some() { Mode::Policy } else { Mode::Human },
        target_digest: target.digest()?,
        approver_did: cx.key.did(),
        policy_digest: policy,
        reason: Prose::lossy(reason),
        issued_at: Time::from(cx.now),
        expires_at: Time::from(cx.now).plus(APPROVAL_LIFE_MS),
        max_uses: Int::new(1)?,
        nonce: Nonce::draw(cx.entropy),
        signature: Signature::blank(Role::Owner, cx.key.did()),
    }
    .signed(cx.key, cx.now)
}

/// ACCEPT with the owner's approval of this contract.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a proposal.
pub fn accept(cx: &Cx<'_>, view: &View, approval: &ApprovalReceipt) -> Result<Wish> {
    let mut contract = view.contract().ok_or_else(not_yet)?.clone();
    let second = sign::sign(&contract, cx.key, Role::Worker, cx.now)?;
    let mut signatures = contract.signatures.to_vec();
    signatures.push(second);
    contract.signatures = Seq::new(signatures)?;
    Ok(wish(Event::Accept, vec![value(&contract)?, value(approval)?]))
}

/// The action that ACCEPT needs an approval for.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a proposal.
pub fn acceptance_target(view: &View) -> Result<Target> {
    let contract_digest = view.contract_digest().ok_or_else(not_yet)?;
    Ok(Target::ContractAcceptance { contract_digest })
}

/// START.
#[must_use]
pub fn start() -> Wish {
    wish(Event::Start, Vec::new())
}

/// WITHDRAW.
#[must_use]
pub fn withdraw() -> Wish {
    wish(Event::Withdraw, Vec::new())
}

/// REJECT, with a code.
///
/// # Errors
/// None in practice.
pub fn reject(cx: &Cx<'_>, view: &View, code: Code, message: &str) -> Result<Wish> {
    let (task_id, at) = (view.task_id().clone(), Time::from(cx.now));
    let notice = RejectNotice { task_id, code, message: Note::lossy(message), at };
    Ok(wish(Event::Reject, vec![value(&notice)?]))
}

/// PROGRESS; the log gives it its number.
///
/// # Errors
/// `BAD_FIELD` for more than 100 percent.
pub fn progress(
    cx: &Cx<'_>,
    view: &View,
    percent: Option<u64>,
    step: &str,
    message: &str,
    metrics: Metrics,
    usage: Option<&UsageReceipt>,
) -> Result<Wish> {
    let update = ProgressUpdate {
        task_id: view.task_id().clone(),
        progress_seq: Count::clamped(view.next_progress()),
        percent: percent.map(Int::new).transpose()?,
        step: Note::lossy(step),
        message: Note::lossy(message),
        metrics,
        at: Time::from(cx.now),
    };
    let mut objects = vec![value(&update)?];
    objects.extend(usage.map(value).transpose()?);
    Ok(wish(Event::Progress, objects))
}

/// The next usage receipt of a task, over `usage` so far.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a proposal.
pub fn usage(
    cx: &mut Cx<'_>,
    view: &View,
    usage: Usage,
    source: UsageSource,
    (adapter, model): (&str, Option<Name>),
    started_at: Time,
    is_final: bool,
) -> Result<UsageReceipt> {
    let before = view.usage();
    UsageReceipt {
        receipt_id: UsageId::draw(cx.entropy),
        task_id: view.task_id().clone(),
        contract_digest: view.contract_digest().ok_or_else(not_yet)?,
        worker_did: cx.key.did(),
        sequence: Count::clamped(before.map_or(0, |b| b.object.sequence.get() + 1)),
        previous_digest: before.map(|b| b.digest),
        is_final,
        adapter: Word::parse(adapter)?,
        model,
        source,
        started_at,
        ended_at: Time::from(cx.now),
        usage,
        cost: None,
        signature: Signature::blank(Role::Worker, cx.key.did()),
    }
    .signed(cx.key, cx.now)
}

/// The worker's word on how a run was kept apart.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a proposal.
pub fn attest(
    cx: &mut Cx<'_>,
    view: &View,
    ran: &Ran,
    output_digest: Option<Digest>,
) -> Result<ExecutionAttestation> {
    let contract = view.contract().ok_or_else(not_yet)?;
    let policy = &contract.manifest.sandbox_policy;
    let facts = ran.run.clone();
    ExecutionAttestation {
        attestation_id: AttestationId::draw(cx.entropy),
        task_id: view.task_id().clone(),
        contract_digest: view.contract_digest().ok_or_else(not_yet)?,
        worker_did: cx.key.did(),
        requested_isolation: policy.isolation,
        effective_isolation: facts.effective,
        runtime: facts.runtime,
        policy_digest: Digest::of(policy)?,
        limits: facts.limits,
        started_at: Time::from(ran.started_at),
        ended_at: Time::from(ran.ended_at),
        exit: facts.exit,
        input_digest: contract.manifest.input_digest,
        output_digest,
        stderr_digest: facts.stderr_digest,
        denials: Seq::new(facts.denials)?,
        signature: Signature::blank(Role::Worker, cx.key.did()),
    }
    .signed(cx.key, cx.now)
}

/// DELIVER with a final receipt.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a proposal.
pub fn deliver(
    cx: &mut Cx<'_>,
    view: &View,
    output: Value,
    usage: &UsageReceipt,
    attestation: Option<&ExecutionAttestation>,
) -> Result<Wish> {
    let deliverable = Deliverable {
        deliverable_id: DeliverableId::draw(cx.entropy),
        task_id: view.task_id().clone(),
        contract_digest: view.contract_digest().ok_or_else(not_yet)?,
        worker_did: cx.key.did(),
        revision: Int::new(view.revision())?,
        output_digest: Digest::of(&output)?,
        output,
        usage_receipt_digest: Digest::of(usage)?,
        attestation_digest: attestation.map(Digest::of).transpose()?,
        delivered_at: Time::from(cx.now),
        signature: Signature::blank(Role::Worker, cx.key.did()),
    }
    .signed(cx.key, cx.now)?;
    let mut objects = vec![value(&deliverable)?, value(usage)?];
    objects.extend(attestation.map(value).transpose()?);
    Ok(wish(Event::Deliver, objects))
}

/// What a report leads to: VERIFY_PASS; REWORK when `again` and a revision is left; VERIFY_FAIL.
///
/// # Errors
/// None in practice.
pub fn verdict(view: &View, report: &VerificationReport, again: bool) -> Result<Wish> {
    let left = view
        .contract()
        .is_some_and(|contract| view.revision() < contract.manifest.max_revisions.get());
    let event = match (report.passed, again && left) {
        (true, _) => Event::VerifyPass,
        (false, true) => Event::Rework,
        (false, false) => Event::VerifyFail,
    };
    Ok(wish(event, vec![value(report)?]))
}

/// The action that SETTLE and DECLINE need an answer for.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a verification.
pub fn final_target(view: &View) -> Result<Target> {
    let report = view.report().ok_or_else(not_yet)?;
    Ok(Target::FinalAcceptance {
        contract_digest: view.contract_digest().ok_or_else(not_yet)?,
        deliverable_digest: report.object.deliverable_digest,
        report_digest: report.digest,
    })
}

/// SETTLE with the owner's approval.
///
/// # Errors
/// `ILLEGAL_TRANSITION` before a verification.
pub fn settle(cx: &mut Cx<'_>, view: &View, approval: &ApprovalReceipt) -> Result<Wish> {
    let report = view.report().ok_or_else(not_yet)?;
    let settlement = SettlementReceipt {
        settlement_id: SettlementId::draw(cx.entropy),
        task_id: view.task_id().clone(),
        contract_digest: view.contract_digest().ok_or_else(not_yet)?,
        requester_did: cx.key.did(),
        deliverable_digest: report.object.deliverable_digest,
        report_digest: report.digest,
        final_approval_digest: Digest::of(approval)?,
        usage_receipt_digest: view.usage().ok_or_else(not_yet)?.digest,
        settled_at: Time::from(cx.now),
        signature: Signature::blank(Role::Requester, cx.key.did()),
    }
    .signed(cx.key, cx.now)?;
    Ok(wish(Event::Settle, vec![value(approval)?, value(&settlement)?]))
}

/// DECLINE with the owner's refusal.
///
/// # Errors
/// None in practice.
pub fn decline(refusal: &ApprovalReceipt) -> Result<Wish> {
    Ok(wish(Event::Decline, vec![value(refusal)?]))
}

/// APPROVAL: an owner's answer put into the log; for a raised budget with the raise itself.
///
/// # Errors
/// `BAD_FIELD` for a metric that is no short name.
pub fn approve(receipt: &ApprovalReceipt, target: &Target) -> Result<Wish> {
    let mut objects = vec![value(receipt)?];
    if let Target::BudgetOverrun { contract_digest, metric, from, to } = target {
        objects.push(value(&BudgetTarget {
            gate: OverrunGate::BudgetOverrun,
            contract_digest: *contract_digest,
            metric: Word::parse(metric)?,
            from: Count::new(*from)?,
            to: Count::new(*to)?,
        })?);
    }
    Ok(wish(Event::Approval, objects))
}

/// CANCEL, giving the worker `grace_ms`.
///
/// # Errors
/// None in practice.
pub fn cancel(cx: &Cx<'_>, view: &View, reason: &str, grace_ms: u64) -> Result<Wish> {
    let notice = CancelNotice {
        task_id: view.task_id().clone(),
        reason: Note::lossy(reason),
        requested_at: Time::from(cx.now),
        grace_ms: Count::clamped(grace_ms),
    };
    Ok(wish(Event::Cancel, vec![value(&notice)?]))
}

/// CANCELLED, once the run is gone.
///
/// # Errors
/// None in practice.
pub fn cancelled(usage: &UsageReceipt, attestation: Option<&ExecutionAttestation>) -> Result<Wish> {
    let mut objects = vec![value(usage)?];
    objects.extend(attestation.map(value).transpose()?);
    Ok(wish(Event::Cancelled, objects))
}

/// FAIL, with a code and a final receipt.
///
/// # Errors
/// None in practice.
pub fn fail(
    cx: &Cx<'_>,
    view: &View,
    code: Code,
    message: &str,
    usage: &UsageReceipt,
) -> Result<Wish> {
    let (task_id, at) = (view.task_id().clone(), Time::from(cx.now));
    let notice = FailNotice { task_id, code, message: Note::lossy(message), at };
    Ok(wish(Event::Fail, vec![value(&notice)?, value(usage)?]))
}

/// SUPERSEDE: another worker was first, or enough agreed.
///
/// # Errors
/// None in practice.
pub fn supersede(cx: &Cx<'_>, view: &View, cause: Cause) -> Result<Wish> {
    let (task_id, at) = (view.task_id().clone(), Time::from(cx.now));
    Ok(wish(Event::Supersede, vec![value(&EvidenceNotice { task_id, cause, at })?]))
}
