//! The session with a relay hub: when there is one, what of our agents is told to it, and who of
//! those it tells of counts (`transport.md` 8). The hub is nobody's peer: it passes on adverts and
//! sealed payloads. Whoever is trusted and heard of through it is reached by channels as through
//! another machine's daemon (`relay`).

use std::collections::{BTreeMap, BTreeSet};

use super::super::directory::{self, AgentSelf, key};
use super::super::log::LogEvent;
use super::super::message::{MeshMessage, Patch};
use super::super::records::{Now, RoomRecord, RoomType, Visibility};
use super::super::session::{Origin, Session, SessionId, SessionKind};
use super::super::wire::advert::PeerAdvert;
use super::super::wire::cose::CoseSign1;
use super::super::wire::frame::Frame;
use super::super::wire::token::{self, TokenClaims};
use super::gossip::Detail;
use super::{DialFor, DialId, DialTarget, Node, Output};
use crate::codec::cbor;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Pause before the hub is dialled again, at first and at most (reference `hub-link`).
pub const HUB_REDIAL_FIRST_MS: u64 = 1_000;
/// See [`HUB_REDIAL_FIRST_MS`].
pub const HUB_REDIAL_MAX_MS: u64 = 60_000;
/// A session that lasted so long was a good one: the pause begins anew. The reference begins it anew
/// with every session, so that a hub which accepts and closes is dialled every second.
const HUB_GOOD_AFTER_MS: u64 = 60_000;
/// Adverts in one frame to the hub.
const ADVERTS_A_FRAME: usize = 64;
/// Proofs verified, and hellos taken, within a second on a hub's word: it may repeat what it has
/// heard as often as it likes, and each costs a tenth of a millisecond.
const CHECKS_A_SECOND: u32 = 64;
/// How long a refused proof is not looked at again.
const REFUSED_FOR_MS: u64 = 60_000;
/// A proof that runs out within this is replaced by a newer one: ours are renewed every 5 minutes.
const RENEW_WITHIN_MS: u64 = 600_000;
/// Devices judged that are remembered.
const MAX_JUDGED: usize = 1024;
/// Rooms told when a channel opens; with the rest they have to fit what waits for its opening.
const MAX_ROOMS_TOLD: usize = 64;
/// Why a session with the hub is ended by this side.
const HUB_UNWANTED: &str = "hub_unwanted";
/// In the place of a device where a session needs one: no key has this id.
pub(super) const HUB: DeviceId = DeviceId([0; 32]);

/// The hub as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubConfig {
    /// Its URL, told to whoever traces the way here.
    pub url: String,
    /// Whether the hub, and so everybody connected to it, is told the names of agents, of this
    /// machine and of public rooms, as the reference does. Peers that are trusted learn names
    /// through their channels.
    pub names: bool,
}

/// Whom the user trusts beyond this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustList {
    /// Devices.
    pub devices: BTreeSet<DeviceId>,
    /// Users, whose devices prove it.
    pub principals: BTreeSet<DeviceId>,
    /// Machines, whose devices prove it.
    pub machines: BTreeSet<DeviceId>,
}

impl TrustList {
    /// Whether nobody is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.principals.is_empty() && self.machines.is_empty()
    }

    /// Trusted by its id. That of a user stands for the user's own device, as in the reference.
    fn names(&self, device: &DeviceId) -> bool {
        self.devices.contains(device) || self.principals.contains(device)
    }
}

/// The hub for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubView {
    /// Its URL.
    pub url: String,
    /// Whether anybody is trusted, so that it is wanted.
    pub wanted: bool,
    /// Since when there is a session (monotonic ms).
    pub since: Option<u64>,
    /// Trusted devices heard of through it.
    pub devices: usize,
    /// Dials in a row that have come to nothing.
    pub failures: u32,
}

/// A proof that has been verified.
struct Proven {
    until: UnixMillis,
    issuer: DeviceId,
    /// Of a machine; otherwise of a user.
    machine: bool,
}

/// Where we stand with the hub.
#[derive(Default)]
pub(super) struct HubState {
    trust: TrustList,
    dial: Option<DialId>,
    session: Option<SessionId>,
    failures: u32,
    retry_at: u64,
    proven: BTreeMap<DeviceId, Proven>,
    refused: BTreeMap<DeviceId, u64>,
    checks: u32,
    checks_since: u64,
}

impl Node {
    /// The hub as it stands; none when none is configured.
    #[must_use]
    pub fn hub_view(&self) -> Option<HubView> {
        let config = self.config.hub.as_ref()?;
        let session = self.hub.session.and_then(|id| self.sessions.get(&id));
        let via = |entry: &directory::Entry| Some(entry.via) == self.hub.session;
        Some(HubView {
            url: config.url.clone(),
            wanted: !self.hub.trust.is_empty(),
            since: session.map(|session| session.opened_at),
            devices: self.directory.iter().filter(|(_, entry)| via(entry)).count(),
            failures: self.hub.failures,
        })
    }

    fn hub_wanted(&self) -> bool {
        self.config.hub.is_some()
            && self.shutting_down.is_none()
            && !self.hub.trust.is_empty()
            && !self.fronted().is_empty()
    }

    /// Dials the hub when it is wanted, and lets go of it when it is not.
    pub(super) fn hub_upkeep(&mut self, now: Now) {
        if !self.hub_wanted() {
            if let Some(session) = self.hub.session {
                self.close(session, HUB_UNWANTED, now);
            }
            return;
        }
        if self.hub.session.is_none() && self.hub.dial.is_none() && self.hub.retry_at <= now.mono {
            let dial = DialId(self.id());
            self.hub.dial = Some(dial);
            self.dials.insert(dial, DialFor::Hub);
            let (local, target) = (self.daemon, DialTarget::Hub);
            self.outputs.push_back(Output::Dial { dial, local, target, expect: None });
        }
    }

    pub(super) fn hub_dialled(&mut self, id: SessionId, now: Now) {
        self.hub.dial = None;
        if !self.hub_wanted() {
            self.outputs.push_back(Output::Close { session: id, reason: HUB_UNWANTED });
            return;
        }
        let session = Session::new(id, self.daemon, HUB, SessionKind::Hub, Origin::Network, now);
        self.sessions.insert(id, session);
        self.hub.session = Some(id);
        self.outputs.push_back(Output::Admitted { session: id });
        self.log(LogEvent::new("hub_up").with("session", id.0));
        self.send_opening_advert(id, now);
    }

    pub(super) fn hub_dial_failed(&mut self, reason: &'static str, now: Now) {
        self.hub.dial = None;
        self.hub_lost(reason, now);
    }

    pub(super) fn hub_closed(
        &mut self,
        session: &Session<super::Purpose>,
        reason: &'static str,
        now: Now,
    ) {
        if self.hub.session != Some(session.id) {
            return;
        }
        self.hub.session = None;
        if reason == HUB_UNWANTED {
            self.hub.failures = 0;
            self.hub.retry_at = now.mono;
            return self.log(LogEvent::new("hub_left"));
        }
        if now.mono.saturating_sub(session.opened_at) >= HUB_GOOD_AFTER_MS {
            self.hub.failures = 0;
        }
        self.hub_lost(reason, now);
    }

    fn hub_lost(&mut self, reason: &'static str, now: Now) {
        let pause = (HUB_REDIAL_FIRST_MS << self.hub.failures.min(16)).min(HUB_REDIAL_MAX_MS);
        // Not everybody at once when a hub comes back: up to a quarter earlier.
        let earlier = u64::from(self.random::<1>()[0]) * (pause / 4) / 256;
        let retry_ms = pause - earlier;
        self.hub.failures = self.hub.failures.saturating_add(1);
        self.hub.retry_at = now.mono + retry_ms;
        self.log(LogEvent::new("hub_down").with("reason", reason).with("retry_ms", retry_ms));
    }

    /// What the hub hears: of each agent but ghosts, and of a hidden one only that it is there.
    pub(super) fn send_hub_adverts(&mut self, id: SessionId, now: Now) {
        self.tell_hub_of(id, self.fronted(), now);
    }

    /// An agent that has just come into service has something to say before the next round: the hub
    /// pairs only whom it has heard of.
    pub(super) fn introduce_to_hub(&mut self, id: SessionId, agent: DeviceId, now: Now) {
        let heard = self.devices.get(&agent).is_none_or(|device| device.told_hub == Some(id));
        if !heard && self.fronted().contains(&agent) {
            self.tell_hub_of(id, vec![agent], now);
        }
    }

    fn tell_hub_of(&mut self, id: SessionId, agents: Vec<DeviceId>, now: Now) {
        let known = self.config.hub.as_ref().is_some_and(|hub| hub.names);
        let mut adverts = Vec::new();
        for agent in agents {
            if let Some(device) = self.devices.get_mut(&agent) {
                device.told_hub = Some(id);
            }
            let visible = self.record(&agent).is_some_and(|r| r.visibility == Visibility::Visible);
            let detail = match (visible, known) {
                (false, _) => Detail::Plain,
                (true, false) => Detail::Nameless,
                (true, true) => Detail::Reduced,
            };
            adverts.extend(self.advert_for(agent, detail, now));
        }
        for part in adverts.chunks(ADVERTS_A_FRAME) {
            let peers = part.iter().map(|advert| (**advert).clone()).collect();
            self.outputs.push_back(Output::Send { session: id, frame: Frame::Gossip { peers } });
        }
    }

    // --- whom the hub tells of --------------------------------------------------------------------

    /// Whether an advert that the hub passes on is one of a trusted device for which there is no
    /// nearer way.
    pub(super) fn takes_from_hub(&mut self, id: SessionId, advert: &PeerAdvert, now: Now) -> bool {
        let nearer = self.directory.get(&advert.device).is_some_and(|entry| {
            entry.via != id
                && !entry.is_stale(now.unix)
                && self.sessions.get(&entry.via).is_some_and(Session::is_admitted)
        });
        !nearer && self.judge_from_hub(advert, now)
    }

    fn judge_from_hub(&mut self, advert: &PeerAdvert, now: Now) -> bool {
        let device = advert.device;
        if self.hub.trust.names(&device) {
            return true;
        }
        let until = self.hub.proven.get(&device).map(|proven| proven.until);
        if until.is_some_and(|until| until > now.unix.plus(RENEW_WITHIN_MS)) {
            return true;
        }
        let still = until.is_some_and(|until| until > now.unix);
        let refused = self.hub.refused.get(&device).is_some_and(|at| *at > now.mono);
        if refused && !still {
            return false;
        }
        let agent: Option<AgentSelf> =
            advert.extension(key::SELF).and_then(|value| cbor::from_value(value).ok());
        let Some(agent) = agent else { return still };
        for (proof, machine) in [(agent.membership, false), (agent.machine, true)] {
            let Some(proof) = proof.filter(|proof| proof.len() <= token::MAX_PROOF_TEXT) else {
                continue;
            };
            // Whom it names is cheap to see; whether it is true is not.
            let issuer = CoseSign1::from_text(&proof)
                .ok()
                .and_then(|token| TokenClaims::of(&token))
                .map(|claims| claims.issuer)
                .filter(|issuer| self.trusts_issuer(issuer, machine));
            let Some(issuer) = issuer else { continue };
            if !self.may_check_for_hub(now) {
                return still;
            }
            match self.proof_holds(&proof, device, &issuer, now) {
                Some(until) => {
                    make_room(&mut self.hub.proven, |proven| proven.until.0);
                    self.hub.refused.remove(&device);
                    // Never shortened by a later proof.
                    let until = self
                        .hub
                        .proven
                        .get(&device)
                        .filter(|held| held.issuer == issuer)
                        .map_or(until, |held| held.until.max(until));
                    self.hub.proven.insert(device, Proven { until, issuer, machine });
                    return true;
                }
                None => {
                    make_room(&mut self.hub.refused, |at| *at);
                    self.hub.refused.insert(device, now.mono + REFUSED_FOR_MS);
                }
            }
        }
        still
    }

    fn proof_holds(
        &self,
        proof: &str,
        device: DeviceId,
        issuer: &DeviceId,
        now: Now,
    ) -> Option<UnixMillis> {
        let token = token::parse_membership_proof(proof).ok()?;
        let context = token::VerifyContext {
            now: now.unix,
            bearer: Some(device),
            revocations: &self.revocations,
        };
        token::verify_membership_proof(&token, &context, issuer)
            .ok()
            .map(|verified| verified.claims.expires)
    }

    fn trusts_issuer(&self, issuer: &DeviceId, machine: bool) -> bool {
        let trust = &self.hub.trust;
        if machine { trust.machines.contains(issuer) } else { trust.principals.contains(issuer) }
    }

    /// Whether one more check may be made that somebody beyond a hub has caused.
    pub(super) fn may_check_for_hub(&mut self, now: Now) -> bool {
        if now.mono >= self.hub.checks_since + 1_000 {
            self.hub.checks_since = now.mono;
            self.hub.checks = 0;
        }
        self.hub.checks += 1;
        self.hub.checks <= CHECKS_A_SECOND
    }

    /// Whether a device beyond a hub may be reached, and heard.
    pub(super) fn is_trusted(&self, device: &DeviceId) -> bool {
        let now = self.last_now.unwrap_or_default();
        self.hub.trust.names(device)
            || self.hub.proven.get(device).is_some_and(|proven| proven.until > now.unix)
    }

    /// Whether this session is the one with the hub.
    pub(super) fn is_hub(&self, session: SessionId) -> bool {
        self.hub.session == Some(session)
    }

    /// A trusted device is there: a channel from one of ours, through which it tells its name, as
    /// its daemon opens one to each of ours.
    pub(super) fn meet_through_hub(&mut self, device: DeviceId, now: Now) {
        if self.remotes.contains_key(&device) {
            return;
        }
        if let Some(first) = self.fronted().first().copied() {
            self.open_channel(first, device, now);
        }
    }

    /// A channel through the hub is open: its other end, whom the user trusts, hears of the public
    /// rooms here, which the hub is not told of.
    pub(super) fn send_public_rooms(&mut self, session: SessionId, now: Now) {
        let local = self.sessions.get(&session).map(|session| session.local);
        let Some(local) = local.filter(|_| self.is_through_hub(session)) else { return };
        let rooms: Vec<RoomRecord> = self
            .replica
            .rooms()
            .filter(|(path, room)| path.owner() == Some(local) && room.kind == RoomType::Public)
            .take(MAX_ROOMS_TOLD)
            .map(|(_, room)| room.clone())
            .collect();
        for room in rooms {
            let message = MeshMessage::StateUpdate(Box::new(Patch::RoomUpsert { room }));
            self.tell(session, &message, now);
        }
    }

    /// The user trusts others than before. Who is trusted no longer is forgotten, and heard no more.
    pub(super) fn trust_changed(&mut self, trust: TrustList, now: Now) {
        self.hub.trust = trust;
        self.hub.refused.clear();
        let mut proven = std::mem::take(&mut self.hub.proven);
        proven.retain(|_, proven| self.trusts_issuer(&proven.issuer, proven.machine));
        self.hub.proven = proven;
        let dropped: Vec<(DeviceId, SessionId)> = self
            .directory
            .iter()
            .filter(|(device, entry)| self.needs_trust(entry.via) && !self.is_trusted(device))
            .filter(|(device, entry)| {
                // A daemon that was let in speaks for itself.
                self.sessions.get(&entry.via).is_none_or(|s| s.remote != **device)
            })
            .map(|(device, entry)| (*device, entry.via))
            .collect();
        for (device, via) in dropped {
            self.directory.remove(&device);
            self.close_channels_with(device, via, "not_trusted", now);
        }
        let Some(hub) = self.hub.session else {
            // Whoever has just been trusted need not wait.
            self.hub.retry_at = self.hub.retry_at.min(now.mono);
            return;
        };
        // The reference's hub tells of everybody after each gossip; from ours we hear with their
        // next.
        self.send_opening_advert(hub, now);
    }
}

/// Room for one more entry: the one that counts least by `rank` goes.
fn make_room<V>(map: &mut BTreeMap<DeviceId, V>, rank: impl Fn(&V) -> u64) {
    if map.len() >= MAX_JUDGED
        && let Some(least) = map.iter().min_by_key(|(_, value)| rank(value)).map(|(id, _)| *id)
    {
        map.remove(&least);
    }
}
