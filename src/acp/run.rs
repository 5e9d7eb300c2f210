//! A run of the work as values: what a worker's adapter is given, and what it reports. Running
//! itself is `runtime::adapter`'s.

use serde_json::Value;

use super::code::Code;
use super::objects::{
    CapabilityToken, Denial, Exit, Isolation, Metrics, Runtime, SandboxPolicy, Usage, UsageSource,
};
use super::value::{Digest, Name, TaskId};
use crate::codec::time::UnixMillis;

/// One run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Of which task.
    pub task_id: TaskId,
    /// The requester's title of it; as everything of the order, another owner's words.
    pub title: String,
    /// What is to be done, in words.
    pub description: String,
    /// What the output must fit: for models, which are told. Nothing is checked here.
    pub output_schema: Value,
    /// The input: another owner's data, trusted with nothing.
    pub input: Value,
    /// What the requester laid down.
    pub policy: SandboxPolicy,
    /// The level that was chosen before ACCEPT.
    pub isolation: Isolation,
    /// How long it may take, ms.
    pub max_wall_ms: u64,
    /// How long its output may be, bytes of JSON.
    pub max_output_bytes: u64,
    /// What may be used through the requester's gateway.
    pub grants: Vec<CapabilityToken>,
}

/// How far a run is; texts are cut to their bounds when they go into the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// 0 to 100.
    pub percent: Option<u8>,
    /// What it is doing.
    pub step: String,
    /// In words.
    pub message: String,
    /// Counters so far.
    pub metrics: Metrics,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    /// With a result.
    Output(Value),
    /// Without.
    Failed {
        /// `SANDBOX_FAILED`, `ADAPTER_FAILED`, `OUTPUT_TOO_LARGE`, `OUTPUT_NOT_JSON`,
        /// `BUDGET_EXCEEDED`.
        code: Code,
        /// For people; never a payload.
        message: String,
    },
    /// Stopped on request; nothing of it is left running.
    Cancelled,
}

/// How a run was kept apart: what the attestation says.
#[derive(Clone, Debug, PartialEq)]
pub struct RunFacts {
    /// The level that was really applied.
    pub effective: Isolation,
    /// What ran it.
    pub runtime: Runtime,
    /// The bounds that were really applied.
    pub limits: SandboxPolicy,
    /// How the process ended.
    pub exit: Exit,
    /// Of what it wrote to stderr.
    pub stderr_digest: Option<Digest>,
    /// What was refused to it, and how each bound was kept.
    pub denials: Vec<Denial>,
}

/// A run that is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    /// How.
    pub ended: Ended,
    /// What it used.
    pub usage: Usage,
    /// Where these numbers come from.
    pub source: UsageSource,
    /// The model, where there is one.
    pub model: Option<Name>,
    /// When it began.
    pub started_at: UnixMillis,
    /// When it was over.
    pub ended_at: UnixMillis,
    /// How it was kept apart.
    pub run: RunFacts,
    /// The end of what a program that has failed wrote to stderr: for this side's owner alone, and as
    /// the program wrote it.
    pub complaint: Option<String>,
}
