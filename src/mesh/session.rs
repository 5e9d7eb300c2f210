//! One connection's protocol state: admission, request matching, deadlines, liveness
//! (`wire.md` "Session start", "Manage requests"; decision 5). No bytes and no sockets here.

use std::collections::BTreeMap;

use super::records::Now;
use crate::identity::device::DeviceId;

/// Deadline of an ordinary request (reference `request-timeouts`).
pub const REQUEST_TIMEOUT_MS: u64 = 15_000;
/// How long an owner's side holds a request for a human decision.
pub const APPROVAL_WINDOW_MS: u64 = 300_000;
/// The requester's extra patience beyond that window.
pub const APPROVAL_GRACE_MS: u64 = 10_000;
/// Requests awaiting an answer per session. At 46 ms an answer (the slowest real peer) this is
/// 20,000 messages a second; more means the peer has stopped answering.
pub const MAX_PENDING_REQUESTS: usize = 1024;
/// Silence after which a session is probed. Real peers gossip every 20 s.
pub const SILENCE_BEFORE_PROBE_MS: u64 = 45_000;
/// Answer time of a probe before the session counts as dead.
pub const PROBE_TIMEOUT_MS: u64 = 15_000;
/// A session still in quarantine after this is closed: real introducers speak at once, and an
/// approval has its own window.
pub const QUARANTINE_MS: u64 = 30_000;
/// Requests of one session that may wait for a human at the same time.
pub const MAX_WAITING_FOR_DECISION: usize = 16;

/// Names a session for the lifetime of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What those may do who come in by a listener, once they are let in. The reference has the words and
/// enforces nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Whatever another machine may.
    #[default]
    Full,
    /// Hear who is here and ask for versions and ways; reach nobody and bring nobody.
    Observe,
    /// Rooms and conversations, and nothing that is shared beside them.
    RoomsOnly,
    /// As through a hub: only whom the user trusts is heard of, and heard.
    Gateway,
}

impl Policy {
    /// Whether somebody who was let in under this needs no new yes to come in under another.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self == Self::Full || self == other
    }
}

/// How a session came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionKind {
    /// Accepted on a device's data port.
    DataAccepted,
    /// We dialled a peer's data port.
    DataDialled,
    /// Accepted on the well-known port.
    PortAccepted,
    /// We dialled the well-known port.
    PortDialled,
    /// Accepted on an address for other machines.
    NetworkAccepted(Policy),
    /// We dialled another machine.
    NetworkDialled,
    /// A secure channel through another machine's daemon, or through a relay hub.
    Relayed,
    /// With a relay hub, which is nobody's peer.
    Hub,
}

impl SessionKind {
    /// A word for logs and status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DataAccepted => "data_accepted",
            Self::DataDialled => "data_dialled",
            Self::PortAccepted => "port_accepted",
            Self::PortDialled => "port_dialled",
            Self::NetworkAccepted(_) => "network_accepted",
            Self::NetworkDialled => "network_dialled",
            Self::Relayed => "relayed",
            Self::Hub => "hub",
        }
    }
}

/// Who is at the other end, as far as the operating system can tell (decision 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A loopback connection of our own user (or of an unknown one where the platform cannot tell).
    SameUser,
    /// A loopback connection of another user.
    OtherUser,
    /// Another machine.
    Network,
}

/// How far a session has been let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Only introduce, connect_request and version.get are heard.
    Quarantined,
    /// A connect_request waits for a decision.
    AwaitingApproval,
    /// A peer.
    Admitted,
}

/// What an answer, or its absence, is for.
#[derive(Debug)]
pub struct Pending<P> {
    /// Monotonic ms; `None` waits for ever (connect_request: the acceptor's window decides).
    pub deadline: Option<u64>,
    /// What to do with the outcome.
    pub purpose: P,
}

/// One connection.
#[derive(Debug)]
pub struct Session<P> {
    /// Our name for it.
    pub id: SessionId,
    /// Our device at this end.
    pub local: DeviceId,
    /// The authenticated device at the other end.
    pub remote: DeviceId,
    /// How it came to be.
    pub kind: SessionKind,
    /// Who is there.
    pub origin: Origin,
    /// How far it is let in.
    pub admission: Admission,
    /// Takes part in the election.
    pub enrolled: bool,
    /// The other machine has said yes to our connect_request.
    pub let_in: bool,
    /// Requests waiting for a decision of an agent of ours.
    pub waiting_for_decision: usize,
    /// Monotonic ms.
    pub opened_at: u64,
    last_heard: u64,
    probe_deadline: Option<u64>,
    next_request: u64,
    pending: BTreeMap<u64, Pending<P>>,
}

impl<P> Session<P> {
    /// A session that has just been authenticated.
    #[must_use]
    pub fn new(
        id: SessionId,
        local: DeviceId,
        remote: DeviceId,
        kind: SessionKind,
        origin: Origin,
        now: Now,
    ) -> Self {
        let admission = match (kind, origin) {
            (SessionKind::PortAccepted | SessionKind::NetworkAccepted(_), _) => {
                Admission::Quarantined
            }
            (SessionKind::NetworkDialled, _) => Admission::AwaitingApproval,
            _ => Admission::Admitted,
        };
        Self {
            id,
            local,
            remote,
            kind,
            origin,
            admission,
            enrolled: false,
            let_in: false,
            waiting_for_decision: 0,
            opened_at: now.mono,
            last_heard: now.mono,
            probe_deadline: None,
            next_request: 0,
            pending: BTreeMap::new(),
        }
    }

    /// What the other end may do.
    #[must_use]
    pub fn policy(&self) -> Policy {
        match self.kind {
            SessionKind::NetworkAccepted(policy) => policy,
            _ => Policy::Full,
        }
    }

    /// Whether frames of ours may be addressed to it.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.admission == Admission::Admitted
    }

    /// Whether the other end runs under our user on this machine.
    #[must_use]
    pub fn is_same_user(&self) -> bool {
        self.origin == Origin::SameUser
    }

    /// Whether the other end is on this machine.
    #[must_use]
    pub fn is_machine_local(&self) -> bool {
        self.origin != Origin::Network
    }

    /// Takes a request id and remembers what the answer is for; the purpose comes back when the
    /// session has too many requests open.
    pub fn open_request(&mut self, purpose: P, deadline: Option<u64>) -> Result<u64, P> {
        if self.pending.len() >= MAX_PENDING_REQUESTS {
            return Err(purpose);
        }
        let id = self.next_request;
        self.next_request += 1;
        self.pending.insert(id, Pending { deadline, purpose });
        Ok(id)
    }

    /// The purpose of an answered request; `None` for an id that is not open (late or invented).
    pub fn close_request(&mut self, id: u64) -> Option<P> {
        self.pending.remove(&id).map(|pending| pending.purpose)
    }

    /// What open requests are for.
    pub fn open_purposes(&self) -> impl Iterator<Item = &P> {
        self.pending.values().map(|pending| &pending.purpose)
    }

    /// As [`Self::open_purposes`], to note something in them.
    pub fn open_purposes_mut(&mut self) -> impl Iterator<Item = &mut P> {
        self.pending.values_mut().map(|pending| &mut pending.purpose)
    }

    /// Takes the purposes whose deadline has passed, in the order they were sent.
    pub fn expired_requests(&mut self, now: u64) -> Vec<P> {
        let due: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.deadline.is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        due.into_iter().filter_map(|id| self.close_request(id)).collect()
    }

    /// Takes every open purpose, for a session that has ended.
    pub fn drain_requests(&mut self) -> Vec<P> {
        std::mem::take(&mut self.pending).into_values().map(|pending| pending.purpose).collect()
    }

    /// Something was heard: the link lives.
    pub fn heard(&mut self, now: u64) {
        self.last_heard = now;
        self.probe_deadline = None;
    }

    /// Whether a probe should be sent now; the caller sends one.
    pub fn wants_probe(&mut self, now: u64) -> bool {
        let silent = now.saturating_sub(self.last_heard) >= SILENCE_BEFORE_PROBE_MS;
        if silent && self.probe_deadline.is_none() && self.is_admitted() {
            self.probe_deadline = Some(now + PROBE_TIMEOUT_MS);
            return true;
        }
        false
    }

    /// Demands proof of life at the next check (after a suspend).
    pub fn doubt(&mut self, now: u64) {
        self.last_heard = now.saturating_sub(SILENCE_BEFORE_PROBE_MS);
    }

    /// Why this session must end now, if it must.
    #[must_use]
    pub fn overdue(&self, now: u64) -> Option<&'static str> {
        if self.probe_deadline.is_some_and(|at| at <= now) {
            return Some("keepalive_timeout");
        }
        if self.admission == Admission::Quarantined && now >= self.opened_at + QUARANTINE_MS {
            return Some("quarantine_timeout");
        }
        None
    }

    /// The next moment at which this session needs attention.
    #[must_use]
    pub fn next_deadline(&self) -> u64 {
        let request = self.pending.values().filter_map(|pending| pending.deadline).min();
        let liveness = self.probe_deadline.unwrap_or(self.last_heard + SILENCE_BEFORE_PROBE_MS);
        let quarantine =
            (self.admission == Admission::Quarantined).then_some(self.opened_at + QUARANTINE_MS);
        let liveness = if self.is_admitted() { Some(liveness) } else { None };
        request.into_iter().chain(liveness).chain(quarantine).min().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(kind: SessionKind) -> Session<&'static str> {
        Session::new(
            SessionId(1),
            DeviceId([1; 32]),
            DeviceId([2; 32]),
            kind,
            Origin::SameUser,
            Now::default(),
        )
    }

    #[test]
    fn request_ids_count_from_zero_and_are_never_reused() {
        let mut s = session(SessionKind::DataDialled);
        assert_eq!(s.open_request("a", Some(10)), Ok(0));
        assert_eq!(s.open_request("b", None), Ok(1));
        assert_eq!(s.close_request(0), Some("a"));
        assert_eq!(s.close_request(0), None);
        assert_eq!(s.open_request("c", Some(5)), Ok(2));
        assert_eq!(s.expired_requests(5), vec!["c"]);
        assert_eq!(s.drain_requests(), vec!["b"]);
    }

    #[test]
    fn too_many_open_requests_are_handed_back() {
        let mut s = session(SessionKind::DataDialled);
        for _ in 0..MAX_PENDING_REQUESTS {
            assert!(s.open_request("x", None).is_ok());
        }
        assert_eq!(s.open_request("over", None), Err("over"));
    }

    #[test]
    fn a_silent_session_is_probed_once_then_overdue() {
        let mut s = session(SessionKind::DataAccepted);
        assert!(!s.wants_probe(SILENCE_BEFORE_PROBE_MS - 1));
        assert!(s.wants_probe(SILENCE_BEFORE_PROBE_MS));
        assert!(!s.wants_probe(SILENCE_BEFORE_PROBE_MS + 1));
        let end = SILENCE_BEFORE_PROBE_MS + PROBE_TIMEOUT_MS;
        assert_eq!(s.overdue(end - 1), None);
        assert_eq!(s.overdue(end), Some("keepalive_timeout"));
        s.heard(end - 1);
        assert_eq!(s.overdue(end), None);
    }

    #[test]
    fn quarantine_ends() {
        let s = session(SessionKind::PortAccepted);
        assert_eq!(s.overdue(QUARANTINE_MS - 1), None);
        assert_eq!(s.overdue(QUARANTINE_MS), Some("quarantine_timeout"));
    }
}
