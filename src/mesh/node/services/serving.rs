//! Calls of services, from both sides: verified and handed to the daemon here, made and ended there.

use std::sync::Arc;

use super::super::super::records::Now;
use super::super::super::wire::cose::CoseSign1;
use super::super::super::wire::scope::{KIND_VAULT, Scope};
use super::super::super::wire::token::{self, ParsedToken, TokenError, VerifyContext};
use super::super::requests::error;
use super::super::{
    Answer, AnswerTo, CommandError, CommandResult, Node, OpId, OutRequest, Outcome, Output, Purpose,
};
use super::{
    CALL, Call, CallId, CallKind, MAX_CALLS, MAX_CALLS_OF_DEVICE, MAX_REASON_CHARS,
    SERVICE_DEADLINE_MS, SERVICE_TIMEOUT_MS, ServiceCall, ServiceOutcome, TokenKey, capability,
    refused,
};
use crate::codec::cbor::Value;
use crate::codec::text::truncate_chars;
use crate::identity::device::DeviceId;

impl Node {
    pub(super) fn service_called(
        &mut self,
        from: DeviceId,
        to: AnswerTo,
        request: &OutRequest,
        (name, write): (&str, bool),
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        let Some(token) = token else { return Answer::Now(error("unauthorized")) };
        if let Err(why) = self.verify_call(from, name, write, &token, now) {
            return Answer::Now(refused(why.code(), &why.to_string()));
        }
        let Some(share) = self.services.shares.get(name) else {
            return Answer::Now(error(TokenError::Revoked.code()));
        };
        let (place, may_write) = (share.place.clone(), write && share.write);
        let call = match self.call_begun(CallKind::Share, from, to, now) {
            Ok(call) => call,
            Err(busy) => return Answer::Now(busy),
        };
        let from_name = self.name_of(&from);
        self.outputs.push_back(Output::Service(Box::new(ServiceCall {
            call,
            from,
            from_name,
            share: name.to_owned(),
            place,
            may_write,
            params: request.params.clone(),
        })));
        Answer::Later
    }

    /// Takes a call down until it is answered, or says that there is no room for it.
    pub(in super::super) fn call_begun(
        &mut self,
        kind: CallKind,
        from: DeviceId,
        to: AnswerTo,
        now: Now,
    ) -> Result<CallId, Outcome> {
        let of_kind = self.services.calls.values().filter(|call| call.kind == kind);
        let (all, of_device) = of_kind.fold((0, 0), |(all, of_device), call| {
            (all + 1, of_device + usize::from(call.from == from))
        });
        if all >= MAX_CALLS || of_device >= MAX_CALLS_OF_DEVICE {
            return Err(refused("busy", "too many calls are under way; try again"));
        }
        let call = CallId(self.id());
        let until = now.mono + SERVICE_DEADLINE_MS;
        self.services.calls.insert(call, Call { kind, to, from, until });
        Ok(call)
    }

    /// Token, capability, scope, bearer, whose word it is, and whether that still stands.
    fn verify_call(
        &self,
        from: DeviceId,
        name: &str,
        write: bool,
        token: &ParsedToken,
        now: Now,
    ) -> Result<(), TokenError> {
        let context =
            VerifyContext { now: now.unix, bearer: Some(from), revocations: &self.revocations };
        let scope = (KIND_VAULT, name);
        let verified =
            token::verify_service_token(token, &context, capability(write), scope, &self.daemon)?;
        // Revocations are bounded in number, grants are what we remember of our own word: a token
        // that is not among them is not good any more.
        let id = <[u8; 16]>::try_from(verified.root.token_id.as_slice());
        let granted = id.ok().and_then(|id| self.services.shares.get(name)?.grants.get(&id));
        match granted {
            Some(grant) if !grant.revoked => Ok(()),
            _ => Err(TokenError::Revoked),
        }
    }

    /// Answers calls that take too long.
    pub(super) fn calls_upkeep(&mut self, now: Now) {
        let late: Vec<CallId> = self
            .services
            .calls
            .iter()
            .filter(|(_, call)| call.until <= now.mono)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            let message = "this took too long; what was to be written may be written";
            self.service_answered(id, Err(("timeout".into(), message.into())), now);
        }
    }

    pub(in super::super) fn service_answered(
        &mut self,
        call: CallId,
        outcome: ServiceOutcome,
        now: Now,
    ) {
        // Too late: it has been answered already.
        let Some(call) = self.services.calls.remove(&call) else { return };
        let outcome = match outcome {
            Ok(members) => {
                let result = ("result".to_owned(), Value::Text("ok".into()));
                Outcome::Ok(Value::map([result].into_iter().chain(members)))
            }
            Err((code, message)) => refused(&code, &message),
        };
        self.answer(call.to, outcome, now);
    }
    pub(in super::super) fn call_service(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        share: String,
        write: bool,
        params: Vec<(String, Value)>,
        op: OpId,
        now: Now,
    ) {
        // The narrowest that does: writing includes reading.
        let candidates: &[bool] = if write { &[true] } else { &[false, true] };
        let (may_write, token) = match self.held_token(agent, owner, &share, candidates, now) {
            Ok(found) => found,
            Err(error) => {
                self.fail(op, error);
                return;
            }
        };
        let verb = [("verb".to_owned(), Value::Text(CALL.into()))];
        let request = OutRequest {
            verb: capability(may_write).to_owned(),
            params: Value::map(verb.into_iter().chain(params)),
            scope: Scope::new(KIND_VAULT, share),
            token: Some(token),
        };
        let deadline = Some(now.mono + SERVICE_TIMEOUT_MS);
        self.request(agent, owner, request, Purpose::Call { op }, deadline);
    }

    /// The first good token of those for these capabilities (`true`: for writing).
    pub(super) fn held_token(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        share: &str,
        candidates: &[bool],
        now: Now,
    ) -> Result<(bool, CoseSign1), CommandError> {
        let mut why = None;
        for write in candidates {
            let key = TokenKey::new(owner, *write, share);
            let held = self.agent(&agent).and_then(|held| held.services.get(&key)).cloned();
            let Some(token) = held else { continue };
            let parsed = self.tokens.get_or_parse(&token);
            let context = VerifyContext {
                now: now.unix,
                bearer: Some(agent),
                revocations: &self.revocations,
            };
            match token::verify(&parsed, &context) {
                Ok(_) => return Ok((*write, token)),
                Err(error) => {
                    why.get_or_insert(error);
                }
            }
        }
        let what = if candidates.contains(&false) { "read" } else { "write to" };
        let permission = format!("the permission to {what} {share:?}");
        Err(match why {
            None => CommandError::new(
                "not_allowed",
                format!("this agent has no permission to {what} {share:?} there"),
            ),
            Some(TokenError::Expired) => {
                CommandError::new("expired", format!("{permission} is over"))
            }
            Some(TokenError::Revoked) => {
                CommandError::new("revoked", format!("{permission} was taken back"))
            }
            Some(TokenError::ParentInvalid) => CommandError::new(
                "revoked",
                format!("{permission} was taken back from, or is over for, who passed it on"),
            ),
            Some(other) => CommandError::new(other.code(), other.to_string()),
        })
    }

    pub(in super::super) fn call_ended(&mut self, op: OpId, outcome: Outcome) {
        let result = match outcome {
            Outcome::Ok(answer) => Ok(CommandResult::Served(answer)),
            Outcome::Error { code, message } => {
                let message = message.unwrap_or_default();
                let message = truncate_chars(&message, MAX_REASON_CHARS).to_owned();
                Ok(CommandResult::Refused { code, message })
            }
            Outcome::Timeout => Err(CommandError::new(
                "timeout",
                "the other side did not answer in time; what was to be written may be written",
            )),
            Outcome::NotConnected => {
                Err(CommandError::new("not_connected", "the other side is not connected"))
            }
            Outcome::ConnectionLost => Err(CommandError::new(
                "connection_lost",
                "the other side went away; what was to be written may be written",
            )),
        };
        self.outputs.push_back(Output::Reply { op, result });
    }
}
