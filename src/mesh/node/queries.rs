//! What agents and operators may see: read-only views of the node.

use super::super::delivery::Numbered;
use super::super::events::DeliveryEvent;
use super::super::formation::PortState;
use super::super::records::{
    AgentRecord, AgentStatus, DmMessage, Now, RoomMessage, RoomRecord, RoomType, Visibility,
};
use super::super::session::SessionKind;
use super::super::wire::claim::Claim;
use super::super::wire::room_path::RoomPath;
use super::{Counters, Node};
use crate::codec::text::mentions;
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::identity::names;

/// An agent as listed.
#[derive(Clone, Debug)]
pub struct AgentView {
    /// The record, with presence as it is now.
    pub record: AgentRecord,
    /// Of this daemon, in service or not.
    pub local: bool,
    /// Machine it proves to be on.
    pub machine: Option<DeviceId>,
    /// What that machine calls itself.
    pub machine_name: Option<String>,
}

/// A room as listed.
#[derive(Clone, Debug)]
pub struct RoomView {
    /// The record.
    pub record: RoomRecord,
    /// The asking agent is in it.
    pub joined: bool,
}

/// A request that waits for an answer.
#[derive(Clone, Debug)]
pub struct PendingView {
    /// Handle.
    pub id: String,
    /// `dm`, `room`, `invite`, `mesh` or `capability`.
    pub kind: &'static str,
    /// Share that a capability is asked for, and whether to write to it.
    pub share: Option<(String, bool)>,
    /// Room or conversation; none for another machine.
    pub room: Option<String>,
    /// Who asks.
    pub requester: DeviceId,
    /// Its name.
    pub requester_name: String,
    /// Since when.
    pub at: UnixMillis,
}

/// Whose a device is, as far as the system or a signature says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origination {
    /// Our own user's, on this machine.
    OwnUser,
    /// Another user's, on this machine.
    OtherUser,
    /// On another machine: the name that it has proven, else its id.
    Machine(String),
    /// Nothing is known, or not any more.
    Unknown,
}

/// A peer for operators.
#[derive(Clone, Debug)]
pub struct PeerView {
    /// Device.
    pub device: DeviceId,
    /// `host:port` of its data listener, where known.
    pub address: Option<String>,
    /// Open sessions.
    pub sessions: usize,
    /// On this machine.
    pub machine_local: bool,
    /// Let in.
    pub admitted: bool,
    /// Monotonic ms of its oldest session.
    pub since: u64,
    /// The agent-comms version that it advertises.
    pub version: Option<String>,
}

/// The state of the node for operators.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Where we stand with the port.
    pub port: PortState,
    /// Failed rounds at the port in a row.
    pub port_failures: u32,
    /// The accepted claim.
    pub claim: Option<Claim>,
    /// Whether one of our devices holds the role.
    pub role_held: bool,
    /// Peers.
    pub peers: Vec<PeerView>,
    /// Messages waiting for recipients, consent included.
    pub outgoing: usize,
    /// Events waiting for agents.
    pub inbound: usize,
    /// Copies held for absent recipients.
    pub copies: usize,
    /// When the oldest waiting message came.
    pub oldest: Option<UnixMillis>,
    /// Open sessions.
    pub sessions: usize,
    /// Counters.
    pub counters: Counters,
}

impl Node {
    /// The record of one of our agents.
    #[must_use]
    pub fn own_agent(&self, agent: &DeviceId) -> Option<&AgentRecord> {
        self.agent(agent).and_then(|_| self.record(agent))
    }

    /// Our agents in service.
    #[must_use]
    pub fn own_agents(&self) -> Vec<DeviceId> {
        self.agent_ids()
    }

    /// Agents that `viewer` may see listed (`None`: an operator), with their own names. Hidden ones
    /// are left out, ghosts show to themselves alone, and so are names that break the rule.
    pub fn listed(&self, viewer: Option<&DeviceId>) -> impl Iterator<Item = (DeviceId, &str)> {
        let held = self.replica.agents().filter(move |record| {
            Some(&record.id) == viewer
                || (record.visibility == Visibility::Visible && names::is_clean(&record.name))
        });
        let heard = self.directory.iter().filter_map(|(device, entry)| {
            let name = entry.agent.as_ref()?.name.as_str();
            let known = self.replica.agent(device).is_some();
            (!known && names::is_clean(name)).then_some((*device, name))
        });
        held.map(|record| (record.id, record.name.as_str())).chain(heard)
    }

    /// What is known of the agents that are [`Self::listed`].
    #[must_use]
    pub fn agents(&self, viewer: Option<&DeviceId>, now: Now) -> Vec<AgentView> {
        let mut views: Vec<AgentView> = self
            .listed(viewer)
            .filter_map(|(id, _)| self.any_record(&id, now))
            .map(|record| self.agent_view(record, now))
            .collect();
        views.sort_by(|a, b| {
            (!a.local, &a.record.name, a.record.id).cmp(&(!b.local, &b.record.name, b.record.id))
        });
        views
    }

    /// Any agent by id, listed or not; ghosts are nobody's business.
    #[must_use]
    pub fn agent_by_id(&self, id: &DeviceId, now: Now) -> Option<AgentView> {
        let record = self.any_record(id, now)?;
        (record.visibility != Visibility::Ghost || self.is_hosted(id))
            .then(|| self.agent_view(record, now))
    }

    /// An agent's record, or what its adverts say.
    fn any_record(&self, id: &DeviceId, now: Now) -> Option<AgentRecord> {
        self.replica
            .agent(id)
            .cloned()
            .or_else(|| self.directory.get(id).and_then(|entry| entry.agent_record(*id, now.unix)))
    }

    fn agent_view(&self, mut record: AgentRecord, now: Now) -> AgentView {
        let served = self.agent(&record.id).is_some();
        // One out of service whose slot somebody else has taken is here all the same, but not ours.
        let local =
            served || (self.parked.contains_key(&record.id) && !self.is_reachable(&record.id));
        let status = self.effective_status(&record.id, now);
        if !(served && record.status != AgentStatus::Offline) {
            record.status = status;
        }
        let (machine, machine_name) = if local {
            (self.config.machine.as_ref().map(DeviceKey::id), self.config.machine_name.clone())
        } else {
            let (machine, name) = self.machine_of(&record.id, now);
            (machine, name.map(str::to_owned))
        };
        AgentView { record, local, machine, machine_name }
    }

    /// Rooms that `viewer` may see listed: secret ones only from inside.
    #[must_use]
    pub fn rooms(&self, viewer: Option<&DeviceId>) -> Vec<RoomView> {
        let mut views: Vec<RoomView> = self
            .replica
            .rooms()
            .filter(|(_, room)| {
                room.kind != RoomType::Secret || viewer.is_some_and(|viewer| room.is_member(viewer))
            })
            .map(|(path, room)| RoomView {
                record: room.clone(),
                joined: viewer
                    .is_some_and(|viewer| room.is_member(viewer) && self.takes_part(*viewer, path)),
            })
            .collect();
        for (device, entry) in self.directory.iter() {
            for hosted in &entry.rooms {
                let Ok(path) = RoomPath::parse(&hosted.path) else { continue };
                if path.owner() != Some(*device) || self.replica.room(&path).is_some() {
                    continue;
                }
                views.push(RoomView {
                    record: RoomRecord {
                        id: hosted.path.clone(),
                        version: 0,
                        name: hosted.name.clone(),
                        kind: hosted.kind,
                        owner: *device,
                        created_at: String::new(),
                        description: hosted.description.clone().unwrap_or_default(),
                        members: Vec::new(),
                        invited: Vec::new(),
                        member_joins: Default::default(),
                        member_leaves: Default::default(),
                        invited_joins: Default::default(),
                        invited_leaves: Default::default(),
                    },
                    joined: false,
                });
            }
        }
        views.sort_by(|a, b| (&a.record.name, &a.record.id).cmp(&(&b.record.name, &b.record.id)));
        views
    }

    /// Secret rooms that `viewer` is not in.
    pub fn rooms_hidden_from<'a>(
        &'a self,
        viewer: Option<&'a DeviceId>,
    ) -> impl Iterator<Item = &'a RoomPath> {
        let rooms = self.replica.rooms();
        let hidden = move |room: &RoomRecord| {
            room.kind == RoomType::Secret && !viewer.is_some_and(|viewer| room.is_member(viewer))
        };
        rooms.filter(move |(_, room)| hidden(room)).map(|(path, _)| path)
    }

    /// Public rooms of this name.
    pub fn public_rooms_called<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a RoomPath, &'a RoomRecord)> {
        let rooms = self.replica.rooms();
        rooms.filter(move |(_, room)| room.name == name && room.kind == RoomType::Public)
    }

    /// Whether an agent of ours is in a room by its own will.
    #[must_use]
    pub fn is_in_room(&self, agent: &DeviceId, path: &RoomPath) -> bool {
        self.replica.room(path).is_some_and(|room| room.is_member(agent))
            && self.takes_part(*agent, path)
    }

    /// Whether a device is one of our own user's on this machine, as far as can be told.
    #[must_use]
    pub fn is_of_our_user(&self, device: &DeviceId) -> bool {
        self.is_ours(device)
            || self.sessions.values().any(|s| s.remote == *device && s.is_same_user())
    }

    /// Whose a device is.
    #[must_use]
    pub fn origination(&self, device: &DeviceId, now: Now) -> Origination {
        if self.is_of_our_user(device) {
            return Origination::OwnUser;
        }
        if self.sessions.values().any(|s| s.remote == *device && s.is_machine_local()) {
            return Origination::OtherUser;
        }
        match self.machine_of(device, now) {
            (Some(machine), _) if self.is_our_machine(&machine) => Origination::Unknown,
            (Some(machine), name) => {
                Origination::Machine(name.map_or_else(|| machine.short(), str::to_owned))
            }
            (None, _) => Origination::Unknown,
        }
    }

    fn is_our_machine(&self, machine: &DeviceId) -> bool {
        self.config.machine.as_ref().is_some_and(|ours| ours.id() == *machine)
    }

    /// Where an agent works.
    #[must_use]
    pub fn agent_cwd(&self, agent: &DeviceId) -> Option<&String> {
        self.replica.agent(agent).map(|record| &record.cwd)
    }

    /// A room that `viewer` may see.
    #[must_use]
    pub fn room(&self, path: &RoomPath, viewer: Option<&DeviceId>) -> Option<RoomView> {
        let id = path.to_string();
        self.rooms(viewer).into_iter().find(|view| view.record.id == id)
    }

    /// What a device calls itself, where that is known and can be shown.
    #[must_use]
    pub fn shown_name(&self, device: &DeviceId) -> Option<String> {
        Some(self.name_of(device)).filter(|name| !name.is_empty())
    }

    /// Room paths for which an agent holds a token: invitations among them.
    #[must_use]
    pub fn token_paths(&self, agent: &DeviceId) -> Vec<RoomPath> {
        self.agent(agent).map(|held| held.tokens.keys().cloned().collect()).unwrap_or_default()
    }

    /// A room's messages, for a member.
    pub fn room_messages(
        &self,
        path: &RoomPath,
        viewer: &DeviceId,
    ) -> Option<impl DoubleEndedIterator<Item = (u64, &RoomMessage)>> {
        self.replica.room(path).filter(|room| room.is_member(viewer))?;
        Some(self.replica.room_history(path).into_iter().flat_map(|history| history.iter()))
    }

    /// Whether a room's message speaks to one of our agents: it names it behind an `@`, or answers a
    /// message of its own.
    #[must_use]
    pub fn is_addressed(&self, agent: &DeviceId, message: &RoomMessage) -> bool {
        let (id, short) = (agent.hex(), agent.short());
        let name = self.own_agent(agent).map_or("", |record| record.name.as_str());
        let answers = || {
            let answered = message.reply_to.as_deref()?;
            let path = RoomPath::parse(&message.room).ok()?;
            Some(self.replica.room_history(&path)?.find(answered)?.from == *agent)
        };
        mentions(&message.content, &[name, &short, &id]) || answers() == Some(true)
    }

    /// A conversation's messages, for one of the two.
    pub fn dm_messages(
        &self,
        path: &RoomPath,
        viewer: &DeviceId,
    ) -> Option<impl DoubleEndedIterator<Item = (u64, &DmMessage)>> {
        path.has_participant(viewer).then_some(())?;
        Some(self.replica.dm_history(path).into_iter().flat_map(|history| history.iter()))
    }

    /// What waits for an agent's decision, invitations included; requests of other machines and for capabilities wait for
    /// any agent's.
    #[must_use]
    pub fn pending(&self, agent: &DeviceId) -> Vec<PendingView> {
        self.pending_for(Some(agent))
    }

    /// What any agent or the operator may decide on.
    #[must_use]
    pub fn pending_for_anybody(&self) -> Vec<PendingView> {
        self.pending_for(None)
    }

    fn pending_for(&self, agent: Option<&DeviceId>) -> Vec<PendingView> {
        let invited = agent.into_iter().flat_map(|agent| self.invitations(agent));
        let own = agent.and_then(|agent| self.agent(agent));
        let own = own.into_iter().flat_map(|held| held.decisions.values());
        let asks = self.services.open_asks().map(|ask| PendingView {
            id: ask.id.clone(),
            kind: "capability",
            share: Some((ask.share.clone(), ask.write)),
            room: None,
            requester: ask.requester,
            requester_name: self.name_of(&ask.requester),
            at: ask.at,
        });
        let mut views: Vec<PendingView> = own
            .chain(self.mesh_decisions.values())
            .map(|decision| PendingView {
                id: decision.id.clone(),
                kind: match &decision.path {
                    None => "mesh",
                    Some(path) if path.owner().is_some() => "room",
                    Some(_) => "dm",
                },
                share: None,
                room: decision.path.as_ref().map(ToString::to_string),
                requester: decision.requester,
                requester_name: self.name_of(&decision.requester),
                at: decision.at,
            })
            .chain(asks)
            .chain(invited)
            .collect();
        views.sort_by_key(|view| view.at);
        views
    }

    /// Invitations that an agent has and has not answered, each by the path of its room.
    fn invitations(&self, agent: &DeviceId) -> impl Iterator<Item = PendingView> {
        let held = self.agent(agent);
        held.into_iter().flat_map(|held| &held.invitations).filter_map(|path| {
            let (owner, room) = (path.owner()?, path.to_string());
            Some(PendingView {
                id: room.clone(),
                kind: "invite",
                share: None,
                room: Some(room),
                requester: owner,
                requester_name: self.name_of(&owner),
                at: self.invited_at(agent, path)?,
            })
        })
    }

    /// Unacknowledged events of an agent above `after`.
    pub fn inbox(&self, agent: &DeviceId, after: u64) -> impl Iterator<Item = &Numbered> {
        self.agent(agent).into_iter().flat_map(move |held| held.mailbox.after(after))
    }

    /// Highest event number given to an agent, and how far it has acknowledged.
    #[must_use]
    pub fn mailbox_position(&self, agent: &DeviceId) -> Option<(u64, u64)> {
        self.agent(agent).map(|held| (held.mailbox.last_seq(), held.mailbox.acknowledged()))
    }

    /// Whether a delivery event says how a certain message of an agent ended.
    #[must_use]
    pub fn is_outcome_of(event: &DeliveryEvent, message_id: &str) -> bool {
        matches!(event, DeliveryEvent::DeliveryStatus { message_id: id, .. } if id == message_id)
    }

    /// How much waits here from an agent of ours for a recipient, and since when.
    #[must_use]
    pub fn backlog(&self, agent: &DeviceId, recipient: &DeviceId) -> Option<(usize, UnixMillis)> {
        let held = self.agent(agent)?;
        let queued =
            held.outgoing.iter().filter(|(to, _)| *to == recipient).map(|(_, entry)| entry);
        let asking = held.consents.get(recipient).into_iter().flat_map(|c| c.held.iter());
        let since: Vec<UnixMillis> =
            queued.chain(asking.map(|(entry, _)| entry)).map(|entry| entry.queued_at).collect();
        Some((since.len(), since.into_iter().min()?))
    }

    /// Whether a recipient's consent is awaited.
    #[must_use]
    pub fn is_asking(&self, agent: &DeviceId, recipient: &DeviceId) -> bool {
        self.agent(agent).is_some_and(|held| held.consents.contains_key(recipient))
    }

    /// Peers with a session.
    #[must_use]
    pub fn peer_count(&self) -> usize {
        self.remotes.len()
    }

    /// The state of things for operators.
    #[must_use]
    pub fn status(&self) -> NodeStatus {
        let mut peers: Vec<PeerView> = Vec::new();
        for session in self.sessions.values().filter(|s| s.kind != SessionKind::Hub) {
            match peers.iter_mut().find(|peer| peer.device == session.remote) {
                Some(peer) => {
                    peer.sessions += 1;
                    peer.since = peer.since.min(session.opened_at);
                    peer.admitted |= session.is_admitted();
                }
                None => peers.push(PeerView {
                    device: session.remote,
                    address: self.peer_address(&session.remote).map(|info| {
                        format!("{}:{}", info.host.as_deref().unwrap_or("127.0.0.1"), info.port)
                    }),
                    sessions: 1,
                    machine_local: session.is_machine_local(),
                    admitted: session.is_admitted(),
                    since: session.opened_at,
                    version: self
                        .directory
                        .get(&session.remote)
                        .and_then(|entry| entry.version.clone()),
                }),
            }
        }
        let agents = || {
            let served = self.devices.values().filter_map(|device| device.agent.as_ref());
            served.chain(self.parked.values())
        };
        let held = agents().flat_map(|agent| agent.consents.values()).flat_map(|c| c.held.iter());
        let outgoing: Vec<UnixMillis> = agents()
            .flat_map(|agent| agent.outgoing.iter())
            .map(|(_, entry)| entry.queued_at)
            .chain(held.map(|(entry, _)| entry.queued_at))
            .collect();
        NodeStatus {
            port: self.formation.port(),
            port_failures: self.formation.port_failures(),
            claim: self.election.accepted(),
            role_held: self.role.is_some(),
            peers,
            outgoing: outgoing.len(),
            inbound: agents().map(|agent| agent.mailbox.len()).sum(),
            copies: self.copies.len(),
            oldest: outgoing
                .into_iter()
                .chain(agents().filter_map(|agent| agent.mailbox.oldest()))
                .min(),
            sessions: self.sessions.len(),
            counters: self.stats,
        }
    }
}
