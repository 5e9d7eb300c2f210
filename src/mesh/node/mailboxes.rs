//! Events into mailboxes, acknowledgements out of them, messages to recipients and their retry,
//! copies for the absent (`rooms.md` 1.9, 1.10, 6; decisions 1 to 3).

use std::sync::Arc;

use super::super::delivery::{MailboxFull, Queued, event_bytes};
use super::super::events::{DeliveryEvent, DeliveryState};
use super::super::journal::{Record, Ticket};
use super::super::log::LogEvent;
use super::super::message::{MeshMessage, Patch};
use super::super::records::Now;
use super::super::session::{REQUEST_TIMEOUT_MS, Session, SessionId};
use super::super::wire::room_path::RoomPath;
use super::super::wire::scope::Scope;
use super::requests::{error, ok};
use super::rooms::MAX_RECEIPT_IDS;
use super::{
    Agent, Answer, AnswerTo, HandOver, MessageRequest, Node, Op, OpId, OutRequest, Outcome, Output,
    Purpose, Stored,
};
use crate::codec::cbor::Value;
use crate::identity::device::DeviceId;

/// Time each further holder of a copy waits, so that the first in line hands it over alone.
const HAND_OVER_STEP_MS: u64 = 2_000;
/// A returning recipient's own session comes first; its sender may be returning as well.
const HAND_OVER_FIRST_MS: u64 = 1_000;
/// How long a holder leaves it to a sender that is here as well. One that has restarted without
/// its memory never retries.
const AUTHOR_FIRST_MS: u64 = 20_000;
/// Pause before a failed hand-over is tried again.
const HAND_OVER_AGAIN_MS: u64 = 5_000;
/// Answer to a copy that the recipient would not have taken from its author either.
pub(super) const NOT_PERMITTED: &str = "not_permitted";
/// Receipts that wait for the token of one conversation, which is asked for at the first.
const MAX_OWED_RECEIPTS: usize = 256;
/// Attempts of a sender at one message that wait for the store at the same time.
const MAX_REPEATS: usize = 4;

impl Node {
    /// Puts an event into an agent's mailbox and has it stored. `answer` is answered ok once the
    /// event is stored or acknowledged (decision 3).
    pub(super) fn push_event(
        &mut self,
        agent: DeviceId,
        event: DeliveryEvent,
        answer: Option<AnswerTo>,
        now: Now,
    ) -> Result<u64, MailboxFull> {
        let event = Arc::new(event);
        let Some(held) = self.kept_agent_mut(&agent) else { return Err(MailboxFull) };
        let seq = match held.mailbox.push(Arc::clone(&event), now.unix) {
            Ok(seq) => seq,
            Err(full) => {
                self.log(LogEvent::new("mailbox_full").with("agent", agent));
                return Err(full);
            }
        };
        self.keep_losses(agent);
        if let Some((sender, message)) = event.message_key() {
            self.log_traffic(|| {
                LogEvent::new("message_received")
                    .with("agent", agent)
                    .with("sender", sender)
                    .with("message", message)
            });
        }
        self.outputs.push_back(Output::AgentEvent { agent, seq, event: Arc::clone(&event) });
        if self.agent(&agent).is_some_and(|held| held.ephemeral) {
            // Its mailbox ends with it: there is nothing to wait for.
            if let Some(to) = answer {
                self.answer(to, ok(), now);
            }
            return Ok(seq);
        }
        let event = event_bytes(&event);
        let record = Record::Mailbox { agent, seq, at: now.unix, event };
        let answers = answer.into_iter().collect();
        self.commit(vec![record], Stored { agent, seq, answers });
        Ok(seq)
    }

    /// A message that the agent has been shown already comes again: it is answered, not shown.
    pub(super) fn repeated(
        &mut self,
        agent: DeviceId,
        key: &(DeviceId, String),
        to: AnswerTo,
    ) -> Answer {
        let Some(held) = self.agent_mut(&agent) else { return Answer::Now(error("timeout")) };
        // What the agent has taken needs no store.
        let Some(waiting) = held.mailbox.waiting(key) else { return Answer::Now(ok()) };
        let (seq, at, event) = (waiting.seq, waiting.at, Arc::clone(&waiting.event));
        let unstored = held.unstored.remove(&seq);
        if let Some(stored) = self.stored.values_mut().find(|s| s.agent == agent && s.seq == seq) {
            if stored.answers.len() >= MAX_REPEATS {
                return Answer::Now(error("timeout"));
            }
            stored.answers.push(to);
            return Answer::Later;
        }
        if !unstored {
            return Answer::Now(ok());
        }
        let record = Record::Mailbox { agent, seq, at, event: event_bytes(&event) };
        self.commit(vec![record], Stored { agent, seq, answers: vec![to] });
        Answer::Later
    }

    /// An event that nobody waits for; a full mailbox drops it.
    pub(super) fn show(&mut self, agent: DeviceId, event: DeliveryEvent, now: Now) {
        // A question is never given up to make room: one that still waits is not put again, nor one
        // that has been acknowledged and not answered.
        let known = |held: &Agent| {
            held.mailbox.holds(&event)
                || event.question_key().is_some_and(|key| held.mailbox.has_seen(&key))
        };
        if event.is_question() && self.agent(&agent).is_some_and(known) {
            return;
        }
        // Full is logged where it is found; news are what a full mailbox gives up first.
        let _full_mailbox_has_been_logged = self.push_event(agent, event, None, now);
    }

    /// A question to our agents is over: asked again, it is shown again.
    pub(super) fn forget_question(&mut self, key: &(DeviceId, String)) {
        let agents: Vec<DeviceId> =
            self.agent_ids().into_iter().chain(self.parked.keys().copied()).collect();
        for agent in agents {
            if self.kept_agent_mut(&agent).is_some_and(|held| held.mailbox.forget(key)) {
                self.keep_everything_of(agent);
            }
        }
    }

    fn commit(&mut self, records: Vec<Record>, stored: Stored) {
        let ticket = Ticket(self.id());
        self.stored.insert(ticket, stored);
        self.outputs.push_back(Output::Commit { ticket, records });
    }

    pub(super) fn committed(&mut self, ticket: Ticket, done: bool) {
        if self.changes_kept(ticket, done) {
            return;
        }
        let Some(Stored { agent, seq, answers }) = self.stored.remove(&ticket) else { return };
        let now = self.last_now.unwrap_or_default();
        let mut safe = done;
        if !done {
            self.log(LogEvent::new("store_failed").with("agent", agent));
            if let Some(held) = self.kept_agent_mut(&agent) {
                safe = seq <= held.mailbox.acknowledged();
                if !safe {
                    held.unstored.insert(seq);
                }
            }
        }
        for to in answers {
            // Not held safely: the sender keeps it ("timeout" is what senders retry). It has been
            // shown, so it stays in the mailbox and its repetition is only stored.
            self.answer(to, if safe { ok() } else { error("timeout") }, now);
        }
    }

    /// The agent's client has everything up to `seq`.
    pub(super) fn acknowledge(&mut self, agent: DeviceId, seq: u64, now: Now) {
        let Some(held) = self.agent_mut(&agent) else { return };
        let released = held.mailbox.acknowledge(seq);
        held.unstored.retain(|unstored| *unstored > seq);
        if released.is_empty() {
            return;
        }
        let up_to = held.mailbox.acknowledged();
        // A question that is over meanwhile is forgotten: asked again, it is another one.
        let seen = released.iter().filter_map(|numbered| {
            let event = &numbered.event;
            let key = event.message_key().or_else(|| event.question_key())?;
            held.mailbox.has_seen(&key).then_some((numbered.seq, key))
        });
        let seen: Vec<_> = seen.collect();
        self.keep(Record::Acknowledged { agent, seq: up_to });
        for (seq, (author, message)) in seen {
            self.keep(Record::Seen { agent, seq, author, message });
        }
        // Acknowledged is as good as stored: whoever waits need not wait for the store.
        let early: Vec<Ticket> = self
            .stored
            .iter()
            .filter(|(_, s)| s.agent == agent && s.seq <= seq && !s.answers.is_empty())
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in early {
            self.committed(ticket, true);
        }
        let mut receipts: Vec<(RoomPath, DeviceId, Vec<String>)> = Vec::new();
        for numbered in released {
            let (path, author, id) = match &*numbered.event {
                DeliveryEvent::RoomMessage { message } => {
                    let Ok(path) = RoomPath::parse(&message.room) else { continue };
                    (path, message.from, &message.id)
                }
                DeliveryEvent::Dm { message } => {
                    let Some(path) = RoomPath::dm(message.from, message.to) else { continue };
                    (path, message.from, &message.id)
                }
                _ => continue,
            };
            match receipts
                .iter_mut()
                .find(|(p, a, ids)| *p == path && *a == author && ids.len() < MAX_RECEIPT_IDS)
            {
                Some((_, _, ids)) => ids.push(id.clone()),
                None => receipts.push((path, author, vec![id.clone()])),
            }
        }
        for (path, author, ids) in receipts {
            let bytes = |id: &String| data_encoding::HEXLOWER.decode(id.as_bytes()).ok();
            let messages = ids.iter().filter_map(bytes).map(Value::Bytes).collect();
            // An author of ours shares this history: its receipt is what marks it.
            if !self.is_hosted(&author) {
                self.replica.mark_read(&path, ids, None, agent);
            }
            if author == agent {
                continue;
            }
            let params = Value::map([
                ("verb", Value::Text("room.read".into())),
                ("messages", Value::Array(messages)),
                ("at", Value::Uint(now.unix.0)),
            ]);
            let entry = self.entry(agent, path, params, None, now);
            if self.agent(&agent).is_some_and(|a| a.tokens.contains_key(&entry.path)) {
                self.send_entry(agent, author, entry, None, now);
            } else if self.is_hosted(&author) || self.directory.is_commsd(&author) {
                self.send_receipt_later(agent, author, entry, now);
            }
        }
    }

    /// Without a token of its own a reader cannot acknowledge (`rooms.md` 6.1): one that has agreed
    /// to a conversation and not yet written in it asks for one. A commsd has it open since it
    /// asked, and grants at once; a reference peer may have forgotten and would ask its user.
    fn send_receipt_later(&mut self, agent: DeviceId, author: DeviceId, entry: Queued, now: Now) {
        if entry.path.owner().is_some() {
            return;
        }
        let Some(held) = self.agent_mut(&agent) else { return };
        let asking = held.consents.get(&author).is_some_and(|consent| consent.asking);
        let owed = held.receipts.entry(author).or_default();
        let asked = asking || !owed.is_empty();
        if owed.len() < MAX_OWED_RECEIPTS {
            owed.push(entry);
        }
        if !asked {
            self.request_conversation(agent, author, now);
        }
    }

    /// The conversation was opened, or was not.
    pub(super) fn send_owed_receipts(&mut self, agent: DeviceId, author: DeviceId, now: Now) {
        let owed = self.agent_mut(&agent).and_then(|held| held.receipts.remove(&author));
        for entry in owed.unwrap_or_default() {
            if self.agent(&agent).is_some_and(|held| held.tokens.contains_key(&entry.path)) {
                self.send_entry(agent, author, entry, None, now);
            }
        }
    }

    // --- sending ------------------------------------------------------------------------------------

    pub(super) fn entry(
        &mut self,
        agent: DeviceId,
        path: RoomPath,
        params: Value,
        message_id: Option<String>,
        now: Now,
    ) -> Queued {
        let number = self.agent_mut(&agent).map_or(0, |held| held.outgoing.number());
        Queued {
            number,
            path,
            params,
            message_id,
            queued_at: now.unix,
            reason: "not_connected",
            kept: false,
        }
    }

    /// Sends a request to a member or participant, or queues it behind those that wait already.
    pub(super) fn send_entry(
        &mut self,
        agent: DeviceId,
        recipient: DeviceId,
        entry: Queued,
        op: Option<OpId>,
        now: Now,
    ) {
        let waiting = self.agent(&agent).is_some_and(|held| held.outgoing.is_waiting(&recipient));
        let message = MessageRequest { agent, recipient, entry, retry: false, op };
        if waiting {
            self.message_ended(message, Outcome::NotConnected, now);
        } else {
            self.issue(message, now);
        }
    }

    fn issue(&mut self, message: MessageRequest, now: Now) {
        let token = self
            .agent(&message.agent)
            .and_then(|held| held.tokens.get(&message.entry.path))
            .cloned();
        let Some(token) = token else {
            self.message_dropped(message, now);
            return;
        };
        let request = OutRequest {
            verb: "room:member".into(),
            params: message.entry.params.clone(),
            scope: Scope { kind: "room".into(), path: Some(message.entry.path.to_string()) },
            token: Some(token),
        };
        let (agent, recipient) = (message.agent, message.recipient);
        let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
        self.request(agent, recipient, request, Purpose::Message(Box::new(message)), deadline);
    }

    /// The permission to send is gone.
    fn message_dropped(&mut self, message: MessageRequest, now: Now) {
        let MessageRequest { agent, recipient, entry, retry, op } = message;
        if retry && let Some(held) = self.agent_mut(&agent) {
            held.outgoing.finish_retry(&recipient);
        }
        self.report(agent, recipient, &entry, DeliveryState::Dropped, op, true, now);
        self.flush(agent, recipient, now);
    }

    pub(super) fn message_ended(&mut self, message: MessageRequest, outcome: Outcome, now: Now) {
        let MessageRequest { agent, recipient, mut entry, retry, op } = message;
        if retry && let Some(held) = self.agent_mut(&agent) {
            held.outgoing.finish_retry(&recipient);
        }
        let reason = match &outcome {
            Outcome::Ok(_) => {
                self.report(agent, recipient, &entry, DeliveryState::Delivered, op, retry, now);
                if retry {
                    self.forget_copies(agent, recipient, &entry, now);
                    self.flush(agent, recipient, now);
                }
                return;
            }
            Outcome::Timeout => "timeout",
            Outcome::NotConnected => "not_connected",
            Outcome::ConnectionLost => "connection_lost",
            Outcome::Error { code, .. } if code == "timeout" => "timeout",
            Outcome::Error { code, .. } if code == "not_connected" || code == "no_route" => {
                "not_connected"
            }
            refused @ Outcome::Error { .. } => {
                let (code, message) = super::rooms::refusal(refused);
                let text = match message {
                    Some(message) => format!("{code}: {message}"),
                    None => code.clone(),
                };
                // A token that its issuer does not honour any more is worth nothing: the next
                // attempt asks again. (Not for a receipt, whose failing nobody hears of, nor where it
                // may have looked expired by our clock.)
                let tried = entry.message_id.is_some() && !self.doubts_clock(now);
                if code == "unauthorized" && tried && entry.path.is_issued_by(&recipient) {
                    self.give_up_token(agent, &entry.path);
                }
                let state = DeliveryState::Refused { code: text };
                self.report(agent, recipient, &entry, state, op, retry, now);
                if retry {
                    self.forget_copies(agent, recipient, &entry, now);
                    self.flush(agent, recipient, now);
                }
                return;
            }
        };
        if is_notice(&entry) {
            return;
        }
        entry.reason = reason;
        let state = DeliveryState::Queued { reason: reason.to_owned() };
        if !retry {
            self.report(agent, recipient, &entry, state, op, false, now);
            self.spread_copies(agent, recipient, &entry, now);
            self.keep_queued(agent, recipient, &mut entry, false);
        }
        let Some(held) = self.agent_mut(&agent) else {
            // Out of service meanwhile: what it leaves unsent is sent for it.
            self.leave_copies(agent, vec![(recipient, entry)], now);
            return;
        };
        if let Some(evicted) = held.outgoing.queue(recipient, entry) {
            self.report(agent, recipient, &evicted, DeliveryState::Dropped, None, true, now);
        }
    }

    /// Tells whoever wants to know: the open command, else (for what comes later) the agent.
    pub(super) fn report(
        &mut self,
        agent: DeviceId,
        recipient: DeviceId,
        entry: &Queued,
        state: DeliveryState,
        op: Option<OpId>,
        retry: bool,
        now: Now,
    ) {
        if entry.kept && !matches!(state, DeliveryState::Queued { .. }) {
            self.keep(Record::OutgoingDone { agent, number: entry.number });
        }
        let Some(message_id) = entry.message_id.clone() else { return };
        let event = |name| {
            LogEvent::new(name)
                .with("agent", agent)
                .with("recipient", recipient)
                .with("message", &message_id)
        };
        match &state {
            DeliveryState::Delivered | DeliveryState::Read => {
                self.log_traffic(|| event("message_delivered"));
            }
            DeliveryState::Queued { reason } => {
                self.log(event("message_queued").with("reason", reason));
            }
            DeliveryState::Refused { code } => {
                // The code is the peer's text: its first word is the code proper.
                let code = code.split(':').next().unwrap_or_default();
                self.log(event("message_refused").with("code", code));
            }
            DeliveryState::Dropped => self.log(event("message_dropped")),
            DeliveryState::Expired => self.log(event("message_expired")),
        }
        let told = op.is_some_and(|op| self.op_delivery(op, recipient, &state));
        let queued_again = retry && matches!(state, DeliveryState::Queued { .. });
        if !told && !queued_again {
            let room = entry.path.owner().map(|_| entry.path.to_string());
            self.show(
                agent,
                DeliveryEvent::DeliveryStatus {
                    message_id,
                    agent: recipient,
                    delivery: state,
                    room,
                },
                now,
            );
        }
    }

    /// Fills in one recipient's outcome of an open send. False when nobody waits for it any more.
    pub(super) fn op_delivery(
        &mut self,
        op: OpId,
        recipient: DeviceId,
        state: &DeliveryState,
    ) -> bool {
        let Some(Op::Send { deliveries, .. }) = self.ops.get_mut(&op) else { return false };
        for delivery in deliveries.iter_mut().filter(|d| d.agent == recipient) {
            delivery.state = Some(state.clone());
        }
        if deliveries.iter().all(|delivery| delivery.state.is_some()) {
            self.reply_send(op);
        }
        true
    }

    pub(super) fn reply_send(&mut self, op: OpId) {
        if let Some(Op::Send { message_id, deliveries, .. }) = self.ops.remove(&op) {
            self.outputs.push_back(Output::Reply {
                op,
                result: Ok(super::CommandResult::Sent { message_id, deliveries }),
            });
        }
    }

    /// Retries what waits for a recipient, one after another.
    pub(super) fn flush(&mut self, agent: DeviceId, recipient: DeviceId, now: Now) {
        if !self.can_reach(&agent, &recipient) {
            return;
        }
        let Some(held) = self.agent_mut(&agent) else { return };
        if let Some(entry) = held.outgoing.start_retry(&recipient) {
            self.issue(MessageRequest { agent, recipient, entry, retry: true, op: None }, now);
        }
    }

    fn can_reach(&self, local: &DeviceId, remote: &DeviceId) -> bool {
        self.agent(remote).is_some()
            || self.route(local, remote).is_some()
            || self.relay_for(remote).is_some()
    }

    /// A way from one of our devices to a peer has opened.
    pub(super) fn peer_returned(&mut self, local: DeviceId, remote: DeviceId, now: Now) {
        self.way_opened(local, remote);
        if self.agent(&local).is_some() {
            self.flush(local, remote, now);
            self.ask_again(local, remote, now);
        }
        self.schedule_hand_over(remote, now);
    }

    /// One of our agents came (back) into service: ours have things for it, and it for ours.
    pub(super) fn agent_returned(&mut self, agent: DeviceId, now: Now) {
        for other in self.agent_ids() {
            if other != agent {
                self.flush(other, agent, now);
                self.ask_again(other, agent, now);
                self.flush(agent, other, now);
                self.ask_again(agent, other, now);
            }
        }
        let remotes: Vec<DeviceId> = self
            .agent(&agent)
            .map(|held| held.outgoing.recipients().copied().collect())
            .unwrap_or_default();
        for remote in remotes {
            self.flush(agent, remote, now);
        }
        self.schedule_hand_over(agent, now);
    }

    pub(super) fn delivery_upkeep(&mut self, now: Now) {
        for agent in self.agent_ids() {
            let expired = self
                .agent_mut(&agent)
                .map(|held| held.outgoing.expire(now.unix))
                .unwrap_or_default();
            for (recipient, entry) in expired {
                self.report(agent, recipient, &entry, DeliveryState::Expired, None, true, now);
            }
            // A session that stays open while an earlier attempt timed out gets another one.
            let waiting: Vec<DeviceId> = self
                .agent(&agent)
                .map(|held| held.outgoing.recipients().copied().collect())
                .unwrap_or_default();
            if now.mono >= self.retry_at {
                for recipient in waiting {
                    self.flush(agent, recipient, now);
                }
                let unasked: Vec<DeviceId> = self
                    .agent(&agent)
                    .map(|held| held.consents.keys().copied().collect())
                    .unwrap_or_default();
                for recipient in unasked {
                    if self.can_reach(&agent, &recipient) {
                        self.ask_again(agent, recipient, now);
                    }
                }
            }
            self.expire_consents(agent, now);
        }
        if now.mono >= self.retry_at {
            self.retry_at = now.mono + super::RETRY_EVERY_MS;
            // What its author delivered is released; what is still here when the recipient is as
            // well was not, or we have not heard of it.
            let here: Vec<DeviceId> =
                self.copies.recipients().filter(|id| self.is_reachable(id)).copied().collect();
            for recipient in here {
                self.schedule_hand_over(recipient, now);
            }
        }
        for (recipient, (author, message)) in self.copies.expire(now.unix) {
            self.keep(Record::CopyDone { recipient, author, message });
        }
        let due: Vec<(DeviceId, u64)> = self
            .hand_overs
            .iter()
            .filter(|(_, turn)| turn.at <= now.mono)
            .map(|(recipient, turn)| (*recipient, turn.author_until))
            .collect();
        for (recipient, author_until) in due {
            self.hand_overs.remove(&recipient);
            self.hand_over(recipient, author_until, now);
        }
    }

    /// Whether anything waits for this device.
    pub(super) fn is_awaited(&self, device: &DeviceId) -> bool {
        self.devices
            .values()
            .filter_map(|d| d.agent.as_ref())
            .any(|agent| agent.outgoing.is_waiting(device) || agent.consents.contains_key(device))
            || self.copies.recipients().any(|recipient| recipient == device)
    }

    // --- copies for the absent (decision 2) -----------------------------------------------------------

    /// The daemons of our own user that hold copies: each commsd once, by its own device.
    fn holders(&self) -> Vec<DeviceId> {
        let mut holders: Vec<DeviceId> = self
            .sessions
            .values()
            .filter(|s| {
                s.may_hold_copies()
                    && self.directory.get(&s.remote).and_then(|entry| entry.daemon)
                        == Some(s.remote)
            })
            .map(|s| s.remote)
            .collect();
        holders.sort_unstable();
        holders.dedup();
        holders
    }

    fn event_of(agent: DeviceId, recipient: DeviceId, entry: &Queued) -> Option<DeliveryEvent> {
        super::rooms::message_event(agent, recipient, &entry.path, &entry.params)
    }

    /// Asks the other daemons to hold a queued message.
    fn spread_copies(&mut self, agent: DeviceId, recipient: DeviceId, entry: &Queued, now: Now) {
        let Some(event) = Self::event_of(agent, recipient, entry) else { return };
        let message =
            MeshMessage::StateUpdate(Box::new(Patch::Delivery { agent_id: recipient, event }));
        for holder in self.holders() {
            // From the author's own device: nobody else may ask for it.
            if let Some(session) = self.route(&agent, &holder) {
                self.tell(session, &message, now);
            }
        }
    }

    /// Delivered or refused: nobody need hold it any longer.
    fn forget_copies(&mut self, agent: DeviceId, recipient: DeviceId, entry: &Queued, now: Now) {
        if let Some(id) = &entry.message_id {
            self.tell_released(recipient, vec![(agent, id.clone())], now);
        }
    }

    fn tell_released(&mut self, recipient: DeviceId, messages: Vec<(DeviceId, String)>, now: Now) {
        let message = MeshMessage::Release { agent: recipient, messages };
        for holder in self.holders() {
            if let Some(session) = self.route(&self.daemon, &holder) {
                self.tell(session, &message, now);
            }
        }
    }

    pub(super) fn released(
        &mut self,
        session: SessionId,
        recipient: DeviceId,
        messages: Vec<(DeviceId, String)>,
        now: Now,
    ) {
        if !self.sessions.get(&session).is_some_and(Session::is_same_user) {
            return;
        }
        for key in messages {
            if self.copies.release(&recipient, &key).is_some() {
                let (author, message) = key.clone();
                self.keep(Record::CopyDone { recipient, author, message });
            }
            // A holder was faster than we, who had no way to the recipient.
            if let Some(held) = self.agent_mut(&key.0)
                && let Some(entry) = held.outgoing.take_message(&recipient, &key.1)
            {
                let state = DeliveryState::Delivered;
                self.report(key.0, recipient, &entry, state, None, true, now);
            }
            if let Some(queue) = self.own_queues.get_mut(&recipient) {
                queue.retain(|event| event.message_key().as_ref() != Some(&key));
            }
        }
    }

    /// The recipient of held copies is here. Each daemon waits its turn.
    pub(super) fn schedule_hand_over(&mut self, recipient: DeviceId, now: Now) {
        if self.copies.for_recipient(&recipient).is_empty() {
            return;
        }
        let rank = self.holders().iter().filter(|holder| **holder < self.daemon).count() as u64;
        let at = now.mono + HAND_OVER_FIRST_MS + rank * HAND_OVER_STEP_MS;
        let turn = HandOver { at, author_until: at + AUTHOR_FIRST_MS };
        self.hand_overs.entry(recipient).or_insert(turn);
    }

    fn hand_over(&mut self, recipient: DeviceId, author_until: u64, now: Now) {
        for (key, copy) in self.copies.for_recipient(&recipient) {
            // Its author is here and retries by itself. (What an agent of ours left unsent is with
            // us alone.)
            let author = self.is_reachable(&key.0) && !self.is_hosted(&key.0);
            if author && now.mono < author_until {
                let turn = HandOver { at: author_until, author_until };
                self.hand_overs.entry(recipient).or_insert(turn);
                continue;
            }
            if self.agent(&recipient).is_some() {
                let outcome = if !self.may_receive_from_copy(recipient, &copy.event) {
                    error(NOT_PERMITTED)
                } else if let Answer::Now(refused) =
                    self.take_copy(recipient, copy.event, None, now)
                {
                    refused
                } else {
                    ok()
                };
                self.hand_over_ended(recipient, &key, &outcome, now);
                continue;
            }
            if self.route(&self.daemon, &recipient).is_none() {
                return;
            }
            let message = MeshMessage::StateUpdate(Box::new(Patch::Delivery {
                agent_id: recipient,
                event: copy.event,
            }));
            let request = Self::frame_request(&message);
            let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
            let purpose = Purpose::HandOver { recipient, key };
            self.request(self.daemon, recipient, request, purpose, deadline);
        }
    }

    pub(super) fn hand_over_ended(
        &mut self,
        recipient: DeviceId,
        key: &(DeviceId, String),
        outcome: &Outcome,
        now: Now,
    ) {
        let done = match outcome {
            Outcome::Ok(_) => Some(DeliveryState::Delivered),
            // Just back, it may not know yet that it is in the room; after some attempts it means
            // what it says.
            Outcome::Error { code, .. } if code == NOT_PERMITTED => self
                .copies
                .refused(&recipient, key)
                .then(|| DeliveryState::Refused { code: code.clone() }),
            _ => None,
        };
        match done {
            Some(state) => self.copy_done(recipient, key, state, now),
            None => {
                let at = now.mono + HAND_OVER_AGAIN_MS;
                let turn = HandOver { at, author_until: at };
                self.hand_overs.entry(recipient).or_insert(turn);
            }
        }
    }

    fn copy_done(
        &mut self,
        recipient: DeviceId,
        key: &(DeviceId, String),
        state: DeliveryState,
        now: Now,
    ) {
        let Some(copy) = self.copies.release(&recipient, key) else { return };
        let (author, message) = key.clone();
        if state == DeliveryState::Delivered {
            self.log(
                LogEvent::new("copy_handed_over")
                    .with("recipient", recipient)
                    .with("author", author)
                    .with("message", &message),
            );
            self.tell_released(recipient, vec![key.clone()], now);
        }
        self.keep(Record::CopyDone { recipient, author, message: message.clone() });
        // An author of ours, which had left it with us; it reads its mailbox when it is back.
        if self.is_ours(&author) {
            let room = match copy.event {
                DeliveryEvent::RoomMessage { message } => Some(message.room),
                _ => None,
            };
            let event = DeliveryEvent::DeliveryStatus {
                message_id: message,
                agent: recipient,
                delivery: state,
                room,
            };
            self.show(author, event, now);
        }
    }

    /// Shows an agent a message that came by a third party, once. `to` is answered when it is
    /// stored.
    pub(super) fn take_copy(
        &mut self,
        agent: DeviceId,
        event: DeliveryEvent,
        to: Option<AnswerTo>,
        now: Now,
    ) -> Answer {
        if let Some(key) = event.message_key()
            && self.agent(&agent).is_some_and(|held| held.mailbox.has_seen(&key))
        {
            return to.map_or(Answer::Later, |to| self.repeated(agent, &key, to));
        }
        self.remember(&event);
        match self.push_event(agent, event, to, now) {
            Ok(_) => Answer::Later,
            Err(_) => Answer::Now(error("mailbox_full")),
        }
    }

    /// Puts a message into its history.
    pub(super) fn remember(&mut self, event: &DeliveryEvent) {
        let now = self.last_now.unwrap_or_default().unix;
        match event {
            DeliveryEvent::RoomMessage { message } => {
                if let Ok(path) = RoomPath::parse(&message.room)
                    && let Some(history) = self.replica.room_history_mut(&path)
                {
                    history.add(message.clone(), now);
                }
            }
            DeliveryEvent::Dm { message } => {
                if let Some(path) = RoomPath::dm(message.from, message.to)
                    && let Some(history) = self.replica.dm_history_mut(&path)
                {
                    history.add(message.clone(), now);
                }
            }
            _ => {}
        }
    }

    /// Messages that one of our agents leaves unsent when it goes out of service become copies
    /// here, so that their recipients get them all the same.
    pub(super) fn leave_copies(
        &mut self,
        agent: DeviceId,
        queued: Vec<(DeviceId, Queued)>,
        now: Now,
    ) {
        for (recipient, entry) in queued {
            self.keep(Record::OutgoingDone { agent, number: entry.number });
            if let Some(event) = Self::event_of(agent, recipient, &entry)
                && let Some((author, message)) = event.message_key()
            {
                let (bytes, since) = (event_bytes(&event), entry.queued_at);
                if self.copies.hold(recipient, event, since) {
                    self.keep(Record::Copy { recipient, author, message, event: bytes, since });
                }
            }
            if self.is_reachable(&recipient) {
                self.schedule_hand_over(recipient, now);
            }
        }
    }
}

/// News that is not worth keeping for an absent member.
fn is_notice(entry: &Queued) -> bool {
    entry.params.get("verb").and_then(Value::as_text) == Some("room.notify")
}
