//! Every object of the protocol as a closed, typed value (design 6, 8, 9.4, 11.2, 12): members,
//! grammars, who signs it. What the members mean together is judged elsewhere.

mod audit;
mod directory;
mod grants;
mod message;
mod resource;
mod run;
mod task;

pub use audit::{
    Actors, AuditBundle, AuditCheckpoint, AuditEntry, AuditGenesis, BundleEntry, BundleObjects,
    Event, GatewayEntry, GatewayGenesis, Party, State, TrustAnchor,
};
pub use directory::{Invite, RelayAction, RelayAuth, WorkerCard};
pub use grants::{
    ApprovalPolicy, ApprovalReceipt, BudgetTarget, Capability, CapabilityLimits, CapabilityToken,
    Decision, Gate, GatePolicies, GatePolicy, Mode, OverrunGate, RevocationNotice,
    RevocationTarget, Target,
};
pub use message::{
    CallError, Countersignature, Envelope, EnvelopeHeader, Head, Nack, SessionKey, SessionMessage,
    Suite, ToolCall, ToolResult,
};
pub use resource::{Action, Resource};
pub use run::{
    CancelNotice, Cause, Check, Cost, Deliverable, Denial, EvidenceNotice, ExecutionAttestation,
    Exit, ExitKind, FailNotice, Metrics, ProgressUpdate, RejectNotice, Runtime, SettlementReceipt,
    Usage, UsageReceipt, UsageSource, VerificationReport,
};
pub use task::{
    AcceptanceCriterion, Budget, Isolation, Network, Redelegation, RegisteredCheck, SandboxPolicy,
    SchemaText, TaskContract, TaskManifest, Verification, VerificationMethod, VerificationMode,
};
