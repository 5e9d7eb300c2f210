//! Conversations: the consent before the first message, and direct messages
//! (`rooms.md` 3.11, 3.12; decision 21).

use std::sync::Arc;

use super::super::delivery::{MAX_QUEUED, MAX_QUEUED_MS, Queued};
use super::super::events::DeliveryState;
use super::super::journal::Record;
use super::super::records::{ConsentPolicy, Now, Visibility};
use super::super::session::{APPROVAL_GRACE_MS, APPROVAL_WINDOW_MS, SessionId};
use super::super::wire::capability;
use super::super::wire::cose::CoseSign1;
use super::super::wire::room_path::RoomPath;
use super::super::wire::scope::Scope;
use super::super::wire::token::{self, ParsedToken, VerifyContext};
use super::requests::error;
use super::rooms::{Draft, message_event, refusal};
use super::{
    Answer, AnswerTo, CommandError, CommandResult, Node, Op, OpId, OutRequest, Outcome, Purpose,
};
use crate::codec::cbor::Value;
use crate::identity::device::DeviceId;

/// How long a first message waits before its command is answered "awaiting consent": an agent
/// that has already agreed answers within this.
pub(super) const CONSENT_PATIENCE_MS: u64 = 500;

impl Node {
    /// Somebody wants to send direct messages to one of our agents.
    pub(super) fn conversation_asked(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        path: RoomPath,
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        // Both ends must be the two that the path names: a third device gets nowhere.
        if !path.has_participant(&local) || !path.has_participant(&from) || from == local {
            return Answer::Now(error("not_participant"));
        }
        if self.record(&local).is_some_and(|record| record.visibility == Visibility::Ghost) {
            return Answer::Now(error("denied"));
        }
        if let Some(token) = token {
            let context =
                VerifyContext { now: now.unix, bearer: Some(from), revocations: &self.revocations };
            let principal = self.config.user.as_ref().map(|user| user.id());
            let granted = principal.is_some_and(|principal| {
                token::verify_dm_send(&token, &context, &principal).is_ok()
            });
            // A grant that fails is a refusal, never a question to the agent.
            if !granted {
                return Answer::Now(error("unauthorized"));
            }
            self.admit(local, from, &path, vec![to], None, now);
            return Answer::Later;
        }
        let consented = self.agent(&local).is_some_and(|agent| {
            agent.opened.contains(&path) || agent.grants.contains_key(&(path.clone(), from))
        });
        let consented = consented
            || match self.consent(&local) {
                ConsentPolicy::Closed => return Answer::Now(error("denied")),
                ConsentPolicy::Open => true,
                ConsentPolicy::SamePrincipal => self.is_same_principal(&from, now),
                ConsentPolicy::Ask => false,
            };
        if consented {
            self.admit(local, from, &path, vec![to], None, now);
            return Answer::Later;
        }
        self.ask_agent(local, from, session, to, path, now)
    }

    /// Who may begin conversations with an agent of ours.
    #[must_use]
    pub fn consent(&self, agent: &DeviceId) -> ConsentPolicy {
        self.agent(agent).and_then(|held| held.consent).unwrap_or(self.config.consent)
    }

    /// From now on, and for those who wait already.
    pub(super) fn set_consent(&mut self, agent: DeviceId, policy: ConsentPolicy, now: Now) {
        let Some(held) = self.agent_mut(&agent) else { return };
        if held.consent.replace(policy) != Some(policy) {
            self.keep(Record::Consent { agent, policy });
        }
        let waiting: Vec<(String, DeviceId)> = self
            .agent(&agent)
            .into_iter()
            .flat_map(|held| held.decisions.values())
            .filter(|asked| asked.path.as_ref().is_some_and(|path| path.owner().is_none()))
            .map(|asked| (asked.id.clone(), asked.requester))
            .collect();
        for (id, requester) in waiting {
            let lets_in = match policy {
                ConsentPolicy::Open => true,
                ConsentPolicy::SamePrincipal => self.is_same_principal(&requester, now),
                // A question that was put stays one.
                ConsentPolicy::Ask | ConsentPolicy::Closed => false,
            };
            if lets_in {
                self.say_yes(agent, &id, now);
            }
        }
    }

    /// Yes to a question that waits.
    fn say_yes(&mut self, agent: DeviceId, id: &str, now: Now) {
        let asked = self.end_question(agent, id);
        let Some((asked, path)) = asked.and_then(|asked| asked.path.clone().map(|p| (asked, p)))
        else {
            return;
        };
        if asked.waiters.is_empty() {
            self.note_consent(agent, asked.requester, &path, now);
        } else {
            self.admit(agent, asked.requester, &path, asked.waiters, None, now);
        }
    }

    /// Whether a device is one of our own user's: the system says so on this machine, the user's
    /// signature on others.
    fn is_same_principal(&self, device: &DeviceId, now: Now) -> bool {
        let signed = || {
            let proof = self.directory.get(device)?.agent.as_ref()?.membership.as_ref()?;
            let token = token::parse_membership_proof(proof).ok()?;
            let context = VerifyContext {
                now: now.unix,
                bearer: Some(*device),
                revocations: &self.revocations,
            };
            let user = self.config.user.as_ref()?.id();
            Some(token::verify_membership_proof(&token, &context, &user).is_ok())
        };
        self.is_of_our_user(device) || signed() == Some(true)
    }

    pub(super) fn dm(
        &mut self,
        agent: DeviceId,
        recipient: DeviceId,
        draft: Draft,
        wait_ms: u64,
        op: OpId,
        now: Now,
    ) {
        if recipient == agent {
            self.dm_to_self(agent, draft, op, now);
            return;
        }
        let record = self.record(&recipient);
        // Somebody it has written with may be away since before a restart.
        let spoken_with = RoomPath::dm(agent, recipient)
            .is_some_and(|path| self.replica.dm_history(&path).is_some());
        let known = record.is_some()
            || spoken_with
            || self.is_reachable(&recipient)
            || self.directory.get(&recipient).is_some();
        let ghost = record.is_some_and(|record| record.visibility == Visibility::Ghost);
        let agentless = self.is_hosted(&recipient) && self.agent(&recipient).is_none();
        if !known || ghost || agentless {
            self.fail(
                op,
                CommandError::new("agent_not_found", format!("no agent {recipient} is known here")),
            );
            return;
        }
        let Some(path) = RoomPath::dm(agent, recipient) else {
            self.fail(op, CommandError::new("agent_not_found", "that is no other agent"));
            return;
        };
        let Some((params, id)) = self.message_params(draft, now) else {
            self.fail(op, CommandError::new("invalid_reply", "reply-to is no message id"));
            return;
        };
        self.open_send(agent, op, &id, &[recipient], now);
        self.open(agent, &path, now);
        let entry = self.entry(agent, path.clone(), params, Some(id), now);
        if self.has_good_token(agent, &path, now) {
            self.record_dm(agent, recipient, &entry);
            self.send_entry(agent, recipient, entry, Some(op), now);
            return;
        }
        if let Some(Op::Send { reply_by, .. }) = self.ops.get_mut(&op) {
            *reply_by = now.mono + CONSENT_PATIENCE_MS.max(wait_ms);
        }
        let mut entry = entry;
        self.keep_queued(agent, recipient, &mut entry, true);
        let Some(held) = self.agent_mut(&agent) else { return };
        let consent = held.consents.entry(recipient).or_default();
        consent.held.push((entry, Some(op)));
        let over = (consent.held.len() > MAX_QUEUED).then(|| consent.held.remove(0));
        let asking = consent.asking;
        if let Some((evicted, op)) = over {
            self.end_held(agent, recipient, evicted, op, DeliveryState::Dropped, now);
        }
        if !asking {
            self.ask_consent(agent, recipient, now);
        }
    }

    /// The other side of a conversation need not ask our agent any more; if it does just now, the
    /// answer is yes.
    pub(super) fn open(&mut self, agent: DeviceId, path: &RoomPath, now: Now) {
        if self.agent_mut(&agent).is_some_and(|held| held.opened.insert(path.clone())) {
            self.keep(Record::Opened { agent, path: path.to_string() });
        }
        let Some(other) = path.other_participant(&agent) else { return };
        let waiters = self.take_question(agent, path, &other);
        if !waiters.is_empty() {
            self.admit(agent, other, path, waiters, None, now);
        }
    }

    fn dm_to_self(&mut self, agent: DeviceId, draft: Draft, op: OpId, now: Now) {
        let Some((params, id)) = self.message_params(draft, now) else {
            self.fail(op, CommandError::new("invalid_reply", "reply-to is no message id"));
            return;
        };
        self.open_send(agent, op, &id, &[agent], now);
        let event = params_event(agent, &params);
        let state = match event.map(|event| self.push_event(agent, event, None, now)) {
            Some(Ok(_)) => DeliveryState::Delivered,
            _ => DeliveryState::Refused { code: "mailbox_full".into() },
        };
        self.op_delivery(op, agent, &state);
    }

    /// The sender's copy, kept once the message may be sent.
    fn record_dm(&mut self, agent: DeviceId, recipient: DeviceId, entry: &Queued) {
        if let Some(event) = message_event(agent, recipient, &entry.path, &entry.params) {
            self.remember(&event);
        }
    }

    fn ask_consent(&mut self, agent: DeviceId, recipient: DeviceId, now: Now) {
        if let Some(consent) =
            self.agent_mut(&agent).and_then(|held| held.consents.get_mut(&recipient))
        {
            consent.asking = true;
        }
        self.request_conversation(agent, recipient, now);
    }

    /// Asks for the token of a conversation.
    pub(super) fn request_conversation(&mut self, agent: DeviceId, recipient: DeviceId, now: Now) {
        let Some(path) = RoomPath::dm(agent, recipient) else { return };
        let request = OutRequest {
            verb: capability::ROOM_MEMBER.into(),
            params: Value::map([("verb", Value::Text("room.join".into()))]),
            scope: Scope { kind: "room".into(), path: Some(path.to_string()) },
            token: None,
        };
        let purpose = Purpose::Join { agent, path, op: None };
        let deadline = Some(now.mono + APPROVAL_WINDOW_MS + APPROVAL_GRACE_MS);
        self.request(agent, recipient, request, purpose, deadline);
    }

    /// A way to somebody whose consent we still want has opened.
    pub(super) fn ask_again(&mut self, agent: DeviceId, recipient: DeviceId, now: Now) {
        let waiting = self
            .agent(&agent)
            .and_then(|held| held.consents.get(&recipient))
            .is_some_and(|consent| !consent.asking);
        if waiting {
            self.ask_consent(agent, recipient, now);
        }
    }

    pub(super) fn join_ended(
        &mut self,
        agent: DeviceId,
        remote: DeviceId,
        path: RoomPath,
        op: Option<OpId>,
        outcome: Outcome,
        now: Now,
    ) {
        if path.owner().is_some() {
            self.room_join_ended(agent, path, op, outcome, now);
            return;
        }
        let token = match &outcome {
            Outcome::Ok(answer) => answer
                .get("granted-token")
                .and_then(|token| CoseSign1::from_value(token.clone()).ok()),
            _ => None,
        };
        let token = token.filter(|token| {
            let parsed = self.tokens.get_or_parse(token);
            let context = VerifyContext {
                now: now.unix,
                bearer: Some(agent),
                revocations: &self.revocations,
            };
            token::verify_room_token(&parsed, &context, &path, &remote, token::DmRule::Verifier)
                .is_ok()
        });
        let (code, message) = match (&outcome, token) {
            (Outcome::Ok(_), Some(token)) => {
                self.keep_token(agent, &path, token);
                if let Some(op) = op {
                    self.reply_if_open(op, Ok(CommandResult::Done));
                }
                self.send_owed_receipts(agent, remote, now);
                let held = self
                    .agent_mut(&agent)
                    .and_then(|held| held.consents.remove(&remote))
                    .unwrap_or_default();
                for (entry, op) in held.held {
                    self.record_dm(agent, remote, &entry);
                    self.send_entry(agent, remote, entry, op, now);
                }
                return;
            }
            (Outcome::Ok(_), None) => ("malformed_response".to_owned(), None),
            (failed, _) => refusal(failed),
        };
        if let Some(op) = op {
            // A grant that opens nothing takes nothing from those who wait for an answer.
            let message = message.map(|message| format!(": {message}")).unwrap_or_default();
            let text = format!("the other side answered {code}{message}");
            self.reply_if_open(op, Err(CommandError::new("join_refused", text)));
            return;
        }
        self.send_owed_receipts(agent, remote, now);
        // Away, or gone while deciding: asked again when it is back (field reports: a queued
        // message says so, and why).
        if matches!(outcome, Outcome::NotConnected | Outcome::ConnectionLost)
            || code == "no_route"
            || code == "not_connected"
        {
            if let Some(consent) =
                self.agent_mut(&agent).and_then(|held| held.consents.get_mut(&remote))
            {
                consent.asking = false;
                let waiting: Vec<(Queued, OpId)> = consent
                    .held
                    .iter_mut()
                    .filter_map(|(entry, op)| Some((entry.clone(), op.take()?)))
                    .collect();
                let state = DeliveryState::Queued { reason: "not_connected".into() };
                for (_, op) in waiting {
                    self.op_delivery(op, remote, &state);
                }
            }
            return;
        }
        let held = self
            .agent_mut(&agent)
            .and_then(|held| held.consents.remove(&remote))
            .unwrap_or_default();
        let text = match message {
            Some(message) => format!("{code}: {message}"),
            None => code,
        };
        for (entry, op) in held.held {
            let state = DeliveryState::Refused { code: text.clone() };
            self.end_held(agent, remote, entry, op, state, now);
        }
    }

    fn end_held(
        &mut self,
        agent: DeviceId,
        recipient: DeviceId,
        entry: Queued,
        op: Option<OpId>,
        state: DeliveryState,
        now: Now,
    ) {
        self.report(agent, recipient, &entry, state, op, false, now);
    }

    pub(super) fn expire_consents(&mut self, agent: DeviceId, now: Now) {
        let Some(held) = self.agent_mut(&agent) else { return };
        let mut expired = Vec::new();
        held.consents.retain(|recipient, consent| {
            let mut index = 0;
            while index < consent.held.len() {
                if now.unix.since(consent.held[index].0.queued_at) >= MAX_QUEUED_MS {
                    expired.push((*recipient, consent.held.remove(index)));
                } else {
                    index += 1;
                }
            }
            !consent.held.is_empty() || consent.asking
        });
        for (recipient, (entry, op)) in expired {
            self.end_held(agent, recipient, entry, op, DeliveryState::Expired, now);
        }
    }
}

/// A message to oneself as an event.
fn params_event(agent: DeviceId, params: &Value) -> Option<super::super::events::DeliveryEvent> {
    // The path only tells a conversation from a room; with oneself there is none.
    let other = DeviceId([if agent.0[0] == 0 { 1 } else { 0 }; 32]);
    let path = RoomPath::dm(agent, other)?;
    message_event(agent, agent, &path, params)
}
