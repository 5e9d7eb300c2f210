//! How gateways find each other and prove themselves to a relay: invites, worker cards, RelayAuth
//! (design 11.2, 12).

use super::task::Isolation;
use crate::acp::did::Did;
use crate::acp::sign::{Signature, signed_by};
use crate::acp::value::{
    CardId, Int, InviteId, Key32, Name, Nonce, Prose, Seq, Time, UrlText, Word, object, words,
};

object! {
    /// A worker's introduction; no authority by itself.
    pub struct Invite = "Invite" {
        "inviteId" invite_id: InviteId,
        /// The worker.
        "issuerDid" issuer_did: Did,
        "name" name: Name,
        "relayUrls" relay_urls: Seq<UrlText, 1, 4>,
        "encryptionKey" encryption_key: Option<Key32>,
        "adapters" adapters: Seq<Word, 0, 32>,
        "skills" skills: Seq<Word, 0, 32>,
        "maxUses" max_uses: Int<1, 1000>,
        "issuedAt" issued_at: Time,
        "expiresAt" expires_at: Time,
        "nonce" nonce: Nonce,
        "signature" signature: Signature,
    }
}

object! {
    /// What a worker says of itself in a registry: its own claims.
    pub struct WorkerCard = "WorkerCard" {
        "cardId" card_id: CardId,
        "did" did: Did,
        "name" name: Name,
        "description" description: Prose,
        "adapters" adapters: Seq<Word, 0, 32>,
        "skills" skills: Seq<Word, 0, 32>,
        "isolation" isolation: Seq<Isolation, 0, 5>,
        "relayUrls" relay_urls: Seq<UrlText, 1, 4>,
        "encryptionKey" encryption_key: Option<Key32>,
        "issuedAt" issued_at: Time,
        "expiresAt" expires_at: Time,
        "signature" signature: Signature,
    }
}

words! {
    /// What a RelayAuth token is for.
    pub enum RelayAction {
        /// Poll and acknowledge.
        Receive = "receive",
        /// Server-sent events.
        Stream = "stream",
        /// WebSocket.
        Subscribe = "subscribe",
    }
}

object! {
    /// Proof to a relay that a mailbox is one's own; good once.
    pub struct RelayAuth = "RelayAuth" {
        "did" did: Did,
        "action" action: RelayAction,
        /// Origin of the relay, lower-case.
        "audience" audience: UrlText,
        "issuedAt" issued_at: Time,
        "nonce" nonce: Nonce,
        "signature" signature: Signature,
    }
}

signed_by! {
    Invite.issuer_did as Issuer;
    WorkerCard.did as Worker;
    RelayAuth.did as Recipient;
}
