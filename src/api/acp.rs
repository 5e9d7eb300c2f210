//! The Agent Collaboration Protocol as programs and models ask for it: one set of calls for the local
//! API, for an office's own socket and for the MCP tools `acp_*` (design 14). Values only; texts and
//! ids are checked by whoever serves them.

use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How long a delegation is waited for unless the caller says otherwise, ms. Longer ones go on, and
/// `task` tells how they stand.
pub const DEFAULT_WAIT_MS: u64 = 50_000;

/// The longest wait of one call, ms.
pub const MAX_WAIT_MS: u64 = 600_000;

/// Work for one worker, or the same work for several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Work {
    /// The relay of workers that are named by their did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// What it is about, in a line.
    pub title: String,
    /// What is to be done.
    #[serde(default)]
    pub description: String,
    /// What it is done on: any JSON.
    #[serde(default)]
    pub input: Value,
    /// JSON Schema of the input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
    /// JSON Schema (2020-12) that the result must fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
    /// When it must be delivered: an RFC 3339 time; an hour from now by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_at: Option<String>,
    /// Limits: maxInputTokens, maxOutputTokens, maxTotalTokens, maxToolCalls, maxWallTimeMs,
    /// maxOutputBytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Value>,
    /// How the run is kept apart: members of a sandbox policy, e.g. isolation (oci, namespace, kernel,
    /// subprocess, none) and allowSubprocessFallback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_policy: Option<Value>,
    /// Tools of this owner that the work may use, each RESOURCE:ACTION within one that its configuration
    /// names, 32 at most. The owner is asked at every use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// How often they may be used, all together; 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_uses: Option<u64>,
    /// How often the work may be handed on to another worker, one behind the other: 0 to 4; 0 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redelegation: Option<u64>,
    /// A task that this owner is the worker of, and that this work is a part of: it may ask for no more
    /// than was asked of this owner, who must agree to its being handed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_task_id: Option<String>,
    /// Take a result that has passed its checks without asking the owner.
    #[serde(default)]
    pub auto_approve: bool,
    /// How long to wait for the end, ms; the task goes on after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// How the results of several workers are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Combine {
    /// The first that passes is taken.
    Race,
    /// So many equal ones are asked for.
    Quorum,
}

/// A side of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Who ordered it.
    Requester,
    /// Who does it.
    Worker,
}

/// What can be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Revocable {
    /// An invite.
    Invite,
    /// A capability token.
    Capability,
    /// A worker card.
    Card,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum AcpCall {
    /// Who this owner is.
    Whoami,
    /// Have work done.
    DelegateTask(DelegateTask),
    /// Have the same work done by several.
    DelegateMulti(DelegateMulti),
    /// Verify a bundle.
    VerifyAuditBundle(VerifyAuditBundle),
    /// Make an invite.
    CreateInvite(CreateInvite),
    /// How an invite of this owner's stands.
    InviteStatus(InviteStatus),
    /// Take something back.
    RevokeToken(RevokeToken),
    /// How a task stands.
    TaskStatus(TaskStatus),
    /// The tasks, newest first.
    ListTasks(ListTasks),
    /// Stop a task.
    CancelTask(CancelTask),
    /// Ask a relay for workers.
    DiscoverWorkers(DiscoverWorkers),
    /// What waits for the owner.
    ListApprovals,
    /// The owner's answer.
    Answer(Answer),
    /// The log of a task, as a signed bundle.
    ExportAudit(ExportAudit),
}

impl AcpCall {
    /// Whether it changes nothing: for those who may only look.
    #[must_use]
    pub const fn only_reads(&self) -> bool {
        match self {
            Self::Whoami
            | Self::VerifyAuditBundle(_)
            | Self::InviteStatus(_)
            | Self::TaskStatus(_)
            | Self::ListTasks(_)
            | Self::DiscoverWorkers(_)
            | Self::ListApprovals
            | Self::ExportAudit(_) => true,
            Self::DelegateTask(_)
            | Self::DelegateMulti(_)
            | Self::CreateInvite(_)
            | Self::RevokeToken(_)
            | Self::CancelTask(_)
            | Self::Answer(_) => false,
        }
    }

    /// How long it may wait by itself, before its answer is due.
    #[must_use]
    pub fn wait(&self) -> Duration {
        let ms = match self {
            Self::DelegateTask(DelegateTask { work, .. })
            | Self::DelegateMulti(DelegateMulti { work, .. }) => {
                work.wait_ms.unwrap_or(DEFAULT_WAIT_MS)
            }
            Self::TaskStatus(task) => task.wait_ms.unwrap_or(0),
            _ => 0,
        };
        Duration::from_millis(ms.min(MAX_WAIT_MS))
    }
}

/// A call as the local API takes it. Its `Debug` shows nothing of it, so that no log can hold an
/// input.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AcpParams(pub Box<AcpCall>);

impl fmt::Debug for AcpParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AcpParams(..)")
    }
}

/// What somebody who waits for a delegation is told meanwhile. `step` and `message` are another
/// owner's words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum AcpNews {
    /// A task has a new entry.
    Moved {
        /// Its id.
        task_id: String,
        /// Where it is.
        status: String,
        /// How far its worker says it is, percent.
        percent: Option<u64>,
        /// What its worker is at.
        step: String,
        /// What its worker says of it.
        message: String,
    },
    /// The owner is asked.
    Asked {
        /// The question's id, for `answer`.
        id: String,
        /// The gate.
        gate: String,
        /// The task.
        task_id: String,
        /// What is asked, in a sentence that quotes the other owner's title, escaped.
        question: String,
        /// What is to be known for an answer, a line each: another owner's words, not escaped.
        about: Vec<String>,
        /// Until when the answer counts, an RFC 3339 time.
        expires_at: String,
    },
    /// Nobody has answered a proposal for a while.
    Quiet {
        /// The task.
        task_id: String,
    },
}

/// `acp_delegate_task`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DelegateTask {
    /// The worker: an invite (acp-invite:… or acp://invite?token=…), a did with `relay`, or an agent of
    /// the mesh by petname, name or id.
    pub to: String,
    /// The work.
    #[serde(flatten)]
    pub work: Work,
}

/// `acp_delegate_multi`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DelegateMulti {
    /// The workers, 2 to 16, each as in `acp_delegate_task`.
    pub workers: Vec<String>,
    /// race or quorum.
    pub mode: Combine,
    /// Equal results that are asked for; half of the workers and one by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quorum_size: Option<u64>,
    /// The work.
    #[serde(flatten)]
    pub work: Work,
}

/// `acp_verify_audit_bundle`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VerifyAuditBundle {
    /// The bundle.
    pub bundle: Value,
    /// A trust anchor { taskId, actors, head } or a checkpoint, got by another way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchor: Option<Value>,
}

/// `acp_create_invite`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateInvite {
    /// The name in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where this owner is reached, 1 to 4; its own relays by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relay_urls: Vec<String>,
    /// How long it is good, ms; a day by default, 30 days at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
    /// For how many tasks; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_uses: Option<u64>,
}

/// `acp_revoke_token`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RevokeToken {
    /// What it is.
    pub target_type: Revocable,
    /// Its id.
    pub target_id: String,
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// `acp_task_status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskStatus {
    /// Its id.
    pub task_id: String,
    /// Wait so long for its end, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// `acp_list_tasks`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ListTasks {
    /// Only those in which this owner is that side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Side>,
    /// Only those in this state, e.g. IN_PROGRESS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Only those with this other side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// How many; 50 by default, 500 at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// `acp_cancel_task`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CancelTask {
    /// Its id.
    pub task_id: String,
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// Which invite is asked about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InviteStatus {
    /// Its id.
    pub invite_id: String,
}

/// `acp_discover_workers`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DiscoverWorkers {
    /// The relay to ask; this owner's first by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// Only workers with this adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Only workers with this skill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skill: Option<String>,
}

/// An owner's answer to what waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Answer {
    /// The question's id.
    pub id: String,
    /// Yes or no.
    pub approve: bool,
    /// Why.
    #[serde(default)]
    pub reason: String,
}

/// Which log is exported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExportAudit {
    /// Its task.
    pub task_id: String,
    /// Leave out input, progress and results.
    #[serde(default)]
    pub redact: bool,
    /// Where the bundle is written, an absolute path with nothing there; answered otherwise, which a
    /// long log is too large for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<String>,
}
