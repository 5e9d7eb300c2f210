//! The store's twin for tests: the same records in memory, with seeded faults. A commit may be
//! slow, may fail, and what has not reached the medium when the process dies may be lost.

use std::collections::VecDeque;

use super::{MemoryStore, Store, StoreError};
use crate::identity::entropy::{Entropy as _, SeededEntropy};
use crate::mesh::journal::Record;

/// How bad the storage is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Of a thousand commits this many fail.
    pub failing_per_mille: u64,
    /// The slowest commit, milliseconds.
    pub slowest_ms: u64,
}

/// A commit under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Its number, for [`FaultyStore::finish`].
    pub number: u64,
    /// Milliseconds until it is finished.
    pub takes_ms: u64,
}

/// A [`MemoryStore`] with faults. As a [`Store`] it finishes every commit at once; a simulation
/// calls [`FaultyStore::submit`] and, when the time has come, [`FaultyStore::finish`].
#[derive(Clone, Debug)]
pub struct FaultyStore {
    entropy: SeededEntropy,
    faults: Faults,
    medium: MemoryStore,
    under_way: VecDeque<(u64, Vec<Record>)>,
    next: u64,
}

impl FaultyStore {
    /// An empty store whose faults follow from `seed`.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self {
            entropy: SeededEntropy::new(seed),
            faults,
            medium: MemoryStore::default(),
            under_way: VecDeque::new(),
            next: 0,
        }
    }

    /// Changes how bad the storage is from now on.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    fn below(&mut self, bound: u64) -> u64 {
        let mut bytes = [0; 8];
        self.entropy.fill(&mut bytes);
        u64::from_be_bytes(bytes).checked_rem(bound).unwrap_or(0)
    }

    /// Begins a commit.
    pub fn submit(&mut self, records: Vec<Record>) -> Submission {
        self.next += 1;
        let number = self.next;
        self.under_way.push_back((number, records));
        let takes_ms = self.below(self.faults.slowest_ms + 1);
        Submission { number, takes_ms }
    }

    /// Ends a commit: it is on the medium, or it has failed, nothing of it is, and it comes back.
    ///
    /// # Errors
    /// [`StoreError`]: a drawn failure, or one of the engine.
    pub fn finish(&mut self, number: u64) -> Result<(), (StoreError, Vec<Record>)> {
        let at = self.under_way.iter().position(|(held, _)| *held == number);
        let Some((_, records)) = at.and_then(|at| self.under_way.remove(at)) else {
            return Err((StoreError::Busy, Vec::new()));
        };
        if self.below(1000) < self.faults.failing_per_mille {
            return Err((StoreError::NoSpace { path: "drawn by the seed".into() }, records));
        }
        self.medium.commit(&records).map_err(|error| (error, records))
    }

    /// The process ends in order: what is under way is finished.
    pub fn drain(&mut self) {
        let under_way: Vec<u64> = self.under_way.iter().map(|(number, _)| *number).collect();
        for number in under_way {
            // What fails is lost: nobody is there any more to write it again.
            let _ = self.finish(number);
        }
    }

    /// The process dies: of the commits under way, any number of the oldest made it.
    pub fn crash(&mut self) {
        let made_it = self.below(self.under_way.len() as u64 + 1);
        for _ in 0..made_it {
            if let Some((_, records)) = self.under_way.pop_front() {
                // One that no longer fits is lost like those behind it.
                if self.medium.commit(&records).is_err() {
                    break;
                }
            }
        }
        self.under_way.clear();
    }
}

impl Store for FaultyStore {
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let submission = self.submit(records.to_vec());
        self.finish(submission.number).map_err(|(error, _)| error)
    }

    /// A daemon whose store cannot be written does not start.
    fn begin(&mut self, live: Vec<Record>) -> Result<Vec<Record>, StoreError> {
        self.medium.begin(live)
    }

    fn live(&self) -> Result<Vec<Record>, StoreError> {
        self.medium.live()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::time::UnixMillis;
    use crate::identity::device::DeviceId;

    fn mail(seq: u64) -> Record {
        Record::Mailbox { agent: DeviceId([1; 32]), seq, at: UnixMillis(1), event: vec![7] }
    }

    #[test]
    fn faults_follow_from_the_seed() {
        let run = |seed| {
            let mut store =
                FaultyStore::new(seed, Faults { failing_per_mille: 300, slowest_ms: 50 });
            (1..100)
                .map(|seq| {
                    let submission = store.submit(vec![mail(seq)]);
                    (submission.takes_ms, store.finish(submission.number).is_ok())
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        let failed = run(1).iter().filter(|(_, ok)| !ok).count();
        assert!((10..60).contains(&failed), "{failed} of 99 failed");
    }

    #[test]
    fn a_crash_keeps_what_was_finished_and_a_prefix_of_the_rest() {
        for seed in 0..50 {
            let mut store = FaultyStore::new(seed, Faults::default());
            store.commit(&[mail(1)]).unwrap();
            store.submit(vec![mail(2)]);
            store.submit(vec![mail(3)]);
            store.crash();
            let live = store.live().unwrap();
            assert!((1..=3).contains(&live.len()));
            assert_eq!(live, (1..=live.len() as u64).map(mail).collect::<Vec<_>>());
            assert!(store.finish(2).is_err(), "a commit under way does not outlive the process");
        }
    }
}
