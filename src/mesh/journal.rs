//! The durable changes a node asks its store for. Values only: how they reach a disk is the
//! store's matter. A batch is all or nothing.
//!
//! Stored records begin with the number of their variant: new variants go to the end, and every change,
//! a new one as well, makes another format of the store (`store::disk`).

use serde::{Deserialize, Serialize};

use super::discovery::{Sides, Visibility};
use super::records::ConsentPolicy;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Names one batch: the node holds back what depends on it until the store reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One change. Events, params, messages and mesh records are canonical CBOR, as on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The daemon has been started so often with this store. Stored before anything else happens,
    /// so that nothing numbered since then is taken for something of before.
    Start {
        /// How often.
        number: u64,
    },
    /// An agent of ours as it describes itself, and what its slot is for.
    Agent {
        /// Who.
        agent: DeviceId,
        /// Directory or name behind its slot.
        key: String,
        /// Its record.
        #[serde(with = "serde_bytes")]
        record: Vec<u8>,
    },
    /// Nothing of an agent is wanted any more.
    AgentGone {
        /// Whose.
        agent: DeviceId,
    },
    /// An agent acknowledged everything up to a number.
    Acknowledged {
        /// Whose.
        agent: DeviceId,
        /// Up to and including.
        seq: u64,
    },
    /// A message, or a question that is not answered, that an agent has acknowledged: it is not shown
    /// again.
    Seen {
        /// Whose.
        agent: DeviceId,
        /// Number of the event that carried it.
        seq: u64,
        /// Author, or who asks.
        author: DeviceId,
        /// Hex message id, or the question's.
        message: String,
    },
    /// Messages seen so long ago that nobody sends them again.
    Unseen {
        /// Whose.
        agent: DeviceId,
        /// Up to and including.
        up_to: u64,
    },
    /// An event entered an agent's mailbox.
    Mailbox {
        /// Whose.
        agent: DeviceId,
        /// Its number.
        seq: u64,
        /// When it came.
        at: UnixMillis,
        /// The event.
        #[serde(with = "serde_bytes")]
        event: Vec<u8>,
    },
    /// An event was taken out of a mailbox without having been acknowledged.
    Withdrawn {
        /// Whose.
        agent: DeviceId,
        /// Its number.
        seq: u64,
    },
    /// A message waits for its recipient, or for the recipient's consent.
    Outgoing {
        /// Sender.
        agent: DeviceId,
        /// Recipient.
        recipient: DeviceId,
        /// Order number within the sender.
        number: u64,
        /// Room path.
        path: String,
        /// Request params.
        #[serde(with = "serde_bytes")]
        params: Vec<u8>,
        /// First queued at.
        queued_at: UnixMillis,
        /// It is the first of a conversation: the recipient has to agree.
        asks: bool,
    },
    /// It waits no longer.
    OutgoingDone {
        /// Sender.
        agent: DeviceId,
        /// Order number within the sender.
        number: u64,
    },
    /// An agent has begun a conversation, or agreed to one: the other side need not ask.
    Opened {
        /// Whose.
        agent: DeviceId,
        /// The conversation.
        path: String,
    },
    /// An agent holds the token of a room because it was invited, and has not joined.
    Invited {
        /// Whose.
        agent: DeviceId,
        /// The room.
        path: String,
    },
    /// It has joined, or the invitation is over.
    InvitedDone {
        /// Whose.
        agent: DeviceId,
        /// The room.
        path: String,
    },
    /// Somebody waits for an agent's decision.
    Asked {
        /// Whose decision.
        agent: DeviceId,
        /// Handle.
        id: String,
        /// Room or conversation.
        path: String,
        /// Who asks.
        requester: DeviceId,
        /// Since when.
        at: UnixMillis,
    },
    /// It is decided, or the time is up.
    AskedDone {
        /// Whose decision.
        agent: DeviceId,
        /// Handle.
        id: String,
    },
    /// A copy of somebody else's message is held for an absent recipient.
    Copy {
        /// Recipient.
        recipient: DeviceId,
        /// Author.
        author: DeviceId,
        /// Hex message id.
        message: String,
        /// The event.
        #[serde(with = "serde_bytes")]
        event: Vec<u8>,
        /// Held since.
        since: UnixMillis,
    },
    /// The copy is not needed any more.
    CopyDone {
        /// Recipient.
        recipient: DeviceId,
        /// Author.
        author: DeviceId,
        /// Hex message id.
        message: String,
    },
    /// A room that an agent of ours owns, is in or is invited to.
    Room {
        /// Room path.
        path: String,
        /// The record.
        #[serde(with = "serde_bytes")]
        record: Vec<u8>,
        /// Members that its owner has put out.
        put_out: Vec<DeviceId>,
    },
    /// None of ours has to do with it any more.
    RoomGone {
        /// Room path.
        path: String,
    },
    /// A message of a room or conversation.
    Message {
        /// Room or conversation.
        path: String,
        /// Its number in the history.
        seq: u64,
        /// When it came.
        at: UnixMillis,
        /// The message.
        #[serde(with = "serde_bytes")]
        message: Vec<u8>,
    },
    /// The older part of a history is given up.
    MessagesGone {
        /// Room or conversation.
        path: String,
        /// Up to and including.
        up_to: u64,
    },
    /// A token was revoked.
    Revocation {
        /// SHA-256 of the token's id.
        token: [u8; 32],
        /// Who revokes.
        issuer: DeviceId,
        /// From whom we heard it.
        source: DeviceId,
        /// The signed entry.
        #[serde(with = "serde_bytes")]
        entry: Vec<u8>,
    },
    /// There was no more room for a revocation.
    RevocationGone {
        /// SHA-256 of the token's id.
        token: [u8; 32],
        /// Who revokes.
        issuer: DeviceId,
    },
    /// Something of this machine is shared with peers.
    Share {
        /// Its name.
        name: String,
        /// What it is, to whoever serves it: a directory.
        place: String,
        /// Whether it may be written to.
        write: bool,
        /// Since when.
        at: UnixMillis,
    },
    /// It is not shared any more, and nothing granted for it is good.
    ShareGone {
        /// Its name.
        name: String,
    },
    /// A peer may use a share.
    ShareGrant {
        /// The share's name.
        name: String,
        /// Id of the token.
        token: [u8; 16],
        /// Who holds it.
        bearer: DeviceId,
        /// For writing; else for reading.
        write: bool,
        /// Since when.
        at: UnixMillis,
        /// Until when.
        expires: UnixMillis,
        /// How often it may be passed on.
        delegations: u64,
        /// Taken back.
        revoked: bool,
    },
    /// The grant has ended.
    ShareGrantGone {
        /// The share's name.
        name: String,
        /// Id of the token.
        token: [u8; 16],
    },
    /// An agent has asked for the use of somebody's share.
    Sought {
        /// Who asks.
        agent: DeviceId,
        /// Whom.
        owner: DeviceId,
        /// Which capability.
        capability: String,
        /// The share.
        path: String,
        /// Nobody waits for it after this.
        until: UnixMillis,
        /// Until when it is needed.
        valid_until: Option<UnixMillis>,
    },
    /// That is decided, or over.
    SoughtDone {
        /// Who asked.
        agent: DeviceId,
        /// Whom.
        owner: DeviceId,
        /// Which capability.
        capability: String,
        /// The share.
        path: String,
    },
    /// An agent has said who may begin conversations with it.
    Consent {
        /// Whose.
        agent: DeviceId,
        /// What it said.
        policy: ConsentPolicy,
    },
    /// How far beacons make this machine known.
    MeshVisibility {
        /// To either side.
        visibility: Sides<Visibility>,
    },
}

impl Record {
    /// The agent of ours that it belongs to, if to one.
    #[must_use]
    pub fn agent(&self) -> Option<DeviceId> {
        match self {
            Self::Agent { agent, .. }
            | Self::AgentGone { agent }
            | Self::Acknowledged { agent, .. }
            | Self::Seen { agent, .. }
            | Self::Unseen { agent, .. }
            | Self::Mailbox { agent, .. }
            | Self::Withdrawn { agent, .. }
            | Self::Outgoing { agent, .. }
            | Self::OutgoingDone { agent, .. }
            | Self::Opened { agent, .. }
            | Self::Consent { agent, .. }
            | Self::Invited { agent, .. }
            | Self::InvitedDone { agent, .. }
            | Self::Asked { agent, .. }
            | Self::AskedDone { agent, .. }
            | Self::Sought { agent, .. }
            | Self::SoughtDone { agent, .. } => Some(*agent),
            Self::Start { .. }
            | Self::MeshVisibility { .. }
            | Self::Copy { .. }
            | Self::CopyDone { .. }
            | Self::Room { .. }
            | Self::RoomGone { .. }
            | Self::Message { .. }
            | Self::MessagesGone { .. }
            | Self::Revocation { .. }
            | Self::RevocationGone { .. }
            | Self::Share { .. }
            | Self::ShareGone { .. }
            | Self::ShareGrant { .. }
            | Self::ShareGrantGone { .. } => None,
        }
    }

    /// Bytes it takes while it waits to be written, about.
    #[must_use]
    pub fn weight(&self) -> usize {
        /// Ids, numbers and what the value itself takes.
        const REST: usize = 128;
        REST + match self {
            Self::Agent { record, .. } | Self::Room { record, .. } => record.len(),
            Self::Mailbox { event, .. } | Self::Copy { event, .. } => event.len(),
            Self::Outgoing { params, .. } => params.len(),
            Self::Message { message, .. } => message.len(),
            Self::Revocation { entry, .. } => entry.len(),
            Self::Share { place, .. } => place.len(),
            _ => 0,
        }
    }
}
