//! Approvals (design 9.4): one receipt, one exact action, once. A flag or a message that says
//! "approved" is never evidence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::code::{Code, Error, Result};
use super::did::Did;
use super::objects::{ApprovalPolicy, ApprovalReceipt, Decision, Gate, GatePolicy, Mode, Target};
use super::sign::Signed as _;
use super::value::{ApprovalId, Digest, TaskId};
use crate::codec::time::UnixMillis;

/// How long a question waits for a human before it counts as no, ms.
pub const ASK_TIMEOUT_MS: u64 = 600_000;

/// The record that a receipt was used: stored before the action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Used {
    /// Object digest of the receipt.
    pub receipt: Digest,
    /// Its own id, under which nothing else may be used either.
    pub receipt_id: ApprovalId,
    /// When it may be forgotten: it is over by then.
    pub until: UnixMillis,
}

/// The receipts that were used.
#[derive(Clone, Debug, Default)]
pub struct ApprovalBook {
    used: BTreeMap<ApprovalId, Used>,
}

/// The action about to be taken, by whom it must be approved, under which policy.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// Recomputed from the action, never taken from a message.
    pub target: &'a Target,
    /// Its task.
    pub task_id: &'a TaskId,
    /// The owner who must have said yes.
    pub approver: Did,
    /// That owner's policy now, where it is known here.
    pub policy: Option<&'a ApprovalPolicy>,
    /// Clock.
    pub now: UnixMillis,
}

impl ApprovalBook {
    /// A book without entries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a use back from the store.
    pub fn restore(&mut self, used: Used) {
        self.used.insert(used.receipt_id.clone(), used);
    }

    /// Uses `receipt` for `attempt`. The record is stored durably, then the action is taken; a failed
    /// action needs a new receipt.
    ///
    /// # Errors
    /// Signature codes, `APPROVAL_MISMATCH`, `APPROVAL_DENIED`, `APPROVAL_EXPIRED`, `POLICY_CHANGED`,
    /// `APPROVAL_USED`.
    pub fn use_once(&mut self, receipt: &ApprovalReceipt, attempt: &Attempt<'_>) -> Result<Used> {
        receipt.verify()?;
        let mismatch = |message: &str| Err(Error::new(Code::ApprovalMismatch, message));
        if receipt.approver_did != attempt.approver {
            return Err(Error::new(Code::WrongSigner, "approved by somebody else"));
        }
        if receipt.task_id != *attempt.task_id {
            return mismatch("an approval for another task");
        }
        if receipt.gate != attempt.target.gate()
            || receipt.target_digest != attempt.target.digest()?
        {
            return mismatch("an approval of another action");
        }
        if receipt.decision != Decision::Approved {
            return Err(Error::new(Code::ApprovalDenied, "the owner said no"));
        }
        if receipt.expires_at.is_over(attempt.now) || !receipt.issued_at.has_come(attempt.now) {
            return Err(Error::new(
                Code::ApprovalExpired,
                "the approval is over, or from the future",
            ));
        }
        match (receipt.mode, receipt.policy_digest) {
            (Mode::Human, None) => {}
            (Mode::Policy, Some(digest)) => {
                let current = attempt.policy.map(Digest::of).transpose()?;
                let auto = |policy: &ApprovalPolicy| policy.gate(receipt.gate) == GatePolicy::Auto;
                if current != Some(digest) || !attempt.policy.is_some_and(auto) {
                    return Err(Error::new(
                        Code::PolicyChanged,
                        "approved by a policy that is not in force",
                    ));
                }
            }
            _ => return mismatch("a policy's approval names the policy, a human's none"),
        }
        if self.used.contains_key(&receipt.receipt_id) {
            return Err(Error::new(Code::ApprovalUsed, "an approval is good once"));
        }
        let until = receipt.expires_at.millis().plus(super::value::SKEW_MS);
        let used =
            Used { receipt: Digest::of(receipt)?, receipt_id: receipt.receipt_id.clone(), until };
        self.restore(used.clone());
        Ok(used)
    }

    /// Forgets receipts that are over anyway.
    pub fn prune(&mut self, now: UnixMillis) {
        self.used.retain(|_, used| now < used.until);
    }
}

/// Whether a gate needs a question: the policy's answer, or `None` to ask.
#[must_use]
pub fn answer_of(policy: &ApprovalPolicy, gate: Gate) -> Option<Decision> {
    match policy.gate(gate) {
        GatePolicy::Ask => None,
        GatePolicy::Auto => Some(Decision::Approved),
        GatePolicy::Deny => Some(Decision::Denied),
    }
}
