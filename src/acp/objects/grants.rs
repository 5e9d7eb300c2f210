//! What is allowed: capability tokens, approvals and the policy behind them, revocations (design
//! 6.3, 6.4, 6.10, 9.4).

use serde::{Deserialize, Serialize};

use super::resource::{Action, Resource};
use super::task::SchemaText;
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::sign::{Signature, signed_by};
use crate::acp::value::{
    ApprovalId, Count, Digest, Int, Name, Nonce, NoticeId, Prose, Seq, TaskId, Time, TokenId, Word,
    object, words,
};

object! {
    /// One thing that may be done.
    pub struct Capability {
        "resource" resource: Resource,
        /// Sorted, each once.
        "actions" actions: Seq<Action, 1, 16>,
        /// All of them must accept the arguments.
        "argsSchemas" args_schemas: Seq<SchemaText, 0, 16>,
        "maxBytesPerUse" max_bytes_per_use: Option<Count>,
    }
}

object! {
    /// How long, how often and how far a token may be used.
    pub struct CapabilityLimits {
        "notBefore" not_before: Time,
        "expiresAt" expires_at: Time,
        "maxUses" max_uses: Int<1, 1_000_000>,
        /// How many links may be below the root.
        "maxDepth" max_depth: Int<0, 8>,
    }
}

object! {
    /// A grant, or the narrowing of one.
    pub struct CapabilityToken = "CapabilityToken" {
        "tokenId" token_id: TokenId,
        "issuerDid" issuer_did: Did,
        "audienceDid" audience_did: Did,
        "taskId" task_id: TaskId,
        /// Object digest of the token that this one narrows; null at the root.
        "parentDigest" parent_digest: Option<Digest>,
        "depth" depth: Int<0, 8>,
        "capabilities" capabilities: Seq<Capability, 1, 32>,
        "limits" limits: CapabilityLimits,
        "issuedAt" issued_at: Time,
        "nonce" nonce: Nonce,
        "signature" signature: Signature,
    }
}

words! {
    /// Where an owner is asked.
    pub enum Gate {
        /// Something is about to leave the gateway with its credential.
        ExternalSend = "external_send",
        /// A contract is about to be accepted.
        ContractAcceptance = "contract_acceptance",
        /// A budget is about to be raised.
        BudgetOverrun = "budget_overrun",
        /// Work is about to be handed on.
        Redelegation = "redelegation",
        /// A result is about to be accepted.
        FinalAcceptance = "final_acceptance",
    }
}

words! {
    /// An owner's answer.
    pub enum Decision {
        /// Yes.
        Approved = "approved",
        /// No.
        Denied = "denied",
    }
}

words! {
    /// Who decided.
    pub enum Mode {
        /// The owner.
        Human = "human",
        /// The owner's policy, named by its digest.
        Policy = "policy",
    }
}

object! {
    /// An owner's answer to one exact action, good once.
    pub struct ApprovalReceipt = "ApprovalReceipt" {
        "receiptId" receipt_id: ApprovalId,
        "taskId" task_id: TaskId,
        "gate" gate: Gate,
        "decision" decision: Decision,
        "mode" mode: Mode,
        /// Digest of the [`Target`].
        "targetDigest" target_digest: Digest,
        "approverDid" approver_did: Did,
        /// Of the policy; null when a human decided.
        "policyDigest" policy_digest: Option<Digest>,
        "reason" reason: Prose,
        "issuedAt" issued_at: Time,
        "expiresAt" expires_at: Time,
        "maxUses" max_uses: Int<1, 1>,
        "nonce" nonce: Nonce,
        "signature" signature: Signature,
    }
}

/// Bytes of a target as text; real ones have a few hundred.
const MAX_TARGET: usize = 64 * 1024;

/// The exact action that an approval is for (design 9.4). Its digest is signed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(
    tag = "gate",
    rename_all = "snake_case",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum Target {
    /// Accept this contract.
    ContractAcceptance {
        /// Body digest of the contract.
        contract_digest: Digest,
    },
    /// Settle this deliverable, on this report.
    FinalAcceptance {
        /// Body digest of the contract.
        contract_digest: Digest,
        /// Object digest.
        deliverable_digest: Digest,
        /// Object digest.
        report_digest: Digest,
    },
    /// Raise one member of the budget.
    BudgetOverrun {
        /// Body digest of the contract.
        contract_digest: Digest,
        /// Name of the budget's member, e.g. `maxTotalTokens`.
        metric: String,
        /// The limit so far.
        from: u64,
        /// The limit from now on.
        to: u64,
    },
    /// Hand work on by this other contract.
    Redelegation {
        /// Body digest of the contract.
        contract_digest: Digest,
        /// Body digest of the child contract.
        child_contract_digest: Digest,
    },
    /// Send this out.
    ExternalSend {
        /// Body digest of the contract, where there is one.
        contract_digest: Option<Digest>,
        /// Who asked.
        to_did: Did,
        /// What is used.
        resource: Resource,
        /// How.
        action: Action,
        /// Digest of the arguments.
        arguments_digest: Digest,
    },
}

impl Target {
    /// Its gate.
    #[must_use]
    pub const fn gate(&self) -> Gate {
        match self {
            Self::ContractAcceptance { .. } => Gate::ContractAcceptance,
            Self::FinalAcceptance { .. } => Gate::FinalAcceptance,
            Self::BudgetOverrun { .. } => Gate::BudgetOverrun,
            Self::Redelegation { .. } => Gate::Redelegation,
            Self::ExternalSend { .. } => Gate::ExternalSend,
        }
    }

    /// What an approval of it must carry.
    ///
    /// # Errors
    /// As [`Digest::of`].
    pub fn digest(&self) -> Result<Digest> {
        Digest::of(self)
    }

    /// Reads the text of a target that an owner is shown.
    ///
    /// # Errors
    /// The codes of the strict reader; `BAD_FIELD` for anything but one of these.
    pub fn read_text(bytes: &[u8]) -> Result<Self> {
        let value = crate::acp::json::parse(bytes, MAX_TARGET)?;
        serde_json::from_value(value)
            .map_err(|_| Error::new(Code::BadField, "not the target of an approval"))
    }

    /// Reads the target of a raised budget, which an APPROVAL entry carries beside its receipt.
    ///
    /// # Errors
    /// The codes of a closed object.
    pub fn read_budget_overrun(value: serde_json::Value) -> Result<Self> {
        let target = BudgetTarget::read_value(value)?;
        Ok(Self::BudgetOverrun {
            contract_digest: target.contract_digest,
            metric: target.metric.to_string(),
            from: target.from.get(),
            to: target.to.get(),
        })
    }
}

words! {
    /// The one gate of this target.
    pub enum OverrunGate {
        /// A budget is about to be raised.
        BudgetOverrun = "budget_overrun",
    }
}

object! {
    /// The target of a raised budget, as an APPROVAL entry carries it.
    pub struct BudgetTarget {
        "gate" gate: OverrunGate,
        "contractDigest" contract_digest: Digest,
        "metric" metric: Word,
        "from" from: Count,
        "to" to: Count,
    }
}

impl BudgetTarget {
    fn read_value(value: serde_json::Value) -> Result<Self> {
        let target = <Self as crate::acp::value::Read>::read(value)?;
        if target.to <= target.from {
            return Err(Error::new(Code::BadField, "a budget is only raised").inside("to"));
        }
        Ok(target)
    }
}

words! {
    /// What an owner has laid down for a gate.
    pub enum GatePolicy {
        /// Ask each time.
        Ask = "ask",
        /// Yes without asking.
        Auto = "auto",
        /// No without asking.
        Deny = "deny",
    }
}

object! {
    /// The policy of each gate.
    pub struct GatePolicies {
        "external_send" external_send: GatePolicy,
        "contract_acceptance" contract_acceptance: GatePolicy,
        "budget_overrun" budget_overrun: GatePolicy,
        "redelegation" redelegation: GatePolicy,
        "final_acceptance" final_acceptance: GatePolicy,
    }
}

object! {
    /// An owner's policy; receipts of mode `policy` name its digest.
    pub struct ApprovalPolicy = "ApprovalPolicy" {
        "did" did: Did,
        "gates" gates: GatePolicies,
        "createdAt" created_at: Time,
    }
}

impl ApprovalPolicy {
    /// The policy of `gate`.
    #[must_use]
    pub const fn gate(&self, gate: Gate) -> GatePolicy {
        match gate {
            Gate::ExternalSend => self.gates.external_send,
            Gate::ContractAcceptance => self.gates.contract_acceptance,
            Gate::BudgetOverrun => self.gates.budget_overrun,
            Gate::Redelegation => self.gates.redelegation,
            Gate::FinalAcceptance => self.gates.final_acceptance,
        }
    }
}

words! {
    /// What is revoked.
    pub enum RevocationTarget {
        /// An invite.
        Invite = "invite",
        /// A capability token, and every chain with it.
        Capability = "capability",
        /// A worker card.
        Card = "card",
    }
}

object! {
    /// An issuer takes back what it issued; there is no way to take this back.
    pub struct RevocationNotice = "RevocationNotice" {
        "noticeId" notice_id: NoticeId,
        "issuerDid" issuer_did: Did,
        "targetType" target_type: RevocationTarget,
        /// Id of the target.
        "targetId" target_id: Name,
        "reason" reason: Prose,
        "issuedAt" issued_at: Time,
        "effectiveAt" effective_at: Time,
        "signature" signature: Signature,
    }
}

signed_by! {
    CapabilityToken.issuer_did as Issuer;
    ApprovalReceipt.approver_did as Owner;
    RevocationNotice.issuer_did as Issuer;
}
