//! Tasks that a worker has forgotten and that could still be proposed again, word for word: none of
//! them is taken a second time. What is kept of one is small, ends with its offer, and is bounded: when
//! there are too many, the one that was proposed first makes room, and nothing that was proposed until
//! then and is not known is taken any more. That time is never ahead of the clock here, whatever peers
//! date theirs: else they could have everybody refused. (One dated ahead that had to make room is new
//! again; it takes all places filled with such.)

use std::collections::BTreeMap;

use super::value::Digest;
use crate::codec::time::UnixMillis;

/// Tasks that are remembered one by one, 32 bytes and two times each: as many as a relay lets a dozen
/// peers propose in a minute.
pub const MAX_FORGOTTEN: usize = 16_384;

/// What is kept of a forgotten task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// When it was proposed, by its first entry.
    pub proposed_at: UnixMillis,
    /// From when on its offer is over for everybody.
    pub until: UnixMillis,
}

/// A change to be stored: of the task with this key, or, without one, of the time until when nothing
/// unknown is taken. `None` where nothing is kept any more.
pub type Row = (Option<Digest>, Option<Tombstone>);

/// Forgotten tasks.
#[derive(Clone, Debug)]
pub struct Forgotten {
    tasks: BTreeMap<Digest, Tombstone>,
    /// What was proposed until then and is not known is not taken.
    floor: UnixMillis,
    most: usize,
}

impl Default for Forgotten {
    fn default() -> Self {
        Self { tasks: BTreeMap::new(), floor: UnixMillis(0), most: MAX_FORGOTTEN }
    }
}

impl Forgotten {
    /// Takes a change back from the store.
    pub fn restore(&mut self, (task, kept): Row) {
        match (task, kept) {
            (None, kept) => self.floor = kept.map_or(UnixMillis(0), |kept| kept.proposed_at),
            (Some(task), Some(kept)) => drop(self.tasks.insert(task, kept)),
            (Some(task), None) => drop(self.tasks.remove(&task)),
        }
    }

    /// Whether a task that is not known, and was proposed at this time, is a new one.
    #[must_use]
    pub fn is_new(&self, task: &Digest, proposed_at: UnixMillis) -> bool {
        proposed_at > self.floor && !self.tasks.contains_key(task)
    }

    /// Whether no task is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Remembers a task.
    pub fn add(&mut self, task: Digest, kept: Tombstone, now: UnixMillis) -> Vec<Row> {
        let mut changed = vec![(Some(task), Some(kept))];
        self.tasks.insert(task, kept);
        while self.tasks.len() > self.most {
            let first = self.tasks.iter().min_by_key(|(_, kept)| kept.proposed_at);
            let Some((first, kept)) = first.map(|(task, kept)| (*task, *kept)) else { break };
            self.tasks.remove(&first);
            self.floor = self.floor.max(kept.proposed_at.min(now));
            let floor = Tombstone { proposed_at: self.floor, until: UnixMillis(u64::MAX) };
            changed.extend([(Some(first), None), (None, Some(floor))]);
        }
        changed
    }

    /// Forgets those whose offers are over.
    pub fn prune(&mut self, now: UnixMillis) -> Vec<Row> {
        let over = self.tasks.extract_if(.., |_, kept| kept.until <= now);
        over.map(|(task, _)| (Some(task), None)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(n: u64) -> Digest {
        Digest::of(&n).unwrap()
    }

    fn kept(proposed_at: u64, until: u64) -> Tombstone {
        Tombstone { proposed_at: UnixMillis(proposed_at), until: UnixMillis(until) }
    }

    #[test]
    fn what_was_forgotten_is_not_new_also_when_there_was_no_room_for_it() {
        let mut forgotten = Forgotten { most: 3, ..Forgotten::default() };
        let mut stored = Forgotten::default();
        for n in [5, 1, 9, 7, 3] {
            for row in forgotten.add(task(n), kept(n, 100), UnixMillis(10)) {
                stored.restore(row);
            }
        }
        for book in [&forgotten, &stored] {
            assert_eq!(book.tasks.len(), 3);
            for n in [1, 3, 5, 7, 9] {
                assert!(!book.is_new(&task(n), UnixMillis(n)), "{n}");
            }
            // One that came late is taken for an old one, one that is newer is not.
            assert!(!book.is_new(&task(2), UnixMillis(2)));
            assert!(book.is_new(&task(8), UnixMillis(8)));
        }
        assert!(forgotten.prune(UnixMillis(99)).is_empty());
        for row in forgotten.prune(UnixMillis(100)) {
            stored.restore(row);
        }
        assert!(forgotten.tasks.is_empty() && stored.tasks.is_empty());
        assert_eq!(forgotten.floor, UnixMillis(3));
    }

    #[test]
    fn proposals_that_are_dated_ahead_have_nothing_refused_that_is_dated_now() {
        let mut forgotten = Forgotten { most: 3, ..Forgotten::default() };
        let now = UnixMillis(1_000);
        for n in 0..5 {
            forgotten.add(task(n), kept(300_000 + n, 400_000), now);
        }
        assert_eq!(forgotten.floor, now);
        assert!(!forgotten.is_new(&task(7), now) && forgotten.is_new(&task(7), now.plus(1)));
        // What is still known is not new at whatever time.
        assert!(!forgotten.is_new(&task(4), UnixMillis(300_004)));
    }
}
