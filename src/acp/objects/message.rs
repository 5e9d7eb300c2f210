//! What travels: the envelope that a relay sees, the message inside it, tool calls (design 6.12 to
//! 6.14).

use serde::Serialize;
use serde_json::Value;

use super::audit::AuditEntry;
use super::grants::CapabilityToken;
use super::resource::{Action, Resource};
use crate::acp::code::Code;
use crate::acp::did::Did;
use crate::acp::sign::{Signature, signed_by};
use crate::acp::value::{
    Bytes, CallId, Count, Digest, EnvelopeId, Key32, MessageId, Nonce, Note, Seq, SessionKeyId,
    TaskId, Time, Word, object, words,
};

words! {
    /// The one encryption suite.
    pub enum Suite {
        /// RFC 9180 base mode: X25519, HKDF-SHA256, AES-256-GCM.
        HpkeX25519Aes256 = "HPKE-0020-0001-0002",
    }
}

object! {
    /// A message, encrypted to its recipient and signed by its sender.
    pub struct Envelope = "Envelope" {
        "envelopeId" envelope_id: EnvelopeId,
        "from" from: Did,
        "to" to: Did,
        "sentAt" sent_at: Time,
        "expiresAt" expires_at: Time,
        "suite" suite: Suite,
        /// `identity`, `declared`, or `session:` and the id of a session key.
        "recipientKeyId" recipient_key_id: Word,
        /// The encapsulated key.
        "enc" enc: Key32,
        "ciphertext" ciphertext: Bytes,
        "signature" signature: Signature,
    }
}

/// The nine members of an envelope that are bound into its ciphertext.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvelopeHeader {
    /// Always `Envelope`.
    pub r#type: &'static str,
    /// Always `1.0`.
    pub version: &'static str,
    /// See [`Envelope`].
    pub envelope_id: EnvelopeId,
    /// See [`Envelope`].
    pub from: Did,
    /// See [`Envelope`].
    pub to: Did,
    /// See [`Envelope`].
    pub sent_at: Time,
    /// See [`Envelope`].
    pub expires_at: Time,
    /// See [`Envelope`].
    pub suite: Suite,
    /// See [`Envelope`].
    pub recipient_key_id: Word,
}

object! {
    /// The second signature of an entry, for its author.
    pub struct Countersignature {
        "seq" seq: Count,
        "entryDigest" entry_digest: Digest,
        "signature" signature: Signature,
    }
}

object! {
    /// A key for this task alone.
    pub struct SessionKey {
        "sessionKeyId" session_key_id: SessionKeyId,
        "publicKey" public_key: Key32,
    }
}

object! {
    /// The last committed entry of a log.
    pub struct Head {
        "seq" seq: Count,
        "digest" digest: Digest,
    }
}

object! {
    /// An entry that was not countersigned, and why.
    pub struct Nack {
        "seq" seq: Count,
        "code" code: Code,
        /// The sender's head; null before the first entry.
        "head" head: Option<Head>,
    }
}

object! {
    /// Why a tool call brought no result.
    pub struct CallError {
        "code" code: Code,
        "message" message: Note,
    }
}

object! {
    /// A worker asks the requester's gateway to use something for it.
    pub struct ToolCall = "ToolCall" {
        "callId" call_id: CallId,
        "taskId" task_id: TaskId,
        "contractDigest" contract_digest: Digest,
        "callerDid" caller_did: Did,
        /// Root first.
        "chain" chain: Seq<CapabilityToken, 1, 8>,
        "resource" resource: Resource,
        "action" action: Action,
        "arguments" arguments: Value,
        "issuedAt" issued_at: Time,
        "expiresAt" expires_at: Time,
        "nonce" nonce: Nonce,
        "signature" signature: Signature,
    }
}

object! {
    /// The gateway's answer to a tool call.
    pub struct ToolResult = "ToolResult" {
        "callId" call_id: CallId,
        /// Object digest of the call.
        "callDigest" call_digest: Digest,
        "gatewayDid" gateway_did: Did,
        "ok" ok: bool,
        "result" result: Value,
        "error" error: Option<CallError>,
        "at" at: Time,
        "signature" signature: Signature,
    }
}

object! {
    /// The plaintext of an envelope: a step of one task's log.
    pub struct SessionMessage = "SessionMessage" {
        "messageId" message_id: MessageId,
        "taskId" task_id: TaskId,
        "from" from: Did,
        "to" to: Did,
        /// With their author's signature.
        "entries" entries: Seq<AuditEntry, 0, 16>,
        "countersignatures" countersignatures: Seq<Countersignature, 0, 16>,
        /// What the entries refer to.
        "objects" objects: Seq<Value, 0, 64>,
        "sessionKey" session_key: Option<SessionKey>,
        /// The sender's; null before the first entry.
        "head" head: Option<Head>,
        "nack" nack: Option<Nack>,
        "toolCall" tool_call: Option<ToolCall>,
        "toolResult" tool_result: Option<ToolResult>,
        "sentAt" sent_at: Time,
    }
}

signed_by! {
    Envelope.from as Sender;
    ToolCall.caller_did as Worker;
    ToolResult.gateway_did as Requester;
}
