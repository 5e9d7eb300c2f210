//! The owner's gates (design 9.4): what a policy answers, what waits for a person, and the receipt
//! that an answer becomes. A receipt is used before the action is taken, for exactly that action.

use std::collections::BTreeSet;

use super::handing_on::Child;
use super::{Action, File, Grant, Owner, OwnerRecord, Turn};
use crate::acp::approval::{self, ASK_TIMEOUT_MS, Attempt};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::log::{TaskLog, View};
use crate::acp::objects::{
    ApprovalPolicy, ApprovalReceipt, Decision, Gate, GatePolicies, GatePolicy, Network, State,
    Target,
};
use crate::acp::steps;
use crate::acp::value::{Digest, TaskId, Time};
use crate::codec::text::truncate_chars;
use crate::codec::time::UnixMillis;

/// Digits of a target's digest that name a question: enough that no two of an owner's questions
/// share them, short enough to be typed.
const ID_DIGITS: usize = 12;

/// Questions of one task that wait at once at one gate. Each gate has this many for itself: a peer
/// that calls tools as often as it can must not keep a result from being taken.
const MAX_QUESTIONS: usize = 32;

/// Something that waits for the owner.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Key of the task.
    pub task: Digest,
    /// Its id.
    pub task_id: TaskId,
    /// The other side.
    pub peer: Did,
    /// The other side's title of the work: untrusted text.
    pub title: String,
    /// What is to be known for an answer, a line each: untrusted text, within bounds.
    pub about: Vec<String>,
    /// The exact action.
    pub target: Target,
    /// Digest of the target: what the receipt will carry.
    pub digest: Digest,
    /// Since when it waits.
    pub asked_at: UnixMillis,
    /// When it counts as no.
    pub expires_at: UnixMillis,
}

impl Question {
    /// What people call it by; the same after a restart.
    #[must_use]
    pub fn id(&self) -> String {
        let digest = self.digest.to_string();
        let digits = digest.strip_prefix("sha256:").unwrap_or(&digest);
        digits.chars().take(ID_DIGITS).collect()
    }

    /// Whether it is about handing this child contract on.
    #[must_use]
    pub fn asks_about_child(&self, child: &Digest) -> bool {
        matches!(&self.target, Target::Redelegation { child_contract_digest, .. }
            if child_contract_digest == child)
    }

    /// Which gate it is.
    #[must_use]
    pub const fn gate(&self) -> Gate {
        self.target.gate()
    }
}

/// An owner's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    /// A person's word, given to this program.
    Word(Decision, String),
    /// A receipt that was signed elsewhere, with this owner's key.
    Receipt(Box<ApprovalReceipt>),
}

/// What a gate says.
#[derive(Debug)]
pub(super) enum Answer {
    /// Yes; the receipt is used.
    Yes(Box<ApprovalReceipt>),
    /// No.
    No(Box<ApprovalReceipt>),
    /// The owner is asked.
    Wait,
}

/// Characters of a text that is shown with a question; the task shows it whole.
const MAX_SHOWN: usize = 600;

/// Lines about what is granted with a question: more than a token of 32 tools takes.
const MAX_GRANT_LINES: usize = 40;

fn cut(text: &str) -> String {
    truncate_chars(text, MAX_SHOWN).to_owned()
}

/// What is granted, a line for each tool; the uses are of all tools of a grant together.
fn granted(grants: &[Grant]) -> Vec<String> {
    let mut lines = Vec::new();
    for grant in grants {
        lines.push(format!("with these tools, {} uses in all:", grant.max_uses));
        for capability in &grant.capabilities {
            let resource = &capability.resource;
            let tools = capability.actions.iter();
            lines.extend(tools.map(|action| cut(&format!("{action} on {resource}"))));
        }
    }
    let more = lines.len().saturating_sub(MAX_GRANT_LINES);
    if more > 0 {
        lines.truncate(MAX_GRANT_LINES);
        lines.push(format!("and {more} lines more"));
    }
    lines
}

/// What the owner has to know for an answer.
fn about(log: &TaskLog, file: &File, target: &Target, digest: &Digest) -> Vec<String> {
    let view = log.view();
    let Some(contract) = view.contract() else { return Vec::new() };
    let manifest = &contract.manifest;
    match target {
        Target::ContractAcceptance { .. } => {
            let input = log.input().map(ToString::to_string).unwrap_or_default();
            let mut lines: Vec<String> = manifest.description.lines().map(cut).take(8).collect();
            lines.push(format!("input ({} bytes): {}", input.len(), cut(&input)));
            lines.push(format!(
                "until {}, isolation {}",
                manifest.deadline_at,
                manifest.sandbox_policy.isolation.as_str()
            ));
            if manifest.sandbox_policy.network == Network::Allowlist {
                let hosts: Vec<&str> =
                    manifest.sandbox_policy.allow_hosts.iter().map(|host| &**host).collect();
                lines.push(cut(&format!("may connect to {}", hosts.join(", "))));
            }
            lines
        }
        Target::FinalAcceptance { .. } => {
            let output = view.deliverable().map(|kept| kept.object.output.to_string());
            output.iter().map(|output| format!("result: {}", cut(output))).collect()
        }
        Target::Redelegation { child_contract_digest, .. } => {
            let child = file.children.get(child_contract_digest);
            let Some(Child::Waits(waited)) = child else { return Vec::new() };
            let (order, _) = &**waited;
            let input = order.input.to_string();
            let mut lines = vec![
                format!("to {}: {}", order.worker, cut(&order.title)),
                cut(&order.description),
                format!("input ({} bytes): {}", input.len(), cut(&input)),
                format!("until {}", Time::from(order.deadline)),
            ];
            lines.extend(granted(&order.grants));
            lines
        }
        Target::ExternalSend { .. } => {
            let asked = file.asked_calls.values().find(|asked| asked.target == *digest);
            let arguments = asked.map(|asked| asked.call.arguments.to_string());
            let shown = |text: String| format!("arguments ({} bytes): {}", text.len(), cut(&text));
            arguments.map(shown).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// A policy that asks at every gate but those in `auto`, which are open, and those in `deny`, which are
/// closed whatever else is said of them.
#[must_use]
pub fn ask_policy(did: Did, auto: &[Gate], deny: &[Gate], now: UnixMillis) -> ApprovalPolicy {
    let answer = |gate| {
        if deny.contains(&gate) {
            GatePolicy::Deny
        } else if auto.contains(&gate) {
            GatePolicy::Auto
        } else {
            GatePolicy::Ask
        }
    };
    ApprovalPolicy {
        did,
        gates: GatePolicies {
            external_send: answer(Gate::ExternalSend),
            contract_acceptance: answer(Gate::ContractAcceptance),
            budget_overrun: answer(Gate::BudgetOverrun),
            redelegation: answer(Gate::Redelegation),
            final_acceptance: answer(Gate::FinalAcceptance),
        },
        created_at: Time::from(now),
    }
}

impl File {
    /// Whether the question of this target need not be waited for any more: it was answered, it is
    /// over, or it was never put.
    pub(super) fn is_decided(&self, target: &Digest, now: UnixMillis) -> bool {
        self.answers.contains_key(target)
            || self.questions.get(target).is_none_or(|question| question.expires_at <= now)
    }

    /// Keeps the questions that are still about something: their gate is there in this state of the
    /// task, their call waits. What was answered to the others goes with them, or it would count for
    /// a later question about the same.
    pub(super) fn drop_questions(&mut self, state: State) {
        if state != State::InProgress {
            self.asked_calls.clear();
        }
        let Self { questions, answers, asked_calls, .. } = self;
        let called: BTreeSet<&Digest> = asked_calls.values().map(|asked| &asked.target).collect();
        questions.retain(|digest, question| match question.gate() {
            Gate::ContractAcceptance => state == State::Proposed,
            Gate::BudgetOverrun | Gate::Redelegation => state == State::InProgress,
            Gate::ExternalSend => called.contains(digest),
            Gate::FinalAcceptance => state == State::Verified,
        });
        answers.retain(|digest, _| questions.contains_key(digest));
    }
}

impl Owner {
    /// Takes an owner's answer to the question called `id`: the digits of its digest, at least six.
    ///
    /// # Errors
    /// `BAD_ID` when no question, or more than one, has this id.
    pub fn answer(
        &mut self,
        id: &str,
        given: Given,
        now: UnixMillis,
        entropy: &mut dyn crate::identity::entropy::Entropy,
    ) -> Result<super::Outcome> {
        /// Fewer digits are more likely a slip than a name.
        const MIN_DIGITS: usize = 6;
        let meant = self.questions().filter(|question| {
            id.len() >= MIN_DIGITS && question.digest.to_string()["sha256:".len()..].starts_with(id)
        });
        let meant: Vec<_> = meant.map(|question| (question.task, question.digest)).collect();
        let [(task, digest)] = meant[..] else {
            return Err(Error::new(
                Code::BadId,
                "no question, or more than one, has this id; approvals list shows them",
            ));
        };
        let mut turn = Turn::new(now, entropy);
        if let Some(file) = self.files.get_mut(&task) {
            file.answers.insert(digest, given);
        }
        self.consider(task, &mut turn);
        Ok(turn.out)
    }

    /// The policy for a task: its own where it was ordered here with one.
    fn policy_of(&self, task: &Digest) -> ApprovalPolicy {
        let own = self.files.get(task).and_then(|file| file.order.as_ref());
        own.and_then(|order| order.policy.clone()).unwrap_or_else(|| self.policy.clone())
    }

    /// Asks the gate of `target`.
    pub(super) fn gate(
        &mut self,
        task: Digest,
        view: &View,
        target: &Target,
        turn: &mut Turn<'_>,
    ) -> Result<Answer> {
        let policy = self.policy_of(&task);
        let digest = target.digest()?;
        let key = self.key.clone();
        let sign = |decision, by, reason: &str, turn: &mut Turn<'_>| {
            let mut cx = Self::cx(&key, turn);
            steps::approval(&mut cx, view.task_id(), target, decision, by, reason)
        };
        let receipt = match approval::answer_of(&policy, target.gate()) {
            Some(decision) => sign(decision, Some(Digest::of(&policy)?), "by policy", turn)?,
            None => match self.given(task, view, target, digest, turn)? {
                None => return Ok(Answer::Wait),
                Some(Given::Word(decision, reason)) => sign(decision, None, &reason, turn)?,
                Some(Given::Receipt(receipt)) => *receipt,
            },
        };
        if receipt.decision == Decision::Denied {
            return Ok(Answer::No(Box::new(receipt)));
        }
        let attempt = Attempt {
            target,
            task_id: view.task_id(),
            approver: self.did(),
            policy: Some(&policy),
            now: turn.now,
        };
        let used = self.approvals.use_once(&receipt, &attempt)?;
        turn.out.own(OwnerRecord::ApprovalUsed { used });
        Ok(Answer::Yes(Box::new(receipt)))
    }

    /// A person's answer, or the question.
    fn given(
        &mut self,
        task: Digest,
        view: &View,
        target: &Target,
        digest: Digest,
        turn: &mut Turn<'_>,
    ) -> Result<Option<Given>> {
        let file = self.files.entry(task).or_default();
        if let Some(given) = file.answers.remove(&digest) {
            file.questions.remove(&digest);
            return Ok(Some(given));
        }
        if let Some(question) = file.questions.get(&digest) {
            if turn.now < question.expires_at {
                return Ok(None);
            }
            file.questions.remove(&digest);
            return Ok(Some(Given::Word(Decision::Denied, "nobody answered in time".into())));
        }
        let at_gate = file.questions.values().filter(|other| other.gate() == target.gate());
        if at_gate.count() >= MAX_QUESTIONS {
            return Err(Error::new(Code::RateLimited, "too many questions wait for the owner"));
        }
        let log = self.gateway.task(&task).ok_or_else(super::unknown)?;
        let title = super::contract(view)?.manifest.title.to_string();
        let question = Question {
            task,
            task_id: view.task_id().clone(),
            peer: log.peer(),
            title,
            about: about(log, file, target, &digest),
            target: target.clone(),
            digest,
            asked_at: turn.now,
            expires_at: turn.now.plus(ASK_TIMEOUT_MS),
        };
        file.questions.insert(digest, question.clone());
        turn.out.actions.push(Action::Ask(Box::new(question)));
        Ok(None)
    }
}
