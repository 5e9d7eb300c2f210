//! Requests to a peer that has no session yet with the device of ours that asks: an agent that has
//! just come into service meets its daemon's peers, and theirs it, within moments. They wait for that.

use super::super::records::Now;
use super::{Node, OutRequest, Outcome, Purpose};
use crate::identity::device::DeviceId;

/// How long: many times what two daemons of one machine take to connect, and little for whoever asks.
const PATIENCE_MS: u64 = 3_000;
/// Requests that wait; whoever asks beyond them is told at once that there is no connection.
const MAX_AWAITING: usize = 256;

/// A request that waits for a way.
pub(super) struct Awaiting {
    local: DeviceId,
    remote: DeviceId,
    request: OutRequest,
    purpose: Purpose,
    deadline: Option<u64>,
    until: u64,
}

impl Node {
    /// There is no way to a device: the request waits for one that can be expected, and ends
    /// otherwise.
    pub(super) fn await_way(
        &mut self,
        local: DeviceId,
        remote: DeviceId,
        request: OutRequest,
        purpose: Purpose,
        deadline: Option<u64>,
        now: Now,
    ) {
        // Messages have a queue of their own, and receipts are not worth one.
        let waits = !matches!(purpose, Purpose::Message(_))
            && self.awaiting.len() < MAX_AWAITING
            && self.is_expected(&local, &remote);
        if waits {
            let until = deadline.unwrap_or(u64::MAX).min(now.mono + PATIENCE_MS);
            let awaiting = Awaiting { local, remote, request, purpose, deadline, until };
            self.awaiting.push(awaiting);
        } else {
            self.deferred.push_back((purpose, local, remote, None, Outcome::NotConnected));
        }
    }

    /// Whether a device of ours can be expected to have a session with a peer soon: the peer has one
    /// with others here, or nobody has failed to reach it yet.
    pub(super) fn is_expected(&self, local: &DeviceId, remote: &DeviceId) -> bool {
        self.is_hosted(local)
            && (self.is_here(remote) || self.formation.is_first_dial(local, remote))
    }

    /// A way has opened: what waits for it goes, in its order.
    pub(super) fn way_opened(&mut self, local: DeviceId, remote: DeviceId) {
        let opened = |waits: &mut Awaiting| waits.local == local && waits.remote == remote;
        let due: Vec<Awaiting> = self.awaiting.extract_if(.., opened).collect();
        for Awaiting { request, purpose, deadline, .. } in due {
            self.request(local, remote, request, purpose, deadline);
        }
    }

    /// Ends the requests whose way takes too long, or is not to be expected any more.
    pub(super) fn give_up_ways(&mut self, now: Now) {
        for waits in std::mem::take(&mut self.awaiting) {
            let Awaiting { local, remote, until, .. } = waits;
            if until > now.mono && self.is_expected(&local, &remote) {
                self.awaiting.push(waits);
            } else {
                let ended = (waits.purpose, local, remote, None, Outcome::NotConnected);
                self.deferred.push_back(ended);
            }
        }
    }

    /// A device of ours leaves service: what it asked ends with it.
    pub(super) fn end_ways_of(&mut self, device: DeviceId) {
        for waits in self.awaiting.extract_if(.., |waits| waits.local == device) {
            let ended = (waits.purpose, device, waits.remote, None, Outcome::NotConnected);
            self.deferred.push_back(ended);
        }
    }
}
