//! The coordinator role: term-based claims (`transport.md` 3.2, 3.3; decision 8).
//! Decides what to accept and when to claim; sends nothing itself.

use super::wire::claim::{Claim, Evaluation, MAX_TERM};
use crate::identity::device::DeviceId;

/// How long a store waits to be told of a holder before it claims (the reference's ordinary
/// request timeout).
pub const CLAIM_WAIT_MS: u64 = 15_000;

/// What an incoming claim asks of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Taken: send it on to all enrolled sessions, the sender's included.
    Accepted,
    /// Loses against the held claim: send that one back to the sender only.
    AnswerHeld(Claim),
    /// The held claim again, or one that nothing could ever supersede: silence.
    Ignored,
}

/// One daemon's view of the role. All its devices share it.
#[derive(Debug, Default)]
pub struct Election {
    accepted: Option<Claim>,
    claim_at: Option<u64>,
}

impl Election {
    /// The accepted claim.
    #[must_use]
    pub fn accepted(&self) -> Option<Claim> {
        self.accepted
    }

    /// When the claim wait ends (monotonic ms).
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.claim_at
    }

    /// A claim read from an enrolled session. `reachable`: its holder is ours or enrolled.
    pub fn incoming(&mut self, claim: Claim, reachable: bool, now: u64) -> Verdict {
        match (claim.evaluate(self.accepted.as_ref()), self.accepted) {
            (Evaluation::Rejected, _) => Verdict::Ignored,
            (Evaluation::Retained, Some(held)) if held != claim => Verdict::AnswerHeld(held),
            (Evaluation::Retained, _) => Verdict::Ignored,
            // Nobody could follow a holder that is gone: such a claim would pin the role for ever.
            (Evaluation::Accepted, _) if !reachable && is_at_cap(&claim) => Verdict::Ignored,
            (Evaluation::Accepted, _) => {
                self.accepted = Some(claim);
                self.claim_at = None;
                if !reachable {
                    self.wait(now);
                }
                Verdict::Accepted
            }
        }
    }

    /// Starts (or restarts) the claim wait.
    pub fn wait(&mut self, now: u64) {
        self.claim_at = Some(now + CLAIM_WAIT_MS);
    }

    /// Starts a wait unless one runs or a holder is known: for a store that has found nobody.
    pub fn wait_if_vacant(&mut self, now: u64) {
        if self.accepted.is_none() && self.claim_at.is_none() {
            self.wait(now);
        }
    }

    /// The accepted holder is no longer reachable. `successor`: the lowest id among our devices
    /// and the enrolled peers; `ours`: it is one of our devices, which then claims at once.
    pub fn holder_departed(&mut self, successor: DeviceId, ours: bool, now: u64) -> Option<Claim> {
        if self.accepted.as_ref().is_some_and(is_at_cap) {
            self.accepted = None;
        }
        if ours {
            self.claim(successor)
        } else {
            self.wait(now);
            None
        }
    }

    /// The wait is over: forget it, and say whether it is time to claim.
    pub fn due(&mut self, holder_reachable: bool, now: u64) -> bool {
        match self.claim_at {
            Some(at) if at <= now => {
                self.claim_at = None;
                !holder_reachable
            }
            _ => false,
        }
    }

    /// Claims for `device` with a term above the accepted one. A term at the cap whose holder is
    /// gone is forgotten and counting starts again at 0, so it cannot pin the role for ever.
    pub fn claim(&mut self, device: DeviceId) -> Option<Claim> {
        let claim = Claim::raised_by(device, self.accepted.as_ref())
            .or_else(|| Claim::raised_by(device, None));
        self.accepted = claim;
        self.claim_at = None;
        claim
    }
}

/// Whether no claim can have a higher term.
fn is_at_cap(claim: &Claim) -> bool {
    claim.term >= MAX_TERM
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn claim(term: u64, n: u8) -> Claim {
        Claim { term, coordinator: id(n), capacity_hint: None }
    }

    #[test]
    fn higher_term_then_lower_id_wins() {
        let mut e = Election::default();
        assert_eq!(e.incoming(claim(1, 5), true, 0), Verdict::Accepted);
        assert_eq!(e.incoming(claim(1, 5), true, 0), Verdict::Ignored);
        assert_eq!(e.incoming(claim(1, 9), true, 0), Verdict::AnswerHeld(claim(1, 5)));
        assert_eq!(e.incoming(claim(1, 2), true, 0), Verdict::Accepted);
        assert_eq!(e.incoming(claim(0, 1), true, 0), Verdict::AnswerHeld(claim(1, 2)));
        assert_eq!(e.incoming(claim(2, 9), true, 0), Verdict::Accepted);
    }

    #[test]
    fn unreachable_holder_is_waited_for_then_superseded() {
        let mut e = Election::default();
        e.incoming(claim(3, 5), false, 100);
        assert!(!e.due(false, 100 + CLAIM_WAIT_MS - 1));
        assert!(e.due(false, 100 + CLAIM_WAIT_MS));
        assert_eq!(e.claim(id(7)), Some(claim(4, 7)));
        // Reachable again before the end: no claim.
        e.incoming(claim(9, 5), false, 0);
        assert!(!e.due(true, CLAIM_WAIT_MS));
    }

    #[test]
    fn lowest_survivor_claims_at_once() {
        let mut e = Election::default();
        e.incoming(claim(3, 1), true, 0);
        assert_eq!(e.holder_departed(id(2), true, 0), Some(claim(4, 2)));
        assert_eq!(e.holder_departed(id(1), false, 0), None);
        assert_eq!(e.deadline(), Some(CLAIM_WAIT_MS));
    }

    #[test]
    fn a_term_at_the_cap_does_not_pin_the_role() {
        let mut e = Election::default();
        assert_eq!(e.incoming(claim(MAX_TERM, 1), true, 0), Verdict::Accepted);
        assert_eq!(e.incoming(claim(MAX_TERM + 1, 1), true, 0), Verdict::Ignored);
        // Gone for those who wait as well: they forget it, and nobody brings it back.
        assert_eq!(e.holder_departed(id(2), false, 0), None);
        assert_eq!(e.accepted(), None);
        assert_eq!(e.incoming(claim(MAX_TERM, 1), false, 0), Verdict::Ignored);
        assert_eq!(e.incoming(claim(0, 2), true, 0), Verdict::Accepted);
        e.incoming(claim(MAX_TERM, 1), true, 0);
        assert_eq!(e.holder_departed(id(2), true, 0), Some(claim(0, 2)));
    }
}
