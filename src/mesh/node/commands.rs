//! What agents ask of the node. Names and prefixes have become ids before they get here.

use std::collections::BTreeMap;

use super::super::discovery::Found;
use super::super::events::DeliveryState;
use super::super::records::MAX_TEXT_BYTES;
use super::super::records::{
    AgentStatus, ConsentPolicy, Now, RoomType, StreamingBehavior, Visibility,
};
use super::super::wire::cose::CoseSign1;
use super::super::wire::room_path::RoomPath;
use super::insight::Question;
use super::rooms::Draft;
use super::services::GrantTerms;
use super::{Decision, Node, OpId, Output};
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;
use crate::identity::names;

/// A request of an agent.
#[derive(Clone, Debug)]
pub enum Command {
    /// Make a room and join it.
    CreateRoom {
        /// Name; becomes part of the path.
        name: String,
        /// Public, private or secret.
        kind: RoomType,
        /// What it is for.
        description: String,
    },
    /// Join a room.
    JoinRoom(RoomPath),
    /// Leave a room, or decline an invitation; the owner of an otherwise empty room destroys it.
    LeaveRoom {
        /// Room.
        room: RoomPath,
        /// What the owner is told.
        reason: Option<String>,
    },
    /// Leave a room whose agents meet in another one now; the agent, which did not ask for it, is told.
    MoveFromRoom {
        /// Which.
        room: RoomPath,
        /// Where it is already.
        to: RoomPath,
    },
    /// End a room of one's own.
    DestroyRoom(RoomPath),
    /// Invite an agent to a room of one's own.
    Invite {
        /// Room.
        room: RoomPath,
        /// Whom.
        agent: DeviceId,
    },
    /// Put an agent out of a room of one's own.
    Kick {
        /// Room.
        room: RoomPath,
        /// Whom.
        agent: DeviceId,
    },
    /// Write to a room.
    Send {
        /// Room.
        room: RoomPath,
        /// Text.
        text: String,
        /// Hex id of the message answered.
        reply_to: Option<String>,
        /// Timing hint.
        behavior: Option<StreamingBehavior>,
    },
    /// Write to an agent.
    Dm {
        /// Whom.
        to: DeviceId,
        /// Text.
        text: String,
        /// Hex id of the message answered.
        reply_to: Option<String>,
        /// Timing hint.
        behavior: Option<StreamingBehavior>,
        /// How long to wait for consent before answering.
        wait_ms: u64,
    },
    /// Say yes to what waits.
    Accept(DecisionTarget),
    /// Say no.
    Reject {
        /// To what.
        target: DecisionTarget,
        /// Why.
        reason: Option<String>,
    },
    /// Change one's own record.
    Update {
        /// New name.
        name: Option<String>,
        /// New status; not offline.
        status: Option<AgentStatus>,
        /// New visibility.
        visibility: Option<Visibility>,
        /// New labels.
        tags: Option<Vec<String>>,
        /// Who may begin conversations with it from now on.
        consent: Option<ConsentPolicy>,
    },
    /// Ask for permission to use somebody's share.
    AskCapability {
        /// Whose.
        owner: DeviceId,
        /// Its name.
        share: String,
        /// To write as well.
        write: bool,
        /// Until when it is needed.
        valid_until: Option<UnixMillis>,
        /// How long to wait for a decision before answering.
        wait_ms: u64,
    },
    /// Hand a permission to use somebody's share on.
    HandOn {
        /// Whose share.
        owner: DeviceId,
        /// Its name.
        share: String,
        /// To whom.
        to: DeviceId,
        /// How far: for reading without a word of writing.
        terms: GrantTerms,
    },
    /// Use somebody's share.
    CallService {
        /// Whose.
        owner: DeviceId,
        /// Its name.
        share: String,
        /// Needs the permission to write.
        write: bool,
        /// What is wanted.
        params: Vec<(String, Value)>,
    },
    /// Which version a device runs.
    QueryVersion(DeviceId),
    /// The way to a device.
    Trace {
        /// Which.
        to: DeviceId,
        /// How long it may take.
        timeout_ms: Option<u64>,
    },
    /// Connect to another machine.
    Connect {
        /// Its name or address.
        host: String,
        /// The port of its network listener.
        port: u16,
    },
    /// Let somebody write to our user's agents without a question.
    AdmitDm {
        /// A device, or a user whose devices are meant.
        bearer: DeviceId,
        /// It is a user.
        principal: bool,
        /// Id of a grant that it has already.
        known: Option<[u8; 16]>,
    },
    /// Open a conversation with a grant.
    UseDmGrant {
        /// With whom.
        to: DeviceId,
        /// The grant.
        grant: CoseSign1,
    },
    /// Withdraw a grant.
    RevokeDm {
        /// Whose.
        bearer: DeviceId,
        /// Its id.
        token_id: [u8; 16],
    },
    /// Everything up to this event has been received.
    Acknowledge(u64),
}

/// Which waiting request is meant.
#[derive(Clone, Debug)]
pub enum DecisionTarget {
    /// By the id that `pending` shows.
    Id(String),
    /// By room (or conversation) and requester.
    Pair(RoomPath, DeviceId),
    /// A device that asks to be let in.
    Connection(DeviceId),
}

impl DecisionTarget {
    pub(super) fn agent_id(&self, decisions: &BTreeMap<String, Decision>) -> Option<String> {
        match self {
            Self::Id(id) => decisions.contains_key(id).then(|| id.clone()),
            Self::Pair(path, requester) => decisions
                .values()
                .find(|d| d.path.as_ref() == Some(path) && d.requester == *requester)
                .map(|d| d.id.clone()),
            Self::Connection(_) => None,
        }
    }

    pub(super) fn mesh_id(&self, decisions: &BTreeMap<String, Decision>) -> Option<String> {
        match self {
            Self::Id(id) => decisions.contains_key(id).then(|| id.clone()),
            Self::Connection(device) => {
                decisions.values().find(|d| d.requester == *device).map(|d| d.id.clone())
            }
            Self::Pair(..) => None,
        }
    }
}

/// One recipient's outcome; `None` while its consent is awaited.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// Recipient.
    pub agent: DeviceId,
    /// What became of it.
    pub state: Option<DeliveryState>,
}

/// A command's result.
#[derive(Clone, Debug, PartialEq)]
pub enum CommandResult {
    /// The room concerned; its record is to be had by query.
    Room(RoomPath),
    /// The owner has not decided yet; the outcome comes as an event.
    JoinPending(RoomPath),
    /// A message was taken.
    Sent {
        /// Hex message id.
        message_id: String,
        /// Per recipient.
        deliveries: Vec<Delivery>,
    },
    /// A capability was granted.
    Granted {
        /// For writing; else for reading.
        write: bool,
        /// Until when.
        expires: UnixMillis,
    },
    /// A capability was asked for; the outcome comes as an event.
    AskPending,
    /// What a service answered.
    Served(Value),
    /// The other side refused: its code and its words.
    Refused {
        /// A word of the other side.
        code: String,
        /// Its text.
        message: String,
    },
    /// What a device runs.
    Version(String),
    /// The way to a device.
    Traced {
        /// There and back.
        rtt_ms: u64,
        /// Whether a hub passed it on, as the device says.
        relayed: Option<bool>,
        /// That hub.
        hub: Option<String>,
    },
    /// Who is at an address; whether it lets us in is for its side to say.
    Connected(DeviceId),
    /// A grant to hand on.
    Grant(CoseSign1),
    /// Whoever was heard.
    Discovered(Vec<Found>),
    /// The id of what is announced now.
    Advertised(String),
    /// Whether it was announced.
    Withdrawn(bool),
    /// Nothing to tell.
    Done,
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CommandError {
    /// Stable word.
    pub code: &'static str,
    /// What happened.
    pub message: String,
}

impl CommandError {
    /// An error with a stable code.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Labels of one agent.
const MAX_TAGS: usize = 32;

impl Node {
    pub(super) fn command(&mut self, op: OpId, agent: DeviceId, command: Command, now: Now) {
        if self.agent(&agent).is_none() {
            self.fail(op, CommandError::new("not_attached", "this agent is not in service"));
            return;
        }
        let result = match command {
            Command::CreateRoom { name, kind, description } => {
                self.create_room(agent, &name, kind, description, now)
            }
            Command::JoinRoom(path) => return self.join_room(agent, path, op, now),
            Command::LeaveRoom { room, reason } => {
                return self.leave_room(agent, room, reason, None, op, now);
            }
            Command::MoveFromRoom { room, to } => {
                return self.leave_room(agent, room, None, Some(to), op, now);
            }
            Command::DestroyRoom(path) => self.destroy_room(agent, &path, now),
            Command::Invite { room, agent: invitee } => {
                return self.invite(agent, room, invitee, op, now);
            }
            Command::Kick { room, agent: member } => self.kick(agent, &room, member, now),
            Command::Send { text, .. } | Command::Dm { text, .. }
                if text.len() > MAX_TEXT_BYTES =>
            {
                Err(CommandError::new(
                    "too_large",
                    format!(
                        "the text has {} bytes; at most {MAX_TEXT_BYTES} fit in a message",
                        text.len()
                    ),
                ))
            }
            Command::Send { room, text, reply_to, behavior } => {
                let draft = Draft { text, reply_to, behavior };
                return self.send_to_room(agent, room, draft, op, now);
            }
            Command::Dm { to, text, reply_to, behavior, wait_ms } => {
                let draft = Draft { text, reply_to, behavior };
                return self.dm(agent, to, draft, wait_ms, op, now);
            }
            Command::Accept(target) => match self.decide(agent, &target, true, None, op, now) {
                Some(result) => result,
                None => return,
            },
            Command::Reject { target, reason } => {
                match self.decide(agent, &target, false, reason, op, now) {
                    Some(result) => result,
                    None => return,
                }
            }
            Command::Update { name, status, visibility, tags, consent } => {
                let updated = self.update(agent, name, status, visibility, tags, now);
                if let (Ok(_), Some(policy)) = (&updated, consent) {
                    self.set_consent(agent, policy, now);
                }
                updated
            }
            Command::AskCapability { owner, share, write, valid_until, wait_ms } => {
                let what = (share, write);
                return self.ask_capability(agent, owner, what, valid_until, wait_ms, op, now);
            }
            Command::HandOn { owner, share, to, terms } => {
                return self.hand_on(agent, (owner, share), to, terms, op, now);
            }
            Command::CallService { owner, share, write, params } => {
                return self.call_service(agent, owner, share, write, params, op, now);
            }
            Command::QueryVersion(device) => {
                return self.ask_device(agent, device, Question::Version, None, op, now);
            }
            Command::Trace { to, timeout_ms } => {
                return self.ask_device(agent, to, Question::Trace, timeout_ms, op, now);
            }
            Command::Connect { host, port } => return self.connect_to(host, port, op),
            Command::AdmitDm { bearer, principal, known } => {
                return self.issue_dm_grant(agent, bearer, principal, known, op, now);
            }
            Command::UseDmGrant { to, grant } => {
                return self.use_dm_grant(agent, to, grant, op, now);
            }
            Command::RevokeDm { bearer, token_id } => {
                return self.withdraw_dm_grant(agent, bearer, token_id, op, now);
            }
            Command::Acknowledge(seq) => {
                self.acknowledge(agent, seq, now);
                Ok(CommandResult::Done)
            }
        };
        self.outputs.push_back(Output::Reply { op, result });
    }

    fn update(
        &mut self,
        agent: DeviceId,
        name: Option<String>,
        status: Option<AgentStatus>,
        visibility: Option<Visibility>,
        tags: Option<Vec<String>>,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        let name = match name {
            Some(name) => Some(names::of_agent(&name).map(str::to_owned).ok_or_else(|| {
                CommandError::new(
                    "invalid_name",
                    "an agent name has 1 to 64 characters, something to see and no hidden characters, \
                     and does not read as an id (8 hex digits or more, and nothing else)",
                )
            })?),
            None => None,
        };
        if status == Some(AgentStatus::Offline) {
            return Err(CommandError::new("invalid_status", "an agent goes offline by detaching"));
        }
        if let Some(tags) = &tags
            && (tags.len() > MAX_TAGS || tags.iter().any(|tag| names::own(tag) != Some(tag)))
        {
            return Err(CommandError::new(
                "invalid_tags",
                format!("at most {MAX_TAGS} tags of 1 to 64 characters without hidden characters"),
            ));
        }
        let Some(before) = self.record(&agent).cloned() else {
            return Err(CommandError::new("not_attached", "this agent is not in service"));
        };
        if let (Some(held), Some(status)) = (self.agent_mut(&agent), status) {
            held.presence = status;
        }
        if let Some(record) = self.touch_own_record(&agent) {
            if let Some(name) = &name {
                record.name.clone_from(name);
            }
            if let Some(status) = status {
                record.status = status;
            }
            if let Some(visibility) = visibility {
                record.visibility = visibility;
            }
            if let Some(tags) = tags {
                record.tags = tags;
            }
        }
        self.broadcast_own_record(agent, now);
        if let Some(name) = name.filter(|name| *name != before.name) {
            self.show_name(agent, before.name, name, now);
        }
        if let Some(status) = status.filter(|status| *status != before.status) {
            self.show_status(agent, status, now);
        }
        Ok(CommandResult::Done)
    }
}
