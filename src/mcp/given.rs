//! What has been given to the harness with answers, and what of it has arrived. Pure values: the
//! transport says what was read and written, the server what goes with which answer.
//!
//! The protocol acknowledges no answer. What it does tell: a call whose first byte was read after an
//! answer was written out may have been made knowing the answer, one that was read before was not.
//! And a cancellation says that an answer was not wanted any more, even when it comes after a call
//! that ran beside: what went with that answer is given again.

use std::collections::{HashSet, VecDeque};

use parking_lot::Mutex;
use rmcp::model::RequestId;

use crate::api::tool::feed::Urgency;

/// Answers with messages that have not arrived: more are not given until some have. A client that
/// waits for its answers has one; fifty parallel calls fit.
const MAX_UNDER_WAY: usize = 64;
/// Answers that have arrived and are kept in case their cancellation is still to come.
const MAX_ARRIVED: usize = 8;
/// Calls that are under way at once; more are refused.
const MAX_CALLS: usize = 256;

/// Counts reads of stdin: what was read together has one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Read(pub u64);

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// In the answer to this call, which has not been written.
    With(RequestId),
    /// That answer was written out after so many reads.
    Written(RequestId, Read),
    /// A later call has shown that it arrived.
    Arrived(RequestId),
    /// Its answer was cancelled: to be given again.
    Wanted,
}

impl State {
    fn is_of(&self, call: &RequestId) -> bool {
        match self {
            Self::With(of) | Self::Written(of, _) | Self::Arrived(of) => of == call,
            Self::Wanted => false,
        }
    }
}

/// The messages that went with one answer.
#[derive(Debug)]
struct Part {
    text: String,
    /// Every event up to here is whole in this part or one before it.
    through: u64,
    /// How soon the model should see it.
    urgency: Urgency,
    state: State,
}

/// Why a call is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// A call with this id is under way.
    IdInUse,
    /// [`MAX_CALLS`] are under way.
    TooMany,
}

#[derive(Debug, Default)]
pub(super) struct Given {
    read: Read,
    /// Lines that were written out.
    wrote: u64,
    calls: HashSet<RequestId>,
    /// In the order of their events.
    parts: VecDeque<Part>,
    /// Everything up to here was acknowledged.
    acknowledged: u64,
}

/// Shared by the transport and the server.
pub(super) type SharedGiven = Mutex<Given>;

impl Given {
    /// Bytes came from the client.
    pub fn read(&mut self) -> Read {
        self.read.0 += 1;
        self.read
    }

    /// A call came.
    pub fn called(&mut self, call: &RequestId) -> Result<(), Refused> {
        if self.calls.contains(call) {
            return Err(Refused::IdInUse);
        }
        if self.calls.len() >= MAX_CALLS {
            return Err(Refused::TooMany);
        }
        self.calls.insert(call.clone());
        Ok(())
    }

    /// The answer to a call is ready to be written.
    pub fn answered(&mut self, call: &RequestId) {
        self.calls.remove(call);
    }

    /// A line is with the system, the answer to a call or another one.
    pub fn wrote(&mut self, answers: Option<&RequestId>) {
        self.wrote += 1;
        if let Some(call) = answers {
            self.written(call);
        }
    }

    /// How much was read and written: as long as this grows, the client is at work.
    pub fn moved(&self) -> (Read, u64) {
        (self.read, self.wrote)
    }

    /// The answer to a call is with the system.
    fn written(&mut self, call: &RequestId) {
        let read = self.read;
        for part in &mut self.parts {
            if part.state == State::With(call.clone()) {
                part.state = State::Written(call.clone(), read);
            }
        }
    }

    /// The client does not want the answer to a call any more.
    pub fn cancelled(&mut self, call: &RequestId) {
        self.calls.remove(call);
        for part in &mut self.parts {
            if part.state.is_of(call) {
                part.state = State::Wanted;
            }
        }
    }

    /// What was cancelled and has not been given again: everything up to here, which comes before it,
    /// is in no doubt.
    pub fn in_doubt(&self) -> Option<u64> {
        let wanted = self.parts.iter().position(|part| part.state == State::Wanted)?;
        let before = wanted.checked_sub(1).and_then(|before| self.parts.get(before));
        Some(before.map_or(self.acknowledged, |before| before.through))
    }

    /// A tool is called by a request that was read then. Returns how far that acknowledges events,
    /// when it is further than before.
    pub fn arrived(&mut self, begun: Read) -> Option<u64> {
        for part in &mut self.parts {
            if let State::Written(call, written) = &part.state
                && *written < begun
            {
                part.state = State::Arrived(call.clone());
            }
        }
        let arrived = self.parts.iter().take_while(|part| matches!(part.state, State::Arrived(_)));
        arrived.last().map(|part| part.through).filter(|through| *through > self.acknowledged)
    }

    /// The daemon knows that everything up to here has arrived.
    pub fn acknowledged(&mut self, through: u64) {
        self.acknowledged = self.acknowledged.max(through);
        let done = |part: &&Part| {
            part.through <= self.acknowledged && matches!(part.state, State::Arrived(_))
        };
        let done = self.parts.iter().take_while(done).count();
        self.parts.drain(..done.saturating_sub(MAX_ARRIVED));
    }

    /// How far events are acknowledged.
    pub fn acknowledgement(&self) -> u64 {
        self.acknowledged
    }

    /// Whether another part may be given.
    pub fn has_room(&self) -> bool {
        let arrived = |part: &&Part| matches!(part.state, State::Arrived(_));
        self.parts.len() - self.parts.iter().filter(arrived).count() < MAX_UNDER_WAY
    }

    /// New events go with the answer to `call`.
    pub fn give(&mut self, call: &RequestId, text: &str, through: u64, urgency: Urgency) {
        let state = State::With(call.clone());
        self.parts.push_back(Part { text: text.to_owned(), through, urgency, state });
    }

    /// The most urgent of what has to be given again.
    pub fn wanted(&self) -> Option<Urgency> {
        let wanted = self.parts.iter().filter(|part| part.state == State::Wanted);
        wanted.map(|part| part.urgency).max()
    }

    /// What has to be given again goes with the answer to `call`; and whether more has to.
    pub fn again(&mut self, call: &RequestId) -> Option<(String, bool)> {
        let mut wanted = self.parts.iter_mut().filter(|part| part.state == State::Wanted);
        let part = wanted.next()?;
        let more = wanted.next().is_some();
        part.state = State::With(call.clone());
        Some((part.text.clone(), more))
    }

    /// Another agent, or one whose numbers begin again: nothing of what was given counts.
    pub fn restart(&mut self, acknowledged: u64) {
        self.parts.clear();
        self.acknowledged = acknowledged;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: i64) -> RequestId {
        RequestId::Number(n)
    }

    /// A call whose answer brings events up to `through`, written out.
    fn shown(given: &mut Given, call: i64, through: u64) {
        given.called(&id(call)).unwrap();
        given.give(&id(call), &format!("part {through}"), through, Urgency::Steer);
        given.answered(&id(call));
        given.written(&id(call));
    }

    #[test]
    fn only_a_call_read_after_an_answer_was_written_shows_that_it_arrived() {
        let mut given = Given::default();
        let together = given.read();
        shown(&mut given, 1, 5);
        assert_eq!(given.arrived(together), None, "it was made before the answer");
        let later = given.read();
        given.give(&id(2), "more", 6, Urgency::Info);
        assert_eq!(given.arrived(later), Some(5), "not what has not been written");
        given.acknowledged(5);
        assert_eq!(given.arrived(later), None);
    }

    #[test]
    fn an_acknowledgement_that_failed_is_due_again() {
        let mut given = Given::default();
        shown(&mut given, 1, 5);
        let later = given.read();
        assert_eq!(given.arrived(later), Some(5));
        assert_eq!(given.arrived(later), Some(5));
    }

    #[test]
    fn what_a_cancelled_answer_brought_comes_again_whenever_the_cancellation_comes() {
        for late in 0..4 {
            let mut given = Given::default();
            given.called(&id(1)).unwrap();
            given.give(&id(1), "one", 5, Urgency::FollowUp);
            if late > 0 {
                given.answered(&id(1));
                given.written(&id(1));
            }
            let later = given.read();
            if late > 1 {
                assert_eq!(given.arrived(later), Some(5));
            }
            if late > 2 {
                given.acknowledged(5);
            }
            assert_eq!((given.in_doubt(), given.wanted()), (None, None));
            given.cancelled(&id(1));
            assert_eq!(given.wanted(), Some(Urgency::FollowUp));
            // Once the daemon knows of its arrival, it is too late to doubt that.
            assert_eq!(given.in_doubt(), Some(if late > 2 { 5 } else { 0 }));
            assert_eq!(given.arrived(given.read), None, "{late}");
            assert_eq!(given.again(&id(2)), Some(("one".into(), false)), "{late}");
            assert_eq!(given.again(&id(3)), None, "{late}");
        }
    }

    #[test]
    fn nothing_after_a_cancelled_part_is_acknowledged_before_it() {
        let mut given = Given::default();
        shown(&mut given, 1, 5);
        shown(&mut given, 2, 7);
        given.cancelled(&id(2));
        assert_eq!(given.in_doubt(), Some(5));
        given.cancelled(&id(1));
        assert_eq!(given.in_doubt(), Some(0));
        let later = given.read();
        assert_eq!(given.arrived(later), None);
        for call in [3, 4] {
            assert!(given.again(&id(call)).is_some());
            given.written(&id(call));
        }
        assert_eq!(given.in_doubt(), None);
        let later = given.read();
        assert_eq!(given.arrived(later), Some(7));
    }

    #[test]
    fn calls_parts_and_memory_are_bounded() {
        let mut given = Given::default();
        for call in 0..MAX_CALLS as i64 {
            given.called(&id(call)).unwrap();
        }
        assert_eq!(given.called(&id(7)), Err(Refused::IdInUse));
        assert_eq!(given.called(&id(-1)), Err(Refused::TooMany));
        given.answered(&id(7));
        given.called(&id(7)).unwrap();

        let mut given = Given::default();
        for call in 1..=MAX_UNDER_WAY as u64 {
            assert!(given.has_room());
            shown(&mut given, call as i64, call);
        }
        assert!(!given.has_room());
        let later = given.read();
        let through = given.arrived(later).unwrap();
        given.acknowledged(through);
        assert!(given.has_room());
        assert_eq!(given.parts.len(), MAX_ARRIVED);
    }
}
