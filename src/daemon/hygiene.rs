//! What keeps models from talking without end (decision 143): how often one may write to one place, and
//! when a conversation is only acknowledgements of acknowledgements. It judges what models write by
//! the tool; scripts are free. Pure values: the time is given.

use std::collections::{BTreeMap, VecDeque};

use crate::api::types::ApiError;
use crate::identity::device::DeviceId;

/// How long a message counts.
const WINDOW_MS: u64 = 60_000;
/// Messages of one agent to one other, or to one room, in that time: one every two seconds is more
/// than any conversation needs, and a model in a loop is stopped within a minute.
const MAX_IN_WINDOW: usize = 30;
/// So many messages back and forth, all of them short, are a loop.
const LOOP_TURNS: usize = 8;
/// Longest text that may be an acknowledgement, in bytes.
const SHORT_TEXT: usize = 200;
/// Places remembered; the one that was quiet for the longest makes room.
const MAX_PLACES: usize = 4_096;

/// Where messages go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// The conversation of two, the smaller id first.
    Pair(DeviceId, DeviceId),
    /// What one agent writes to a room, by its path.
    Room(String, DeviceId),
}

impl Place {
    pub(super) fn pair(a: DeviceId, b: DeviceId) -> Self {
        if a <= b { Self::Pair(a, b) } else { Self::Pair(b, a) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Said {
    at: u64,
    by: DeviceId,
    short: bool,
}

/// Why a message is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damped {
    /// Too many in a short time; one goes again after so many seconds.
    TooFast(u64),
    /// Acknowledgements of acknowledgements; so many seconds of quiet end it.
    Loop(u64),
}

impl Damped {
    pub(super) const fn code(self) -> &'static str {
        match self {
            Self::TooFast(_) => "too_fast",
            Self::Loop(_) => "loop",
        }
    }
}

impl From<Damped> for ApiError {
    fn from(damped: Damped) -> Self {
        let (what, todo) = match damped {
            Damped::TooFast(secs) => (
                format!("{MAX_IN_WINDOW} messages went there within a minute"),
                format!("write again in {secs} s; put what belongs together into one message"),
            ),
            Damped::Loop(secs) => (
                format!("{LOOP_TURNS} short messages went back and forth, and this is another one"),
                format!(
                    "nothing needs to be acknowledged: write when there is something new (more than \
                     {SHORT_TEXT} bytes), or in {secs} s"
                ),
            ),
        };
        Self::new(damped.code(), what, todo)
    }
}

/// Who wrote where in the last minute.
#[derive(Debug, Default)]
pub(super) struct Hygiene(BTreeMap<Place, VecDeque<Said>>);

impl Hygiene {
    /// A message went somewhere.
    pub(super) fn note(&mut self, place: Place, by: DeviceId, bytes: usize, now: u64) {
        if !self.0.contains_key(&place) && self.0.len() >= MAX_PLACES {
            let quiet = self.0.iter().min_by_key(|(_, said)| said.back().map(|said| said.at));
            if let Some(quiet) = quiet.map(|(place, _)| place.clone()) {
                self.0.remove(&quiet);
            }
        }
        let said = self.0.entry(place).or_default();
        said.push_back(Said { at: now, by, short: bytes <= SHORT_TEXT });
        // A full window of each tells all that is asked; nobody's pushes another's out.
        if said.iter().filter(|said| said.by == by).count() > MAX_IN_WINDOW
            && let Some(oldest) = said.iter().position(|said| said.by == by)
        {
            said.remove(oldest);
        }
    }

    /// Whether a model's message may go.
    pub(super) fn judge(
        &mut self,
        place: &Place,
        by: DeviceId,
        bytes: usize,
        now: u64,
    ) -> Result<(), Damped> {
        let Some(said) = self.0.get_mut(place) else { return Ok(()) };
        while said.front().is_some_and(|first| first.at + WINDOW_MS <= now) {
            said.pop_front();
        }
        let until = |at: u64| (at + WINDOW_MS).saturating_sub(now).div_ceil(1000).max(1);
        let mut own = said.iter().rev().filter(|said| said.by == by);
        if let Some(oldest) = own.nth(MAX_IN_WINDOW - 1) {
            return Err(Damped::TooFast(until(oldest.at)));
        }
        let last: Vec<&Said> = said.iter().rev().take(LOOP_TURNS).collect();
        let turns = last.windows(2).all(|two| matches!(two, [a, b] if a.by != b.by));
        if matches!(place, Place::Pair(..))
            && last.len() == LOOP_TURNS
            && turns
            && last.iter().all(|said| said.short)
            && bytes <= SHORT_TEXT
            && let Some(oldest) = last.last()
        {
            return Err(Damped::Loop(until(oldest.at)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DeviceId = DeviceId([1; 32]);
    const B: DeviceId = DeviceId([2; 32]);

    #[test]
    fn a_window_holds_so_many_and_opens_again_as_the_oldest_leaves() {
        let mut hygiene = Hygiene::default();
        let room = Place::Room("r".into(), A);
        for n in 0..MAX_IN_WINDOW as u64 {
            assert_eq!(hygiene.judge(&room, A, 10, n * 1000), Ok(()));
            hygiene.note(room.clone(), A, 10, n * 1000);
        }
        assert_eq!(hygiene.judge(&room, A, 10, 30_000), Err(Damped::TooFast(30)));
        // Another agent, and another place, have windows of their own.
        assert_eq!(hygiene.judge(&Place::Room("r".into(), B), B, 10, 30_000), Ok(()));
        assert_eq!(hygiene.judge(&Place::pair(A, B), A, 10, 30_000), Ok(()));
        assert_eq!(hygiene.judge(&room, A, 10, WINDOW_MS - 1), Err(Damped::TooFast(1)));
        assert_eq!(hygiene.judge(&room, A, 10, WINDOW_MS), Ok(()));
    }

    #[test]
    fn thanks_for_thanks_ends_and_what_is_said_does_not() {
        let mut hygiene = Hygiene::default();
        let pair = Place::pair(B, A);
        assert_eq!(pair, Place::pair(A, B));
        for n in 0..LOOP_TURNS as u64 {
            let by = if n % 2 == 0 { A } else { B };
            assert_eq!(hygiene.judge(&pair, by, 20, n), Ok(()), "{n}");
            hygiene.note(pair.clone(), by, 20, n);
        }
        assert_eq!(hygiene.judge(&pair, A, 20, 100), Err(Damped::Loop(60)));
        // Something new may be said, and then short answers too.
        assert_eq!(hygiene.judge(&pair, A, SHORT_TEXT + 1, 100), Ok(()));
        hygiene.note(pair.clone(), A, SHORT_TEXT + 1, 100);
        assert_eq!(hygiene.judge(&pair, B, 20, 101), Ok(()));
        // Quiet ends it as well.
        assert_eq!(hygiene.judge(&pair, A, 20, WINDOW_MS + 101), Ok(()));
        // One who writes several short ones in a row is no loop.
        let mut hygiene = Hygiene::default();
        for n in 0..LOOP_TURNS as u64 {
            hygiene.note(pair.clone(), A, 20, n);
        }
        assert_eq!(hygiene.judge(&pair, A, 20, 100), Ok(()));
    }

    #[test]
    fn places_are_bounded() {
        let mut hygiene = Hygiene::default();
        for n in 0..MAX_PLACES + 10 {
            hygiene.note(Place::Room(n.to_string(), A), A, 1, n as u64);
        }
        assert_eq!(hygiene.0.len(), MAX_PLACES);
        assert!(!hygiene.0.contains_key(&Place::Room("0".into(), A)));
        for n in 0..1_000 {
            hygiene.note(Place::pair(A, B), A, 1, n);
        }
        assert_eq!(hygiene.0[&Place::pair(A, B)].len(), MAX_IN_WINDOW);
    }
}
