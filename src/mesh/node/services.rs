//! Services that peers call: what this machine shares, who may use it, and calls under way.
//!
//! One call's way: a manage-request under a service's capability comes in, its token is verified
//! against scope, bearer, the share and what has been granted, and [`Output::Service`] asks the
//! daemon to do it; [`super::Input::ServiceAnswered`] brings the answer back, which goes out as the response.
//! What a call means is the daemon's matter. Capabilities are asked for and granted here as
//! `rooms.md` 3.13 describes, where the decision may come after the request has ended: then the token
//! follows as `capability.grant` (decisions 32, 84, 85).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::events::DeliveryEvent;
use super::super::journal::Record;
use super::super::log::LogEvent;
use super::super::records::{Now, Visibility};
use super::super::session::{
    APPROVAL_GRACE_MS, APPROVAL_WINDOW_MS, MAX_WAITING_FOR_DECISION, REQUEST_TIMEOUT_MS, SessionId,
};
use super::super::wire::capability::{VAULT_READ, VAULT_WRITE};
use super::super::wire::cose::CoseSign1;
use super::super::wire::frame::Frame;
use super::super::wire::revocation::{self, RevocationEntry};
use super::super::wire::scope::{KIND_VAULT, Scope};
use super::super::wire::token::{
    self, MintRequest, ParsedToken, TokenClaims, TokenError, VerifyContext,
};
use super::control::too_many;
use super::requests::{error, ok, ok_with};
use super::rooms::refusal;
use super::{
    Answer, AnswerTo, CommandError, CommandResult, IdentityChange, Node, Op, OpId, OutRequest,
    Outcome, Output, Purpose,
};
use crate::codec::cbor::Value;
use crate::codec::text::{hides_something, truncate_chars};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

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
/// Calls under way; more are answered `busy`.
pub const MAX_CALLS: usize = 32;
/// Those of one device, so that one caller leaves room for others.
pub const MAX_CALLS_OF_DEVICE: usize = 4;
/// Within what a call is answered here, done or not: longer than a writer waits for a vault's lock.
pub const SERVICE_DEADLINE_MS: u64 = 25_000;
/// How long a caller waits.
const SERVICE_TIMEOUT_MS: u64 = SERVICE_DEADLINE_MS + 5_000;
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
    /// Say no to it.
    Refuse {
        /// Its id.
        id: String,
        /// Why.
        reason: Option<String>,
    },
}

/// How far a yes goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantTerms {
    /// Until when; 30 days from now without it.
    pub expires: Option<UnixMillis>,
    /// How often it may be passed on; not at all without it.
    pub delegations: Option<u64>,
    /// `Some(false)`: for reading only, whatever was asked for.
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

/// A request for a capability that waits for a decision.
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

struct Call {
    to: AnswerTo,
    from: DeviceId,
    until: u64,
}

/// What this daemon offers, who asks for it and what is under way.
#[derive(Default)]
pub(super) struct Services {
    shares: BTreeMap<String, Share>,
    pub asks: BTreeMap<String, Ask>,
    calls: BTreeMap<CallId, Call>,
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

fn not_shared() -> Outcome {
    Outcome::Error {
        code: "not_shared".into(),
        message: Some("nothing is shared here under this name".into()),
    }
}

fn refused(code: &str, message: &str) -> Outcome {
    Outcome::Error { code: code.to_owned(), message: Some(message.to_owned()) }
}

impl Node {
    // --- the owner's side: asking and granting ---------------------------------------------------

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

    fn capability_asked(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        request: &OutRequest,
        name: &str,
        now: Now,
    ) -> Answer {
        let params = &request.params;
        if params.get("capability").and_then(Value::as_text) != Some(request.verb.as_str()) {
            return Answer::Now(error("malformed"));
        }
        let valid_until = match params.get("valid-until") {
            None => None,
            Some(value) => match value.as_u64() {
                Some(until) => Some(UnixMillis(until)),
                None => return Answer::Now(error("malformed")),
            },
        };
        if valid_until.is_some_and(|until| until <= now.unix) {
            return Answer::Now(error("expired"));
        }
        if self.record(&local).is_some_and(|record| record.visibility == Visibility::Ghost) {
            return Answer::Now(error("denied"));
        }
        let Some(share) = self.services.shares.get(name) else {
            return Answer::Now(not_shared());
        };
        let write = request.verb == VAULT_WRITE;
        if write && !share.write {
            return Answer::Now(refused("read_only", "this is shared for reading only"));
        }
        let of_bearer =
            || share.grants.iter().filter(|(_, g)| g.bearer == from && g.write == write);
        // Asked again: the token has been lost, or the yes came when nobody waited for it.
        let live = of_bearer().find(|(_, grant)| grant.is_live(now.unix));
        if let Some((id, grant)) = live.map(|(id, grant)| (*id, grant.clone())) {
            let token = self.mint_grant(name, id, &grant, now);
            return Answer::Now(match token {
                Some(token) => ok_with([("granted-token", token.to_value())]),
                None => error("mint_failed"),
            });
        }
        let barred = of_bearer().any(|(_, grant)| grant.revoked);
        if self.is_hosted(&from) && !barred {
            // The same user through the same daemon (decision 84).
            let day = now.unix.plus(PASSING_GRANT_MS);
            let expires = match self.agent(&from).is_some_and(|agent| agent.ephemeral) {
                true => Some(valid_until.map_or(day, |until| until.min(day))),
                false => valid_until,
            };
            let terms = GrantTerms { expires, ..GrantTerms::default() };
            return Answer::Now(match self.grant(name, from, write, terms, now) {
                Ok(token) => ok_with([("granted-token", token.to_value())]),
                Err(failed) => refused(failed.code, &failed.message),
            });
        }
        self.ask_operator(local, from, session, to, (name, write, valid_until), now)
    }

    /// Puts a request before the operator and his agents.
    fn ask_operator(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        (share, write, valid_until): (&str, bool, Option<UnixMillis>),
        now: Now,
    ) -> Answer {
        let waiting = session
            .and_then(|session| self.sessions.get(&session))
            .map_or(0, |held| held.waiting_for_decision);
        if waiting >= MAX_WAITING_FOR_DECISION {
            return Answer::Now(too_many());
        }
        let asks = &self.services.asks;
        let known = asks
            .values()
            .find(|ask| ask.requester == from && ask.share == share && ask.write == write)
            .map(|ask| ask.id.clone());
        let of_device = asks.values().filter(|ask| ask.requester == from).count();
        if known.is_none() && (asks.len() >= MAX_ASKS || of_device >= MAX_ASKS_OF_DEVICE) {
            return Answer::Now(too_many());
        }
        let new = known.is_none();
        let id = match known {
            Some(id) => id,
            None => self.decision_id(),
        };
        if let Some(held) = session.and_then(|session| self.sessions.get_mut(&session)) {
            held.waiting_for_decision += 1;
        }
        let ask = self.services.asks.entry(id.clone()).or_insert_with(|| Ask {
            id,
            requester: from,
            local,
            share: share.to_owned(),
            write,
            valid_until,
            at: now.unix,
            deadline: 0,
            waiters: Vec::new(),
        });
        ask.local = local;
        ask.valid_until = valid_until;
        ask.deadline = now.mono + ASK_KEPT_MS;
        ask.waiters.push((to, now.mono + APPROVAL_WINDOW_MS));
        let over = (ask.waiters.len() > MAX_WAITERS).then(|| ask.waiters.remove(0).0);
        let event = ask.event();
        if let Some(over) = over {
            self.release_waiter(over);
            self.answer(over, too_many(), now);
        }
        if new {
            self.log(
                LogEvent::new("capability_asked")
                    .with("device", from)
                    .with("capability", capability(write))
                    .with("share", share),
            );
        }
        // Whoever was spoken to is told; the daemon's own device has nobody, and then all are.
        let told = if self.agent(&local).is_some() { vec![local] } else { self.agent_ids() };
        for agent in told {
            self.show(agent, event.clone(), now);
        }
        Answer::Later
    }

    /// The token of a grant. Tokens of a grant have one id: taking it back takes back each of them.
    fn mint_grant(&self, share: &str, id: [u8; 16], grant: &Grant, now: Now) -> Option<CoseSign1> {
        let key = &self.devices.get(&self.daemon)?.key;
        let scope = Scope::new(KIND_VAULT, share);
        let request =
            MintRequest::new(id, grant.bearer, capability(grant.write), scope, grant.expires)
                .delegations(grant.delegations);
        token::mint(key, now.unix, request).ok()
    }

    fn grant(
        &mut self,
        name: &str,
        bearer: DeviceId,
        write: bool,
        terms: GrantTerms,
        now: Now,
    ) -> Result<CoseSign1, CommandError> {
        let latest = now.unix.plus(MAX_GRANT_LIFE_MS);
        let expires = terms.expires.unwrap_or(now.unix.plus(GRANT_LIFE_MS)).min(latest);
        if expires <= now.unix {
            return Err(CommandError::new("invalid_expiry", "that time is over already"));
        }
        let delegations = terms.delegations.unwrap_or(0);
        if delegations > MAX_DELEGATIONS {
            return Err(CommandError::new(
                "invalid_delegations",
                format!("a grant can be passed on at most {MAX_DELEGATIONS} times"),
            ));
        }
        let id = self.random::<16>();
        let grant = Grant { bearer, write, at: now.unix, expires, delegations, revoked: false };
        let token = self
            .mint_grant(name, id, &grant, now)
            .ok_or_else(|| CommandError::new("mint_failed", "the token could not be made"))?;
        let share = self.services.shares.get_mut(name).ok_or_else(|| unknown_share(name))?;
        // What stood in this one's way is over.
        let past: Vec<[u8; 16]> = share
            .grants
            .iter()
            .filter(|(_, g)| {
                g.expires <= now.unix || (g.revoked && g.bearer == bearer && g.write == write)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in &past {
            share.grants.remove(id);
        }
        if share.grants.len() >= MAX_GRANTS {
            return Err(CommandError::new(
                "too_many_grants",
                format!("{MAX_GRANTS} grants are kept for one share; take some back"),
            ));
        }
        share.grants.insert(id, grant.clone());
        for token in past {
            self.keep(Record::ShareGrantGone { name: name.to_owned(), token });
        }
        self.keep(grant_record(name, id, &grant));
        self.log(
            LogEvent::new("capability_granted")
                .with("device", bearer)
                .with("capability", capability(write))
                .with("share", name)
                .with("until", expires.iso()),
        );
        Ok(token)
    }

    pub(super) fn operator_command(&mut self, op: OpId, command: OperatorCommand, now: Now) {
        let result = match command {
            OperatorCommand::Share { name, place, write } => self.share(name, place, write, now),
            OperatorCommand::Unshare(name) => self.unshare(&name, now),
            OperatorCommand::Revoke { share, bearer } => self.revoke_shared(&share, bearer, now),
            OperatorCommand::Grant { id, terms } => self.grant_asked(&id, terms, now),
            OperatorCommand::Refuse { id, reason } => self.refuse_asked(&id, reason, now),
        };
        self.outputs.push_back(Output::Reply { op, result });
    }

    fn share(
        &mut self,
        name: String,
        place: String,
        write: bool,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        if !is_share_name(&name) {
            return Err(CommandError::new(
                "invalid_name",
                format!(
                    "a share's name has 1 to {MAX_SHARE_NAME_BYTES} bytes, no slash and nothing hidden"
                ),
            ));
        }
        let shares = &mut self.services.shares;
        let before = shares.get(&name);
        if before.is_some_and(|share| share.place != place) {
            return Err(CommandError::new(
                "share_exists",
                format!("{name:?} is another folder; unshare it first, or choose another name"),
            ));
        }
        if before.is_none() && shares.len() >= MAX_SHARES {
            return Err(CommandError::new(
                "too_many_shares",
                format!("{MAX_SHARES} folders are shared already; unshare one"),
            ));
        }
        let share = shares.entry(name.clone()).or_insert_with(|| Share {
            place,
            write,
            at: now.unix,
            grants: BTreeMap::new(),
        });
        share.write = write;
        let record = share_record(&name, share);
        self.keep(record);
        self.log(
            LogEvent::new("vault_shared")
                .with("share", &name)
                .with("mode", if write { "write" } else { "read" }),
        );
        Ok(CommandResult::Done)
    }

    fn unshare(&mut self, name: &str, now: Now) -> Result<CommandResult, CommandError> {
        if !self.services.shares.contains_key(name) {
            return Err(unknown_share(name));
        }
        let waiting: Vec<String> = self
            .services
            .asks
            .values()
            .filter(|ask| ask.share == name)
            .map(|ask| ask.id.clone())
            .collect();
        for id in waiting {
            if let Some(ask) = self.take_ask(&id) {
                self.answer_ask(ask, &not_shared(), now);
            }
        }
        self.take_back(name, None, now);
        self.services.shares.remove(name);
        self.keep(Record::ShareGone { name: name.to_owned() });
        self.log(LogEvent::new("vault_unshared").with("share", name));
        Ok(CommandResult::Done)
    }

    fn revoke_shared(
        &mut self,
        name: &str,
        bearer: Option<DeviceId>,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        if !self.services.shares.contains_key(name) {
            return Err(unknown_share(name));
        }
        if self.take_back(name, bearer, now) == 0 {
            return Err(CommandError::new("not_granted", "nothing of this share is granted to it"));
        }
        Ok(CommandResult::Done)
    }

    /// Revokes live grants of a share, tells peers, and says how many there were.
    fn take_back(&mut self, name: &str, bearer: Option<DeviceId>, now: Now) -> usize {
        let Some(share) = self.services.shares.get_mut(name) else { return 0 };
        let mut ended = Vec::new();
        for (id, grant) in &mut share.grants {
            if grant.is_live(now.unix) && bearer.is_none_or(|bearer| grant.bearer == bearer) {
                grant.revoked = true;
                ended.push((*id, grant.clone()));
            }
        }
        let mut entries = Vec::new();
        for (id, grant) in &ended {
            self.keep(grant_record(name, *id, grant));
            if let Some(device) = self.devices.get(&self.daemon) {
                let entry = revocation::revoke(&device.key, id, now.unix);
                if let Ok(parsed) = RevocationEntry::parse(&entry) {
                    self.revoked(self.daemon, parsed);
                }
                entries.push(entry);
            }
            self.log(
                LogEvent::new("capability_revoked")
                    .with("device", grant.bearer)
                    .with("capability", capability(grant.write))
                    .with("share", name),
            );
        }
        if !entries.is_empty() {
            // Every peer once: a holder may have passed the token on.
            let peers: BTreeMap<DeviceId, DeviceId> =
                self.routes.keys().map(|(local, remote)| (*remote, *local)).collect();
            for (remote, local) in peers {
                if let Some(session) = self.route(&local, &remote) {
                    self.send(session, Frame::RevocationAnnounce { entries: entries.clone() });
                }
            }
        }
        ended.len()
    }

    /// Takes a request out, and its question out of every mailbox.
    fn take_ask(&mut self, id: &str) -> Option<Ask> {
        let ask = self.services.asks.remove(id)?;
        let event = ask.event();
        for agent in self.agent_ids() {
            if let Some(held) = self.agent_mut(&agent) {
                held.mailbox.withdraw(&event);
            }
            self.keep_losses(agent);
        }
        Some(ask)
    }

    fn answer_ask(&mut self, ask: Ask, outcome: &Outcome, now: Now) {
        for (to, _) in ask.waiters {
            self.release_waiter(to);
            self.answer(to, outcome.clone(), now);
        }
    }

    fn grant_asked(
        &mut self,
        id: &str,
        terms: GrantTerms,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        let Some(ask) = self.services.asks.get(id) else { return Err(not_pending()) };
        if terms.write == Some(true) && !ask.write {
            return Err(CommandError::new(
                "not_narrower",
                "reading was asked for; no more than that can be granted",
            ));
        }
        let write = ask.write && terms.write != Some(false);
        let (share, requester, local) = (ask.share.clone(), ask.requester, ask.local);
        let expires = match (terms.expires, ask.valid_until) {
            (Some(expires), Some(until)) => Some(expires.min(until)),
            (expires, until) => expires.or(until),
        };
        if write && self.services.shares.get(&share).is_some_and(|share| !share.write) {
            return Err(CommandError::new(
                "read_only",
                "this is shared for reading only; grant reading, or share it for writing",
            ));
        }
        let token = self.grant(&share, requester, write, GrantTerms { expires, ..terms }, now)?;
        let Some(ask) = self.take_ask(id) else { return Err(not_pending()) };
        if ask.waiters.is_empty() {
            self.give(local, requester, &share, write, &token, now);
        }
        let outcome = ok_with([("granted-token", token.to_value())]);
        self.answer_ask(ask, &outcome, now);
        Ok(CommandResult::Done)
    }

    /// Sends a token whose request has ended before it was decided.
    fn give(
        &mut self,
        local: DeviceId,
        to: DeviceId,
        share: &str,
        write: bool,
        token: &CoseSign1,
        now: Now,
    ) {
        let request = OutRequest {
            verb: capability(write).to_owned(),
            params: Value::map([
                ("verb", Value::Text(GRANT.into())),
                ("granted-token", token.to_value()),
            ]),
            scope: Scope::new(KIND_VAULT, share),
            token: None,
        };
        // Not heard: it is answered with the token when it asks again.
        self.request(local, to, request, Purpose::Given, Some(now.mono + REQUEST_TIMEOUT_MS));
    }

    fn refuse_asked(
        &mut self,
        id: &str,
        reason: Option<String>,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        let ask = self.take_ask(id).ok_or_else(not_pending)?;
        self.log(
            LogEvent::new("capability_refused")
                .with("device", ask.requester)
                .with("capability", capability(ask.write))
                .with("share", &ask.share),
        );
        self.answer_ask(ask, &Outcome::Error { code: "denied".into(), message: reason }, now);
        Ok(CommandResult::Done)
    }

    // --- the owner's side: calls ------------------------------------------------------------------

    fn service_called(
        &mut self,
        from: DeviceId,
        to: AnswerTo,
        request: &OutRequest,
        (name, write): (&str, bool),
        token: Option<Arc<ParsedToken>>,
        now: Now,
    ) -> Answer {
        let Some(token) = token else { return Answer::Now(error("unauthorized")) };
        if let Err(why) = self.verify_call(from, name, write, &token, now) {
            return Answer::Now(refused(why.code(), &why.to_string()));
        }
        let Some(share) = self.services.shares.get(name) else {
            return Answer::Now(not_shared());
        };
        let calls = &self.services.calls;
        let of_device = calls.values().filter(|call| call.from == from).count();
        if calls.len() >= MAX_CALLS || of_device >= MAX_CALLS_OF_DEVICE {
            return Answer::Now(refused("busy", "too many calls are under way; try again"));
        }
        let (place, may_write) = (share.place.clone(), write && share.write);
        let call = CallId(self.id());
        let until = now.mono + SERVICE_DEADLINE_MS;
        self.services.calls.insert(call, Call { to, from, until });
        let from_name = self.name_of(&from);
        self.outputs.push_back(Output::Service(Box::new(ServiceCall {
            call,
            from,
            from_name,
            share: name.to_owned(),
            place,
            may_write,
            params: request.params.clone(),
        })));
        Answer::Later
    }

    /// Token, capability, scope, bearer, whose word it is, and whether that still stands.
    fn verify_call(
        &self,
        from: DeviceId,
        name: &str,
        write: bool,
        token: &ParsedToken,
        now: Now,
    ) -> Result<(), TokenError> {
        let context =
            VerifyContext { now: now.unix, bearer: Some(from), revocations: &self.revocations };
        let scope = (KIND_VAULT, name);
        let verified =
            token::verify_service_token(token, &context, capability(write), scope, &self.daemon)?;
        // Revocations are bounded in number, grants are what we remember of our own word: a token
        // that is not among them is not good any more.
        let id = <[u8; 16]>::try_from(verified.root.token_id.as_slice());
        let granted = id.ok().and_then(|id| self.services.shares.get(name)?.grants.get(&id));
        match granted {
            Some(grant) if !grant.revoked => Ok(()),
            _ => Err(TokenError::Revoked),
        }
    }

    pub(super) fn service_answered(&mut self, call: CallId, outcome: ServiceOutcome, now: Now) {
        // Too late: it has been answered already.
        let Some(call) = self.services.calls.remove(&call) else { return };
        let outcome = match outcome {
            Ok(members) => {
                let result = ("result".to_owned(), Value::Text("ok".into()));
                Outcome::Ok(Value::map([result].into_iter().chain(members)))
            }
            Err((code, message)) => refused(&code, &message),
        };
        self.answer(call.to, outcome, now);
    }

    // --- the asking side ----------------------------------------------------------------------------

    pub(super) fn ask_capability(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        (share, write): (String, bool),
        valid_until: Option<UnixMillis>,
        wait_ms: u64,
        op: OpId,
        now: Now,
    ) {
        let key = TokenKey::new(owner, write, &share);
        if let Some(held) = self.agent_mut(&agent) {
            held.asked.retain(|_, until| *until > now.mono);
            if held.asked.len() >= MAX_ASKED && !held.asked.contains_key(&key) {
                let what = format!("{MAX_ASKED} requests are open already; wait for answers");
                self.fail(op, CommandError::new("too_many_requests", what));
                return;
            }
            held.asked.insert(key.clone(), now.mono + ASK_KEPT_MS);
        }
        let request = OutRequest {
            verb: capability(write).to_owned(),
            params: Value::record([
                ("verb", Some(Value::from(REQUEST))),
                ("capability", Some(Value::from(capability(write)))),
                ("valid-until", valid_until.map(|until| Value::from(until.0))),
            ]),
            scope: Scope::new(KIND_VAULT, share),
            token: None,
        };
        let reply_by = now.mono + ASK_PATIENCE_MS.max(wait_ms);
        self.ops.insert(op, Op::Ask { reply_by });
        let deadline = Some(now.mono + APPROVAL_WINDOW_MS + APPROVAL_GRACE_MS);
        self.request(agent, owner, request, Purpose::Ask { agent, key, op }, deadline);
    }

    /// How a request of ours for a capability has ended.
    pub(super) fn ask_ended(
        &mut self,
        agent: DeviceId,
        key: TokenKey,
        op: OpId,
        outcome: Outcome,
        now: Now,
    ) {
        let (code, reason) = match &outcome {
            Outcome::Ok(answer) => {
                let token = answer
                    .get("granted-token")
                    .and_then(|token| CoseSign1::from_value(token.clone()).ok());
                if let Some(token) = token
                    && self.take_token(agent, &key, token, Some(op), now)
                {
                    return;
                }
                ("malformed_response".to_owned(), Some("the answer holds no good token".into()))
            }
            failed => refusal(failed),
        };
        let open = self.ops.remove(&op).is_some();
        // Nobody has decided yet; the token comes by itself when somebody does.
        if code == "pending" {
            if open {
                let result = Ok(CommandResult::AskPending);
                self.outputs.push_back(Output::Reply { op, result });
            }
            return;
        }
        // Where nobody has said no, it may still be decided.
        if matches!(outcome, Outcome::Error { .. })
            && let Some(held) = self.agent_mut(&agent)
        {
            held.asked.remove(&key);
        }
        let reason = reason.unwrap_or_default();
        let reason = truncate_chars(&reason, MAX_REASON_CHARS).to_owned();
        if open {
            let result = Ok(CommandResult::Refused { code, message: reason });
            self.outputs.push_back(Output::Reply { op, result });
        } else {
            let event = DeliveryEvent::CapabilityOutcome {
                owner: key.owner,
                capability: key.capability,
                scope_kind: KIND_VAULT.to_owned(),
                scope_path: Some(key.path),
                accepted: false,
                expires: None,
                code,
                reason,
            };
            self.show(agent, event, now);
        }
    }

    /// A token that comes after its request has ended. Only one that was asked for is taken.
    fn capability_given(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        request: &OutRequest,
        now: Now,
    ) -> Outcome {
        let Some(path) = request.scope.path.clone() else { return error("missing_scope_path") };
        let Some(token) = request
            .params
            .get("granted-token")
            .and_then(|token| CoseSign1::from_value(token.clone()).ok())
        else {
            return error("malformed");
        };
        let asked = [VAULT_WRITE, VAULT_READ].into_iter().find_map(|capability| {
            let key = TokenKey { owner: from, capability: capability.into(), path: path.clone() };
            let until = self.agent(&local)?.asked.get(&key)?;
            (*until > now.mono).then_some(key)
        });
        match asked {
            Some(key) if self.take_token(local, &key, token, None, now) => ok(),
            Some(_) => error("malformed"),
            None => error("unauthorized"),
        }
    }

    /// Keeps a granted token if it is what was asked for, or less; tells who asked.
    fn take_token(
        &mut self,
        agent: DeviceId,
        asked: &TokenKey,
        token: CoseSign1,
        op: Option<OpId>,
        now: Now,
    ) -> bool {
        let parsed = self.tokens.get_or_parse(&token);
        let context =
            VerifyContext { now: now.unix, bearer: Some(agent), revocations: &self.revocations };
        let Ok(verified) = token::verify(&parsed, &context) else { return false };
        let claims = verified.claims;
        let narrower = asked.capability == VAULT_WRITE && claims.capability == VAULT_READ;
        if (claims.capability != asked.capability && !narrower)
            || claims.scope != Scope::new(KIND_VAULT, asked.path.as_str())
        {
            return false;
        }
        let (capability, expires) = (claims.capability.clone(), claims.expires);
        let key = TokenKey { capability: capability.clone(), ..asked.clone() };
        let Some(held) = self.agent_mut(&agent) else { return false };
        held.asked.remove(asked);
        let mut gone = Vec::new();
        if held.services.len() >= MAX_HELD && !held.services.contains_key(&key) {
            gone.extend(held.services.pop_first().map(|(key, _)| key));
        }
        held.services.insert(key.clone(), token.clone());
        for key in gone {
            self.save_identity(agent, IdentityChange::ServiceToken { key, token: None });
        }
        self.save_identity(agent, IdentityChange::ServiceToken { key, token: Some(token) });
        if let Some(op) = op
            && self.ops.remove(&op).is_some()
        {
            let write = capability == VAULT_WRITE;
            let result = Ok(CommandResult::Granted { write, expires });
            self.outputs.push_back(Output::Reply { op, result });
        } else {
            let event = DeliveryEvent::CapabilityOutcome {
                owner: asked.owner,
                capability,
                scope_kind: KIND_VAULT.to_owned(),
                scope_path: Some(asked.path.clone()),
                accepted: true,
                expires: Some(expires.0),
                code: String::new(),
                reason: String::new(),
            };
            self.show(agent, event, now);
        }
        true
    }

    pub(super) fn call_service(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        share: String,
        write: bool,
        params: Vec<(String, Value)>,
        op: OpId,
        now: Now,
    ) {
        let (may_write, token) = match self.token_for(agent, owner, &share, write, now) {
            Ok(found) => found,
            Err(error) => {
                self.fail(op, error);
                return;
            }
        };
        let verb = [("verb".to_owned(), Value::Text(CALL.into()))];
        let request = OutRequest {
            verb: capability(may_write).to_owned(),
            params: Value::map(verb.into_iter().chain(params)),
            scope: Scope::new(KIND_VAULT, share),
            token: Some(token),
        };
        let deadline = Some(now.mono + SERVICE_TIMEOUT_MS);
        self.request(agent, owner, request, Purpose::Call { op }, deadline);
    }

    /// The token to call with: the narrowest that does. Writing includes reading.
    fn token_for(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        share: &str,
        write: bool,
        now: Now,
    ) -> Result<(bool, CoseSign1), CommandError> {
        let mut why = None;
        for candidate in [false, true] {
            if write && !candidate {
                continue;
            }
            let key = TokenKey::new(owner, candidate, share);
            let held = self.agent(&agent).and_then(|held| held.services.get(&key)).cloned();
            let Some(token) = held else { continue };
            let parsed = self.tokens.get_or_parse(&token);
            let context = VerifyContext {
                now: now.unix,
                bearer: Some(agent),
                revocations: &self.revocations,
            };
            match token::verify(&parsed, &context) {
                Ok(_) => return Ok((candidate, token)),
                Err(error) => {
                    why.get_or_insert(error);
                }
            }
        }
        let what = if write { "write to" } else { "read" };
        Err(match why {
            None => CommandError::new(
                "not_allowed",
                format!("this agent has no permission to {what} {share:?} there"),
            ),
            Some(TokenError::Expired) => {
                CommandError::new("expired", format!("the permission to {what} {share:?} is over"))
            }
            Some(TokenError::Revoked) => CommandError::new(
                "revoked",
                format!("the permission to {what} {share:?} was taken back"),
            ),
            Some(other) => CommandError::new(other.code(), other.to_string()),
        })
    }

    pub(super) fn call_ended(&mut self, op: OpId, outcome: Outcome) {
        let result = match outcome {
            Outcome::Ok(answer) => Ok(CommandResult::Served(answer)),
            Outcome::Error { code, message } => {
                let message = message.unwrap_or_default();
                let message = truncate_chars(&message, MAX_REASON_CHARS).to_owned();
                Ok(CommandResult::Refused { code, message })
            }
            Outcome::Timeout => Err(CommandError::new(
                "timeout",
                "the other side did not answer in time; what was to be written may be written",
            )),
            Outcome::NotConnected => {
                Err(CommandError::new("not_connected", "the other side is not connected"))
            }
            Outcome::ConnectionLost => Err(CommandError::new(
                "connection_lost",
                "the other side went away; what was to be written may be written",
            )),
        };
        self.outputs.push_back(Output::Reply { op, result });
    }

    // --- upkeep, views, storage --------------------------------------------------------------------

    pub(super) fn services_upkeep(&mut self, now: Now) {
        let late: Vec<CallId> = self
            .services
            .calls
            .iter()
            .filter(|(_, call)| call.until <= now.mono)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            let message = "this took too long; what was to be written may be written";
            self.service_answered(id, Err(("timeout".into(), message.into())), now);
        }
        let mut waited = Vec::new();
        let mut over = Vec::new();
        for ask in self.services.asks.values_mut() {
            ask.waiters.retain(|(to, until)| {
                let waits = *until > now.mono;
                if !waits {
                    waited.push(*to);
                }
                waits
            });
            if ask.deadline <= now.mono {
                over.push(ask.id.clone());
            }
        }
        for to in waited {
            self.release_waiter(to);
            self.answer(to, refused("pending", "nobody has decided yet"), now);
        }
        for id in over {
            if let Some(ask) = self.take_ask(&id) {
                self.answer_ask(ask, &error("timeout"), now);
            }
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

fn unknown_share(name: &str) -> CommandError {
    CommandError::new("share_not_found", format!("nothing is shared as {name:?}"))
}

fn not_pending() -> CommandError {
    CommandError::new("not_pending", "nothing like that is waiting; see what is pending")
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
