//! The durable changes a node asks its store for. Values only: how they reach a disk is the
//! store's matter. A batch is all or nothing.

use serde::{Deserialize, Serialize};

use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Names one batch: the node holds back what depends on it until the store reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One change. Events and params are canonical CBOR, as on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// An event entered an agent's mailbox.
    Mailbox {
        /// Whose.
        agent: DeviceId,
        /// Its number.
        seq: u64,
        /// The event.
        #[serde(with = "serde_bytes")]
        event: Vec<u8>,
    },
    /// An agent acknowledged everything up to a number.
    Acknowledged {
        /// Whose.
        agent: DeviceId,
        /// Up to and including.
        seq: u64,
    },
    /// A message waits for its recipient.
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
    },
    /// It waits no longer.
    OutgoingDone {
        /// Sender.
        agent: DeviceId,
        /// Order number within the sender.
        number: u64,
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
}
