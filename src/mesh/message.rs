//! The agent-comms messages that ride in the opaque frame verb, and the state patches
//! (`transport.md` 1.3, 1.4). Parsing is tolerant: a message that does not fit is
//! [`MeshMessage::Unknown`], which is answered ok and ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::events::DeliveryEvent;
use super::records::{AgentRecord, DmMessage, PeerInfo, RoomMessage, RoomRecord};
use crate::codec::cbor::{self, Value};
use crate::identity::device::DeviceId;

/// The one session domain of agent-comms.
pub const DOMAIN: &str = "exadev.io/agent-comms-v1";
/// Outer verb of every frame request.
pub const FRAME_VERB: &str = "exadev.io/agent-comms-v1:frame";
/// Scope kind of every frame request.
pub const FRAME_SCOPE_KIND: &str = "agent-comms-mesh";

/// A snapshot of replicated state. Members of one collection that do not parse are left out one
/// by one (see [`MeshMessage::parse`]), so one odd record does not hide the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Agents by id.
    pub agents: BTreeMap<String, AgentRecord>,
    /// Rooms by path.
    pub rooms: BTreeMap<String, RoomRecord>,
    /// Room histories by path.
    pub messages: BTreeMap<String, Vec<RoomMessage>>,
    /// DM histories by key.
    pub dms: BTreeMap<String, Vec<DmMessage>>,
    /// Undelivered events by agent.
    pub delivery_queues: BTreeMap<String, Vec<DeliveryEvent>>,
}

/// A single change to replicated state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum Patch {
    /// An agent's record.
    AgentUpsert {
        /// The record.
        agent: AgentRecord,
    },
    /// An agent is gone.
    AgentOffline {
        /// Which.
        agent_id: DeviceId,
    },
    /// A room's record.
    RoomUpsert {
        /// The record.
        room: RoomRecord,
    },
    /// A room is gone.
    RoomDelete {
        /// Its path.
        room_id: String,
    },
    /// Legacy: a room message.
    MessageAdd {
        /// Room path.
        room_id: String,
        /// The message.
        message: RoomMessage,
    },
    /// Legacy: a direct message.
    DmAdd {
        /// DM key.
        key: String,
        /// The message.
        message: DmMessage,
    },
    /// An event for an agent.
    Delivery {
        /// For whom.
        agent_id: DeviceId,
        /// What.
        event: DeliveryEvent,
    },
}

/// One MeshMessage.
#[derive(Clone, Debug, PartialEq)]
pub enum MeshMessage {
    /// First request on a session to the well-known port.
    Introduce {
        /// Claimed id (never believed; TLS says who it is).
        peer_id: String,
        /// The introducer's data port; `None` when missing or no port number.
        data_port: Option<u16>,
    },
    /// The sender's peer table.
    PeerList(Vec<PeerInfo>),
    /// One more peer.
    PeerJoined(PeerInfo),
    /// Please take over the port.
    BecomeCoordinator(Vec<PeerInfo>),
    /// A device from beyond the machine asks to be let in.
    ConnectRequest {
        /// Data port it names.
        data_port: u16,
        /// Agent name or empty.
        name: String,
        /// Fingerprint, informational.
        fingerprint: String,
    },
    /// Replicated state.
    StateSync(Box<Snapshot>),
    /// One change.
    StateUpdate(Box<Patch>),
    /// commsd only: copies of these messages for `agent` need not be held any longer.
    Release {
        /// The recipient.
        agent: DeviceId,
        /// Author and hex message id of each.
        messages: Vec<(DeviceId, String)>,
    },
    /// Anything else: answered ok, ignored.
    Unknown,
}

/// Method name of [`MeshMessage::Release`]; reference peers answer ok and ignore it.
const RELEASE_METHOD: &str = "x-commsd/release";

fn text(map: &Value, key: &str) -> Option<String> {
    map.get(key)?.as_text().map(str::to_owned)
}

fn typed<T: serde::de::DeserializeOwned>(map: &Value, key: &str) -> Option<T> {
    cbor::from_value(map.get(key)?).ok()
}

/// Elements that parse, in order, at most `limit`.
fn list<T: serde::de::DeserializeOwned>(value: Option<&Value>, limit: usize) -> Vec<T> {
    let Some(Value::Array(items)) = value else { return Vec::new() };
    items.iter().take(limit).filter_map(|item| cbor::from_value(item).ok()).collect()
}

fn entries(value: Option<&Value>, limit: usize) -> impl Iterator<Item = (&str, &Value)> {
    let items: &[(Value, Value)] = match value {
        Some(Value::Map(items)) => items,
        _ => &[],
    };
    items.iter().take(limit).filter_map(|(key, value)| Some((key.as_text()?, value)))
}

/// Elements taken from one list or map of a message; more than any real mesh has, and small
/// enough that a hostile frame cannot make the node work for long.
pub const MAX_ELEMENTS: usize = 16_384;

impl MeshMessage {
    /// Reads the params of a frame request: a map with `message`, a map with text `method`.
    #[must_use]
    pub fn parse(params: &Value) -> Self {
        Self::parse_known(params).unwrap_or(Self::Unknown)
    }

    fn parse_known(params: &Value) -> Option<Self> {
        let message = params.get("message")?;
        Some(match message.get("method")?.as_text()? {
            "introduce" => Self::Introduce {
                peer_id: text(message, "peerId").unwrap_or_default(),
                data_port: message
                    .get("dataPort")
                    .and_then(Value::as_u64)
                    .and_then(|port| u16::try_from(port).ok())
                    .filter(|port| *port != 0),
            },
            "peer_list" => Self::PeerList(list(message.get("peers"), MAX_ELEMENTS)),
            "peer_joined" => Self::PeerJoined(typed(message, "peer")?),
            "become_coordinator" => {
                Self::BecomeCoordinator(list(message.get("peerList"), MAX_ELEMENTS))
            }
            "connect_request" => Self::ConnectRequest {
                data_port: typed(message, "dataPort").unwrap_or(0),
                name: text(message, "name").unwrap_or_default(),
                fingerprint: text(message, "fingerprint").unwrap_or_default(),
            },
            "state_sync" => Self::StateSync(Box::new(Snapshot::parse(message.get("state")?))),
            "state_update" => Self::StateUpdate(Box::new(typed(message, "patch")?)),
            RELEASE_METHOD => Self::Release {
                agent: typed(message, "agent")?,
                messages: list(message.get("messages"), MAX_ELEMENTS),
            },
            _ => return None,
        })
    }

    /// The params map of a frame request carrying this message.
    #[must_use]
    pub fn to_params(&self) -> Value {
        let value = |v: Result<Value, cbor::ConvertError>| v.unwrap_or(Value::Null);
        let mut members = Vec::new();
        let mut put = |key: &str, v: Value| members.push((key.to_owned(), v));
        match self {
            Self::Introduce { peer_id, data_port } => {
                put("method", Value::Text("introduce".into()));
                put("peerId", Value::Text(peer_id.clone()));
                put("dataPort", Value::Uint(u64::from(data_port.unwrap_or(0))));
            }
            Self::PeerList(peers) => {
                put("method", Value::Text("peer_list".into()));
                put("peers", value(cbor::to_value(peers)));
            }
            Self::PeerJoined(peer) => {
                put("method", Value::Text("peer_joined".into()));
                put("peer", value(cbor::to_value(peer)));
            }
            Self::BecomeCoordinator(peers) => {
                put("method", Value::Text("become_coordinator".into()));
                put("peerList", value(cbor::to_value(peers)));
            }
            Self::ConnectRequest { data_port, name, fingerprint } => {
                put("method", Value::Text("connect_request".into()));
                put("dataPort", Value::Uint(u64::from(*data_port)));
                put("name", Value::Text(name.clone()));
                put("fingerprint", Value::Text(fingerprint.clone()));
            }
            Self::StateSync(state) => {
                put("method", Value::Text("state_sync".into()));
                put("state", value(cbor::to_value(state)));
            }
            Self::StateUpdate(patch) => {
                put("method", Value::Text("state_update".into()));
                put("patch", value(cbor::to_value(patch)));
            }
            Self::Release { agent, messages } => {
                put("method", Value::Text(RELEASE_METHOD.into()));
                put("agent", Value::Text(agent.hex()));
                put("messages", value(cbor::to_value(messages)));
            }
            Self::Unknown => put("method", Value::Text("unknown".into())),
        }
        Value::map([("message", Value::map(members))])
    }
}

impl Snapshot {
    /// Reads a snapshot, leaving out what does not parse.
    #[must_use]
    pub fn parse(state: &Value) -> Self {
        let mut out = Self::default();
        for (id, value) in entries(state.get("agents"), MAX_ELEMENTS) {
            if let Ok(agent) = cbor::from_value(value) {
                out.agents.insert(id.to_owned(), agent);
            }
        }
        for (id, value) in entries(state.get("rooms"), MAX_ELEMENTS) {
            if let Ok(room) = cbor::from_value(value) {
                out.rooms.insert(id.to_owned(), room);
            }
        }
        for (id, value) in entries(state.get("messages"), MAX_ELEMENTS) {
            out.messages.insert(id.to_owned(), list(Some(value), MAX_ELEMENTS));
        }
        for (id, value) in entries(state.get("dms"), MAX_ELEMENTS) {
            out.dms.insert(id.to_owned(), list(Some(value), MAX_ELEMENTS));
        }
        for (id, value) in entries(state.get("deliveryQueues"), MAX_ELEMENTS) {
            out.delivery_queues.insert(id.to_owned(), list(Some(value), MAX_ELEMENTS));
        }
        out
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.agents.is_empty()
            && self.rooms.is_empty()
            && self.messages.is_empty()
            && self.dms.is_empty()
            && self.delivery_queues.is_empty()
    }
}
