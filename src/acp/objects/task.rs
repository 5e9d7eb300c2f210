//! What is ordered: manifest and contract (design 6.1, 6.2).

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::acp::code::Result;
use crate::acp::did::Did;
use crate::acp::sign::{Signature, signed_by};
use crate::acp::value::{
    ContractId, Count, Digest, Int, InviteId, Labels, Name, Prose, Read, Seq, TaskId, Time, Word,
    bad, object, words,
};

/// A JSON Schema (Draft 2020-12) as it was written, or `true`; whether it is one is judged by
/// [`crate::acp::schema`].
#[derive(Clone, PartialEq, Debug)]
pub struct SchemaText(pub Value);

impl Serialize for SchemaText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Read for SchemaText {
    fn read(value: Value) -> Result<Self> {
        if value.is_object() || value == Value::Bool(true) {
            Ok(Self(value))
        } else {
            Err(bad("neither a JSON Schema object nor true"))
        }
    }
}

impl JsonSchema for SchemaText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "SchemaText".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "object" }, { "const": true }] })
    }
}

words! {
    /// How well a run is kept apart from the machine, strongest first.
    pub enum Isolation {
        /// A container.
        Oci = "oci",
        /// Namespaces.
        Namespace = "namespace",
        /// Landlock and seccomp, or the like.
        Kernel = "kernel",
        /// An own process group with a clean environment.
        Subprocess = "subprocess",
        /// The owner's own command.
        None = "none",
    }
}

impl Isolation {
    /// Whether this level is at least as strong as `other`.
    #[must_use]
    pub fn is_at_least(self, other: Self) -> bool {
        self <= other
    }
}

words! {
    /// What a run may reach.
    pub enum Network {
        /// Nothing.
        None = "none",
        /// The hosts of the list, through the daemon's proxy.
        Allowlist = "allowlist",
    }
}

words! {
    /// How a deliverable is verified.
    pub enum VerificationMethod {
        /// By the output schema.
        Schema = "schema",
        /// By schema and registered checks.
        SchemaAndChecks = "schema_and_checks",
        /// By schema, and then by the owner's eyes.
        Manual = "manual",
    }
}

words! {
    /// How checks are combined.
    pub enum VerificationMode {
        /// Every one must pass.
        All = "all",
    }
}

object! {
    /// Something the result must be.
    pub struct AcceptanceCriterion {
        "criterionId" criterion_id: Word,
        "description" description: Prose,
        "checkName" check_name: Option<Word>,
    }
}

object! {
    /// A check by name, with its parameters.
    pub struct RegisteredCheck {
        "checkName" check_name: Word,
        "params" params: Value,
    }
}

object! {
    /// How the deliverable will be verified.
    pub struct Verification {
        "method" method: VerificationMethod,
        "checks" checks: Seq<RegisteredCheck, 0, 50>,
        "mode" mode: VerificationMode,
    }
}

object! {
    /// Upper limits of what the work may use; null is unlimited.
    pub struct Budget {
        "maxInputTokens" max_input_tokens: Option<Count>,
        "maxOutputTokens" max_output_tokens: Option<Count>,
        "maxTotalTokens" max_total_tokens: Option<Count>,
        "maxToolCalls" max_tool_calls: Option<Count>,
        "maxWallTimeMs" max_wall_time_ms: Option<Count>,
        "maxOutputBytes" max_output_bytes: Option<Count>,
    }
}

object! {
    /// How the run is kept apart; in an attestation, what was really applied.
    pub struct SandboxPolicy {
        "isolation" isolation: Isolation,
        "allowSubprocessFallback" allow_subprocess_fallback: bool,
        "network" network: Network,
        "allowHosts" allow_hosts: Seq<Name, 0, 32>,
        "memoryMaxBytes" memory_max_bytes: Count,
        "pidsMax" pids_max: Count,
        "cpuTimeMaxMs" cpu_time_max_ms: Count,
        "diskMaxBytes" disk_max_bytes: Count,
    }
}

object! {
    /// Whether the worker may hand work on.
    pub struct Redelegation {
        "allowed" allowed: bool,
        "maxDepth" max_depth: Int<0, 4>,
    }
}

object! {
    /// What is asked for.
    pub struct TaskManifest = "TaskManifest" {
        "taskId" task_id: TaskId,
        "title" title: Name,
        "description" description: Prose,
        "requesterDid" requester_did: Did,
        "createdAt" created_at: Time,
        /// The work must be delivered before it.
        "deadlineAt" deadline_at: Time,
        /// How long the requester may take to verify a delivery.
        "verifyWithinMs" verify_within_ms: Count,
        "inputSchema" input_schema: SchemaText,
        "outputSchema" output_schema: SchemaText,
        /// Of the input, which travels with the proposal.
        "inputDigest" input_digest: Digest,
        "acceptanceCriteria" acceptance_criteria: Seq<AcceptanceCriterion, 0, 50>,
        "verification" verification: Verification,
        "requireExecutionAttestation" require_execution_attestation: bool,
        "budget" budget: Budget,
        "sandboxPolicy" sandbox_policy: SandboxPolicy,
        "redelegation" redelegation: Redelegation,
        /// How often a failed verification may go back to work.
        "maxRevisions" max_revisions: Int<0, 5>,
        "parentTaskId" parent_task_id: Option<TaskId>,
        "parentManifestDigest" parent_manifest_digest: Option<Digest>,
        "metadata" metadata: Labels,
        "signature" signature: Signature,
    }
}

object! {
    /// An order, signed by the requester, and by the worker once it is accepted.
    pub struct TaskContract = "TaskContract" {
        "contractId" contract_id: ContractId,
        "taskId" task_id: TaskId,
        "manifest" manifest: Box<TaskManifest>,
        /// Object digest of the manifest.
        "manifestDigest" manifest_digest: Digest,
        "workerDid" worker_did: Did,
        /// Object digests of the tokens granted.
        "capabilityDigests" capability_digests: Seq<Digest, 0, 32>,
        "inviteId" invite_id: Option<InviteId>,
        "offeredAt" offered_at: Time,
        "offerExpiresAt" offer_expires_at: Time,
        /// The requester's first.
        "signatures" signatures: Seq<Signature, 1, 2>,
    }
}

signed_by! {
    TaskManifest.requester_did as Requester;
}
