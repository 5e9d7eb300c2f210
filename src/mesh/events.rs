//! What an agent is shown: delivery events and delivery states (`rooms.md` 1.5, 1.6).

use serde::{Deserialize, Serialize};

use super::records::{AgentStatus, DmMessage, RoomMessage};
use crate::identity::device::DeviceId;

/// What became of one message for one recipient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum DeliveryState {
    /// The recipient's device accepted it.
    Delivered,
    /// The recipient's agent consumed it.
    Read,
    /// No answer yet; held here for retry.
    Queued {
        /// `timeout`, `not_connected` or `connection_lost`.
        reason: String,
    },
    /// The recipient answered with an error that a retry cannot change.
    Refused {
        /// Wire code, optionally followed by `: message`.
        code: String,
    },
    /// Evicted by a bound, or the permission to send is gone.
    Dropped,
    /// Older than the retry window.
    Expired,
}

/// A room member as listed in a `room_members` event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Device id.
    pub id: DeviceId,
    /// Its own name (untrusted).
    pub name: String,
    /// Presence.
    pub status: AgentStatus,
}

/// One thing that happened, from one agent's point of view.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum DeliveryEvent {
    /// A message in a room.
    RoomMessage {
        /// The message.
        message: RoomMessage,
    },
    /// A direct message.
    Dm {
        /// The message.
        message: DmMessage,
    },
    /// An invitation to a room.
    RoomInvite {
        /// Room path.
        room: String,
        /// What the owner says it is for.
        #[serde(default)]
        room_description: String,
        /// Inviter (the path's owner).
        from: DeviceId,
        /// Inviter's name.
        #[serde(default)]
        from_name: String,
        /// Inviter's working directory, if shared.
        #[serde(default)]
        from_cwd: String,
    },
    /// An agent joined a room this one is in.
    MemberJoined {
        /// Room path.
        room: String,
        /// Who.
        agent: DeviceId,
    },
    /// An agent left or was removed.
    MemberLeft {
        /// Room path.
        room: String,
        /// Who.
        agent: DeviceId,
    },
    /// Who is in a room, on joining it.
    RoomMembers {
        /// Room path.
        room: String,
        /// Current members.
        members: Vec<MemberInfo>,
    },
    /// A member's presence changed.
    MemberStatus {
        /// Room path.
        room: String,
        /// Who.
        agent: DeviceId,
        /// New presence.
        status: AgentStatus,
    },
    /// News of a message this agent sent.
    DeliveryStatus {
        /// Hex message id.
        message_id: String,
        /// The recipient concerned.
        agent: DeviceId,
        /// What became of it.
        delivery: DeliveryState,
        /// Room path; absent for direct messages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        room: Option<String>,
    },
    /// Several messages this agent sent were read, which one receipt told. (Ours alone: the
    /// reference has a [`Self::DeliveryStatus`] for each, as we have for a receipt of one.)
    MessagesRead {
        /// Their hex ids, oldest first.
        message_ids: Vec<String>,
        /// The reader.
        agent: DeviceId,
        /// Room path; absent for direct messages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        room: Option<String>,
    },
    /// An invited agent said no.
    InviteDeclined {
        /// Room path.
        room: String,
        /// Who.
        agent: DeviceId,
        /// Its name.
        #[serde(default)]
        agent_name: String,
        /// Why.
        #[serde(default)]
        reason: String,
    },
    /// A member changed its name.
    NameChanged {
        /// Who.
        agent: DeviceId,
        /// Before.
        old_name: String,
        /// After.
        new_name: String,
    },
    /// A device from beyond the machine asks to be let in.
    ConnectionRequest {
        /// Device-id hex: the handle to accept or reject by.
        connection_id: String,
        /// Authenticated device.
        peer_id: DeviceId,
        /// Data port it names.
        data_port: u16,
        /// Name it gives itself.
        #[serde(default)]
        name: String,
        /// Certificate fingerprint, informational.
        #[serde(default)]
        fingerprint: String,
    },
    /// Somebody asks to join a room, or to send direct messages (room = DM path).
    RoomJoinRequest {
        /// Room path.
        room: String,
        /// Who asks.
        requester_id: DeviceId,
    },
    /// Ours, never on the wire: how a join ended that the owner took time to decide; or that an agent
    /// is in a room by another name, or in another room, without its own doing; or that a room it was
    /// in is no more.
    JoinOutcome {
        /// Room path.
        room: String,
        /// Let in or not.
        accepted: bool,
        /// Why not, or why without its doing (`moved`, `renamed`, `destroyed`).
        #[serde(default, skip_serializing_if = "String::is_empty")]
        code: String,
        /// The owner's words, or what has changed.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
    },
    /// Ours, never on the wire: how a request for a capability ended that took time to decide.
    CapabilityOutcome {
        /// Who was asked.
        owner: DeviceId,
        /// The capability asked for, or what was granted of it.
        capability: String,
        /// Scope kind.
        scope_kind: String,
        /// Scope path.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scope_path: Option<String>,
        /// Granted or not.
        accepted: bool,
        /// Until when, as Unix milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expires: Option<u64>,
        /// Why not.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        code: String,
        /// The owner's words.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reason: String,
    },
    /// Somebody asks for a capability.
    CapabilityRequest {
        /// Handle.
        request_id: String,
        /// Capability verb.
        capability: String,
        /// Scope kind.
        scope_kind: String,
        /// Scope path.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scope_path: Option<String>,
        /// Who asks.
        requester_device: DeviceId,
    },
}

impl DeliveryEvent {
    /// Whether somebody waits for what the agent says to it.
    #[must_use]
    pub const fn is_question(&self) -> bool {
        matches!(
            self,
            Self::RoomInvite { .. }
                | Self::RoomJoinRequest { .. }
                | Self::ConnectionRequest { .. }
                | Self::CapabilityRequest { .. }
        )
    }

    /// The id of the message this event carries, if it carries one: what deduplication goes by.
    #[must_use]
    pub fn message_id(&self) -> Option<&str> {
        match self {
            Self::RoomMessage { message } => Some(&message.id),
            Self::Dm { message } => Some(&message.id),
            _ => None,
        }
    }

    /// Who asks, and what, of questions that are asked again after each start of the daemon: what
    /// deduplication goes by until they are answered. No message has such an id.
    #[must_use]
    pub fn question_key(&self) -> Option<(DeviceId, String)> {
        match self {
            Self::ConnectionRequest { peer_id, .. } => Some(Self::connection_key(*peer_id)),
            Self::CapabilityRequest { requester_device, request_id, .. } => {
                Some((*requester_device, format!("capability {request_id}")))
            }
            _ => None,
        }
    }

    /// The question of a machine that asks to be let in.
    #[must_use]
    pub fn connection_key(peer: DeviceId) -> (DeviceId, String) {
        (peer, "connection".to_owned())
    }

    /// Author and id of a carried message.
    #[must_use]
    pub fn message_key(&self) -> Option<(DeviceId, String)> {
        match self {
            Self::RoomMessage { message } => Some((message.from, message.id.clone())),
            Self::Dm { message } => Some((message.from, message.id.clone())),
            _ => None,
        }
    }

    /// The event's room, if it has a top-level one (`rooms.md` 3.2, room.notify).
    #[must_use]
    pub fn room(&self) -> Option<&str> {
        match self {
            Self::RoomInvite { room, .. }
            | Self::MemberJoined { room, .. }
            | Self::MemberLeft { room, .. }
            | Self::RoomMembers { room, .. }
            | Self::MemberStatus { room, .. }
            | Self::InviteDeclined { room, .. }
            | Self::JoinOutcome { room, .. }
            | Self::RoomJoinRequest { room, .. } => Some(room),
            Self::DeliveryStatus { room, .. } | Self::MessagesRead { room, .. } => room.as_deref(),
            _ => None,
        }
    }
}
