//! Services that peers call: what this machine shares, who may use it, and calls under way.
//!
//! One call's way: a manage-request under a service's capability comes in, its token is verified
//! against scope, bearer, the share and what has been granted, and [`Output::Service`](super::Output::Service) asks the
//! daemon to do it; [`super::Input::ServiceAnswered`] brings the answer back, which goes out as the response.
//! What a call means is the daemon's matter (`serving`). Capabilities are granted (`granting`) and
//! asked for and handed on (`asking`) as `rooms.md` 3.13 describes, where the decision may come after
//! the request has ended: then the token follows as `capability.grant` (decisions 32, 84, 85, 94).

mod asking;
mod granting;
mod serving;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::events::DeliveryEvent;
use super::super::journal::Record;
use super::super::records::Now;
use super::super::session::SessionId;
use super::super::wire::capability::{VAULT_READ, VAULT_WRITE};
use super::super::wire::cose::CoseSign1;
use super::super::wire::scope::KIND_VAULT;
use super::super::wire::token::{ParsedToken, TokenClaims};
use super::requests::error;
use super::{Answer, AnswerTo, Node, OutRequest, Outcome};
use crate::codec::cbor::Value;
use crate::codec::text::hides_something;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

pub(super) use asking::{HandOn, Sought, sought_record};

/// Shares of this daemon: an operator names each by hand.
pub const MAX_SHARES: usize = 64;
/// Grants of one share that are kept, those taken back included.
pub const MAX_GRANTS: usize = 256;
/// Bytes of a share's name.
pub const MAX_SHARE_NAME_BYTES: usize = 64;
/// Requests for capabilities that wait here for a decision.
pub const MAX_ASKS: usize = 64;
/// Those of one device.
const MAX_ASKS_OF_DEVICE: usize = 4;
/// Wire requests that one decision answers.
const MAX_WAITERS: usize = 4;
/// How long a request waits for a decision: people sleep.
pub const ASK_KEPT_MS: u64 = 24 * 3600 * 1000;
/// Calls of one kind under way; more are answered `busy`.
pub const MAX_CALLS: usize = 32;
/// Those of one device, so that one caller leaves room for others.
pub const MAX_CALLS_OF_DEVICE: usize = 4;
/// Within what a call is answered here, done or not: longer than a writer waits for a vault's lock.
pub const SERVICE_DEADLINE_MS: u64 = 25_000;
/// How long a caller waits.
pub(super) const SERVICE_TIMEOUT_MS: u64 = SERVICE_DEADLINE_MS + 5_000;
/// Life of a grant without another said, as that of room tokens (`rooms.md` 3.1).
pub const GRANT_LIFE_MS: u64 = 30 * 24 * 3600 * 1000;
/// Life of the grant of an agent whose key ends with its service: few such keep a share's table full.
const PASSING_GRANT_MS: u64 = 24 * 3600 * 1000;
/// Longest life of a grant: a revocation is remembered for about so long.
pub const MAX_GRANT_LIFE_MS: u64 = 366 * 24 * 3600 * 1000;
/// How often a granted token may be passed on at most.
pub const MAX_DELEGATIONS: u64 = 8;
/// Tokens for others' services that one agent holds.
const MAX_HELD: usize = 256;
/// Capabilities that one agent has asked for and not got.
const MAX_ASKED: usize = 64;
/// How long a request's command waits for a decision before it is answered "pending".
const ASK_PATIENCE_MS: u64 = 1_000;
/// Characters of a peer's words on a refusal.
const MAX_REASON_CHARS: usize = 512;

/// Inner verb of a request for a capability.
pub(super) const REQUEST: &str = "capability.request";
/// Inner verb of a granted token that comes after its request has ended.
pub(super) const GRANT: &str = "capability.grant";
/// Inner verb of a call.
const CALL: &str = "x-commsd-vault.call";

/// Names a call until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// A call that a peer may make.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceCall {
    /// Name for the answer.
    pub call: CallId,
    /// Who calls, proven.
    pub from: DeviceId,
    /// Its name; empty where it has none.
    pub from_name: String,
    /// The share.
    pub share: String,
    /// What the share is.
    pub place: String,
    /// Whether token and share let it write.
    pub may_write: bool,
    /// What it wants; unverified.
    pub params: Value,
}

/// What came of a call: members of the answer, or code and text.
pub type ServiceOutcome = Result<Vec<(String, Value)>, (String, String)>;

/// What an operator asks of the node.
#[derive(Clone, Debug)]
pub enum OperatorCommand {
    /// Share something, or change what may be done with it.
    Share {
        /// Its name.
        name: String,
        /// What it is.
        place: String,
        /// May be written to.
        write: bool,
    },
    /// Share it no longer; what was granted is taken back.
    Unshare(String),
    /// Take back what was granted.
    Revoke {
        /// For which share.
        share: String,
        /// To whom; `None`: to everybody.
        bearer: Option<DeviceId>,
    },
    /// Say yes to a request for a capability.
    Grant {
        /// Its id.
        id: String,
        /// How far.
        terms: GrantTerms,
    },
    /// Yes or no to a machine that asks to be let in.
    Machine {
        /// The request's id.
        id: String,
        /// Yes, or no with a reason.
        decision: Result<(), Option<String>>,
    },
    /// Say no to it.
    Refuse {
        /// Its id.
        id: String,
        /// Why.
        reason: Option<String>,
    },
}

/// How far a yes, or what is handed on, goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantTerms {
    /// Until when; 30 days from now without it, or as long as what is handed on.
    pub expires: Option<UnixMillis>,
    /// How often it may be passed on; not at all without it.
    pub delegations: Option<u64>,
    /// `Some(false)`: for reading only, whatever was asked for. What is handed on is for writing with
    /// `Some(true)` alone.
    pub write: Option<bool>,
}

/// A share as operators see it.
#[derive(Clone, Debug)]
pub struct ShareView {
    /// Its name.
    pub name: String,
    /// What it is.
    pub place: String,
    /// May be written to.
    pub write: bool,
    /// Since when.
    pub at: UnixMillis,
    /// Who may use it.
    pub grants: Vec<GrantView>,
}

/// A grant as operators see it.
#[derive(Clone, Debug)]
pub struct GrantView {
    /// Who holds it.
    pub bearer: DeviceId,
    /// For writing.
    pub write: bool,
    /// Since when.
    pub at: UnixMillis,
    /// Until when.
    pub expires: UnixMillis,
    /// How often it may be passed on.
    pub delegations: u64,
    /// Taken back.
    pub revoked: bool,
}

#[derive(Clone, Debug)]
struct Grant {
    bearer: DeviceId,
    write: bool,
    at: UnixMillis,
    expires: UnixMillis,
    delegations: u64,
    revoked: bool,
}

impl Grant {
    fn is_live(&self, now: UnixMillis) -> bool {
        !self.revoked && self.expires > now
    }
}

#[derive(Default)]
struct Share {
    place: String,
    write: bool,
    at: UnixMillis,
    grants: BTreeMap<[u8; 16], Grant>,
}

/// A request for a capability that waits for a decision. One for what is not shared waits as well
/// and is shown to nobody: who may not use a share is not told whether it is there.
pub(super) struct Ask {
    pub id: String,
    pub requester: DeviceId,
    /// Our device that was asked.
    local: DeviceId,
    pub share: String,
    pub write: bool,
    valid_until: Option<UnixMillis>,
    pub at: UnixMillis,
    deadline: u64,
    /// Requests to answer, and until when they wait.
    waiters: Vec<(AnswerTo, u64)>,
}

impl Services {
    /// Requests that somebody can decide on.
    pub(super) fn open_asks(&self) -> impl Iterator<Item = &Ask> {
        self.asks.values().filter(|ask| self.shares.contains_key(&ask.share))
    }
}

impl Ask {
    fn event(&self) -> DeliveryEvent {
        DeliveryEvent::CapabilityRequest {
            request_id: self.id.clone(),
            capability: capability(self.write).to_owned(),
            scope_kind: KIND_VAULT.to_owned(),
            scope_path: Some(self.share.clone()),
            requester_device: self.requester,
        }
    }
}

/// What a call is of: each kind has bounds of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CallKind {
    /// A command on a share.
    Share,
    /// The Agent Collaboration Protocol.
    Acp,
}

struct Call {
    kind: CallKind,
    to: AnswerTo,
    from: DeviceId,
    until: u64,
}

/// What this daemon offers, who asks for it and what is under way.
#[derive(Default)]
pub(super) struct Services {
    shares: BTreeMap<String, Share>,
    asks: BTreeMap<String, Ask>,
    calls: BTreeMap<CallId, Call>,
    /// How often devices have called lately, for the Agent Collaboration Protocol.
    pub(super) pace: super::acp::Pace,
}

/// A token for somebody's service: whose, for what, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenKey {
    /// Which device honours it.
    pub owner: DeviceId,
    /// Capability.
    pub capability: String,
    /// Scope path.
    pub path: String,
}

impl TokenKey {
    fn new(owner: DeviceId, write: bool, share: &str) -> Self {
        Self { owner, capability: capability(write).to_owned(), path: share.to_owned() }
    }

    /// What a token of an identity file is for, by the device that granted it and its claims.
    #[must_use]
    pub fn of(owner: DeviceId, token: &CoseSign1) -> Option<Self> {
        let claims = TokenClaims::of(token)?;
        Some(Self { owner, capability: claims.capability, path: claims.scope.path? })
    }
}

const fn capability(write: bool) -> &'static str {
    if write { VAULT_WRITE } else { VAULT_READ }
}

/// Whether a request belongs here.
pub(super) fn is_service(request: &OutRequest) -> bool {
    request.scope.kind == KIND_VAULT && matches!(request.verb.as_str(), VAULT_READ | VAULT_WRITE)
}

/// Whether a share can be called so: one label, nothing hidden, nothing that a path means something
/// by.
#[must_use]
pub fn is_share_name(name: &str) -> bool {
    (1..=MAX_SHARE_NAME_BYTES).contains(&name.len())
        && name.trim() == name
        && name != "."
        && name != ".."
        && !name.contains(['/', '\\'])
        && !hides_something(name)
}

pub(super) fn refused(code: &str, message: &str) -> Outcome {
    Outcome::Error { code: code.to_owned(), message: Some(message.to_owned()) }
}

impl Node {
    /// A request under a service's capability.
    pub(super) fn service_request(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        request: &OutRequest,
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        let Some(share) = request.scope.path.as_deref() else {
            return Answer::Now(error("missing_scope_path"));
        };
        let write = request.verb == VAULT_WRITE;
        match request.params.get("verb").and_then(Value::as_text).unwrap_or_default() {
            REQUEST => self.capability_asked(local, from, session, to, request, share, now),
            GRANT => Answer::Now(self.capability_given(local, from, request, now)),
            CALL => self.service_called(from, to, request, (share, write), token, now),
            _ => Answer::Now(error("unsupported_verb")),
        }
    }

    // --- upkeep, views, storage --------------------------------------------------------------------

    pub(super) fn services_upkeep(&mut self, now: Now) {
        self.calls_upkeep(now);
        self.services.pace.tidy(now.mono);
        self.asks_upkeep(now);
        self.sought_upkeep(now);
        if !self.doubts_clock(now) {
            self.grants_upkeep(now);
        }
    }

    /// The requests of a closed session cannot be answered any more; the questions stay.
    pub(super) fn drop_asks_of_session(&mut self, of_session: impl Fn(&AnswerTo) -> bool) {
        for ask in self.services.asks.values_mut() {
            ask.waiters.retain(|(to, _)| !of_session(to));
        }
    }

    /// What is shared, by name.
    #[must_use]
    pub fn shares(&self) -> Vec<ShareView> {
        let view = |(name, share): (&String, &Share)| ShareView {
            name: name.clone(),
            place: share.place.clone(),
            write: share.write,
            at: share.at,
            grants: share
                .grants
                .values()
                .map(|grant| GrantView {
                    bearer: grant.bearer,
                    write: grant.write,
                    at: grant.at,
                    expires: grant.expires,
                    delegations: grant.delegations,
                    revoked: grant.revoked,
                })
                .collect(),
        };
        self.services.shares.iter().map(view).collect()
    }

    /// A share with its grants, in place of whatever is stored of it.
    pub(super) fn everything_of_share(&self, name: &str) -> Vec<Record> {
        let mut records = vec![Record::ShareGone { name: name.to_owned() }];
        if let Some(share) = self.services.shares.get(name) {
            records.push(share_record(name, share));
            let grants = share.grants.iter();
            records.extend(grants.map(|(id, grant)| grant_record(name, *id, grant)));
        }
        records
    }

    /// Takes a stored share or grant back.
    pub(super) fn restore_share(&mut self, record: Record) {
        match record {
            Record::Share { name, place, write, at } => {
                let share = Share { place, write, at, grants: BTreeMap::new() };
                self.services.shares.insert(name, share);
            }
            Record::ShareGrant {
                name,
                token,
                bearer,
                write,
                at,
                expires,
                delegations,
                revoked,
            } => {
                let grant = Grant { bearer, write, at, expires, delegations, revoked };
                if let Some(share) = self.services.shares.get_mut(&name) {
                    share.grants.insert(token, grant);
                }
            }
            _ => {}
        }
    }
}

fn share_record(name: &str, share: &Share) -> Record {
    Record::Share {
        name: name.to_owned(),
        place: share.place.clone(),
        write: share.write,
        at: share.at,
    }
}

fn grant_record(name: &str, token: [u8; 16], grant: &Grant) -> Record {
    Record::ShareGrant {
        name: name.to_owned(),
        token,
        bearer: grant.bearer,
        write: grant.write,
        at: grant.at,
        expires: grant.expires,
        delegations: grant.delegations,
        revoked: grant.revoked,
    }
}
