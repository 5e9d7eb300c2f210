//! Replicated state on the wire: patches and snapshots, in and out, with authority
//! (`transport.md` 1.4, 1.5, `rooms.md` 1.8, 1.9 and 2; decisions 2, 6 and 7).

use std::collections::{BTreeMap, BTreeSet};

use super::super::delivery::{MAX_REPLICATED, event_bytes};
use super::super::events::DeliveryEvent;
use super::super::log::LogEvent;
use super::super::message::{MeshMessage, Patch, Snapshot};
use super::super::records::{
    AgentRecord, AgentStatus, DmMessage, MAX_TEXT_BYTES, MAX_VERSION, Now, RoomMessage, RoomRecord,
    RoomType,
};
use super::super::replica::{MAX_AGENTS, Merge, Message as _, Owner, Speaker};
use super::super::session::{Session, SessionId};
use super::super::wire::room_path::RoomPath;
use super::mailboxes::NOT_PERMITTED;
use super::requests::{error, ok};
use super::{Answer, AnswerTo, Node, Purpose, Record};
use crate::codec::cbor;
use crate::identity::device::DeviceId;

/// Most bytes in one frame of ours where it can be split (decision 15).
pub const MAX_SNAPSHOT_BYTES: usize = 1024 * 1024;
/// Least time between contradictions about one agent of ours (decision 6).
const CONTRADICT_EVERY_MS: u64 = 60_000;
/// Versions that somebody claims of an agent of ours are believed up to here: well above what we
/// ever gave, and far enough from the top to go on from.
const MAX_OWN_VERSION: u64 = MAX_VERSION / 2;
/// How long after it came into service an owner takes its rooms back from what peers remember:
/// they all connect, and send what they have, well within it.
const RESTORE_MS: u64 = 600_000;
/// Agents whose own undelivered events are kept for them.
const MAX_OWN_QUEUES: usize = 1024;

impl Node {
    fn speaker(&self, session: SessionId) -> Option<Speaker> {
        let session = self.sessions.get(&session)?;
        let device = session.remote;
        let commsd = self.directory.is_commsd(&device);
        Some(Speaker { device, same_user: session.is_same_user(), commsd })
    }

    // --- out --------------------------------------------------------------------------------------

    pub(super) fn send_own_record(&mut self, session: SessionId, now: Now) {
        let Some((local, same_user)) =
            self.sessions.get(&session).map(|s| (s.local, s.is_same_user()))
        else {
            return;
        };
        if self.agent(&local).is_none() {
            return;
        }
        if let Some(agent) = self.public_record(&local, same_user) {
            let message = MeshMessage::StateUpdate(Box::new(Patch::AgentUpsert { agent }));
            self.tell(session, &message, now);
        }
    }

    /// Our agent's record as others may see it: no secret or private room in it, and for those who
    /// are not our own user no more than in an advert.
    fn public_record(&self, agent: &DeviceId, same_user: bool) -> Option<AgentRecord> {
        let mut record = self.record(agent)?.clone();
        if !same_user {
            record.cwd.clear();
            record.tags.clear();
            record.pid = 0;
        }
        record.subscribed_rooms.retain(|room| {
            RoomPath::parse(room).is_ok_and(|path| {
                self.replica.room(&path).is_some_and(|room| room.kind == RoomType::Public)
            })
        });
        Some(record)
    }

    pub(super) fn broadcast_own_record(&mut self, agent: DeviceId, now: Now) {
        self.advert_changed(&agent, now);
        for same_user in [true, false] {
            if let Some(record) = self.public_record(&agent, same_user) {
                let message =
                    MeshMessage::StateUpdate(Box::new(Patch::AgentUpsert { agent: record }));
                self.broadcast_to(agent, &message, now, |session, _| {
                    session.is_same_user() == same_user
                });
            }
        }
    }

    /// Raises the version of our agent's record above everything seen for it.
    pub(super) fn touch_own_record(&mut self, agent: &DeviceId) -> Option<&mut AgentRecord> {
        self.keep_agent(*agent);
        let record = self.replica.agent_mut(agent)?;
        record.version += 1;
        Some(record)
    }

    pub(super) fn say_offline(&mut self, agent: DeviceId, now: Now) {
        if let Some(record) = self.touch_own_record(&agent) {
            record.status = AgentStatus::Offline;
        }
        let message = MeshMessage::StateUpdate(Box::new(Patch::AgentOffline { agent_id: agent }));
        self.broadcast(agent, &message, now);
        self.show_status(agent, AgentStatus::Offline, now);
    }

    /// A room changed: everybody hears of a public one, members of another (decision 7). Said by
    /// `speaker`, a device of ours: the owner, or a member of its own coming and going.
    pub(super) fn broadcast_room(&mut self, speaker: DeviceId, path: &RoomPath, now: Now) {
        let Some(room) = self.replica.room(path).cloned() else { return };
        let members = room.members.clone();
        let public = room.kind == RoomType::Public;
        // Whom the user trusts, and whom no advert tells.
        let trusted = if public { self.channels_through_hub() } else { BTreeSet::new() };
        let message = MeshMessage::StateUpdate(Box::new(Patch::RoomUpsert { room }));
        self.broadcast_to(speaker, &message, now, |session, remote| {
            members.contains(remote)
                || (public && (session.is_machine_local() || trusted.contains(&session.id)))
        });
    }

    /// The state of things, from the accepting side of a data session: complete for our own user,
    /// our agent's record for others.
    pub(super) fn send_state_sync(&mut self, session: SessionId, now: Now) {
        let Some(s) = self.sessions.get(&session) else { return };
        let (local, remote, same_user) = (s.local, s.remote, s.is_same_user());
        if !same_user {
            self.send_own_record(session, now);
            return;
        }
        let mut base = Snapshot::default();
        for record in self.replica.agents() {
            let shown = if self.is_hosted(&record.id) {
                self.public_record(&record.id, true)
            } else {
                Some(record.clone())
            };
            if let Some(record) = shown {
                base.agents.insert(record.id.hex(), record);
            }
        }
        if base.agents.is_empty() {
            return;
        }
        for (path, room) in self.replica.rooms() {
            if room.kind == RoomType::Public || room.is_member(&remote) || room.owner == remote {
                base.rooms.insert(path.to_string(), room.clone());
            }
        }
        let mut parts = vec![base];
        let mut size = 0;
        for (path, history) in self.replica.room_histories() {
            if self.replica.room(path).is_some_and(|room| room.is_member(&remote)) {
                let messages: Vec<RoomMessage> = history.iter().map(|(_, m)| m.clone()).collect();
                append(&mut parts, &mut size, messages, |part| {
                    part.messages.entry(path.to_string()).or_default()
                });
            }
        }
        for (path, history) in self.replica.dm_histories() {
            if path.has_participant(&remote) {
                let messages: Vec<DmMessage> = history.iter().map(|(_, m)| m.clone()).collect();
                append(&mut parts, &mut size, messages, |part| {
                    part.dms.entry(path.to_string()).or_default()
                });
            }
        }
        let mut queues: BTreeMap<String, Vec<DeliveryEvent>> = BTreeMap::new();
        if let Some(agent) = self.agent(&local) {
            let events: Vec<DeliveryEvent> = agent
                .mailbox
                .after(0)
                .filter(|held| held.event.is_replayed())
                .map(|held| (*held.event).clone())
                .collect();
            let skip = events.len().saturating_sub(MAX_REPLICATED);
            if !events.is_empty() {
                queues.insert(local.hex(), events.into_iter().skip(skip).collect());
            }
        }
        if let Some(events) = self.own_queues.get(&remote) {
            queues.insert(remote.hex(), events.clone());
        }
        for (agent, events) in queues {
            append(&mut parts, &mut size, events, |part| {
                part.delivery_queues.entry(agent.clone()).or_default()
            });
        }
        for part in parts {
            self.tell(session, &MeshMessage::StateSync(Box::new(part)), now);
        }
    }

    /// A session that ended, or does not answer, may have swallowed what we told the peer: over one
    /// that is left it is told everything. (A new one begins with everything anyway.)
    pub(super) fn tell_unheard(&mut self, now: Now) {
        for (local, remote) in std::mem::take(&mut self.unheard) {
            if let Some(session) = self.route(&local, &remote) {
                self.send_state_sync(session, now);
            }
        }
    }

    // --- in ---------------------------------------------------------------------------------------

    pub(super) fn patch(
        &mut self,
        session: SessionId,
        to: AnswerTo,
        patch: Patch,
        now: Now,
    ) -> Answer {
        let Some(speaker) = self.speaker(session) else { return Answer::Now(ok()) };
        match patch {
            Patch::AgentUpsert { agent } => self.agent_stated(agent, speaker, now),
            Patch::AgentOffline { agent_id } => self.offline_stated(agent_id, speaker, now),
            Patch::RoomUpsert { room } => self.room_stated(room, speaker, now),
            Patch::RoomDelete { room_id } => {
                let Ok(path) = RoomPath::parse(&room_id) else { return Answer::Now(ok()) };
                let room = self.replica.room(&path);
                let members = room.map(|room| room.members.clone()).unwrap_or_default();
                match self.replica.merge_room_delete(&path, speaker) {
                    Merge::Refused(reason) => self.refuse(speaker.device, "room_delete", reason),
                    Merge::Changed => self.room_gone(&path, &members, now),
                    Merge::Unchanged => {}
                }
            }
            Patch::Delivery { agent_id, event } => {
                return self.event_stated(agent_id, event, speaker, to, now);
            }
            // No real peer sends these; a history is told by its own author or a snapshot.
            Patch::MessageAdd { .. } | Patch::DmAdd { .. } => {
                self.refuse(speaker.device, "legacy_patch", "not_taken");
            }
        }
        Answer::Now(ok())
    }

    fn agent_stated(&mut self, agent: AgentRecord, speaker: Speaker, now: Now) {
        let id = agent.id;
        if self.is_hosted(&id) {
            if speaker.same_user {
                self.own_agent_stated(id, agent.version, agent.status == AgentStatus::Offline, now);
            } else {
                self.refuse(speaker.device, "agent_upsert", "not_authorised");
            }
            return;
        }
        if self.parked.contains_key(&id) && speaker.device != id {
            return;
        }
        let before = self.record(&id).map(|record| (record.name.clone(), record.status));
        if before.is_none() && id == speaker.device && self.replica.agents().len() >= MAX_AGENTS {
            self.make_room(now);
        }
        let lives = self.remotes.contains_key(&id);
        match self.replica.merge_agent(agent, speaker, lives) {
            // Real peers put everybody they know into a snapshot: not worth a word.
            Merge::Refused("device_speaks_for_itself") | Merge::Unchanged => {}
            Merge::Refused(reason) => self.refuse(speaker.device, "agent_upsert", reason),
            Merge::Changed => {
                let Some(record) = self.record(&id) else { return };
                let (name, status) = (record.name.clone(), record.status);
                if let Some((old_name, old_status)) = before {
                    if old_name != name {
                        self.show_name(id, old_name, name, now);
                    }
                    if old_status != status {
                        self.show_status(id, status, now);
                    }
                }
            }
        }
    }

    /// Somebody's copy of one of our own agents: it never overrules us, but our next version is
    /// above it, and a report that it is offline is contradicted.
    fn own_agent_stated(&mut self, id: DeviceId, version: u64, offline: bool, now: Now) {
        let Some(record) = self.replica.agent_mut(&id) else { return };
        let wrong = offline && record.status != AgentStatus::Offline;
        if version > MAX_OWN_VERSION || (version < record.version && !wrong) {
            return;
        }
        if wrong || version > record.version {
            record.version = record.version.max(version);
            self.keep_agent(id);
        }
        if wrong {
            self.contradict(id, now);
        }
    }

    fn contradict(&mut self, id: DeviceId, now: Now) {
        let last = self.contradicted.get(&id).copied();
        if last.is_some_and(|at| now.mono < at + CONTRADICT_EVERY_MS) {
            self.contradict_later.insert(id);
            return;
        }
        self.contradict_later.remove(&id);
        self.contradicted.insert(id, now.mono);
        self.touch_own_record(&id);
        self.broadcast_own_record(id, now);
    }

    /// Reports that came too soon after the last contradiction are contradicted as well, later.
    pub(super) fn contradict_upkeep(&mut self, now: Now) {
        for id in std::mem::take(&mut self.contradict_later) {
            let runs = self.record(&id).is_some_and(|r| r.status != AgentStatus::Offline);
            if self.is_hosted(&id) && runs {
                self.contradict(id, now);
            }
        }
    }

    fn offline_stated(&mut self, id: DeviceId, speaker: Speaker, now: Now) {
        if self.is_hosted(&id) {
            if speaker.same_user
                && self.record(&id).is_some_and(|record| record.status != AgentStatus::Offline)
            {
                self.contradict(id, now);
            }
            return;
        }
        let own_word = speaker.device == id;
        if !own_word && (!speaker.same_user || self.remotes.contains_key(&id)) {
            return;
        }
        if self.replica.set_offline(&id, own_word) {
            self.show_status(id, AgentStatus::Offline, now);
        }
    }

    pub(super) fn room_stated(&mut self, room: RoomRecord, speaker: Speaker, now: Now) {
        let (before, owner) = match RoomPath::parse(&room.id) {
            Ok(path) => (
                self.replica
                    .room(&path)
                    .map(|room| (room.members.clone(), room.version, room.name.clone())),
                self.owner_of(&path, room.owner, speaker, now),
            ),
            Err(_) => (None, Owner::Away),
        };
        let owner_id = room.owner;
        let (merge, path) = self.replica.merge_room(room, speaker, owner);
        match (merge, path) {
            // Its end, or that it has ended and begun anew, has not reached everybody.
            (Merge::Refused("unknown_own_room" | "other_creation"), Some(path)) => {
                self.correct_room(owner_id, &path, speaker.device, now);
            }
            (Merge::Refused("owner_speaks_for_itself"), _) => {}
            (Merge::Refused(reason), _) => self.refuse(speaker.device, "room_upsert", reason),
            (Merge::Changed, Some(path)) => {
                let known = before.is_some();
                let (members, version, name) = before.unwrap_or_default();
                if known {
                    self.show_room_name(&path, &name, now);
                }
                self.members_changed(&path, members, speaker.device, now);
                self.subscribe_members(&path, now);
                self.forget_if_outside(&path);
                if matches!(owner, Owner::Ours { .. })
                    && self.replica.room(&path).is_some_and(|room| room.version > version)
                {
                    self.broadcast_room(owner_id, &path, now);
                }
            }
            _ => {}
        }
    }

    /// Tells one peer how it stands with a room of ours: what it is, or that it has none of us.
    fn correct_room(&mut self, owner: DeviceId, path: &RoomPath, peer: DeviceId, now: Now) {
        let Some(session) = self.route(&owner, &peer) else { return };
        let room = self
            .replica
            .room(path)
            .filter(|room| room.kind == RoomType::Public || room.is_member(&peer));
        let patch = match room {
            Some(room) => Patch::RoomUpsert { room: room.clone() },
            None => Patch::RoomDelete { room_id: path.to_string() },
        };
        self.tell(session, &MeshMessage::StateUpdate(Box::new(patch)), now);
    }

    /// Where the owner of a room is while somebody speaks of the room.
    fn owner_of(&self, path: &RoomPath, owner: DeviceId, speaker: Speaker, now: Now) -> Owner {
        if let Some(device) = self.devices.get(&owner) {
            let token = device.agent.as_ref().is_some_and(|agent| agent.tokens.contains_key(path));
            let restored = token && now.unix.since(device.started_at) < RESTORE_MS;
            return Owner::Ours { restored };
        }
        // Out of service here: another process may serve it, and then speaks for it.
        if self.parked.contains_key(&owner) && speaker.device != owner {
            return Owner::Ours { restored: false };
        }
        if self.remotes.contains_key(&owner) { Owner::Here } else { Owner::Away }
    }

    pub(super) fn snapshot(&mut self, session: SessionId, snapshot: Snapshot, now: Now) {
        let Some(speaker) = self.speaker(session) else { return };
        for agent in snapshot.agents.into_values() {
            if speaker.same_user || agent.id == speaker.device {
                self.agent_stated(agent, speaker, now);
            }
        }
        for room in snapshot.rooms.into_values() {
            self.room_stated(room, speaker, now);
        }
        if !speaker.same_user {
            return;
        }
        let stored = self.durable.is_on();
        let own: BTreeSet<DeviceId> =
            self.devices.keys().chain(self.parked.keys()).copied().collect();
        let is_ours = |device: &DeviceId| own.contains(device);
        for (id, messages) in snapshot.messages {
            let Ok(path) = RoomPath::parse(&id) else { continue };
            let wanted = self
                .replica
                .room(&path)
                .is_some_and(|room| room.members.iter().any(|member| self.is_hosted(member)));
            if wanted && let Some(history) = self.replica.room_history_mut(&path) {
                let fitting = |message: &RoomMessage| message.room == id && message.fits();
                for message in messages.into_iter().filter(fitting) {
                    // What ours have said we know, and who has read it is for receipts to say.
                    let known =
                        is_ours(&message.from) && (stored || history.find(&message.id).is_some());
                    if !known {
                        history.add(message, now.unix);
                    }
                }
            }
        }
        for (id, messages) in snapshot.dms {
            let Ok(path) = RoomPath::parse(&id) else { continue };
            let wanted = self.agent_ids().iter().any(|agent| path.has_participant(agent));
            if wanted && let Some(history) = self.replica.dm_history_mut(&path) {
                for message in messages {
                    let known =
                        is_ours(&message.from) && (stored || history.find(&message.id).is_some());
                    let fits = RoomPath::dm(message.from, message.to).is_some_and(|dm| dm == path);
                    if fits && message.fits() && !known {
                        history.add(message, now.unix);
                    }
                }
            }
        }
        for (id, events) in snapshot.delivery_queues {
            let Some(agent) = DeviceId::parse(&id) else { continue };
            if self.is_hosted(&agent) {
                for event in events {
                    self.replayed(agent, event, speaker, now);
                }
            } else if agent == speaker.device {
                self.keep_own_queue(agent, events);
            }
        }
    }

    /// A peer's own undelivered events, kept so that it gets them back after a restart.
    fn keep_own_queue(&mut self, agent: DeviceId, events: Vec<DeliveryEvent>) {
        if self.own_queues.len() >= MAX_OWN_QUEUES && !self.own_queues.contains_key(&agent) {
            return;
        }
        let held = self.own_queues.entry(agent).or_default();
        for event in events {
            if event.is_replayed() && fits(&event) && !held.contains(&event) {
                held.push(event);
            }
        }
        let over = held.len().saturating_sub(MAX_REPLICATED);
        held.drain(..over);
    }

    /// An event that comes back to one of our agents out of a peer's snapshot: shown if it has not
    /// been shown before (decision 1).
    fn replayed(&mut self, agent: DeviceId, event: DeliveryEvent, speaker: Speaker, now: Now) {
        if !event.is_replayed()
            || !fits(&event)
            || !self.may_be_brought(agent, &event, speaker, true, now)
            || !self.may_receive_from_copy(agent, &event)
        {
            return;
        }
        let read = match &event {
            DeliveryEvent::RoomMessage { message } => message.read_by.contains(&agent),
            DeliveryEvent::Dm { message } => message.read_by.contains(&agent),
            _ => false,
        };
        if !read {
            // Nobody asks what became of it: the peer keeps its copy until it is told.
            let _nobody_is_answered = self.take_copy(agent, event, None, now);
        }
    }

    /// A `delivery` patch: for one of our agents, a copy handed over by a peer of our own user;
    /// for somebody who is away, a copy to hold (decision 2).
    fn event_stated(
        &mut self,
        agent: DeviceId,
        event: DeliveryEvent,
        speaker: Speaker,
        to: AnswerTo,
        now: Now,
    ) -> Answer {
        if !speaker.same_user {
            self.refuse(speaker.device, "delivery", "not_authorised");
            return Answer::Now(ok());
        }
        if !fits(&event) {
            self.refuse(speaker.device, "delivery", "too_large");
            return Answer::Now(error("too_large"));
        }
        // What its author itself asks us to hold. One that is for an agent of ours is held as well:
        // its author is here, and sends it in its turn.
        let asked = event.message_key().filter(|(author, _)| {
            *author == speaker.device && self.directory.is_commsd(&speaker.device)
        });
        let Some((author, message)) = asked else {
            if !self.is_hosted(&agent) {
                return Answer::Now(ok());
            }
            if self.may_be_brought(agent, &event, speaker, false, now)
                && self.may_receive_from_copy(agent, &event)
            {
                return self.take_copy(agent, event, Some(to), now);
            }
            self.refuse(speaker.device, "delivery", NOT_PERMITTED);
            return Answer::Now(error(NOT_PERMITTED));
        };
        let record = Record::Copy {
            recipient: agent,
            author,
            message: message.clone(),
            event: event_bytes(&event),
            since: now.unix,
        };
        if self.copies.hold(agent, event, now.unix) {
            self.log(
                LogEvent::new("copy_held")
                    .with("recipient", agent)
                    .with("author", author)
                    .with("message", message),
            );
            self.keep(record);
            if self.is_reachable(&agent) {
                self.schedule_hand_over(agent, now);
            }
        }
        Answer::Now(ok())
    }

    /// Whether somebody else than its author may bring an event now. Nobody signs messages, so a
    /// peer of our own user is believed only where the author cannot speak for itself: what our own
    /// agents have sent is in our own store; whoever is away has left it with a commsd; and out of
    /// a snapshot (what a device had when its program ended) an agent takes it back when it has
    /// come into service.
    fn may_be_brought(
        &self,
        agent: DeviceId,
        event: &DeliveryEvent,
        speaker: Speaker,
        from_snapshot: bool,
        now: Now,
    ) -> bool {
        let author = match event {
            DeliveryEvent::Dm { message } => message.from,
            DeliveryEvent::RoomMessage { message } => message.from,
            DeliveryEvent::RoomInvite { from, .. } => *from,
            _ => return false,
        };
        if author == speaker.device {
            return true;
        }
        let just_came = self
            .devices
            .get(&agent)
            .is_some_and(|device| now.unix.since(device.started_at) < RESTORE_MS);
        if self.is_ours(&author) {
            return just_came && !self.durable.is_on();
        }
        if !from_snapshot {
            return self.directory.is_commsd(&speaker.device);
        }
        just_came || !self.remotes.contains_key(&author)
    }

    /// Whether an agent can get this from its author: only that is taken from anybody else.
    pub(super) fn may_receive_from_copy(&self, agent: DeviceId, event: &DeliveryEvent) -> bool {
        let Some(held) = self.agent(&agent) else { return false };
        match event {
            DeliveryEvent::Dm { message } => {
                message.to == agent
                    && RoomPath::dm(message.from, message.to).is_some_and(|path| {
                        held.opened.contains(&path)
                            || held.grants.contains_key(&(path.clone(), message.from))
                    })
            }
            DeliveryEvent::RoomMessage { message } => {
                RoomPath::parse(&message.room).is_ok_and(|path| match self.replica.room(&path) {
                    // A member that has not had its token yet is one all the same.
                    Some(room) => {
                        room.is_member(&message.from)
                            && (room.is_member(&agent) || held.tokens.contains_key(&path))
                    }
                    None => held.tokens.contains_key(&path),
                })
            }
            DeliveryEvent::RoomInvite { room, .. } => RoomPath::parse(room).is_ok_and(|path| {
                held.tokens.contains_key(&path)
                    && self.replica.room(&path).is_some_and(|room| room.is_invited(&agent))
            }),
            _ => false,
        }
    }
}

/// Whether an event that a third party brings is no larger than its author could have made it: it
/// has to fit a line of the local API.
fn fits(event: &DeliveryEvent) -> bool {
    match event {
        DeliveryEvent::RoomMessage { message } => message.fits(),
        DeliveryEvent::Dm { message } => message.fits(),
        other => event_bytes(other).len() <= MAX_TEXT_BYTES,
    }
}

impl Session<Purpose> {
    /// Whether a commsd of our own user is at the other end, as far as the session tells.
    pub(super) fn may_hold_copies(&self) -> bool {
        self.is_admitted() && self.is_same_user()
    }
}

impl DeliveryEvent {
    /// The types that a peer replays from a snapshot (`rooms.md` 1.9).
    pub(super) fn is_replayed(&self) -> bool {
        matches!(self, Self::RoomMessage { .. } | Self::Dm { .. } | Self::RoomInvite { .. })
    }
}

/// Appends a list to the last part, starting new parts as they fill.
fn append<T: serde::Serialize>(
    parts: &mut Vec<Snapshot>,
    size: &mut usize,
    items: Vec<T>,
    slot: impl Fn(&mut Snapshot) -> &mut Vec<T>,
) {
    for item in items {
        let bytes = cbor::to_value(&item).map(|value| value.encode().len()).unwrap_or(0);
        if parts.len() == 1 || *size + bytes > MAX_SNAPSHOT_BYTES {
            parts.push(Snapshot::default());
            *size = 0;
        }
        *size += bytes;
        if let Some(part) = parts.last_mut() {
            slot(part).push(item);
        }
    }
}
