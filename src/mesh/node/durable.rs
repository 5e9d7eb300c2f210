//! What outlives a crash beside the mailboxes: which changes the store is asked to keep at the end
//! of each input, the answers that wait for it, and the way back (`architecture.md`, Durability).
//!
//! Small changes are noted where they happen ([`Node::keep`]); records of agents and rooms and the
//! histories are compared as a whole by what they have noted as changed. A batch that the store
//! could not keep is not repeated: what it was about is written anew from what holds by then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::delivery::{Mailbox, Queued, RUN_SEQ_STEP, event_bytes};
use super::super::events::{DeliveryEvent, DeliveryState};
use super::super::journal::{Record, Ticket};
use super::super::log::LogEvent;
use super::super::message::{MeshMessage, Patch};
use super::super::records::{
    AgentRecord, AgentStatus, ConsentPolicy, DmMessage, MAX_VERSION, Now, RoomMessage, RoomRecord,
};
use super::super::replica::{HistoryChange, HistoryLimits, RESTORED_VERSION_STEP};
use super::super::session::{APPROVAL_WINDOW_MS, Session};
use super::super::wire::cose::CoseSign1;
use super::super::wire::revocation::RevocationEntry;
use super::super::wire::room_path::RoomPath;
use super::services::{Sought, sought_record};
use super::{Agent, CommandError, CommandResult, Decision, Node, OpId, Output, Purpose, TokenKey};
use crate::codec::cbor::{self, Value};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Pause after a failure of the store before what it concerned is written anew.
const AGAIN_MS: u64 = 1_000;
/// How long an answer waits for the store.
const HOLD_MS: u64 = 5_000;
/// Pause between writes of who has read what, which changes often and matters least.
const READERS_EVERY_MS: u64 = 5_000;
/// How long messages of an agent that has not come back after a restart wait for it before they
/// are sent without it.
const LEAVE_AFTER_MS: u64 = 60_000;
/// Agents that nothing waits for and that are in no room, and that come back into service all the
/// same: a script may have made a new one with every run.
const MAX_IDLE_RESTORED: usize = 256;

/// What is stored, and what waits for it.
#[derive(Default)]
pub(super) struct Durable {
    /// Whether anything outlives the process.
    on: bool,
    /// Runs with this store before this one.
    runs: u64,
    pending: Vec<Record>,
    /// Agents whose record has changed.
    agents: BTreeSet<DeviceId>,
    /// Agents of which everything has to be written anew.
    anew: BTreeSet<DeviceId>,
    /// Shares of which everything has to be written anew.
    shares: BTreeSet<String>,
    /// Other things that have to be written anew, as records that may be repeated.
    owed: Vec<Record>,
    again_at: u64,
    readers_at: u64,
    leave_at: Option<u64>,
    /// Rooms that are stored.
    rooms: BTreeSet<RoomPath>,
    /// Rooms of others as they were before the restart: their owners have yet to hear of it.
    unconfirmed: BTreeSet<RoomPath>,
    outstanding: BTreeSet<Ticket>,
    held: BTreeMap<Ticket, Vec<Held>>,
    /// Answers that wait until what failed has been written anew.
    unsettled: Vec<Held>,
    /// Changes of identity files that are under way.
    saving: BTreeSet<Ticket>,
    /// Answers that wait for one of them.
    unsaved: BTreeMap<Ticket, Vec<Held>>,
    released: Vec<Output>,
}

impl Durable {
    /// Whether anything outlives the process.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    fn is_unsettled(&self) -> bool {
        !self.anew.is_empty() || !self.owed.is_empty() || !self.shares.is_empty()
    }
}

/// An answer that waits for the store.
struct Held {
    op: OpId,
    result: CommandResult,
    until: u64,
    /// The identity file that it waits for as well.
    saving: Option<Ticket>,
}

fn waits_for_the_store(result: &CommandResult) -> bool {
    match result {
        CommandResult::Sent { deliveries, .. } => {
            deliveries.iter().any(|d| matches!(d.state, None | Some(DeliveryState::Queued { .. })))
        }
        CommandResult::Served(_)
        | CommandResult::Refused { .. }
        | CommandResult::Discovered(_)
        | CommandResult::Advertised(_)
        | CommandResult::Withdrawn(_) => false,
        _ => true,
    }
}

fn not_stored() -> CommandError {
    CommandError::new(
        "store_failed",
        "it is done, but it could not be stored yet: a crash would undo it",
    )
}

/// Stored records that do not fit together. The store is then as good as damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stored {what} cannot be read: it was written by another version, or is damaged")]
pub struct RecoverError {
    /// What kind of record.
    pub what: &'static str,
}

/// An agent that can come back into service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restorable {
    /// Who.
    pub agent: DeviceId,
    /// Harness of its slot.
    pub harness: String,
    /// Directory or name behind its slot.
    pub key: String,
    /// Working directory.
    pub cwd: String,
}

impl Node {
    /// What is kept of histories; to be said before anything is restored.
    pub fn limit_histories(&mut self, limits: HistoryLimits) {
        self.replica.limit_histories(limits);
    }

    // --- out ----------------------------------------------------------------------------------------

    /// Has a change stored with the others of this input. Of an agent whose key ends with its
    /// service nothing is.
    pub(super) fn keep(&mut self, record: Record) {
        let passing = record.agent().and_then(|id| self.agent(&id)).is_some_and(|a| a.ephemeral);
        if self.durable.on && !passing {
            self.durable.pending.push(record);
        }
    }

    /// The record of an agent of ours has changed.
    pub(super) fn keep_agent(&mut self, agent: DeviceId) {
        if self.durable.on {
            self.durable.agents.insert(agent);
        }
    }

    /// Has an agent written anew, for a change that no record says by itself.
    pub(super) fn keep_everything_of(&mut self, agent: DeviceId) {
        if self.durable.on {
            self.durable.anew.insert(agent);
        }
    }

    /// Has a message stored that waits for its recipient.
    pub(super) fn keep_queued(
        &mut self,
        agent: DeviceId,
        recipient: DeviceId,
        entry: &mut Queued,
        asks: bool,
    ) {
        entry.kept = true;
        self.keep(outgoing(agent, recipient, entry, asks));
    }

    /// Messages of a send that is answered before all its recipients are: they are promised from
    /// here on.
    pub(super) fn keep_under_way(&mut self, op: OpId) {
        let purposes = self.sessions.values_mut().flat_map(Session::open_purposes_mut);
        let internal = self.internal_open.values_mut().map(|(_, _, purpose, _)| purpose);
        let mut promised = Vec::new();
        for purpose in purposes.chain(internal) {
            if let Purpose::Message(message) = purpose
                && message.op == Some(op)
                && !std::mem::replace(&mut message.entry.kept, true)
            {
                promised.push(outgoing(message.agent, message.recipient, &message.entry, false));
            }
        }
        for record in promised {
            self.keep(record);
        }
    }

    /// What a mailbox has let go of need not be stored any longer.
    pub(super) fn keep_losses(&mut self, agent: DeviceId) {
        let Some(held) = self.kept_agent_mut(&agent) else { return };
        let losses = held.mailbox.take_losses();
        for seq in losses.events {
            self.keep(Record::Withdrawn { agent, seq });
        }
        if let Some(up_to) = losses.unseen {
            self.keep(Record::Unseen { agent, up_to });
        }
    }

    /// At the end of every input: asks for everything that has changed to be stored, and holds
    /// back answers that must not be undone by a crash.
    pub(super) fn keep_changes(&mut self, now: Now) {
        let readers = self.durable.readers_at <= now.mono;
        let rooms = self.replica.take_changed_rooms();
        let driven_out = self.revocations.take_driven_out();
        if !self.durable.on {
            self.replica.skip_changed_histories();
            return;
        }
        if readers {
            self.durable.readers_at = now.mono + READERS_EVERY_MS;
        }
        let mut records = std::mem::take(&mut self.durable.pending);
        for agent in std::mem::take(&mut self.durable.agents) {
            records.extend(self.agent_record(&agent));
        }
        for path in rooms {
            self.push_room(path, &mut records);
        }
        for change in self.changed_histories(readers) {
            let path = change.path.to_string();
            if let Some(up_to) = change.gone_up_to {
                records.push(Record::MessagesGone { path: path.clone(), up_to });
            }
            records.extend(change.messages.into_iter().map(|(seq, at, message)| Record::Message {
                path: path.clone(),
                seq,
                at,
                message,
            }));
        }
        records.extend(
            driven_out.into_iter().map(|(token, issuer)| Record::RevocationGone { token, issuer }),
        );
        let settles = self.durable.is_unsettled() && self.durable.again_at <= now.mono;
        if settles {
            for agent in std::mem::take(&mut self.durable.anew) {
                records.extend(self.everything_of(agent));
            }
            for name in std::mem::take(&mut self.durable.shares) {
                records.extend(self.everything_of_share(&name));
            }
            records.append(&mut self.durable.owed);
        }
        if !records.is_empty() {
            let ticket = Ticket(self.id());
            self.durable.outstanding.insert(ticket);
            self.outputs.push_back(Output::Commit { ticket, records });
            if settles {
                // Whatever was said of these since they failed is certain with this batch.
                let mut waiting = std::mem::take(&mut self.durable.unsettled);
                let held = std::mem::take(&mut self.durable.held);
                waiting.extend(held.into_values().flatten());
                self.durable.held.insert(ticket, waiting);
            }
        }
        self.hold_answers(now);
        self.outputs.extend(std::mem::take(&mut self.durable.released));
    }

    /// What an agent is told is never undone by a crash: answers that say that something was done,
    /// or that a message waits here, wait for the store. One that says that a message has arrived
    /// does not.
    fn hold_answers(&mut self, now: Now) {
        let newest = self.durable.outstanding.last().copied();
        let saving = self.durable.saving.last().copied();
        if newest.is_none() && saving.is_none() && !self.durable.is_unsettled() {
            return;
        }
        let waits = |output: &Output| match output {
            Output::Reply { result: Ok(result), .. } => waits_for_the_store(result),
            _ => false,
        };
        if !self.outputs.iter().any(waits) {
            return;
        }
        let (held, others) = std::mem::take(&mut self.outputs).into_iter().partition(waits);
        self.outputs = others;
        let until = now.mono + HOLD_MS;
        let held: VecDeque<Output> = held;
        let held = held.into_iter().filter_map(|output| match output {
            Output::Reply { op, result: Ok(result) } => Some(Held { op, result, until, saving }),
            _ => None,
        });
        let held: Vec<Held> = held.collect();
        match newest {
            _ if self.durable.is_unsettled() => self.durable.unsettled.extend(held),
            Some(ticket) => self.durable.held.entry(ticket).or_default().extend(held),
            None => self.release(held),
        }
    }

    /// What answers waited for is stored; some wait for an identity file as well.
    fn release(&mut self, held: Vec<Held>) {
        for held in held {
            match held.saving.filter(|ticket| self.durable.saving.contains(ticket)) {
                Some(ticket) => self.durable.unsaved.entry(ticket).or_default().push(held),
                None => {
                    let reply = Output::Reply { op: held.op, result: Ok(held.result) };
                    self.durable.released.push(reply);
                }
            }
        }
    }

    /// A change of an identity file is under way.
    pub(super) fn save_begun(&mut self, ticket: Ticket) {
        if self.durable.on {
            self.durable.saving.insert(ticket);
        }
    }

    /// It is on disk, or has failed and been reported.
    pub(super) fn save_ended(&mut self, ticket: Ticket) {
        self.durable.saving.remove(&ticket);
        let held = self.durable.unsaved.remove(&ticket).unwrap_or_default();
        self.release(held);
    }

    /// A batch of changes is stored, or is not. True when the ticket was one of these.
    pub(super) fn changes_kept(&mut self, ticket: Ticket, done: bool) -> bool {
        if !self.durable.outstanding.remove(&ticket) {
            return false;
        }
        let held = self.durable.held.remove(&ticket).unwrap_or_default();
        if done && !self.durable.is_unsettled() {
            self.release(held);
        } else {
            // Nothing is certain until what a failure concerned has been written anew.
            self.durable.unsettled.extend(held);
        }
        true
    }

    /// A store that does not answer keeps nobody waiting for ever.
    fn release_held(&mut self, now: Now) {
        let durable = &mut self.durable;
        let waiting = durable.held.values_mut().chain(durable.unsaved.values_mut());
        let waiting = waiting.chain([&mut durable.unsettled]);
        for held in waiting {
            for late in held.extract_if(.., |held| held.until <= now.mono) {
                let reply = Output::Reply { op: late.op, result: Err(not_stored()) };
                durable.released.push(reply);
            }
        }
    }

    /// The store gave a batch back: what it was about is written anew a little later.
    pub(super) fn write_anew(&mut self, records: Vec<Record>, now: Now) {
        if !self.durable.on {
            return;
        }
        if self.durable.again_at <= now.mono {
            self.log(LogEvent::new("changes_not_stored").with("records", records.len()));
        }
        self.durable.again_at = now.mono + AGAIN_MS;
        for record in records {
            if let Some(agent) = record.agent() {
                self.durable.anew.insert(agent);
                continue;
            }
            match record {
                Record::Room { path, .. } | Record::RoomGone { path } => {
                    if let Ok(path) = RoomPath::parse(&path) {
                        self.durable.rooms.insert(path.clone());
                        self.replica.note_room_changed(path);
                    }
                }
                Record::Message { path, .. } | Record::MessagesGone { path, .. } => {
                    if let Ok(path) = RoomPath::parse(&path) {
                        self.replica.store_history_again(&path);
                    }
                }
                Record::Copy { recipient, author, message, .. }
                | Record::CopyDone { recipient, author, message } => {
                    let key = (author, message);
                    let owed = self.copy_record(recipient, key);
                    self.durable.owed.push(owed);
                }
                Record::Share { name, .. }
                | Record::ShareGone { name }
                | Record::ShareGrant { name, .. }
                | Record::ShareGrantGone { name, .. } => {
                    self.durable.shares.insert(name);
                }
                Record::MeshVisibility { .. } => {
                    // As it is now; an older one would undo what was said since.
                    let owed = self.mesh_visibility_record();
                    self.durable.owed.push(owed);
                }
                other => self.durable.owed.push(other),
            }
        }
    }

    fn copy_record(&self, recipient: DeviceId, (author, message): (DeviceId, String)) -> Record {
        let key = (author, message.clone());
        match self.copies.iter().find(|(held_for, k, _)| **held_for == recipient && **k == key) {
            Some((_, _, copy)) => Record::Copy {
                recipient,
                author,
                message,
                event: event_bytes(&copy.event),
                since: copy.since,
            },
            None => Record::CopyDone { recipient, author, message },
        }
    }

    fn agent_record(&self, agent: &DeviceId) -> Option<Record> {
        let held = self.kept_agent(agent)?;
        // Away while its daemon is: what it said of itself is what it comes back with.
        let record = AgentRecord { status: held.presence, ..self.record(agent)?.clone() };
        let record = cbor::to_value(&record).ok()?.encode();
        (!held.ephemeral).then(|| Record::Agent { agent: *agent, key: held.key.clone(), record })
    }

    /// What the store needs of a room: its record and history while it concerns one of ours that
    /// outlives the process.
    fn push_room(&mut self, path: RoomPath, records: &mut Vec<Record>) {
        let kept = self.replica.room(&path).filter(|room| {
            [&room.members, &room.invited]
                .into_iter()
                .flatten()
                .chain([&room.owner])
                .any(|agent| self.kept_agent(agent).is_some_and(|held| !held.ephemeral))
        });
        let name = path.to_string();
        match kept.and_then(|room| cbor::to_value(room).ok()) {
            Some(record) => {
                let put_out = self.replica.put_out(&path);
                records.push(Record::Room { path: name, record: record.encode(), put_out });
                if !self.durable.rooms.contains(&path) {
                    self.replica.store_history_again(&path);
                    self.durable.rooms.insert(path);
                }
            }
            None if self.durable.rooms.remove(&path) => {
                records.push(Record::RoomGone { path: name.clone() });
                records.push(Record::MessagesGone { path: name, up_to: u64::MAX });
            }
            None => {}
        }
    }

    /// Changes of histories that are stored: those of stored rooms, and of conversations of an agent
    /// that outlives the process.
    fn changed_histories(&mut self, readers: bool) -> Vec<HistoryChange> {
        let (devices, parked, rooms) = (&self.devices, &self.parked, &self.durable.rooms);
        let lasts = |id: DeviceId| {
            let held = devices.get(&id).and_then(|device| device.agent.as_ref());
            held.or_else(|| parked.get(&id)).is_some_and(|held| !held.ephemeral)
        };
        self.replica.take_changed_histories(readers, |path| match path.participants() {
            Some((a, b)) => lasts(a) || lasts(b),
            None => rooms.contains(path),
        })
    }

    fn kept_agent(&self, id: &DeviceId) -> Option<&Agent> {
        self.agent(id).or_else(|| self.parked.get(id))
    }

    /// Everything of an agent, in place of whatever is stored of it.
    fn everything_of(&self, agent: DeviceId) -> Vec<Record> {
        let mut records = vec![Record::AgentGone { agent }];
        let Some(held) = self.kept_agent(&agent).filter(|held| !held.ephemeral) else {
            return records;
        };
        records.extend(self.agent_record(&agent));
        records.push(Record::Acknowledged { agent, seq: held.mailbox.acknowledged() });
        records.extend(held.mailbox.seen().map(|(seq, (author, message))| Record::Seen {
            agent,
            seq: *seq,
            author: *author,
            message: message.clone(),
        }));
        records.extend(held.mailbox.after(0).map(|numbered| Record::Mailbox {
            agent,
            seq: numbered.seq,
            at: numbered.at,
            event: event_bytes(&numbered.event),
        }));
        for (recipient, entry) in held.outgoing.iter() {
            records.push(outgoing(agent, *recipient, entry, false));
        }
        // Those that are just being sent are in no queue.
        let purposes = self.sessions.values().flat_map(Session::open_purposes);
        let internal = self.internal_open.values().map(|(_, _, purpose, _)| purpose);
        for purpose in purposes.chain(internal) {
            if let Purpose::Message(message) = purpose
                && message.agent == agent
                && message.entry.kept
            {
                records.push(outgoing(agent, message.recipient, &message.entry, false));
            }
        }
        for (recipient, consent) in &held.consents {
            for (entry, _) in &consent.held {
                records.push(outgoing(agent, *recipient, entry, true));
            }
        }
        let path = |path: &RoomPath| path.to_string();
        records.extend(held.opened.iter().map(|p| Record::Opened { agent, path: path(p) }));
        records.extend(held.consent.map(|policy| Record::Consent { agent, policy }));
        records.extend(held.invitations.iter().map(|p| Record::Invited { agent, path: path(p) }));
        records.extend(held.decisions.values().filter_map(|decision| asked(agent, decision)));
        records.extend(held.asked.iter().map(|(key, sought)| sought_record(agent, key, sought)));
        records
    }

    /// Rounds of upkeep.
    pub(super) fn durable_upkeep(&mut self, now: Now) {
        self.release_held(now);
        self.confirm_rooms(now);
        if !self.doubts_clock(now) {
            self.replica.trim_histories(now.unix);
        }
        if self.durable.leave_at.is_some_and(|at| at <= now.mono) {
            self.durable.leave_at = None;
            // Whoever has not come back by now may never do; what it had queued is sent for it.
            let left: Vec<DeviceId> = self.parked.keys().copied().collect();
            for agent in left {
                let Some(held) = self.parked.get_mut(&agent) else { continue };
                let queued: Vec<_> =
                    held.outgoing.iter().map(|(to, entry)| (*to, entry.clone())).collect();
                held.outgoing.clear();
                self.leave_copies(agent, queued, now);
            }
        }
    }

    /// Tells owners what we remember of their rooms: what has changed, or ended, meanwhile they
    /// tell us in return. (A reference owner would take a room back that it has destroyed.)
    fn confirm_rooms(&mut self, now: Now) {
        let mut told = Vec::new();
        for path in &self.durable.unconfirmed {
            let Some(room) = self.replica.room(path) else {
                told.push((path.clone(), None));
                continue;
            };
            if !self.directory.is_commsd(&room.owner) {
                continue;
            }
            let members = room.members.iter().filter(|member| self.is_hosted(member));
            let speakers = members.copied().chain([self.daemon]);
            let session = speakers.filter_map(|device| self.route(&device, &room.owner)).next();
            if let Some(session) = session {
                told.push((path.clone(), Some((session, room.clone()))));
            }
        }
        for (path, statement) in told {
            self.durable.unconfirmed.remove(&path);
            if let Some((session, room)) = statement {
                let patch = Patch::RoomUpsert { room };
                self.tell(session, &MeshMessage::StateUpdate(Box::new(patch)), now);
            }
        }
    }

    // --- the way back ---------------------------------------------------------------------------------

    /// Takes back what was stored, as [`crate::store::Store::live`] returns it, before the first
    /// input; from then on everything is stored. Agents are out of service until their devices are
    /// added.
    ///
    /// # Errors
    /// [`RecoverError`] when a record cannot be read.
    pub fn recover(&mut self, records: Vec<Record>, now: Now) -> Result<(), RecoverError> {
        self.durable.on = true;
        let mut agents: BTreeMap<DeviceId, Stored> = BTreeMap::new();
        let (mut rooms, mut messages) = (0_u64, 0_u64);
        for record in records {
            match record {
                Record::Start { number } => self.durable.runs = number.saturating_sub(1),
                Record::Agent { agent, key, record } => {
                    let mut record: AgentRecord = read(&record, "agent")?;
                    // Above everything announced before, stored or not (decision 6).
                    record.version = self.version_floor().max(record.version) + 1;
                    let presence = std::mem::replace(&mut record.status, AgentStatus::Offline);
                    self.replica.put_own_agent(record);
                    let stored = agents.entry(agent).or_default();
                    (stored.key, stored.presence) = (key, Some(presence));
                    self.durable.agents.insert(agent);
                }
                Record::Acknowledged { agent, seq } => {
                    agents.entry(agent).or_default().acknowledged = seq;
                }
                Record::Seen { agent, seq, author, message } => {
                    agents.entry(agent).or_default().seen.push((seq, (author, message)));
                }
                Record::Mailbox { agent, seq, at, event } => {
                    let event: DeliveryEvent = read(&event, "event")?;
                    // Whoever asked has no session with us any more: it asks again.
                    if !matches!(
                        event,
                        DeliveryEvent::ConnectionRequest { .. }
                            | DeliveryEvent::CapabilityRequest { .. }
                    ) {
                        agents.entry(agent).or_default().mail.push((seq, at, event));
                    }
                }
                Record::Outgoing { agent, recipient, number, path, params, queued_at, asks } => {
                    let entry = queued(number, &path, &params, queued_at)?;
                    agents.entry(agent).or_default().outgoing.push((recipient, entry, asks));
                }
                Record::Opened { agent, path } => {
                    agents.entry(agent).or_default().opened.insert(parse(&path)?);
                }
                Record::Consent { agent, policy } => {
                    agents.entry(agent).or_default().consent = Some(policy);
                }
                Record::Invited { agent, path } => {
                    agents.entry(agent).or_default().invitations.insert(parse(&path)?);
                }
                Record::Asked { agent, id, path, requester, at } => {
                    let decision = decision(id, parse(&path)?, requester, at, now);
                    agents.entry(agent).or_default().decisions.push(decision);
                }
                Record::Copy { recipient, event, since, .. } => {
                    self.copies.hold(recipient, read(&event, "copy")?, since);
                }
                Record::Room { path, record, put_out } => {
                    let record: RoomRecord = read(&record, "room")?;
                    let path = parse(&path)?;
                    self.durable.rooms.insert(path.clone());
                    let ours = agents.contains_key(&record.owner);
                    if !ours {
                        self.durable.unconfirmed.insert(path.clone());
                    }
                    self.replica.restore_room(path, record, put_out, ours);
                    rooms += 1;
                }
                Record::Message { path, seq, at, message } => {
                    let path = parse(&path)?;
                    if path.owner().is_some() {
                        let message: RoomMessage = read(&message, "message")?;
                        self.replica.restore_room_message(&path, seq, at, message);
                    } else {
                        let message: DmMessage = read(&message, "message")?;
                        self.replica.restore_dm(&path, seq, at, message);
                    }
                    messages += 1;
                }
                Record::Revocation { source, entry, .. } => {
                    let entry = CoseSign1::decode(&entry)
                        .and_then(|signed| RevocationEntry::parse(&signed).ok())
                        .ok_or(RecoverError { what: "revocation" })?;
                    self.revocations.insert(source, entry);
                }
                Record::Sought { agent, owner, capability, path, until, valid_until } => {
                    let key = TokenKey { owner, capability, path };
                    let sought = Sought::restored(until, valid_until);
                    agents.entry(agent).or_default().asked.insert(key, sought);
                }
                Record::MeshVisibility { visibility } => self.restore_mesh_visibility(visibility),
                share @ (Record::Share { .. } | Record::ShareGrant { .. }) => {
                    self.restore_share(share);
                }
                // Changes that take something away are never read back.
                Record::AgentGone { .. }
                | Record::Unseen { .. }
                | Record::Withdrawn { .. }
                | Record::OutgoingDone { .. }
                | Record::InvitedDone { .. }
                | Record::AskedDone { .. }
                | Record::CopyDone { .. }
                | Record::RoomGone { .. }
                | Record::MessagesGone { .. }
                | Record::RevocationGone { .. }
                | Record::ShareGone { .. }
                | Record::ShareGrantGone { .. }
                | Record::SoughtDone { .. } => {}
            }
        }
        if agents.is_empty() && rooms + messages == 0 {
            return Ok(());
        }
        let outgoing = agents.values().map(|a| a.outgoing.len()).sum::<usize>();
        self.log(
            LogEvent::new("state_restored")
                .with("agents", agents.len())
                .with("mail", agents.values().map(|a| a.mail.len()).sum::<usize>())
                .with("outgoing", outgoing)
                .with("copies", self.copies.len())
                .with("rooms", rooms)
                .with("messages", messages),
        );
        for (id, stored) in agents {
            self.parked.insert(id, stored.into_agent(self.seq_floor()));
        }
        if outgoing > 0 {
            self.durable.leave_at = Some(now.mono + LEAVE_AFTER_MS);
        }
        Ok(())
    }

    /// Events are numbered above this one.
    pub(super) fn seq_floor(&self) -> u64 {
        self.durable.runs.saturating_mul(RUN_SEQ_STEP)
    }

    /// Our own records have versions above this one: those announced in earlier runs, stored or
    /// not, are below.
    pub(super) fn version_floor(&self) -> u64 {
        self.durable.runs.saturating_mul(RESTORED_VERSION_STEP).min(MAX_VERSION / 2)
    }

    /// Agents of a harness that are out of service: those first that something waits for or that
    /// are in a room, then the others, the last begun first.
    #[must_use]
    pub fn restorable(&self, harness: &str) -> Vec<Restorable> {
        let of_harness = self.parked.iter().filter_map(|(id, held)| {
            let record = self.record(id).filter(|record| record.harness == harness)?;
            Some((held, record))
        });
        let (wanted, mut idle): (Vec<_>, Vec<_>) =
            of_harness.partition(|(held, record)| self.is_wanted(held, &record.id));
        idle.sort_by(|(_, a), (_, b)| b.started_at.cmp(&a.started_at));
        idle.truncate(MAX_IDLE_RESTORED);
        let all = wanted.into_iter().chain(idle);
        all.map(|(held, record)| Restorable {
            agent: record.id,
            harness: record.harness.clone(),
            key: held.key.clone(),
            cwd: record.cwd.clone(),
        })
        .collect()
    }

    /// Whether something waits for an agent, or it is in a room.
    fn is_wanted(&self, held: &Agent, id: &DeviceId) -> bool {
        !held.mailbox.is_empty()
            || held.outgoing.iter().next().is_some()
            || !held.consents.is_empty()
            || !held.decisions.is_empty()
            || !held.asked.is_empty()
            || self.replica.rooms().any(|(_, room)| room.is_member(id) || room.owner == *id)
    }
}

/// An agent while its records are read.
#[derive(Default)]
struct Stored {
    key: String,
    presence: Option<AgentStatus>,
    acknowledged: u64,
    seen: Vec<(u64, (DeviceId, String))>,
    mail: Vec<(u64, UnixMillis, DeliveryEvent)>,
    outgoing: Vec<(DeviceId, Queued, bool)>,
    opened: BTreeSet<RoomPath>,
    consent: Option<ConsentPolicy>,
    invitations: BTreeSet<RoomPath>,
    decisions: Vec<Decision>,
    asked: BTreeMap<TokenKey, Sought>,
}

impl Stored {
    fn into_agent(self, floor: u64) -> Agent {
        let mut agent = Agent::new(floor);
        agent.key = self.key;
        // Older stores hold that it was offline.
        agent.presence = self
            .presence
            .filter(|presence| *presence != AgentStatus::Offline)
            .unwrap_or(AgentStatus::Active);
        agent.mailbox = Mailbox::restored(floor, self.acknowledged, self.seen, self.mail);
        for (recipient, entry, asks) in self.outgoing {
            agent.outgoing.skip_to(entry.number);
            if asks {
                agent.opened.insert(entry.path.clone());
                agent.consents.entry(recipient).or_default().held.push((entry, None));
            } else {
                // The bounds were kept when it was queued.
                let _none_is_over = agent.outgoing.queue(recipient, entry);
            }
        }
        agent.opened.extend(self.opened);
        agent.consent = self.consent;
        agent.invitations = self.invitations;
        agent.asked = self.asked;
        agent.decisions = self.decisions.into_iter().map(|d| (d.id.clone(), d)).collect();
        agent
    }
}

fn outgoing(agent: DeviceId, recipient: DeviceId, entry: &Queued, asks: bool) -> Record {
    Record::Outgoing {
        agent,
        recipient,
        number: entry.number,
        path: entry.path.to_string(),
        params: entry.params.encode(),
        queued_at: entry.queued_at,
        asks,
    }
}

/// A question to an agent, as it is stored.
pub(super) fn asked(agent: DeviceId, decision: &Decision) -> Option<Record> {
    Some(Record::Asked {
        agent,
        id: decision.id.clone(),
        path: decision.path.as_ref()?.to_string(),
        requester: decision.requester,
        at: decision.at,
    })
}

fn decision(id: String, path: RoomPath, requester: DeviceId, at: UnixMillis, now: Now) -> Decision {
    let left = APPROVAL_WINDOW_MS.saturating_sub(now.unix.since(at));
    let event = DeliveryEvent::RoomJoinRequest { room: path.to_string(), requester_id: requester };
    Decision {
        id,
        event: Some(event),
        path: Some(path),
        requester,
        at,
        deadline: now.mono + left,
        waiters: Vec::new(),
        session: None,
    }
}

fn queued(
    number: u64,
    path: &str,
    params: &[u8],
    queued_at: UnixMillis,
) -> Result<Queued, RecoverError> {
    let params = cbor::decode(params).map_err(|_| RecoverError { what: "message" })?;
    let message_id = (params.get("verb").and_then(Value::as_text) == Some("room.send"))
        .then(|| params.get("message-id").and_then(Value::as_bytes))
        .flatten()
        .map(|id| data_encoding::HEXLOWER.encode(id));
    let path = parse(path)?;
    Ok(Queued { number, path, params, message_id, queued_at, reason: "not_connected", kept: true })
}

fn parse(path: &str) -> Result<RoomPath, RecoverError> {
    RoomPath::parse(path).map_err(|_| RecoverError { what: "path" })
}

fn read<T: serde::de::DeserializeOwned>(
    bytes: &[u8],
    what: &'static str,
) -> Result<T, RecoverError> {
    cbor::decode(bytes)
        .ok()
        .and_then(|value| cbor::from_value(&value).ok())
        .ok_or(RecoverError { what })
}
