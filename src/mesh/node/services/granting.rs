//! The owner's side of shares: who asks for what, what the operator says, and what is granted.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256};

use super::super::super::journal::Record;
use super::super::super::log::LogEvent;
use super::super::super::records::{Now, Visibility};
use super::super::super::session::{
    APPROVAL_WINDOW_MS, MAX_WAITING_FOR_DECISION, REQUEST_TIMEOUT_MS, SessionId,
};
use super::super::super::wire::capability::VAULT_WRITE;
use super::super::super::wire::cose::CoseSign1;
use super::super::super::wire::frame::Frame;
use super::super::super::wire::revocation::{self, RevocationEntry};
use super::super::super::wire::scope::{KIND_VAULT, Scope};
use super::super::super::wire::token::{self, MintRequest};
use super::super::control::{DECISION_ID_BYTES, too_many};
use super::super::requests::{error, ok_with};
use super::super::{
    Answer, AnswerTo, CommandError, CommandResult, Node, OpId, OutRequest, Outcome, Output, Purpose,
};
use super::{
    ASK_KEPT_MS, Ask, GRANT, GRANT_LIFE_MS, Grant, GrantTerms, MAX_ASKS, MAX_ASKS_OF_DEVICE,
    MAX_DELEGATIONS, MAX_GRANT_LIFE_MS, MAX_GRANTS, MAX_SHARE_NAME_BYTES, MAX_SHARES, MAX_WAITERS,
    OperatorCommand, PASSING_GRANT_MS, Share, capability, grant_record, is_share_name, refused,
    share_record,
};
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

impl Node {
    pub(super) fn capability_asked(
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
        if params.get("capability").and_then(Value::as_text) != Some(request.verb.as_str())
            || !is_share_name(name)
        {
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
        let write = request.verb == VAULT_WRITE;
        let ours = self.is_hosted(&from);
        let Some(share) = self.services.shares.get(name) else {
            // To anybody else a name that is not there is as one that nobody decides on.
            return match ours {
                true => Answer::Now(refused("not_shared", "nothing is shared under this name")),
                false => {
                    self.ask_operator(local, from, session, to, (name, write, valid_until), now)
                }
            };
        };
        let of_bearer = || share.grants.iter().filter(|(_, grant)| grant.bearer == from);
        let holds = of_bearer().any(|(_, grant)| grant.is_live(now.unix));
        if write && !share.write && (ours || holds) {
            return Answer::Now(refused("read_only", "this is shared for reading only"));
        }
        // Asked again: the token has been lost, or the yes came when nobody waited for it. Whoever may
        // write may have a token for reading besides, to hand on.
        let live = of_bearer()
            .filter(|(_, grant)| grant.is_live(now.unix) && (grant.write || !write))
            .min_by_key(|(_, grant)| grant.write != write);
        if let Some((id, grant)) = live.map(|(id, grant)| (*id, grant.clone())) {
            let token = self.mint_grant(name, id, &Grant { write, ..grant }, now);
            return Answer::Now(match token {
                Some(token) => ok_with([("granted-token", token.to_value())]),
                None => error("mint_failed"),
            });
        }
        let barred = of_bearer().any(|(_, grant)| grant.revoked && grant.write == write);
        if ours && !barred {
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
            .map(|ask| (ask.id.clone(), ask.local));
        let of_device = asks.values().filter(|ask| ask.requester == from).count();
        if known.is_none() && of_device >= MAX_ASKS_OF_DEVICE {
            return Answer::Now(too_many());
        }
        if known.is_none() && asks.len() >= MAX_ASKS {
            // What nobody can decide on makes room first.
            let shares = &self.services.shares;
            let idle = asks
                .values()
                .filter(|ask| !shares.contains_key(&ask.share))
                .min_by_key(|ask| ask.deadline)
                .map(|ask| ask.id.clone());
            match idle.and_then(|id| self.services.asks.remove(&id)) {
                Some(idle) => self.answer_ask(idle, &undecided(), now),
                None => return Answer::Now(too_many()),
            }
        }
        let (new, told) = (known.is_none(), known.as_ref().map(|(_, told)| *told));
        let id = match known {
            Some((id, _)) => id,
            None => self.ask_id(from, share, write),
        };
        if let Some(held) = session.and_then(|session| self.sessions.get_mut(&session)) {
            held.waiting_for_decision += 1;
        }
        let ask = self.services.asks.entry(id.clone()).or_insert_with(|| Ask {
            id: id.clone(),
            requester: from,
            local,
            share: share.to_owned(),
            write,
            valid_until,
            at: now.unix,
            // However often it is made.
            deadline: now.mono + ASK_KEPT_MS,
            waiters: Vec::new(),
        });
        ask.local = local;
        ask.valid_until = valid_until;
        ask.waiters.push((to, now.mono + APPROVAL_WINDOW_MS));
        let over = (ask.waiters.len() > MAX_WAITERS).then(|| ask.waiters.remove(0).0);
        if let Some(over) = over {
            self.release_waiter(over);
            self.answer(over, undecided(), now);
        }
        if new {
            self.log(
                LogEvent::new("capability_asked")
                    .with("device", from)
                    .with("capability", capability(write))
                    .with("share", share),
            );
        }
        // Asked again, it has been shown already.
        if told != Some(local) {
            self.show_ask(&id, now);
        }
        Answer::Later
    }

    /// The id of a request: the same whenever it is made, since it is not stored here, and no choice
    /// of who makes it.
    fn ask_id(&mut self, from: DeviceId, share: &str, write: bool) -> String {
        let what = format!("commsd request {} {} {share}", from.hex(), capability(write));
        let signed = self.devices.get(&self.daemon).map(|device| device.key.sign(what.as_bytes()));
        let digest = signed.map(Sha256::digest);
        let id = digest.and_then(|digest| Some(HEXLOWER.encode(digest.get(..DECISION_ID_BYTES)?)));
        // Another one may have it, once in a long while.
        id.filter(|id| !self.services.asks.contains_key(id)).unwrap_or_else(|| self.decision_id())
    }

    /// Puts a request into mailboxes, if it is for something that is shared. Whoever was spoken to is
    /// told; the daemon's own device has nobody, and then all are.
    fn show_ask(&mut self, id: &str, now: Now) {
        let Some(ask) = self.services.open_asks().find(|ask| ask.id == id) else { return };
        let (event, local) = (ask.event(), ask.local);
        let told = if self.agent(&local).is_some() { vec![local] } else { self.agent_ids() };
        for agent in told {
            self.show(agent, event.clone(), now);
        }
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
        let mut past: Vec<[u8; 16]> = share
            .grants
            .iter()
            .filter(|(_, g)| g.revoked && g.bearer == bearer && g.write == write)
            .map(|(id, _)| *id)
            .collect();
        if share.grants.len() - past.len() >= MAX_GRANTS {
            // Of what was taken back, the oldest is remembered least: no token of it counts without.
            let revoked = share.grants.iter().filter(|(id, g)| g.revoked && !past.contains(id));
            past.extend(revoked.min_by_key(|(_, g)| g.at).map(|(id, _)| *id));
        }
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

    pub(in super::super) fn operator_command(
        &mut self,
        op: OpId,
        command: OperatorCommand,
        now: Now,
    ) {
        let result = match command {
            OperatorCommand::Share { name, place, write } => self.share(name, place, write, now),
            OperatorCommand::Unshare(name) => self.unshare(&name, now),
            OperatorCommand::Revoke { share, bearer } => self.revoke_shared(&share, bearer, now),
            OperatorCommand::Grant { id, terms } => self.grant_asked(&id, terms, now),
            OperatorCommand::Machine { id, decision } => {
                let accept = decision.is_ok();
                self.decide_mesh(&id, accept, decision.err().flatten(), now)
                    .ok_or_else(super::super::control::not_pending)
            }
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
        let known = before.is_some();
        if !known && shares.len() >= MAX_SHARES {
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
        if !known {
            // Some may have asked before it was there.
            for id in self.asks_for(&name) {
                self.show_ask(&id, now);
            }
        }
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
        // Who waits for a decision is told neither that it was there nor that it is gone.
        for id in self.asks_for(name) {
            self.withdraw_ask(&id);
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

    fn asks_for(&self, share: &str) -> Vec<String> {
        let asks = self.services.asks.values();
        asks.filter(|ask| ask.share == share).map(|ask| ask.id.clone()).collect()
    }

    /// Takes a request's question out of every mailbox.
    fn withdraw_ask(&mut self, id: &str) {
        let Some(event) = self.services.asks.get(id).map(Ask::event) else { return };
        for agent in self.agent_ids() {
            if let Some(held) = self.agent_mut(&agent) {
                held.mailbox.withdraw(&event);
            }
            self.keep_losses(agent);
        }
        if let Some(key) = event.question_key() {
            self.forget_question(&key);
        }
    }

    /// Takes a request out, and its question out of every mailbox.
    fn take_ask(&mut self, id: &str) -> Option<Ask> {
        self.withdraw_ask(id);
        self.services.asks.remove(id)
    }

    /// As [`Self::take_ask`], of those that can be decided on.
    fn take_open_ask(&mut self, id: &str) -> Result<Ask, CommandError> {
        let open = self.services.open_asks().any(|ask| ask.id == id);
        open.then(|| self.take_ask(id)).flatten().ok_or_else(not_pending)
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
        let Some(ask) = self.services.open_asks().find(|ask| ask.id == id) else {
            return Err(not_pending());
        };
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
        let ask = self.take_open_ask(id)?;
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
        let ask = self.take_open_ask(id)?;
        self.log(
            LogEvent::new("capability_refused")
                .with("device", ask.requester)
                .with("capability", capability(ask.write))
                .with("share", &ask.share),
        );
        self.answer_ask(ask, &Outcome::Error { code: "denied".into(), message: reason }, now);
        Ok(CommandResult::Done)
    }

    /// Answers what has waited long enough, and ends what nobody has decided on.
    pub(super) fn asks_upkeep(&mut self, now: Now) {
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
            self.answer(to, undecided(), now);
        }
        for id in over {
            if let Some(ask) = self.take_ask(&id) {
                self.answer_ask(ask, &error("timeout"), now);
            }
        }
    }

    /// Grants whose time is over go. What was taken back from an agent of ours stays, or it would
    /// have it again for the asking.
    pub(super) fn grants_upkeep(&mut self, now: Now) {
        let over: Vec<(String, [u8; 16])> = self
            .services
            .shares
            .iter()
            .flat_map(|(name, share)| share.grants.iter().map(move |(id, grant)| (name, id, grant)))
            .filter(|(_, _, grant)| grant.expires <= now.unix)
            .filter(|(_, _, grant)| !(grant.revoked && self.is_hosted(&grant.bearer)))
            .map(|(name, id, _)| (name.clone(), *id))
            .collect();
        for (name, token) in over {
            if let Some(share) = self.services.shares.get_mut(&name) {
                share.grants.remove(&token);
            }
            self.keep(Record::ShareGrantGone { name, token });
        }
    }
}

fn unknown_share(name: &str) -> CommandError {
    CommandError::new("share_not_found", format!("nothing is shared as {name:?}"))
}

fn not_pending() -> CommandError {
    CommandError::new("not_pending", "nothing like that is waiting; see what is pending")
}

fn undecided() -> Outcome {
    refused("pending", "nobody has decided yet")
}
