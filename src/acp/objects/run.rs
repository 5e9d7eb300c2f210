//! What comes of the work: receipts, attestations, deliverables, reports, and the small notices
//! (design 6.5 to 6.9, 6.11).

use serde_json::Value;

use super::task::{Isolation, SandboxPolicy};
use crate::acp::code::Code;
use crate::acp::did::Did;
use crate::acp::sign::{Signature, signed_by};
use crate::acp::value::{
    AttestationId, Count, DeliverableId, Digest, Int, Name, Note, ReportId, Seq, SettlementId,
    TaskId, Text, Time, UsageId, Word, object, words,
};

words! {
    /// Where the numbers of a receipt come from.
    pub enum UsageSource {
        /// The provider of the model.
        Provider = "provider",
        /// The worker's own meter.
        Metered = "metered",
        /// A guess.
        Estimated = "estimated",
    }
}

object! {
    /// What was used so far; null where it cannot be measured.
    pub struct Usage {
        "inputTokens" input_tokens: Option<Count>,
        "outputTokens" output_tokens: Option<Count>,
        "totalTokens" total_tokens: Option<Count>,
        "toolCalls" tool_calls: Option<Count>,
        "wallTimeMs" wall_time_ms: Option<Count>,
        "cpuTimeMs" cpu_time_ms: Option<Count>,
        "outputBytes" output_bytes: Option<Count>,
    }
}

impl Usage {
    /// Nothing that could be measured.
    #[must_use]
    pub const fn unmeasured() -> Self {
        Self {
            input_tokens: None,
            output_tokens: None,
            total_tokens: None,
            tool_calls: None,
            wall_time_ms: None,
            cpu_time_ms: None,
            output_bytes: None,
        }
    }
}

object! {
    /// Money, for information only.
    pub struct Cost {
        /// Millionths of the currency's unit.
        "costMicros" cost_micros: Count,
        /// ISO 4217.
        "currency" currency: Text<3, 3, false>,
    }
}

object! {
    /// The worker's word on what it used, cumulative.
    pub struct UsageReceipt = "UsageReceipt" {
        "receiptId" receipt_id: UsageId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "workerDid" worker_did: Did,
        "sequence" sequence: Count,
        /// Object digest of the receipt before.
        "previousDigest" previous_digest: Option<Digest>,
        "final" is_final: bool,
        "adapter" adapter: Word,
        "model" model: Option<Name>,
        "source" source: UsageSource,
        "startedAt" started_at: Time,
        "endedAt" ended_at: Time,
        "usage" usage: Usage,
        "cost" cost: Option<Cost>,
        "signature" signature: Signature,
    }
}

object! {
    /// What ran the work.
    pub struct Runtime {
        "name" name: Name,
        "version" version: Name,
        "imageDigest" image_digest: Option<Digest>,
    }
}

words! {
    /// How a run ended.
    pub enum ExitKind {
        /// By itself.
        Exited = "exited",
        /// By a signal.
        Signalled = "signalled",
        /// Its time was over.
        Timeout = "timeout",
        /// It was cancelled.
        Cancelled = "cancelled",
        /// It never began.
        SpawnFailed = "spawn_failed",
    }
}

object! {
    /// How a run ended, with its code or signal.
    pub struct Exit {
        "kind" kind: ExitKind,
        "code" code: Option<i64>,
        "signal" signal: Option<i64>,
    }
}

object! {
    /// Something that the sandbox refused.
    pub struct Denial {
        "kind" kind: Word,
        "detail" detail: Note,
    }
}

object! {
    /// How the run was kept apart: the worker's own word, no proof by hardware.
    pub struct ExecutionAttestation = "ExecutionAttestation" {
        "attestationId" attestation_id: AttestationId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "workerDid" worker_did: Did,
        "requestedIsolation" requested_isolation: Isolation,
        "effectiveIsolation" effective_isolation: Isolation,
        "runtime" runtime: Runtime,
        /// Digest of the manifest's sandboxPolicy.
        "policyDigest" policy_digest: Digest,
        /// What was really applied.
        "limits" limits: SandboxPolicy,
        "startedAt" started_at: Time,
        "endedAt" ended_at: Time,
        "exit" exit: Exit,
        "inputDigest" input_digest: Digest,
        "outputDigest" output_digest: Option<Digest>,
        "stderrDigest" stderr_digest: Option<Digest>,
        "denials" denials: Seq<Denial, 0, 100>,
        "signature" signature: Signature,
    }
}

object! {
    /// A result.
    pub struct Deliverable = "Deliverable" {
        "deliverableId" deliverable_id: DeliverableId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "workerDid" worker_did: Did,
        "revision" revision: Int<0, 5>,
        "output" output: Value,
        "outputDigest" output_digest: Digest,
        "usageReceiptDigest" usage_receipt_digest: Digest,
        "attestationDigest" attestation_digest: Option<Digest>,
        "deliveredAt" delivered_at: Time,
        "signature" signature: Signature,
    }
}

object! {
    /// One check of a deliverable.
    pub struct Check {
        "name" name: Word,
        "passed" passed: bool,
        "code" code: Option<Code>,
        "detail" detail: Note,
    }
}

object! {
    /// What the requester's checks found.
    pub struct VerificationReport = "VerificationReport" {
        "reportId" report_id: ReportId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "requesterDid" requester_did: Did,
        "deliverableDigest" deliverable_digest: Digest,
        /// The seven fixed ones, then one per registered check.
        "checks" checks: Seq<Check, 7, 57>,
        "passed" passed: bool,
        "verifiedAt" verified_at: Time,
        "signature" signature: Signature,
    }
}

object! {
    /// The requester takes the result.
    pub struct SettlementReceipt = "SettlementReceipt" {
        "settlementId" settlement_id: SettlementId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "requesterDid" requester_did: Did,
        "deliverableDigest" deliverable_digest: Digest,
        "reportDigest" report_digest: Digest,
        "finalApprovalDigest" final_approval_digest: Digest,
        "usageReceiptDigest" usage_receipt_digest: Digest,
        "settledAt" settled_at: Time,
        "signature" signature: Signature,
    }
}

object! {
    /// Counters while the work goes on, cumulative.
    pub struct Metrics {
        "inputTokens" input_tokens: Option<Count>,
        "outputTokens" output_tokens: Option<Count>,
        "totalTokens" total_tokens: Option<Count>,
        "toolCalls" tool_calls: Option<Count>,
    }
}

object! {
    /// How far the work is.
    pub struct ProgressUpdate = "ProgressUpdate" {
        "taskId" task_id: TaskId,
        "progressSeq" progress_seq: Count,
        "percent" percent: Option<Int<0, 100>>,
        "step" step: Note,
        "message" message: Note,
        "metrics" metrics: Metrics,
        "at" at: Time,
    }
}

object! {
    /// The requester wants the work stopped.
    pub struct CancelNotice = "CancelNotice" {
        "taskId" task_id: TaskId,
        "reason" reason: Note,
        "requestedAt" requested_at: Time,
        /// How long the worker has.
        "graceMs" grace_ms: Count,
    }
}

object! {
    /// The worker does not take the work.
    pub struct RejectNotice = "RejectNotice" {
        "taskId" task_id: TaskId,
        "code" code: Code,
        "message" message: Note,
        "at" at: Time,
    }
}

object! {
    /// The work failed.
    pub struct FailNotice = "FailNotice" {
        "taskId" task_id: TaskId,
        "code" code: Code,
        "message" message: Note,
        "at" at: Time,
    }
}

words! {
    /// Why a task ended without either side's doing.
    pub enum Cause {
        /// The offer ran out.
        OfferExpired = "OFFER_EXPIRED",
        /// The deadline passed.
        Deadline = "DEADLINE",
        /// Nobody verified in time.
        VerifyTimeout = "VERIFY_TIMEOUT",
        /// The worker did not confirm a cancellation.
        CancelGrace = "CANCEL_GRACE",
        /// Another worker was first.
        RaceLost = "RACE_LOST",
        /// Enough others agreed.
        QuorumDone = "QUORUM_DONE",
    }
}

object! {
    /// Why EXPIRE, ABANDON or SUPERSEDE was written.
    pub struct EvidenceNotice = "EvidenceNotice" {
        "taskId" task_id: TaskId,
        "cause" cause: Cause,
        "at" at: Time,
    }
}

signed_by! {
    UsageReceipt.worker_did as Worker;
    ExecutionAttestation.worker_did as Worker;
    Deliverable.worker_did as Worker;
    VerificationReport.requester_did as Requester;
    SettlementReceipt.requester_did as Requester;
}
