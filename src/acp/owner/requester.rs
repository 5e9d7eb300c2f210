//! The requester's side: ordering work, judging what is delivered, taking it or not.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::gates::Answer;
use super::group::Group;
use super::worker::exceeded;
use super::{File, Owner, OwnerRecord, Route, Turn, contract};
use crate::acp::approval::ASK_TIMEOUT_MS;
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::log::{TaskLog, View};
use crate::acp::objects::{
    ApprovalPolicy, Budget, Capability, CapabilityLimits, CapabilityToken, Gate, Redelegation,
    SandboxPolicy, SchemaText, State, TaskContract, TaskManifest, Verification,
};
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::value::{
    Count, Digest, Int, InviteId, Key32, Labels, Name, Nonce, Prose, Seq, TaskId, Time, TokenId,
};
use crate::acp::{steps, verify};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// How long an offer waits for its worker, ms.
pub const OFFER_MS: u64 = 600_000;

/// What the worker of a task may use through this gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Grant {
    /// What.
    pub capabilities: Vec<Capability>,
    /// How often.
    pub max_uses: u64,
    /// How far the worker may hand it on.
    pub max_depth: u64,
}

/// Work to be ordered.
#[derive(Clone, Debug)]
pub struct Order {
    /// From whom.
    pub worker: Did,
    /// The key that the worker's invite or card declares.
    pub worker_key: Option<Key32>,
    /// By which invite.
    pub invite: Option<InviteId>,
    /// By which way.
    pub route: Route,
    /// In a few words.
    pub title: Name,
    /// In more words.
    pub description: Prose,
    /// What the work is done on.
    pub input: Value,
    /// What the input is.
    pub input_schema: SchemaText,
    /// What the result must be.
    pub output_schema: SchemaText,
    /// When it must be delivered.
    pub deadline: UnixMillis,
    /// How long this side may take to judge a delivery, ms.
    pub verify_within_ms: u64,
    /// How the result is judged besides its schema.
    pub verification: Verification,
    /// What may be used up.
    pub budget: Budget,
    /// How the run is kept apart.
    pub sandbox: SandboxPolicy,
    /// Whether the worker must attest how it was.
    pub attested: bool,
    /// How often a bad result may go back to work.
    pub max_revisions: u64,
    /// What may be used through this gateway.
    pub grants: Vec<Grant>,
    /// How often the work may be handed on, one behind the other.
    pub redelegation: u64,
    /// The task of this worker's that it is a part of, by its key.
    pub parent: Option<Digest>,
    /// Whether the result is taken by policy once it passes (`--auto-approve`).
    pub auto_approve: bool,
    /// The group of workers that are given the same work.
    pub group: Option<Group>,
    /// Free labels.
    pub labels: Labels,
}

/// What this owner laid down when it ordered a task, beside the contract.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ordered {
    /// The policy for this task, where it is another one than the owner's.
    #[serde(with = "policy_form")]
    pub policy: Option<ApprovalPolicy>,
    /// The group that it is part of.
    pub group: Option<Group>,
    /// The task of this worker's that it is a part of.
    #[serde(default)]
    pub parent: Option<Digest>,
}

/// An order that is ready to be offered.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    pub(super) contract: TaskContract,
    tokens: Vec<Value>,
}

/// Objects of the protocol are read strictly, also from the store.
mod policy_form {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer, de::Error as _};
    use serde_json::Value;

    use crate::acp::objects::ApprovalPolicy;
    use crate::acp::value::Read as _;

    pub(super) fn serialize<S: Serializer>(
        policy: &Option<ApprovalPolicy>,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        policy.serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Option<ApprovalPolicy>, D::Error> {
        let value = Option::<Value>::deserialize(d)?;
        value.map(ApprovalPolicy::read).transpose().map_err(D::Error::custom)
    }
}

impl Owner {
    /// Orders work; the key of the task comes back with what is to be done.
    ///
    /// # Errors
    /// What makes the order impossible: `MANIFEST_INVALID`, `SCHEMA_INVALID`, `INPUT_INVALID`,
    /// `WORKER_BUSY`, `BAD_FIELD`.
    pub fn order(
        &mut self,
        order: Order,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(Digest, TaskId, super::Outcome)> {
        let mut turn = Turn::new(now, entropy);
        if order.parent.is_some() {
            return Err(Error::new(Code::BadField, "a part of a task is handed on"));
        }
        let prepared = self.prepare(&order, &mut turn)?;
        let (task, task_id) = self.propose(order, prepared, &mut turn)?;
        Ok((task, task_id, turn.out))
    }

    /// The contract of an order, with what it grants.
    pub(super) fn prepare(&self, order: &Order, turn: &mut Turn<'_>) -> Result<Prepared> {
        if order.worker == self.did() {
            return Err(Error::new(Code::BadField, "the worker is the requester itself"));
        }
        let manifest = self.manifest(order, turn)?;
        verify::check_manifest(&manifest)?;
        verify::check_input(&manifest, &order.input)?;
        let mut tokens = Vec::new();
        for grant in &order.grants {
            let (task_id, deadline) = (&manifest.task_id, order.deadline);
            tokens.push(self.token(task_id, order.worker, grant, deadline, turn)?);
        }
        let digests = tokens.iter().map(Digest::of).collect::<Result<Vec<_>>>()?;
        let tokens = tokens
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| Error::new(Code::BadField, "no JSON form"))?;
        // Before a part of a task is offered, the owner may think about it.
        let thinking = if order.parent.is_some() { ASK_TIMEOUT_MS } else { 0 };
        let until = Time::from(turn.now).plus(OFFER_MS + thinking).min(manifest.deadline_at);
        let mut cx = Self::cx(&self.key, turn);
        let invite = order.invite.clone();
        let contract = steps::contract(&mut cx, manifest, order.worker, invite, digests, until)?;
        Ok(Prepared { contract, tokens })
    }

    /// Offers an order.
    pub(super) fn propose(
        &mut self,
        order: Order,
        prepared: Prepared,
        turn: &mut Turn<'_>,
    ) -> Result<(Digest, TaskId)> {
        let Prepared { contract, tokens } = prepared;
        let output = self.gateway.propose(
            &contract,
            order.input,
            tokens,
            order.worker_key,
            turn.now,
            turn.entropy,
        )?;
        let task = output.task;
        let policy = order.auto_approve.then(|| {
            let mut policy = self.policy.clone();
            policy.gates.final_acceptance = crate::acp::objects::GatePolicy::Auto;
            policy.created_at = Time::from(turn.now);
            policy
        });
        let ordered = Ordered { policy, group: order.group, parent: order.parent };
        turn.out.of(task, OwnerRecord::Route { route: order.route.clone() });
        turn.out.of(task, OwnerRecord::Ordered { order: Box::new(ordered.clone()) });
        let file = File { route: Some(order.route), order: Some(ordered), ..File::default() };
        self.files.insert(task, file);
        self.take(output, turn);
        self.join_group(task, turn);
        Ok((task, contract.task_id))
    }

    fn manifest(&self, order: &Order, turn: &mut Turn<'_>) -> Result<TaskManifest> {
        let parent = order.parent.map(|parent| self.view(&parent)).transpose()?;
        let parent = parent.as_ref().map(contract).transpose()?.map(|contract| &contract.manifest);
        TaskManifest {
            task_id: TaskId::draw(turn.entropy),
            title: order.title.clone(),
            description: order.description.clone(),
            requester_did: self.did(),
            created_at: Time::from(turn.now),
            deadline_at: Time::from(order.deadline),
            verify_within_ms: Count::clamped(order.verify_within_ms),
            input_schema: order.input_schema.clone(),
            output_schema: order.output_schema.clone(),
            input_digest: Digest::of(&order.input)?,
            acceptance_criteria: Seq::default(),
            verification: order.verification.clone(),
            require_execution_attestation: order.attested,
            budget: order.budget.clone(),
            sandbox_policy: order.sandbox.clone(),
            redelegation: Redelegation {
                allowed: order.redelegation > 0,
                max_depth: Int::new(order.redelegation)?,
            },
            max_revisions: Int::new(order.max_revisions)?,
            parent_task_id: parent.map(|parent| parent.task_id.clone()),
            parent_manifest_digest: parent.map(Digest::of).transpose()?,
            metadata: order.labels.clone(),
            signature: Signature::blank(Role::Requester, self.did()),
        }
        .signed(&self.key, turn.now)
    }

    fn token(
        &self,
        task_id: &TaskId,
        worker: Did,
        grant: &Grant,
        deadline: UnixMillis,
        turn: &mut Turn<'_>,
    ) -> Result<CapabilityToken> {
        CapabilityToken {
            token_id: TokenId::draw(turn.entropy),
            issuer_did: self.did(),
            audience_did: worker,
            task_id: task_id.clone(),
            parent_digest: None,
            depth: Int::new(0)?,
            capabilities: Seq::new(grant.capabilities.clone())?,
            limits: CapabilityLimits {
                not_before: Time::from(turn.now),
                expires_at: Time::from(deadline),
                max_uses: Int::new(grant.max_uses)?,
                max_depth: Int::new(grant.max_depth)?,
            },
            issued_at: Time::from(turn.now),
            nonce: Nonce::draw(turn.entropy),
            signature: Signature::blank(Role::Issuer, self.did()),
        }
        .signed(&self.key, turn.now)
    }

    /// Stops a task: takes an offer back, cancels work, lets a result go that was not taken yet.
    ///
    /// # Errors
    /// `UNKNOWN_TASK`; `ILLEGAL_TRANSITION` for a task that is over or is not this owner's order.
    pub fn cancel(
        &mut self,
        task: &Digest,
        reason: &str,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<super::Outcome> {
        let mut turn = Turn::new(now, entropy);
        self.cancel_in(*task, reason, &mut turn)?;
        self.consider(*task, &mut turn);
        Ok(turn.out)
    }

    pub(super) fn cancel_in(
        &mut self,
        task: Digest,
        reason: &str,
        turn: &mut Turn<'_>,
    ) -> Result<()> {
        /// What a worker has to end a run: as long as its own stop takes, and the way there and back.
        const GRACE_MS: u64 = 30_000;
        let view = self.view(&task)?;
        if self.gateway.task(&task).is_some_and(TaskLog::is_forked) {
            let text = "the task was stopped already: the peer signed two entries at one place";
            return Err(Error::new(Code::AuditFork, text));
        }
        let key = self.key.clone();
        let cx = Self::cx(&key, turn);
        let wish = match view.state() {
            Some(State::Accepted | State::InProgress) => {
                steps::cancel(&cx, &view, reason, GRACE_MS)?
            }
            Some(State::Proposed) | None => steps::withdraw(),
            _ => {
                return Err(Error::new(
                    Code::IllegalTransition,
                    "the task is past the point where it can be cancelled",
                ));
            }
        };
        self.act(task, wish, turn)
    }

    pub(super) fn requester_step(
        &mut self,
        task: Digest,
        view: &View,
        state: State,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        match state {
            State::InProgress => {
                self.retry_calls(task, turn);
                self.consider_raise(task, view, turn)
            }
            State::Delivered => self.judge_delivery(task, view, turn),
            State::Verified => self.take_or_not(task, view, turn),
            _ => Ok(false),
        }
    }

    /// Charges what the newest entry reports.
    pub(super) fn charge(&mut self, task: Digest) {
        let Some(view) = self.gateway.task(&task).map(|log| log.view()) else { return };
        let (progress, receipt) = (view.last_progress().cloned(), view.usage().cloned());
        let file = self.files.entry(task).or_default();
        if let Some(progress) = progress {
            file.meter.progress(&progress.metrics);
        }
        if let Some(receipt) = receipt {
            file.meter.receipt(&receipt.object.usage);
        }
    }

    /// After a start: what the logs say was used.
    pub(super) fn recount(&mut self) {
        let tasks: Vec<Digest> = self.gateway.tasks().map(|(task, _)| *task).collect();
        for task in tasks {
            self.charge(task);
        }
    }

    /// A budget that is used up: the owner is asked whether it goes on.
    fn consider_raise(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        let file = self.files.entry(task).or_default();
        let found = file.meter.alarms(view).into_iter().find_map(exceeded);
        let Some((metric, limit)) = found else { return Ok(false) };
        Ok(self.raise(task, view, metric, limit, turn)? == super::worker::Raise::Made)
    }

    fn judge_delivery(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        self.charge(task);
        let proxied = self.files.entry(task).or_default().meter.proxied_calls();
        let report = verify::report(view, proxied, &self.key, turn.now, turn.entropy)?;
        let wish = steps::verdict(view, &report, true)?;
        match self.act(task, wish, turn) {
            // Too late for another round: the verdict stands without it.
            Err(error) if error.code() == Code::DeadlinePassed => {
                self.act(task, steps::verdict(view, &report, false)?, turn)?;
            }
            other => other?,
        }
        Ok(true)
    }

    fn take_or_not(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        let file = self.files.entry(task).or_default();
        let grouped = file.order.as_ref().is_some_and(|order| order.group.is_some());
        if grouped && !file.settle {
            return Ok(false);
        }
        let target = steps::final_target(view)?;
        let key = self.key.clone();
        let wish = match self.gate(task, view, &target, turn)? {
            Answer::Wait => return Ok(false),
            Answer::No(receipt) => steps::decline(&receipt)?,
            Answer::Yes(receipt) => steps::settle(&mut Self::cx(&key, turn), view, &receipt)?,
        };
        self.act(task, wish, turn)?;
        Ok(true)
    }

    /// The title of a task, as its requester gave it.
    ///
    /// # Errors
    /// `ILLEGAL_TRANSITION` before a proposal.
    pub fn title(&self, task: &Digest) -> Result<String> {
        let view = self.gateway.task(task).ok_or_else(super::unknown)?.view();
        Ok(contract(view)?.manifest.title.to_string())
    }

    /// Whether a gate asks a person in this task.
    #[must_use]
    pub fn asks(&self, gate: Gate) -> bool {
        crate::acp::approval::answer_of(&self.policy, gate).is_none()
    }
}
