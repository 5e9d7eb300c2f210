//! Every frame of the mesh (`frames.md`, "Frames").

use thiserror::Error;

use super::advert::PeerAdvert;
use super::capability::is_capability_verb;
use super::cose::CoseSign1;
use super::fields::{
    Fields, ShapeError, array, bytes, device, device_value, fixed, identity_key,
    identity_key_value, int, open_map, text, uint,
};
use super::handshake::Handshake;
use super::scope::Scope;
use crate::codec::cbor::{CborError, Value, decode};
use crate::identity::device::{DeviceId, IdentityKey};

/// One frame. Members that a closed map does not know are dropped on reading; open maps keep them.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// Version and domains, once from each side.
    Handshake(Handshake),
    /// Asks for a pong.
    Ping,
    /// Answers a ping.
    Pong,
    /// Announces the end of the connection.
    Close {
        /// Free text.
        reason: Option<String>,
    },
    /// Peer adverts.
    Gossip {
        /// Not verified yet.
        peers: Vec<PeerAdvert>,
    },
    /// A claim to the coordinator role.
    Coordinator {
        /// Term of the claim.
        term: u64,
        /// Who claims or holds the role.
        coordinator: DeviceId,
        /// How many peers the coordinator would carry.
        capacity_hint: Option<u64>,
    },
    /// A command for the other side.
    ManageRequest(ManageRequest),
    /// The answer to a command.
    ManageResponse(ManageResponse),
    /// Signed revocations.
    RevocationAnnounce {
        /// Not verified yet.
        entries: Vec<CoseSign1>,
    },
    /// How much of a log the sender holds.
    DataHave {
        /// Whose log.
        peer: DeviceId,
        /// Last sequence number held; 0 for none.
        head_seq: u64,
    },
    /// Asks for the entries of a log after a sequence number.
    DataRequest {
        /// Whose log.
        peer: DeviceId,
        /// Exclusive lower bound.
        from_seq: u64,
    },
    /// Entries of a log.
    DataEntries {
        /// Whose log.
        peer: DeviceId,
        /// Entry n has sequence number `from_seq + 1 + n`.
        from_seq: u64,
        /// The entries, opaque.
        entries: Vec<Vec<u8>>,
    },
    /// Addresses under which the sender may be reached.
    Candidates {
        /// In no particular order.
        candidates: Vec<Candidate>,
    },
    /// A time at which both sides dial each other.
    SyncPunch {
        /// Ties the two sides together.
        nonce: u64,
        /// Unix milliseconds.
        deadline_unix_ms: u64,
    },
    /// The address under which the sender sees the receiver.
    ObservedAddress {
        /// `host:port`.
        address: String,
    },
    /// Addresses of relays.
    RelayOffer {
        /// `host:port` each.
        addresses: Vec<String>,
    },
    /// Asks a relay for a pairing.
    RelayConnect {
        /// With whom.
        target_device: DeviceId,
        /// On behalf of whom.
        source_device: Option<DeviceId>,
    },
    /// A nested frame through a relay.
    RelayData {
        /// The encoded nested frame.
        payload: Vec<u8>,
        /// To whom; absent means the latest pairing.
        to_device: Option<DeviceId>,
        /// From whom, set by the relay.
        from_device: Option<DeviceId>,
    },
    /// A relay tells of a pairing that another device asked for.
    RelayInbound {
        /// Who asked.
        source_device: DeviceId,
        /// Whom it is for.
        target_device: Option<DeviceId>,
    },
    /// Opens a secure channel.
    SecureHello(SecureHello),
    /// A sealed frame.
    SecureData {
        /// Rises by one for each frame.
        counter: u64,
        /// Ciphertext and tag.
        ciphertext: Vec<u8>,
    },
    /// Bytes of a running command.
    StreamData {
        /// Which command.
        session: u64,
        /// Sequence number.
        seq: u64,
        /// Which stream.
        channel: String,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Flow control of a running command.
    StreamAck {
        /// Which command.
        session: u64,
        /// Last sequence number received.
        ack_seq: u64,
        /// How many more bytes may come.
        window: u64,
    },
    /// A command has ended.
    StreamEnd {
        /// Which command.
        session: u64,
        /// Its exit code.
        exit_code: Option<i64>,
        /// The signal that ended it.
        exit_signal: Option<i64>,
    },
    /// A chunk of a bulk transfer.
    BulkData {
        /// Which transfer.
        transfer_id: [u8; 16],
        /// Sequence number.
        seq: u64,
        /// The chunk.
        bytes: Vec<u8>,
    },
    /// Flow control of a bulk transfer.
    BulkAck {
        /// Which transfer.
        transfer_id: [u8; 16],
        /// Count of chunks durably held.
        ack_seq: u64,
        /// How many more chunks may come.
        window: u64,
    },
    /// A bulk transfer is complete.
    BulkEnd {
        /// Which transfer.
        transfer_id: [u8; 16],
        /// Digest over everything.
        digest: Vec<u8>,
    },
}

/// `manage-request`.
#[derive(Clone, Debug, PartialEq)]
pub struct ManageRequest {
    /// Counted by the sender per session, from 0.
    pub request_id: u64,
    /// What to do.
    pub command: Command,
    /// On what.
    pub scope: Scope,
    /// By what right.
    pub token: Option<CoseSign1>,
}

/// The command of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    /// Outer verb: a capability verb.
    pub verb: String,
    /// A map with text keys; `verb` in it is the inner verb that requests are dispatched on.
    pub params: Value,
}

impl Command {
    /// A command with `inner` as the inner verb beside `params`.
    pub fn new<'k>(
        verb: &str,
        inner: &str,
        params: impl IntoIterator<Item = (&'k str, Option<Value>)>,
    ) -> Self {
        let inner = [("verb", Some(Value::from(inner)))];
        Self { verb: verb.to_owned(), params: Value::record(params.into_iter().chain(inner)) }
    }

    /// The inner verb, when the params have one.
    #[must_use]
    pub fn inner_verb(&self) -> Option<&str> {
        self.params.get("verb").and_then(Value::as_text)
    }
}

/// `manage-response`.
#[derive(Clone, Debug, PartialEq)]
pub struct ManageResponse {
    /// Of the request answered.
    pub request_id: u64,
    /// How it went.
    pub outcome: Outcome,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The whole outcome map, `result: "ok"` included.
    Ok(Value),
    /// A refusal.
    Error {
        /// Stable code.
        code: String,
        /// Free text.
        message: Option<String>,
    },
}

impl Outcome {
    /// Success without more.
    #[must_use]
    pub fn ok() -> Self {
        Self::ok_with([])
    }

    /// Success with members.
    pub fn ok_with<'k>(members: impl IntoIterator<Item = (&'k str, Option<Value>)>) -> Self {
        let result = [("result", Some(Value::from("ok")))];
        Self::Ok(Value::record(members.into_iter().chain(result)))
    }

    /// A refusal.
    #[must_use]
    pub fn error(code: &str, message: Option<&str>) -> Self {
        Self::Error { code: code.to_owned(), message: message.map(ToOwned::to_owned) }
    }

    fn from_value(value: Value) -> Option<Self> {
        match value.get("result")?.as_text()? {
            "ok" => {
                Fields::of(value, "outcome").ok().map(|fields| Self::Ok(Value::Map(fields.rest())))
            }
            "error" => {
                let mut fields = Fields::of(value, "outcome").ok()?;
                Some(Self::Error {
                    code: fields.required("code", text).ok()?,
                    message: fields.optional("message", text).ok()?,
                })
            }
            _ => None,
        }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Ok(members) => members.clone(),
            Self::Error { code, message } => Value::record([
                ("result", Some(Value::from("error"))),
                ("code", Some(Value::from(code.as_str()))),
                ("message", message.as_deref().map(Value::from)),
            ]),
        }
    }
}

/// One address of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// `host:port`.
    pub address: String,
    /// How it was learned.
    pub kind: CandidateKind,
    /// Higher is tried first.
    pub priority: u64,
}

/// How a candidate was learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateKind {
    /// An address of the host itself.
    Host,
    /// As seen by a server.
    ServerReflexive,
    /// Through a relay.
    Relayed,
}

impl CandidateKind {
    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::ServerReflexive => "server-reflexive",
            Self::Relayed => "relayed",
        }
    }
}

impl Candidate {
    fn from_value(value: Value) -> Option<Self> {
        let mut fields = Fields::of(value, "candidate").ok()?;
        let kind = |value: Value| {
            [CandidateKind::Host, CandidateKind::ServerReflexive, CandidateKind::Relayed]
                .into_iter()
                .find(|kind| value.as_text() == Some(kind.as_str()))
        };
        Some(Self {
            address: fields.required("address", text).ok()?,
            kind: fields.required("kind", kind).ok()?,
            priority: fields.required("priority", uint).ok()?,
        })
    }

    fn to_value(&self) -> Value {
        Value::map([
            ("address", Value::from(self.address.as_str())),
            ("kind", Value::from(self.kind.as_str())),
            ("priority", Value::from(self.priority)),
        ])
    }
}

/// `secure-hello`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecureHello {
    /// Fresh P-256 point, uncompressed.
    pub ephemeral_key: [u8; 65],
    /// Fresh.
    pub nonce: [u8; 16],
    /// The sender's identity key.
    pub identity_key: IdentityKey,
    /// The recipient.
    pub to_device: DeviceId,
    /// Over all of the above.
    pub signature: Vec<u8>,
}

/// Why bytes are no frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Not canonical CBOR: the connection ends.
    #[error(transparent)]
    NotCanonical(#[from] CborError),
    /// No map with a known `type`: the frame is dropped and the connection goes on.
    #[error("the frame's type is unknown")]
    UnknownType,
    /// A known type with another shape: the frame is dropped and the connection goes on.
    #[error(transparent)]
    Malformed(#[from] ShapeError),
}

impl FrameError {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotCanonical(_) => "not_canonical",
            Self::UnknownType => "unknown_type",
            Self::Malformed(_) => "malformed",
        }
    }

    /// Whether the connection that the bytes came over has to end.
    #[must_use]
    pub fn ends_connection(&self) -> bool {
        matches!(self, Self::NotCanonical(_))
    }
}

impl Frame {
    /// Reads one encoded frame (without its length prefix).
    ///
    /// # Errors
    /// [`FrameError`]: see its variants for what becomes of the connection.
    pub fn decode(encoded: &[u8]) -> Result<Self, FrameError> {
        Self::from_value(decode(encoded)?)
    }

    /// The canonical bytes of this frame, without length prefix.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.to_value().encode()
    }

    /// Reads a decoded frame.
    ///
    /// # Errors
    /// [`FrameError::UnknownType`] or [`FrameError::Malformed`].
    pub fn from_value(value: Value) -> Result<Self, FrameError> {
        let mut fields = Fields::of(value, "frame").map_err(|_| FrameError::UnknownType)?;
        let kind = fields.required("type", text).map_err(|_| FrameError::UnknownType)?;
        Self::read(&kind, &mut fields)?.ok_or(FrameError::UnknownType)
    }

    fn read(kind: &str, fields: &mut Fields) -> Result<Option<Self>, ShapeError> {
        let texts = |value| array(value, text);
        Ok(Some(match kind {
            "handshake" => Self::Handshake(Handshake::from_fields(fields)?),
            "ping" => Self::Ping,
            "pong" => Self::Pong,
            "close" => Self::Close { reason: fields.optional("reason", text)? },
            "gossip" => {
                let advert = |value| PeerAdvert::from_value(value).ok();
                Self::Gossip { peers: fields.required("peers", |value| array(value, advert))? }
            }
            "coordinator" => Self::Coordinator {
                term: fields.required("term", uint)?,
                coordinator: fields.required("coordinator", device)?,
                capacity_hint: fields.optional("capacity-hint", uint)?,
            },
            "manage-request" => {
                let mut command = Fields::of(fields.required("command", Some)?, "command")?;
                let verb = |value| text(value).filter(|verb| is_capability_verb(verb));
                Self::ManageRequest(ManageRequest {
                    request_id: fields.required("request-id", uint)?,
                    command: Command {
                        verb: command.required("verb", verb)?,
                        params: command.required("params", open_map)?,
                    },
                    scope: Scope::from_value(fields.required("scope", Some)?)?,
                    token: fields.optional("token", |value| CoseSign1::from_value(value).ok())?,
                })
            }
            "manage-response" => Self::ManageResponse(ManageResponse {
                request_id: fields.required("request-id", uint)?,
                outcome: fields.required("outcome", Outcome::from_value)?,
            }),
            "revocation-announce" => {
                let entry = |value| CoseSign1::from_value(value).ok();
                Self::RevocationAnnounce {
                    entries: fields.required("entries", |value| array(value, entry))?,
                }
            }
            "data-have" => Self::DataHave {
                peer: fields.required("peer", device)?,
                head_seq: fields.required("head-seq", uint)?,
            },
            "data-request" => Self::DataRequest {
                peer: fields.required("peer", device)?,
                from_seq: fields.required("from-seq", uint)?,
            },
            "data-entries" => Self::DataEntries {
                peer: fields.required("peer", device)?,
                from_seq: fields.required("from-seq", uint)?,
                entries: fields.required("entries", |value| array(value, bytes))?,
            },
            "candidates" => Self::Candidates {
                candidates: fields
                    .required("candidates", |value| array(value, Candidate::from_value))?,
            },
            "sync-punch" => Self::SyncPunch {
                nonce: fields.required("nonce", uint)?,
                deadline_unix_ms: fields.required("deadline-unix-ms", uint)?,
            },
            "observed-address" => {
                Self::ObservedAddress { address: fields.required("address", text)? }
            }
            "relay-offer" => Self::RelayOffer { addresses: fields.required("addresses", texts)? },
            "relay-connect" => Self::RelayConnect {
                target_device: fields.required("target-device", device)?,
                source_device: fields.optional("source-device", device)?,
            },
            "relay-data" => Self::RelayData {
                payload: fields.required("payload", bytes)?,
                to_device: fields.optional("to-device", device)?,
                from_device: fields.optional("from-device", device)?,
            },
            "relay-inbound" => Self::RelayInbound {
                source_device: fields.required("source-device", device)?,
                target_device: fields.optional("target-device", device)?,
            },
            "secure-hello" => Self::SecureHello(SecureHello {
                ephemeral_key: fields.required("ephemeral-key", fixed)?,
                nonce: fields.required("nonce", fixed)?,
                identity_key: fields.required("identity-key", identity_key)?,
                to_device: fields.required("to-device", device)?,
                signature: fields.required("signature", bytes)?,
            }),
            "secure-data" => Self::SecureData {
                counter: fields.required("counter", uint)?,
                ciphertext: fields.required("ciphertext", bytes)?,
            },
            "stream-data" => Self::StreamData {
                session: fields.required("session", uint)?,
                seq: fields.required("seq", uint)?,
                channel: fields.required("channel", text)?,
                bytes: fields.required("bytes", bytes)?,
            },
            "stream-ack" => Self::StreamAck {
                session: fields.required("session", uint)?,
                ack_seq: fields.required("ack-seq", uint)?,
                window: fields.required("window", uint)?,
            },
            "stream-end" => Self::StreamEnd {
                session: fields.required("session", uint)?,
                exit_code: fields.optional("exit-code", int)?,
                exit_signal: fields.optional("exit-signal", int)?,
            },
            "bulk-data" => Self::BulkData {
                transfer_id: fields.required("transfer-id", fixed)?,
                seq: fields.required("seq", uint)?,
                bytes: fields.required("bytes", bytes)?,
            },
            "bulk-ack" => Self::BulkAck {
                transfer_id: fields.required("transfer-id", fixed)?,
                ack_seq: fields.required("ack-seq", uint)?,
                window: fields.required("window", uint)?,
            },
            "bulk-end" => Self::BulkEnd {
                transfer_id: fields.required("transfer-id", fixed)?,
                digest: fields.required("digest", bytes)?,
            },
            _ => return Ok(None),
        }))
    }

    /// The value of the `type` member.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Handshake(_) => "handshake",
            Self::Ping => "ping",
            Self::Pong => "pong",
            Self::Close { .. } => "close",
            Self::Gossip { .. } => "gossip",
            Self::Coordinator { .. } => "coordinator",
            Self::ManageRequest(_) => "manage-request",
            Self::ManageResponse(_) => "manage-response",
            Self::RevocationAnnounce { .. } => "revocation-announce",
            Self::DataHave { .. } => "data-have",
            Self::DataRequest { .. } => "data-request",
            Self::DataEntries { .. } => "data-entries",
            Self::Candidates { .. } => "candidates",
            Self::SyncPunch { .. } => "sync-punch",
            Self::ObservedAddress { .. } => "observed-address",
            Self::RelayOffer { .. } => "relay-offer",
            Self::RelayConnect { .. } => "relay-connect",
            Self::RelayData { .. } => "relay-data",
            Self::RelayInbound { .. } => "relay-inbound",
            Self::SecureHello(_) => "secure-hello",
            Self::SecureData { .. } => "secure-data",
            Self::StreamData { .. } => "stream-data",
            Self::StreamAck { .. } => "stream-ack",
            Self::StreamEnd { .. } => "stream-end",
            Self::BulkData { .. } => "bulk-data",
            Self::BulkAck { .. } => "bulk-ack",
            Self::BulkEnd { .. } => "bulk-end",
        }
    }

    /// The frame map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let kind = [("type", Some(Value::from(self.kind())))];
        Value::record(kind.into_iter().chain(self.members()))
    }

    fn members(&self) -> Vec<(&'static str, Option<Value>)> {
        let number = |n: &u64| Some(Value::from(*n));
        let byte_string = |bytes: &[u8]| Some(Value::from(bytes));
        let id = |device: &DeviceId| Some(device_value(device));
        let optional_id = |device: &Option<DeviceId>| device.as_ref().map(device_value);
        match self {
            Self::Handshake(handshake) => handshake.members(),
            Self::Ping | Self::Pong => Vec::new(),
            Self::Close { reason } => vec![("reason", reason.as_deref().map(Value::from))],
            Self::Gossip { peers } => {
                vec![("peers", Some(list(peers, PeerAdvert::to_value)))]
            }
            Self::Coordinator { term, coordinator, capacity_hint } => vec![
                ("term", number(term)),
                ("coordinator", id(coordinator)),
                ("capacity-hint", capacity_hint.map(Value::from)),
            ],
            Self::ManageRequest(request) => vec![
                ("request-id", number(&request.request_id)),
                (
                    "command",
                    Some(Value::map([
                        ("verb", Value::from(request.command.verb.as_str())),
                        ("params", request.command.params.clone()),
                    ])),
                ),
                ("scope", Some(request.scope.to_value())),
                ("token", request.token.as_ref().map(CoseSign1::to_value)),
            ],
            Self::ManageResponse(response) => vec![
                ("request-id", number(&response.request_id)),
                ("outcome", Some(response.outcome.to_value())),
            ],
            Self::RevocationAnnounce { entries } => {
                vec![("entries", Some(list(entries, CoseSign1::to_value)))]
            }
            Self::DataHave { peer, head_seq } => {
                vec![("peer", id(peer)), ("head-seq", number(head_seq))]
            }
            Self::DataRequest { peer, from_seq } => {
                vec![("peer", id(peer)), ("from-seq", number(from_seq))]
            }
            Self::DataEntries { peer, from_seq, entries } => vec![
                ("peer", id(peer)),
                ("from-seq", number(from_seq)),
                ("entries", Some(list(entries, |entry| Value::from(entry.as_slice())))),
            ],
            Self::Candidates { candidates } => {
                vec![("candidates", Some(list(candidates, Candidate::to_value)))]
            }
            Self::SyncPunch { nonce, deadline_unix_ms } => {
                vec![("nonce", number(nonce)), ("deadline-unix-ms", number(deadline_unix_ms))]
            }
            Self::ObservedAddress { address } => {
                vec![("address", Some(Value::from(address.as_str())))]
            }
            Self::RelayOffer { addresses } => {
                vec![("addresses", Some(list(addresses, |a| Value::from(a.as_str()))))]
            }
            Self::RelayConnect { target_device, source_device } => vec![
                ("target-device", id(target_device)),
                ("source-device", optional_id(source_device)),
            ],
            Self::RelayData { payload, to_device, from_device } => vec![
                ("payload", byte_string(payload)),
                ("to-device", optional_id(to_device)),
                ("from-device", optional_id(from_device)),
            ],
            Self::RelayInbound { source_device, target_device } => vec![
                ("source-device", id(source_device)),
                ("target-device", optional_id(target_device)),
            ],
            Self::SecureHello(hello) => vec![
                ("ephemeral-key", byte_string(&hello.ephemeral_key)),
                ("nonce", byte_string(&hello.nonce)),
                ("identity-key", Some(identity_key_value(&hello.identity_key))),
                ("to-device", id(&hello.to_device)),
                ("signature", byte_string(&hello.signature)),
            ],
            Self::SecureData { counter, ciphertext } => {
                vec![("counter", number(counter)), ("ciphertext", byte_string(ciphertext))]
            }
            Self::StreamData { session, seq, channel, bytes } => vec![
                ("session", number(session)),
                ("seq", number(seq)),
                ("channel", Some(Value::from(channel.as_str()))),
                ("bytes", byte_string(bytes)),
            ],
            Self::StreamAck { session, ack_seq, window } => vec![
                ("session", number(session)),
                ("ack-seq", number(ack_seq)),
                ("window", number(window)),
            ],
            Self::StreamEnd { session, exit_code, exit_signal } => vec![
                ("session", number(session)),
                ("exit-code", exit_code.map(Value::from)),
                ("exit-signal", exit_signal.map(Value::from)),
            ],
            Self::BulkData { transfer_id, seq, bytes } => vec![
                ("transfer-id", byte_string(transfer_id)),
                ("seq", number(seq)),
                ("bytes", byte_string(bytes)),
            ],
            Self::BulkAck { transfer_id, ack_seq, window } => vec![
                ("transfer-id", byte_string(transfer_id)),
                ("ack-seq", number(ack_seq)),
                ("window", number(window)),
            ],
            Self::BulkEnd { transfer_id, digest } => {
                vec![("transfer-id", byte_string(transfer_id)), ("digest", byte_string(digest))]
            }
        }
    }
}

fn list<T>(elements: &[T], value: impl Fn(&T) -> Value) -> Value {
    Value::Array(elements.iter().map(value).collect())
}
