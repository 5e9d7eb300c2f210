//! Tool calls through the requester's gateway (design 6.14, 9.2, decision 41): each is run at most
//! once, and asked twice it is answered the same. The credential never leaves; what runs is not here.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::capability::{Call, Counted, Guard, UseCounters};
use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::json::canonical;
use super::log::View;
use super::objects::{Action, CallError, Capability, Party, Resource, State, ToolCall, ToolResult};
use super::revocation::RevocationRegistry;
use super::sign::{Role, Signature, Signed as _};
use super::value::{CallId, Digest, Note, Seq, Time};
use crate::codec::time::UnixMillis;

/// How long a call may be good, ms.
pub const MAX_CALL_LIFE_MS: u64 = 600_000;

/// Calls of a task that are remembered; they are kept until the task has ended.
pub const MAX_CALLS: usize = 10_000;

/// A tool as its owner names it: `RESOURCE:ACTION`, e.g. `mcp:docs/**:read`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolName {
    /// The resource, or a pattern of resources.
    pub resource: Resource,
    /// What is done with it.
    pub action: Action,
}

impl ToolName {
    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        // Neither what follows a resource's scheme nor an action has a colon.
        let parts = text.rsplit_once(':').filter(|(resource, _)| resource.contains(':'));
        let (resource, action) = parts.ok_or_else(|| {
            Error::new(Code::BadField, "a tool is RESOURCE:ACTION, e.g. mcp:docs/**:read")
        })?;
        Ok(Self { resource: Resource::parse(resource)?, action: Action::parse(action)? })
    }

    /// Whether everything that this names is named by `other` as well.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        self.action == other.action && self.resource.is_within(&other.resource)
    }

    /// What a token allows that grants this, whatever the arguments are.
    ///
    /// # Errors
    /// None in practice: one action is within the bounds.
    pub fn capability(&self) -> Result<Capability> {
        Ok(Capability {
            resource: self.resource.clone(),
            actions: Seq::new(vec![self.action.clone()])?,
            args_schemas: Seq::default(),
            max_bytes_per_use: None,
        })
    }
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.resource, self.action)
    }
}

/// The record of a call: stored with its counts before the tool runs, and again with the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum CallRecord {
    /// About to run.
    Started {
        /// The call.
        call_id: CallId,
        /// Its object digest.
        call: Digest,
        /// The new counts of its tokens.
        counted: Counted,
    },
    /// Answered.
    Done {
        /// The answer.
        result: Box<ToolResult>,
    },
}

/// What a call is answered with.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// Store the record, run the tool, then [`ToolDesk::done`].
    Run(CallRecord),
    /// Answered before: send the same again.
    Again(Box<ToolResult>),
    /// Running; the answer will come.
    Running,
}

#[derive(Clone, Debug)]
struct Known {
    call: Digest,
    result: Option<ToolResult>,
    /// Whether it was started in this run of the gateway.
    ours: bool,
}

/// The calls of one task.
#[derive(Clone, Debug, Default)]
pub struct ToolDesk {
    calls: BTreeMap<CallId, Known>,
}

/// What admission needs to know besides the call.
pub struct Desk<'a> {
    /// The task's log at the requester.
    pub view: &'a View,
    /// Counters of this gateway's tokens.
    pub counters: &'a mut UseCounters,
    /// What was taken back.
    pub revocations: &'a RevocationRegistry,
    /// Who sent the envelope.
    pub sender: Did,
    /// Clock.
    pub now: UnixMillis,
}

impl ToolDesk {
    /// No call yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a record back from the store. A call that was started and not answered stays unknown.
    pub fn restore(&mut self, record: CallRecord, counters: &mut UseCounters) {
        match record {
            CallRecord::Started { call_id, call, counted } => {
                counters.restore(&counted);
                self.calls.insert(call_id, Known { call, result: None, ours: false });
            }
            CallRecord::Done { result } => {
                if let Some(known) = self.calls.get_mut(&result.call_id) {
                    known.result = Some(*result);
                }
            }
        }
    }

    /// Whether a call with this id was admitted before.
    #[must_use]
    pub fn knows(&self, id: &CallId) -> bool {
        self.calls.contains_key(id)
    }

    /// Judges a call: who and when, whether it was there before, whether the chain allows it; counts
    /// its use.
    ///
    /// # Errors
    /// The code to answer with.
    pub fn admit(&mut self, call: &ToolCall, desk: &mut Desk<'_>) -> Result<Admission> {
        let view = desk.view;
        let worker = view.genesis().actor(Party::Worker);
        if call.caller_did != worker || desk.sender != worker {
            return Err(Error::new(Code::WrongSigner, "not the worker of this task"));
        }
        call.verify()?;
        if call.task_id != *view.task_id() || Some(call.contract_digest) != view.contract_digest() {
            return Err(Error::new(Code::DigestMismatch, "a call for another task"));
        }
        let digest = Digest::of(call)?;
        if let Some(known) = self.calls.get(&call.call_id) {
            if known.call != digest {
                return Err(Error::new(Code::CallIdReused, "another call has this id"));
            }
            return match &known.result {
                Some(result) => Ok(Admission::Again(Box::new(result.clone()))),
                None if known.ours => Ok(Admission::Running),
                None => Err(Error::new(
                    Code::CallOutcomeUnknown,
                    "started before a restart; whether it took effect is not known",
                )),
            };
        }
        if view.state() != Some(State::InProgress) {
            return Err(Error::new(Code::IllegalTransition, "tools are for work in progress"));
        }
        let too_long = call.expires_at > call.issued_at.plus(MAX_CALL_LIFE_MS);
        if too_long || call.expires_at.is_over(desk.now) || !call.issued_at.has_come(desk.now) {
            return Err(Error::new(
                Code::TokenExpired,
                "the call is over, early, or good for too long",
            ));
        }
        if call.chain.iter().any(|token| token.task_id != *view.task_id()) {
            return Err(Error::new(Code::ChainBroken, "a token for another task"));
        }
        if self.calls.len() >= MAX_CALLS {
            return Err(Error::new(Code::RateLimited, "too many calls in one task"));
        }
        let guard = Guard {
            owner: view.genesis().actor(Party::Requester),
            caller: call.caller_did,
            now: desk.now,
            revocations: desk.revocations,
        };
        let bytes = u64::try_from(canonical(&call.arguments)?.len()).unwrap_or(u64::MAX);
        let wanted = Call {
            resource: &call.resource,
            action: &call.action,
            arguments: &call.arguments,
            bytes,
        };
        let counted = guard.check(&call.chain, &wanted)?.count(desk.counters)?;
        let known = Known { call: digest, result: None, ours: true };
        self.calls.insert(call.call_id.clone(), known);
        let call_id = call.call_id.clone();
        Ok(Admission::Run(CallRecord::Started { call_id, call: digest, counted }))
    }

    /// Notes the answer of a call that ran.
    ///
    /// # Errors
    /// `BAD_ID` for a call that was not admitted, `CALL_ID_REUSED` for a second answer.
    pub fn done(&mut self, result: ToolResult) -> Result<CallRecord> {
        let known = self
            .calls
            .get_mut(&result.call_id)
            .ok_or_else(|| Error::new(Code::BadId, "no such call"))?;
        if known.result.is_some() || known.call != result.call_digest {
            return Err(Error::new(
                Code::CallIdReused,
                "answered before, or another call's answer",
            ));
        }
        known.result = Some(result.clone());
        Ok(CallRecord::Done { result: Box::new(result) })
    }
}

/// The signed answer to a call: a result, or the error of a refusal.
///
/// # Errors
/// As [`Digest::of`].
pub fn answer(
    call: &ToolCall,
    outcome: Result<serde_json::Value, &Error>,
    key: &Secret,
    now: UnixMillis,
) -> Result<ToolResult> {
    let error = outcome
        .as_ref()
        .err()
        .map(|error| CallError { code: error.code(), message: Note::lossy(error.message()) });
    ToolResult {
        call_id: call.call_id.clone(),
        call_digest: Digest::of(call)?,
        gateway_did: key.did(),
        ok: outcome.is_ok(),
        result: outcome.unwrap_or_default(),
        error,
        at: Time::from(now),
        signature: Signature::blank(Role::Requester, key.did()),
    }
    .signed(key, now)
}
