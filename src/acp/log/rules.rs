//! The state machine as a table (design 7.1 to 7.3): who may write what when, which of two entries
//! stays, what may stand with one signature.

use crate::acp::objects::{Event, Party, State};

/// Entries of a log.
pub const MAX_ENTRIES: u64 = 10_000;

/// Sequence numbers at the end that only results, verdicts and endings may take (decision 44).
pub const RESERVED_ENTRIES: u64 = 16;

/// APPROVAL entries of one side (decision 44).
pub const MAX_APPROVALS: usize = 64;

/// PROGRESS entries of a task (design 17).
pub const MAX_PROGRESS: u64 = 5000;

/// Least time between two PROGRESS entries, ms.
pub const PROGRESS_EVERY_MS: u64 = 1000;

/// How far times may be off, and how long after a limit EXPIRE and ABANDON wait, ms.
pub const TOLERANCE_MS: u64 = 300_000;

/// Where `event` leads from `from`; `None` is illegal.
#[must_use]
pub const fn transition(from: Option<State>, event: Event) -> Option<State> {
    use Event as E;
    use State as S;
    let Some(from) = from else {
        return match event {
            E::Propose => Some(S::Proposed),
            _ => None,
        };
    };
    if is_terminal(from) {
        return None;
    }
    match (event, from) {
        (E::Reject, S::Proposed) => Some(S::Rejected),
        (E::Withdraw, S::Proposed) => Some(S::Withdrawn),
        (E::Accept, S::Proposed) => Some(S::Accepted),
        (E::Start, S::Accepted) | (E::Progress, S::InProgress) | (E::Rework, S::Delivered) => {
            Some(S::InProgress)
        }
        (E::Approval, _) => Some(from),
        (E::Deliver, S::InProgress) => Some(S::Delivered),
        (E::VerifyPass, S::Delivered) => Some(S::Verified),
        (E::VerifyFail, S::Delivered) | (E::Decline, S::Verified) => Some(S::Disputed),
        (E::Settle, S::Verified) => Some(S::Settled),
        (E::Supersede, S::Delivered | S::Verified) => Some(S::Superseded),
        (E::Cancel, S::Accepted | S::InProgress) => Some(S::Cancelling),
        (E::Cancelled | E::Abandon, S::Cancelling) => Some(S::Cancelled),
        (E::Fail, S::Accepted | S::InProgress | S::Cancelling) => Some(S::Failed),
        (E::Expire, _) => Some(S::Expired),
        _ => None,
    }
}

/// Whether nothing follows.
#[must_use]
pub const fn is_terminal(state: State) -> bool {
    use State as S;
    match state {
        S::Proposed | S::Accepted | S::InProgress | S::Delivered | S::Verified | S::Cancelling => {
            false
        }
        S::Settled
        | S::Cancelled
        | S::Rejected
        | S::Withdrawn
        | S::Failed
        | S::Disputed
        | S::Expired
        | S::Superseded => true,
    }
}

/// Who writes `event`; `None` is either.
#[must_use]
pub const fn author(event: Event) -> Option<Party> {
    use Event as E;
    match event {
        E::Propose
        | E::Withdraw
        | E::VerifyPass
        | E::VerifyFail
        | E::Rework
        | E::Settle
        | E::Decline
        | E::Supersede
        | E::Cancel
        | E::Abandon => Some(Party::Requester),
        E::Reject | E::Accept | E::Start | E::Progress | E::Deliver | E::Cancelled | E::Fail => {
            Some(Party::Worker)
        }
        E::Approval | E::Expire => None,
    }
}

/// Of two pending entries at one place, the one of higher rank stays; at equal rank the requester's.
#[must_use]
pub const fn rank(event: Event) -> u8 {
    use Event as E;
    match event {
        E::Cancel => 100,
        E::Withdraw => 95,
        E::Expire => 90,
        E::Fail => 80,
        E::Deliver => 70,
        E::VerifyPass | E::VerifyFail | E::Decline | E::Supersede => 65,
        E::Accept | E::Reject => 60,
        E::Settle => 55,
        E::Start | E::Rework | E::Cancelled => 50,
        E::Abandon => 45,
        E::Approval => 40,
        E::Progress => 10,
        // There is nothing beside it: no other entry is legal at the beginning.
        E::Propose => 0,
    }
}

/// Whether `event` says `unilateral: true` (decision 35): an ending that may stand with its author's
/// signature alone.
#[must_use]
pub const fn is_unilateral(event: Event) -> bool {
    use Event as E;
    matches!(event, E::Expire | E::Abandon | E::Fail | E::Withdraw | E::Reject | E::Cancelled)
}

/// Whether `event`, as the last entry, may be sealed without the other side: the unilateral endings,
/// and those that are the requester's alone (decision 35).
#[must_use]
pub const fn may_be_last_alone(event: Event) -> bool {
    use Event as E;
    is_unilateral(event) || matches!(event, E::Settle | E::VerifyFail | E::Decline | E::Supersede)
}

/// Whether `event` may take one of the reserved last places.
#[must_use]
pub const fn may_take_reserved(event: Event) -> bool {
    use Event as E;
    matches!(event, E::Deliver | E::VerifyPass | E::Cancel) || may_be_last_alone(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of design 7.3, written out once more.
    const TABLE: &str = "
        PROPOSE - PROPOSED requester 0
        REJECT PROPOSED REJECTED worker 60
        WITHDRAW PROPOSED WITHDRAWN requester 95
        ACCEPT PROPOSED ACCEPTED worker 60
        START ACCEPTED IN_PROGRESS worker 50
        PROGRESS IN_PROGRESS IN_PROGRESS worker 10
        APPROVAL PROPOSED PROPOSED either 40
        APPROVAL ACCEPTED ACCEPTED either 40
        APPROVAL IN_PROGRESS IN_PROGRESS either 40
        APPROVAL DELIVERED DELIVERED either 40
        APPROVAL VERIFIED VERIFIED either 40
        APPROVAL CANCELLING CANCELLING either 40
        DELIVER IN_PROGRESS DELIVERED worker 70
        VERIFY_PASS DELIVERED VERIFIED requester 65
        VERIFY_FAIL DELIVERED DISPUTED requester 65
        REWORK DELIVERED IN_PROGRESS requester 50
        SETTLE VERIFIED SETTLED requester 55
        DECLINE VERIFIED DISPUTED requester 65
        SUPERSEDE DELIVERED SUPERSEDED requester 65
        SUPERSEDE VERIFIED SUPERSEDED requester 65
        CANCEL ACCEPTED CANCELLING requester 100
        CANCEL IN_PROGRESS CANCELLING requester 100
        CANCELLED CANCELLING CANCELLED worker 50
        ABANDON CANCELLING CANCELLED requester 45
        FAIL ACCEPTED FAILED worker 80
        FAIL IN_PROGRESS FAILED worker 80
        FAIL CANCELLING FAILED worker 80
        EXPIRE PROPOSED EXPIRED either 90
        EXPIRE ACCEPTED EXPIRED either 90
        EXPIRE IN_PROGRESS EXPIRED either 90
        EXPIRE CANCELLING EXPIRED either 90
        EXPIRE DELIVERED EXPIRED either 90
        EXPIRE VERIFIED EXPIRED either 90";

    #[test]
    fn the_table_and_nothing_else() {
        let mut rows = std::collections::BTreeMap::new();
        for row in TABLE.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let [event, from, to, who, order] = row.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{row}")
            };
            rows.insert((event, from), to);
            let event = Event::parse(event).unwrap();
            assert_eq!(author(event).map_or("either", Party::as_str), who);
            assert_eq!(rank(event).to_string(), order);
        }
        let mut legal = 0;
        for event in Event::ALL {
            for from in std::iter::once(None).chain(State::ALL.iter().copied().map(Some)) {
                let to = transition(from, *event).map(State::as_str);
                let name = from.map_or("-", State::as_str);
                assert_eq!(to, rows.get(&(event.as_str(), name)).copied(), "{event} from {name}");
                legal += usize::from(to.is_some());
                assert!(to.is_none() || from.is_none_or(|from| !is_terminal(from)));
            }
        }
        assert_eq!(legal, 33);
    }

    #[test]
    fn what_may_stand_alone_ends_the_task() {
        for event in Event::ALL {
            for from in State::ALL {
                if let Some(to) = transition(Some(*from), *event) {
                    assert!(!may_be_last_alone(*event) || is_terminal(to), "{event}");
                }
            }
        }
        let alone: Vec<_> = Event::ALL.iter().filter(|e| is_unilateral(**e)).collect();
        assert_eq!(alone.len(), 6);
    }
}
