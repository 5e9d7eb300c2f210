//! The Agent Collaboration Protocol between daemons, without a relay: who has let in a session asks
//! which did answers behind a device of ours (`binding`), and hands envelopes in (`envelope`). Both
//! are opaque here: the daemon's office reads them, and [`Output::Acp`] and
//! [`super::Input::ServiceAnswered`] carry them there and back.
//!
//! No token is asked for: an envelope is signed and encrypted, and whom its receiver answers is
//! decided by its did. Whether the device is a peer of our user's is told with it.

use std::collections::BTreeMap;

use super::super::records::Now;
use super::super::session::SessionId;
use super::super::wire::capability::ACP_CALL;
use super::super::wire::scope::{KIND_ACP, Scope};
use super::requests::error;
use super::services::{CallId, CallKind, SERVICE_TIMEOUT_MS, refused};
use super::{Answer, AnswerTo, CommandError, Node, OpId, OutRequest, Output, Purpose};
use crate::codec::cbor::Value;
use crate::identity::device::DeviceId;

/// Bytes of an envelope, as at relays.
pub const MAX_ENVELOPE_BYTES: usize = 1 << 20;
/// Requests of one device in a minute, as at relays (decision 49).
pub const MAX_ENVELOPES_A_MINUTE: u32 = 1_200;
/// Devices whose requests are counted at one time; more are answered `busy`.
const MAX_PACED: usize = 4096;
/// How long they are counted together, monotonic ms.
const WINDOW_MS: u64 = 60_000;

/// Inner verbs.
const BINDING: &str = "x-commsd-acp.binding";
const ENVELOPE: &str = "x-commsd-acp.envelope";

/// What is asked of the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcpAsk {
    /// Which did answers behind the device that is asked.
    Binding,
    /// To take an envelope.
    Envelope(Vec<u8>),
}

/// A peer's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpRequest {
    /// Name for the answer.
    pub call: CallId,
    /// Who asks, proven.
    pub from: DeviceId,
    /// Our device that is asked.
    pub to: DeviceId,
    /// Whether our user has let it in: it runs under our user on this machine, is trusted, or is of a
    /// machine that was let in.
    pub is_peer: bool,
    /// What it asks.
    pub ask: AcpAsk,
}

/// How often devices have asked lately.
#[derive(Default)]
pub(super) struct Pace(BTreeMap<DeviceId, (u64, u32)>);

impl Pace {
    /// Counts a request; false when it is one too many.
    fn admit(&mut self, device: DeviceId, now: u64) -> bool {
        if self.0.len() >= MAX_PACED && !self.0.contains_key(&device) {
            return false;
        }
        let (begun, count) = self.0.entry(device).or_insert((now, 0));
        if now.saturating_sub(*begun) >= WINDOW_MS {
            (*begun, *count) = (now, 0);
        }
        *count = count.saturating_add(1);
        *count <= MAX_ENVELOPES_A_MINUTE
    }

    /// Forgets devices that were quiet for a window.
    pub(super) fn tidy(&mut self, now: u64) {
        self.0.retain(|_, (begun, _)| now.saturating_sub(*begun) < WINDOW_MS);
    }
}

/// Whether a request belongs here.
pub(super) fn is_acp(request: &OutRequest) -> bool {
    request.scope.kind == KIND_ACP && request.verb == ACP_CALL
}

impl Node {
    /// A request of a peer.
    pub(super) fn acp_requested(
        &mut self,
        local: DeviceId,
        from: DeviceId,
        session: Option<SessionId>,
        to: AnswerTo,
        request: &OutRequest,
        now: Now,
    ) -> Answer {
        if !self.services.pace.admit(from, now.mono) {
            return Answer::Now(refused("busy", "too many requests in a minute; try again later"));
        }
        let params = &request.params;
        let ask = match params.get("verb").and_then(Value::as_text).unwrap_or_default() {
            BINDING => AcpAsk::Binding,
            ENVELOPE => match params.get("envelope").and_then(Value::as_bytes) {
                Some(bytes) if bytes.len() <= MAX_ENVELOPE_BYTES => {
                    AcpAsk::Envelope(bytes.to_vec())
                }
                Some(_) => return Answer::Now(refused("too_large", "more than 1 MiB")),
                None => return Answer::Now(error("malformed_params")),
            },
            _ => return Answer::Now(error("unsupported_verb")),
        };
        let call = match self.call_begun(CallKind::Acp, from, to, now) {
            Ok(call) => call,
            Err(busy) => return Answer::Now(busy),
        };
        let is_peer = self.is_let_in(&from, session);
        let request = AcpRequest { call, from, to: local, is_peer, ask };
        self.outputs.push_back(Output::Acp(Box::new(request)));
        Answer::Later
    }

    /// Whether our user has said yes to this device, or it is our user's own.
    fn is_let_in(&self, device: &DeviceId, session: Option<SessionId>) -> bool {
        // Without a session it is a device of this daemon.
        let Some(session) = session else { return true };
        let carrier = self.carrier_of(session);
        self.is_trusted(device)
            || self.sessions.get(&carrier).is_some_and(|session| {
                let is_approved = self.is_approved(session.remote, session.policy());
                session.is_same_user() || is_approved && !self.needs_trust(carrier)
            })
    }

    /// Asks something of a device.
    pub(super) fn ask_acp(&mut self, op: OpId, to: DeviceId, ask: AcpAsk, now: Now) {
        let Some(local) = self.acp_sender(&to) else {
            let message = "the device is not connected, or no agent is here that could reach it";
            self.fail(op, CommandError::new("not_connected", message));
            return;
        };
        let params = match ask {
            AcpAsk::Binding => Value::map([("verb", Value::Text(BINDING.into()))]),
            AcpAsk::Envelope(bytes) => Value::map([
                ("verb", Value::Text(ENVELOPE.into())),
                ("envelope", Value::Bytes(bytes)),
            ]),
        };
        let request = OutRequest {
            verb: ACP_CALL.into(),
            params,
            scope: Scope::of_kind(KIND_ACP),
            token: None,
        };
        let deadline = Some(now.mono + SERVICE_TIMEOUT_MS);
        self.request(local, to, request, Purpose::Call { op }, deadline);
    }

    /// The device of the daemon that serves an agent elsewhere, where ours reaches it: it is there as
    /// long as that daemon, while agents come and go. As the agent's advert says, so unproven.
    #[must_use]
    pub fn daemon_of(&self, agent: &DeviceId) -> Option<DeviceId> {
        let daemon = self.directory.get(agent)?.daemon?;
        self.route(&self.daemon, &daemon).map(|_| daemon)
    }

    /// Which of our devices speaks to `to`: the daemon's own, which is there as long as the daemon;
    /// beyond this machine only agents have channels, and those that nobody may know of have none.
    fn acp_sender(&self, to: &DeviceId) -> Option<DeviceId> {
        if self.is_hosted(to) || self.route(&self.daemon, to).is_some() {
            return Some(self.daemon);
        }
        let agents = self.fronted();
        let with_route = agents.iter().find(|agent| self.route(agent, to).is_some());
        let by_channel = || agents.first().filter(|_| self.relay_for(to).is_some());
        let soon = || self.is_expected(&self.daemon, to).then_some(self.daemon);
        with_route.or_else(by_channel).copied().or_else(soon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_asks_so_often_in_a_minute_and_others_are_not_kept_out() {
        let (loud, quiet) = (DeviceId([1; 32]), DeviceId([2; 32]));
        let mut pace = Pace::default();
        for n in 0..MAX_ENVELOPES_A_MINUTE {
            assert!(pace.admit(loud, u64::from(n)), "{n}");
        }
        assert!(!pace.admit(loud, WINDOW_MS - 1));
        assert!(pace.admit(quiet, WINDOW_MS - 1));
        assert!(pace.admit(loud, WINDOW_MS));
        pace.tidy(2 * WINDOW_MS - 2);
        assert_eq!(pace.0.len(), 2);
        pace.tidy(2 * WINDOW_MS - 1);
        assert_eq!(pace.0.len(), 1);
        for n in 0..MAX_PACED as u64 {
            let mut id = [3; 32];
            id[..8].copy_from_slice(&n.to_le_bytes());
            pace.admit(DeviceId(id), 2 * WINDOW_MS);
        }
        assert_eq!(pace.0.len(), MAX_PACED);
        assert!(!pace.admit(DeviceId([9; 32]), 2 * WINDOW_MS));
        pace.tidy(3 * WINDOW_MS);
        assert!(pace.admit(DeviceId([9; 32]), 3 * WINDOW_MS));
    }
}
