//! Tools through the requester's gateway (design 9.2), both ends: a worker's work asks, the
//! requester's owner and guard are asked, the tool runs there, the answer comes back. A call is
//! resent until it is answered; the requester runs it once.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::gates::Answer;
use super::{Action, Owner, OwnerRecord, Turn};
use crate::acp::capability::{Counted, UseCounters};
use crate::acp::code::{Code, Error, Result};
use crate::acp::log::View;
use crate::acp::objects::{
    Action as Verb, CapabilityToken, Party, Resource, State, Target, ToolCall, ToolResult,
};
use crate::acp::revocation::RevocationRegistry;
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::tool::{self, Admission, Desk, ToolDesk};
use crate::acp::value::{CallId, Digest, Nonce, SKEW_MS, Seq, Time};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// How long a call is good, ms.
const CALL_LIFE_MS: u64 = tool::MAX_CALL_LIFE_MS;

/// How long an answer may take before the call is sent again, ms: tools are slow, and the requester
/// answers a second sending from what it has kept.
const RESEND_MS: u64 = 5000;

/// Calls of one task that wait at one time, on either side.
const MAX_OPEN_CALLS: usize = 64;

/// Refused calls of one task that are put into the journal one by one. Refusing costs the worker
/// nothing, and a journal is kept for ever: beyond these, an entry comes when their number has doubled.
const MAX_JOURNALED: u64 = 64;

/// What work asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolRequest {
    /// The call's id, where the work has one of its own; with another call's it is refused.
    pub call_id: Option<CallId>,
    /// What is used; exact.
    pub resource: Resource,
    /// How.
    pub action: Verb,
    /// With what.
    pub arguments: Value,
}

/// A call that waits for its answer.
#[derive(Clone, Debug)]
pub(super) struct OpenCall {
    call: ToolCall,
    pub(super) next_send: UnixMillis,
}

/// A call that waits for the owner.
#[derive(Clone, Debug)]
pub(super) struct AskedCall {
    pub(super) call: Box<ToolCall>,
    /// Its object digest.
    digest: Digest,
    /// Digest of what the owner is asked.
    pub(super) target: Digest,
}

impl AskedCall {
    /// When nobody may run it any more, by every clock.
    pub(super) fn over_at(&self) -> UnixMillis {
        self.call.expires_at.millis().plus(SKEW_MS)
    }
}

impl Owner {
    /// The work of a task asks for a tool. The answer comes as [`Action::ToolAnswered`].
    ///
    /// # Errors
    /// `CAPABILITY_NOT_GRANTED` when no token of the task names this; `CALL_ID_REUSED`,
    /// `ILLEGAL_TRANSITION`, `RATE_LIMITED`.
    pub fn request_tool(
        &mut self,
        task: &Digest,
        request: ToolRequest,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(CallId, super::Outcome)> {
        let mut turn = Turn::new(now, entropy);
        let view = self.view(task)?;
        let contract_digest = view.contract_digest().ok_or_else(super::unknown)?;
        let token = granted(&view, &request)?.clone();
        let file = self.files.entry(*task).or_default();
        if file.open_calls.len() >= MAX_OPEN_CALLS {
            return Err(Error::new(Code::RateLimited, "too many tool calls wait for an answer"));
        }
        if request.call_id.as_ref().is_some_and(|id| file.open_calls.contains_key(id)) {
            return Err(Error::new(Code::CallIdReused, "another call has this id"));
        }
        let at = Time::from(now);
        let call = ToolCall {
            call_id: request.call_id.unwrap_or_else(|| CallId::draw(turn.entropy)),
            task_id: view.task_id().clone(),
            contract_digest,
            caller_did: self.did(),
            chain: Seq::new(vec![token])?,
            resource: request.resource,
            action: request.action,
            arguments: request.arguments,
            issued_at: at,
            expires_at: at.plus(CALL_LIFE_MS),
            nonce: Nonce::draw(turn.entropy),
            signature: Signature::blank(Role::Worker, self.did()),
        }
        .signed(&self.key, now)?;
        let id = call.call_id.clone();
        let output = self.gateway.send_tool(task, Some(call.clone()), None, now, turn.entropy)?;
        let open = OpenCall { call, next_send: now.plus(RESEND_MS) };
        self.files.entry(*task).or_default().open_calls.insert(id.clone(), open);
        self.take(output, &mut turn);
        Ok((id, turn.out))
    }

    /// A tool has run, or could not.
    ///
    /// # Errors
    /// `BAD_ID` for a call that was not admitted.
    pub fn tool_done(
        &mut self,
        task: &Digest,
        call: &ToolCall,
        outcome: Result<Value, &Error>,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<super::Outcome> {
        let mut turn = Turn::new(now, entropy);
        let result = tool::answer(call, outcome, &self.key, now)?;
        let file = self.files.entry(*task).or_default();
        let record = file.tools.done(result.clone())?;
        turn.out.of(*task, OwnerRecord::Call { record });
        self.send_result(*task, result, &mut turn);
        Ok(turn.out)
    }

    fn send_result(&mut self, task: Digest, result: ToolResult, turn: &mut Turn<'_>) {
        // A task that has ended meanwhile needs no answer.
        if let Ok(output) =
            self.gateway.send_tool(&task, None, Some(result), turn.now, turn.entropy)
        {
            self.take(output, turn);
        }
    }

    /// The worker asks for a tool of this side's.
    pub(super) fn tool_called(&mut self, task: Digest, call: Box<ToolCall>, turn: &mut Turn<'_>) {
        if self.gateway.task(&task).is_none_or(|log| log.me() != Party::Requester) {
            return;
        }
        if let Err(error) = self.admit_call(task, &call, turn) {
            self.refuse_call(task, &call, &error, turn);
        }
    }

    /// Takes up the calls that need not wait for the owner any more: answered, or over.
    pub(super) fn retry_calls(&mut self, task: Digest, turn: &mut Turn<'_>) {
        let Some(file) = self.files.get_mut(&task) else { return };
        let asked = std::mem::take(&mut file.asked_calls);
        let (due, waiting): (BTreeMap<_, _>, _) = asked.into_iter().partition(|(_, asked)| {
            asked.over_at() <= turn.now || file.is_decided(&asked.target, turn.now)
        });
        file.asked_calls = waiting;
        for asked in due.into_values() {
            self.tool_called(task, asked.call, turn);
        }
    }

    fn admit_call(&mut self, task: Digest, call: &ToolCall, turn: &mut Turn<'_>) -> Result<()> {
        let view = self.view(&task)?;
        let known = self.files.get(&task).is_some_and(|file| file.tools.knows(&call.call_id));
        // The owner decides first: a call that is not allowed costs no use.
        if !known && !self.is_allowed(task, &view, call, turn)? {
            return Ok(());
        }
        let file = self.files.entry(task).or_default();
        let mut desk = desk(&view, &mut self.counters, &self.gateway.revocations, turn.now);
        match file.tools.admit(call, &mut desk)? {
            Admission::Run(record) => {
                file.meter.tool_call();
                turn.out.of(task, OwnerRecord::Call { record });
                turn.out.actions.push(Action::CallTool { task, call: Box::new(call.clone()) });
            }
            Admission::Again(result) => self.send_result(task, *result, turn),
            Admission::Running => {}
        }
        Ok(())
    }

    /// Whether the owner allows a new call; `false` while the question waits.
    fn is_allowed(
        &mut self,
        task: Digest,
        view: &View,
        call: &ToolCall,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        let (id, digest) = (&call.call_id, Digest::of(call)?);
        let asked = self.files.get(&task).map(|file| &file.asked_calls);
        if let Some(asked) = asked.and_then(|asked| asked.get(id)) {
            if asked.digest != digest {
                return Err(Error::new(Code::CallIdReused, "another call has this id"));
            }
            return Ok(false);
        }
        self.judge_call(view, call, turn.now)?;
        let target = Target::ExternalSend {
            contract_digest: view.contract_digest(),
            to_did: call.caller_did,
            resource: call.resource.clone(),
            action: call.action.clone(),
            arguments_digest: Digest::of(&call.arguments)?,
        };
        let waits = AskedCall { call: Box::new(call.clone()), digest, target: target.digest()? };
        let file = self.files.entry(task).or_default();
        if file.asked_calls.len() >= MAX_OPEN_CALLS {
            return Err(Error::new(Code::RateLimited, "too many calls wait for the owner"));
        }
        // Before the owner is asked, who is shown what is called.
        file.asked_calls.insert(id.clone(), waits);
        let answer = self.gate(task, view, &target, turn);
        if !matches!(answer, Ok(Answer::Wait)) {
            self.files.entry(task).or_default().asked_calls.remove(id);
        }
        match answer? {
            Answer::Yes(_) => Ok(true),
            Answer::No(_) => Err(Error::new(Code::ApprovalDenied, "the owner did not allow this")),
            Answer::Wait => Ok(false),
        }
    }

    /// Judges a call as if it were admitted, and counts nothing: the owner is not asked about what
    /// can never be allowed.
    fn judge_call(&self, view: &View, call: &ToolCall, now: UnixMillis) -> Result<()> {
        let uses = |token: &CapabilityToken| {
            Digest::of(token).map(|digest| (digest, self.counters.uses(&digest)))
        };
        let mut counters = UseCounters::new();
        counters.restore(&Counted(call.chain.iter().map(uses).collect::<Result<_>>()?));
        let mut desk = desk(view, &mut counters, &self.gateway.revocations, now);
        ToolDesk::new().admit(call, &mut desk).map(drop)
    }

    fn refuse_call(&mut self, task: Digest, call: &ToolCall, error: &Error, turn: &mut Turn<'_>) {
        let refused = &mut self.files.entry(task).or_default().refused_calls;
        *refused = refused.saturating_add(1);
        if *refused <= MAX_JOURNALED || refused.is_power_of_two() {
            let (id, code) = (&call.call_id, error.code());
            let about = [json!({ "callId": id, "code": code, "refused": *refused })];
            if let Err(error) = self.journalize("CALL_REFUSED", &about, turn) {
                self.trouble(task, None, error, turn);
            }
        }
        if let Ok(result) = tool::answer(call, Err(error), &self.key, turn.now) {
            self.send_result(task, result, turn);
        }
    }

    /// The requester has answered a call of this side's work.
    pub(super) fn tool_answered(&mut self, task: Digest, result: &ToolResult, turn: &mut Turn<'_>) {
        let requester =
            self.gateway.task(&task).map(|log| log.view().genesis().actor(Party::Requester));
        let Some(file) = self.files.get_mut(&task) else { return };
        let Some(open) = file.open_calls.get(&result.call_id) else { return };
        let ours = Digest::of(&open.call).is_ok_and(|digest| digest == result.call_digest);
        if !ours || Some(result.gateway_did) != requester || result.verify().is_err() {
            return;
        }
        file.open_calls.remove(&result.call_id);
        let outcome = match (&result.error, result.ok) {
            (None, true) => Ok(result.result.clone()),
            (Some(error), _) => Err(Error::new(error.code, error.message.to_string())),
            (None, false) => Err(Error::new(Code::AdapterFailed, "the tool failed")),
        };
        turn.out.actions.push(Action::ToolAnswered {
            task,
            call: result.call_id.clone(),
            result: outcome,
        });
    }

    /// Sends again what was not answered; what is over is given up.
    pub(super) fn resend_calls(&mut self, turn: &mut Turn<'_>) {
        let tasks: Vec<Digest> = self.files.keys().copied().collect();
        for task in tasks {
            let working = self
                .gateway
                .task(&task)
                .is_some_and(|log| log.view().state() == Some(State::InProgress));
            let Some(file) = self.files.get_mut(&task) else { continue };
            let mut again = Vec::new();
            file.open_calls.retain(|id, open| {
                if !working || open.call.expires_at.is_over(turn.now) {
                    let error = Error::new(Code::PeerTimeout, "the call was not answered in time");
                    let (call, result) = (id.clone(), Err(error));
                    turn.out.actions.push(Action::ToolAnswered { task, call, result });
                    return false;
                }
                if open.next_send <= turn.now {
                    open.next_send = turn.now.plus(RESEND_MS);
                    again.push(open.call.clone());
                }
                true
            });
            for call in again {
                if let Ok(output) =
                    self.gateway.send_tool(&task, Some(call), None, turn.now, turn.entropy)
                {
                    self.take(output, turn);
                }
            }
        }
    }
}

/// Where calls of a task's worker are judged; the gateway takes envelopes of a task from its peer alone.
fn desk<'a>(
    view: &'a View,
    counters: &'a mut UseCounters,
    revocations: &'a RevocationRegistry,
    now: UnixMillis,
) -> Desk<'a> {
    Desk { view, counters, revocations, sender: view.genesis().actor(Party::Worker), now }
}

/// The first token of the task that names what is asked for.
fn granted<'v>(view: &'v View, request: &ToolRequest) -> Result<&'v CapabilityToken> {
    let names = |token: &&CapabilityToken| {
        token.capabilities.iter().any(|capability| {
            request.resource.is_within(&capability.resource)
                && capability.actions.contains(&request.action)
        })
    };
    view.grants().iter().map(|kept| &kept.object).find(names).ok_or_else(|| {
        Error::new(Code::CapabilityNotGranted, "no token of this task names this tool")
    })
}
