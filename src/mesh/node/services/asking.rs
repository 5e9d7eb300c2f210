//! The asking side: requests for capabilities, the tokens that come of them, and handing those on.
//!
//! A request is kept up for a day: answered "pending", or cut off, it is made again, also by a daemon
//! that has been restarted. So the other side's answer arrives, whatever ends meanwhile.

use super::super::super::events::DeliveryEvent;
use super::super::super::journal::Record;
use super::super::super::records::Now;
use super::super::super::session::{APPROVAL_GRACE_MS, APPROVAL_WINDOW_MS, REQUEST_TIMEOUT_MS};
use super::super::super::wire::capability::{VAULT_READ, VAULT_WRITE};
use super::super::super::wire::cose::CoseSign1;
use super::super::super::wire::scope::{KIND_VAULT, Scope};
use super::super::super::wire::token::{
    self, MintRequest, TokenClaims, VerifyContext, verify_service_token,
};
use super::super::requests::{error, ok};
use super::super::rooms::refusal;
use super::super::{
    CommandError, CommandResult, IdentityChange, Node, Op, OpId, OutRequest, Outcome, Output,
    Purpose,
};
use super::{
    ASK_KEPT_MS, ASK_PATIENCE_MS, GRANT, GrantTerms, MAX_ASKED, MAX_HELD, MAX_REASON_CHARS,
    REQUEST, TokenKey, capability, is_share_name, refused,
};
use crate::codec::cbor::Value;
use crate::codec::text::truncate_chars;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Between two requests for the same: an answer that comes at once is not asked for in a loop.
const AGAIN_MS: u64 = 60_000;
/// When a request that has come to nothing at all is made again.
const LOST_MS: u64 = APPROVAL_WINDOW_MS + APPROVAL_GRACE_MS + AGAIN_MS;
/// Member of a token that is handed on: whose device honours it.
const OWNER: &str = "x-commsd-owner";

/// A capability that an agent has asked for.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Sought {
    /// Nobody waits for it after this.
    until: UnixMillis,
    valid_until: Option<UnixMillis>,
    asked_at: u64,
    again: u64,
}

impl Sought {
    /// As it was stored: to be asked for again at once.
    pub(in super::super) fn restored(until: UnixMillis, valid_until: Option<UnixMillis>) -> Self {
        Self { until, valid_until, asked_at: 0, again: 0 }
    }
}

/// What is stored of it.
pub(in super::super) fn sought_record(agent: DeviceId, key: &TokenKey, sought: &Sought) -> Record {
    Record::Sought {
        agent,
        owner: key.owner,
        capability: key.capability.clone(),
        path: key.path.clone(),
        until: sought.until,
        valid_until: sought.valid_until,
    }
}

/// A token that is to be handed on.
#[derive(Clone, Debug)]
pub(in super::super) struct HandOn {
    agent: DeviceId,
    owner: DeviceId,
    share: String,
    to: DeviceId,
    terms: GrantTerms,
}

impl Node {
    pub(in super::super) fn ask_capability(
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
        let sought = Sought {
            until: now.unix.plus(ASK_KEPT_MS),
            valid_until,
            asked_at: now.mono,
            again: now.mono + LOST_MS,
        };
        if let Some(held) = self.agent_mut(&agent) {
            if held.asked.len() >= MAX_ASKED && !held.asked.contains_key(&key) {
                let what = format!("{MAX_ASKED} requests are open already; wait for answers");
                self.fail(op, CommandError::new("too_many_requests", what));
                return;
            }
            held.asked.insert(key.clone(), sought);
            self.keep(sought_record(agent, &key, &sought));
        }
        let reply_by = now.mono + ASK_PATIENCE_MS.max(wait_ms);
        self.ops.insert(op, Op::Ask { reply_by });
        self.ask(agent, key, valid_until, Some(op), now);
    }

    fn ask(
        &mut self,
        agent: DeviceId,
        key: TokenKey,
        valid_until: Option<UnixMillis>,
        op: Option<OpId>,
        now: Now,
    ) {
        let request = OutRequest {
            verb: key.capability.clone(),
            params: Value::record([
                ("verb", Some(Value::from(REQUEST))),
                ("capability", Some(Value::from(key.capability.as_str()))),
                ("valid-until", valid_until.map(|until| Value::from(until.0))),
            ]),
            scope: Scope::new(KIND_VAULT, key.path.as_str()),
            token: None,
        };
        let deadline = Some(now.mono + APPROVAL_WINDOW_MS + APPROVAL_GRACE_MS);
        self.request(agent, key.owner, request, Purpose::Ask { agent, key, op }, deadline);
    }

    /// Nothing is asked for any more.
    fn no_longer_sought(&mut self, agent: DeviceId, key: &TokenKey) {
        if let Some(held) = self.agent_mut(&agent)
            && held.asked.remove(key).is_some()
        {
            self.keep(Record::SoughtDone {
                agent,
                owner: key.owner,
                capability: key.capability.clone(),
                path: key.path.clone(),
            });
        }
    }

    /// Asks again for what has not been decided, and gives up what has taken a day.
    pub(super) fn sought_upkeep(&mut self, now: Now) {
        let mut due = Vec::new();
        let mut over = Vec::new();
        let doubtful = self.doubts_clock(now);
        for agent in self.agent_ids() {
            let Some(held) = self.agent_mut(&agent) else { continue };
            for (key, sought) in &mut held.asked {
                if sought.until <= now.unix && !doubtful {
                    over.push((agent, key.clone()));
                } else if sought.again <= now.mono {
                    (sought.asked_at, sought.again) = (now.mono, now.mono + LOST_MS);
                    due.push((agent, key.clone(), sought.valid_until));
                }
            }
        }
        for (agent, key, valid_until) in due {
            self.ask(agent, key, valid_until, None, now);
        }
        for (agent, key) in over {
            self.no_longer_sought(agent, &key);
            self.tell_outcome(agent, key, "timeout", "nobody has decided within a day", now);
        }
    }

    fn tell_outcome(&mut self, agent: DeviceId, key: TokenKey, code: &str, reason: &str, now: Now) {
        let event = DeliveryEvent::CapabilityOutcome {
            owner: key.owner,
            capability: key.capability,
            scope_kind: KIND_VAULT.to_owned(),
            scope_path: Some(key.path),
            accepted: false,
            expires: None,
            code: code.to_owned(),
            reason: reason.to_owned(),
        };
        self.show(agent, event, now);
    }

    /// How a request of ours for a capability has ended.
    pub(in super::super) fn ask_ended(
        &mut self,
        agent: DeviceId,
        key: TokenKey,
        op: Option<OpId>,
        outcome: Outcome,
        now: Now,
    ) {
        let (code, reason) = match &outcome {
            Outcome::Ok(answer) => {
                let token = answer
                    .get("granted-token")
                    .and_then(|token| CoseSign1::from_value(token.clone()).ok());
                if let Some(token) = token
                    && self.take_token(agent, &key, token, op, now)
                {
                    return;
                }
                ("malformed_response".to_owned(), Some("the answer holds no good token".into()))
            }
            failed => refusal(failed),
        };
        let open = op.and_then(|op| Some((op, self.ops.remove(&op)?)));
        let decided =
            matches!(outcome, Outcome::Ok(_) | Outcome::Error { .. }) && code != "pending";
        // Whoever was told "pending" has it asked for again.
        if !decided && (open.is_none() || code == "pending") {
            if let Some(sought) = self.agent_mut(&agent).and_then(|held| held.asked.get_mut(&key)) {
                sought.again = now.mono.max(sought.asked_at + AGAIN_MS);
            }
            if let Some((op, _)) = open {
                let result = Ok(CommandResult::AskPending);
                self.outputs.push_back(Output::Reply { op, result });
            }
            return;
        }
        self.no_longer_sought(agent, &key);
        let reason = reason.unwrap_or_default();
        let reason = truncate_chars(&reason, MAX_REASON_CHARS).to_owned();
        match open {
            Some((op, _)) => {
                let result = Ok(CommandResult::Refused { code, message: reason });
                self.outputs.push_back(Output::Reply { op, result });
            }
            None => self.tell_outcome(agent, key, &code, &reason, now),
        }
    }

    /// A token that comes without a request of ours under way: one that we asked for, or one that
    /// its holder hands on.
    pub(super) fn capability_given(
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
            self.agent(&local)?.asked.contains_key(&key).then_some(key)
        });
        if let Some(key) = asked
            && self.take_token(local, &key, token.clone(), None, now)
        {
            return ok();
        }
        match request.params.get(OWNER).and_then(Value::as_bytes).and_then(DeviceId::from_slice) {
            Some(owner) => self.handed_on(local, from, (owner, path, &request.verb), token, now),
            None => error("unauthorized"),
        }
    }

    /// A token that `from` holds and hands on. Taken without a question, as it harms nobody: only the
    /// share's own owner can have let it be made, so nobody fills an agent's table with his own.
    fn handed_on(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        (owner, path, verb): (DeviceId, String, &str),
        token: CoseSign1,
        now: Now,
    ) -> Outcome {
        let root = match self.is_hosted(&owner) {
            true => Some(self.daemon),
            false => self.directory.get(&owner).and_then(|entry| entry.daemon),
        };
        let Some(root) = root else {
            return refused("unknown_owner", "the owner of that share is not known here");
        };
        if self.agent(&local).is_none() || !is_share_name(&path) {
            return error("unauthorized");
        }
        let parsed = self.tokens.get_or_parse(&token);
        let context =
            VerifyContext { now: now.unix, bearer: Some(local), revocations: &self.revocations };
        let scope = (KIND_VAULT, path.as_str());
        let expires = match verify_service_token(&parsed, &context, verb, scope, &root) {
            // Only its maker hands it on, and a grant of the owner's own is asked for.
            Ok(verified) if verified.depth > 0 && verified.claims.issuer == from => {
                verified.claims.expires
            }
            Ok(_) => return error("unauthorized"),
            Err(why) => return refused(why.code(), &why.to_string()),
        };
        let key = TokenKey { owner, capability: verb.to_owned(), path };
        let Some(held) = self.agent(&local) else { return error("unauthorized") };
        match held.services.get(&key).cloned() {
            Some(old) => {
                let old = self.tokens.get_or_parse(&old);
                let context = VerifyContext {
                    now: now.unix,
                    bearer: Some(local),
                    revocations: &self.revocations,
                };
                // The one that lasts longer stays.
                if token::verify(&old, &context).is_ok_and(|old| old.claims.expires >= expires) {
                    return ok();
                }
            }
            None if held.services.len() >= MAX_HELD => {
                return refused("too_many", "this agent holds as many permissions as it can");
            }
            None => {}
        }
        self.keep_service_token(local, key, token, expires, None, now);
        ok()
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
        self.no_longer_sought(agent, asked);
        let key = TokenKey { capability, ..asked.clone() };
        self.keep_service_token(agent, key, token, expires, op, now);
        true
    }

    fn keep_service_token(
        &mut self,
        agent: DeviceId,
        key: TokenKey,
        token: CoseSign1,
        expires: UnixMillis,
        op: Option<OpId>,
        now: Now,
    ) {
        let Some(held) = self.agent_mut(&agent) else { return };
        let id = |token: &CoseSign1| TokenClaims::of(token).map(|claims| claims.token_id);
        let known = held.services.get(&key).is_some_and(|old| id(old) == id(&token));
        let mut gone = Vec::new();
        if held.services.len() >= MAX_HELD && !held.services.contains_key(&key) {
            gone.extend(held.services.pop_first().map(|(key, _)| key));
        }
        held.services.insert(key.clone(), token.clone());
        for key in gone {
            self.save_identity(agent, IdentityChange::ServiceToken { key, token: None });
        }
        let change = IdentityChange::ServiceToken { key: key.clone(), token: Some(token) };
        self.save_identity(agent, change);
        match op.and_then(|op| Some((op, self.ops.remove(&op)?))) {
            Some((op, Op::HandOn { what, .. })) => self.hand_on_now(*what, false, op, now),
            Some((op, _)) => {
                let write = key.capability == VAULT_WRITE;
                let result = Ok(CommandResult::Granted { write, expires });
                self.outputs.push_back(Output::Reply { op, result });
            }
            // The answer to a second request for it.
            None if known => {}
            None => {
                let event = DeliveryEvent::CapabilityOutcome {
                    owner: key.owner,
                    capability: key.capability,
                    scope_kind: KIND_VAULT.to_owned(),
                    scope_path: Some(key.path),
                    accepted: true,
                    expires: Some(expires.0),
                    code: String::new(),
                    reason: String::new(),
                };
                self.show(agent, event, now);
            }
        }
    }

    // --- handing on ---------------------------------------------------------------------------------

    /// Hands a permission on to another agent, with no more than this one has. A token of another
    /// capability cannot hang from it, so one for reading is fetched first where only one for writing
    /// is held.
    pub(in super::super) fn hand_on(
        &mut self,
        agent: DeviceId,
        (owner, share): (DeviceId, String),
        to: DeviceId,
        terms: GrantTerms,
        op: OpId,
        now: Now,
    ) {
        let write = terms.write == Some(true);
        let left = |node: &mut Self, write| {
            let held = node.held_token(agent, owner, &share, &[write], now).ok();
            let claims = held.and_then(|(_, token)| TokenClaims::of(&token));
            claims.map_or(0, |claims| claims.delegations_remaining.unwrap_or(u64::MAX))
        };
        let fetch = !write && left(self, false) == 0 && left(self, true) > 0;
        let what = HandOn { agent, owner, share, to, terms };
        if fetch {
            let key = TokenKey::new(owner, false, &what.share);
            let reply_by = now.mono + REQUEST_TIMEOUT_MS;
            self.ops.insert(op, Op::HandOn { what: Box::new(what), reply_by });
            self.ask(agent, key, None, Some(op), now);
            return;
        }
        self.hand_on_now(what, write, op, now);
    }

    fn hand_on_now(&mut self, what: HandOn, write: bool, op: OpId, now: Now) {
        let HandOn { agent, owner, share, to, terms } = what;
        match self.child_token(agent, owner, &share, write, to, terms, now) {
            Ok((token, expires)) => {
                let request = OutRequest {
                    verb: capability(write).to_owned(),
                    params: Value::map([
                        ("verb", Value::Text(GRANT.into())),
                        ("granted-token", token.to_value()),
                        (OWNER, Value::Bytes(owner.0.to_vec())),
                    ]),
                    scope: Scope::new(KIND_VAULT, share),
                    token: None,
                };
                let purpose = Purpose::HandOn { op, write, expires };
                let deadline = Some(now.mono + REQUEST_TIMEOUT_MS);
                self.request(agent, to, request, purpose, deadline);
            }
            Err(error) => self.fail(op, error),
        }
    }

    fn child_token(
        &mut self,
        agent: DeviceId,
        owner: DeviceId,
        share: &str,
        write: bool,
        to: DeviceId,
        terms: GrantTerms,
        now: Now,
    ) -> Result<(CoseSign1, UnixMillis), CommandError> {
        if to == agent {
            return Err(CommandError::new("invalid_target", "that is this agent itself"));
        }
        let (_, parent) = self.held_token(agent, owner, share, &[write], now)?;
        let claims = TokenClaims::of(&parent)
            .ok_or_else(|| CommandError::new("malformed", "the permission cannot be read"))?;
        let left = claims.delegations_remaining.unwrap_or(u64::MAX);
        if left == 0 {
            let what = "this permission cannot be passed on; ask its owner for one that can";
            return Err(CommandError::new("not_delegable", what));
        }
        let delegations = terms.delegations.unwrap_or(0);
        if delegations >= left {
            let what =
                format!("it can be passed on {left} times in all: at most {} more", left - 1);
            return Err(CommandError::new("invalid_delegations", what));
        }
        let expires = terms.expires.unwrap_or(claims.expires).min(claims.expires);
        if expires <= now.unix {
            return Err(CommandError::new("invalid_expiry", "that time is over already"));
        }
        let id = self.random::<16>();
        let failed = || CommandError::new("mint_failed", "the token could not be made");
        let key = &self.devices.get(&agent).ok_or_else(failed)?.key;
        let scope = Scope::new(KIND_VAULT, share);
        let request =
            MintRequest::new(id, to, capability(write), scope, expires).delegations(delegations);
        let token = token::mint(key, now.unix, MintRequest { parent: Some(&parent), ..request })
            .map_err(|_| failed())?;
        Ok((token, expires))
    }

    /// How handing on has ended.
    pub(in super::super) fn hand_on_ended(
        &mut self,
        op: OpId,
        write: bool,
        expires: UnixMillis,
        outcome: Outcome,
    ) {
        let result = match &outcome {
            Outcome::Ok(_) => Ok(CommandResult::Granted { write, expires }),
            failed => {
                let (code, message) = refusal(failed);
                Ok(CommandResult::Refused { code, message: message.unwrap_or_default() })
            }
        };
        self.outputs.push_back(Output::Reply { op, result });
    }
}
