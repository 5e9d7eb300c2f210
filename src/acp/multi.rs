//! One piece of work by several workers (design 13): a race for the first result that passes, or a
//! quorum of equal results. Decides what to do with each task; the tasks are logs of their own.

use std::collections::BTreeMap;

use super::code::{Code, Error, Result};
use super::did::Did;
use super::log::rules::is_terminal;
use super::objects::{Cause, State};
use super::value::{Digest, TaskId};

/// Workers of one delegation.
pub const MAX_WORKERS: usize = 16;

/// How results are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// The first that passes verification.
    Race,
    /// So many equal ones that pass verification.
    Quorum {
        /// How many; half of the workers and one by default.
        size: usize,
    },
}

/// What to do with a task that is not needed any more, or is the winner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Approve and settle it.
    Settle,
    /// CANCEL.
    Cancel,
    /// WITHDRAW.
    Withdraw,
    /// SUPERSEDE, with this cause.
    Supersede(Cause),
}

/// How a delegation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Race: this task won.
    Winner(TaskId),
    /// Quorum: these tasks agree on this output.
    Agreed {
        /// Digest of the output.
        output: Digest,
        /// The tasks that said so.
        tasks: Vec<TaskId>,
    },
    /// `ALL_WORKERS_FAILED`.
    AllFailed,
    /// `QUORUM_NOT_REACHED`, with the votes that there were.
    NoQuorum {
        /// How many equal ones were asked for.
        size: usize,
        /// Outputs and who delivered them.
        votes: Vec<(Digest, Vec<Did>)>,
    },
}

impl Outcome {
    /// The code of a failure.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Winner(_) | Self::Agreed { .. } => None,
            Self::AllFailed => Some(Code::AllWorkersFailed),
            Self::NoQuorum { .. } => Some(Code::QuorumNotReached),
        }
    }
}

#[derive(Clone, Debug)]
struct Entrant {
    worker: Did,
    state: Option<State>,
    /// Output of a deliverable that has passed verification.
    vote: Option<Digest>,
    ordered: Option<Order>,
}

/// A delegation to several workers.
#[derive(Clone, Debug)]
pub struct Multi {
    combine: Combine,
    entrants: BTreeMap<TaskId, Entrant>,
    outcome: Option<Outcome>,
}

impl Multi {
    /// A delegation of the same work to `workers`.
    ///
    /// # Errors
    /// `BAD_FIELD` for fewer than 2 or more than 16 workers, or a quorum that is not 1 to n;
    /// `DUPLICATE_WORKER`.
    pub fn new(combine: Combine, workers: Vec<(TaskId, Did)>) -> Result<Self> {
        let count = workers.len();
        if !(2..=MAX_WORKERS).contains(&count) {
            return Err(Error::new(Code::BadField, "2 to 16 workers"));
        }
        if matches!(combine, Combine::Quorum { size } if !(1..=count).contains(&size)) {
            return Err(Error::new(Code::BadField, "a quorum is 1 to the number of workers"));
        }
        let mut entrants: BTreeMap<TaskId, Entrant> = BTreeMap::new();
        for (task, worker) in workers {
            let known = entrants.values().any(|entrant| entrant.worker == worker);
            let entrant = Entrant { worker, state: None, vote: None, ordered: None };
            if known || entrants.insert(task, entrant).is_some() {
                return Err(Error::new(Code::DuplicateWorker, "one did, one vote"));
            }
        }
        Ok(Self { combine, entrants, outcome: None })
    }

    /// The quorum for `workers` when none is asked for: half of them and one.
    #[must_use]
    pub const fn default_quorum(workers: usize) -> usize {
        workers / 2 + 1
    }

    /// How it ended, once it has.
    #[must_use]
    pub const fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// A task has come to `state`; `output` is the digest of the output where it is VERIFIED. Returns
    /// what to do with which tasks; asking again for the same state repeats nothing.
    pub fn update(
        &mut self,
        task: &TaskId,
        state: State,
        output: Option<Digest>,
    ) -> Vec<(TaskId, Order)> {
        if let Some(entrant) = self.entrants.get_mut(task) {
            entrant.state = Some(state);
            if state == State::Verified {
                entrant.vote = output;
            }
            if state == State::Disputed {
                // Passed the checks and was declined by the owner: no vote any more.
                entrant.vote = None;
            }
        }
        if self.outcome.is_none() {
            self.outcome = self.decide();
        }
        self.orders()
    }

    /// The groups of equal votes, largest first.
    fn votes(&self) -> Vec<(Digest, Vec<TaskId>)> {
        let mut groups: BTreeMap<Digest, Vec<TaskId>> = BTreeMap::new();
        for (task, entrant) in &self.entrants {
            if let Some(vote) = entrant.vote {
                groups.entry(vote).or_default().push(task.clone());
            }
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, tasks)| std::cmp::Reverse(tasks.len()));
        groups
    }

    fn decide(&self) -> Option<Outcome> {
        let open = self.entrants.values().filter(|entrant| {
            entrant.vote.is_none() && entrant.state.is_none_or(|state| !is_terminal(state))
        });
        let open = open.count();
        let groups = self.votes();
        let largest = groups.first();
        match self.combine {
            Combine::Race => match largest {
                Some((_, tasks)) => tasks.first().cloned().map(Outcome::Winner),
                None => (open == 0).then_some(Outcome::AllFailed),
            },
            Combine::Quorum { size } => {
                if let Some((output, tasks)) = largest
                    && tasks.len() >= size
                {
                    return Some(Outcome::Agreed { output: *output, tasks: tasks.clone() });
                }
                let reach = largest.map_or(0, |(_, tasks)| tasks.len()) + open;
                let worker = |task: &TaskId| self.entrants.get(task).map(|entrant| entrant.worker);
                (reach < size).then(|| Outcome::NoQuorum {
                    size,
                    votes: groups
                        .iter()
                        .map(|(vote, tasks)| (*vote, tasks.iter().filter_map(worker).collect()))
                        .collect(),
                })
            }
        }
    }

    /// What each task needs now that it is decided.
    fn orders(&mut self) -> Vec<(TaskId, Order)> {
        let Some(outcome) = self.outcome.clone() else { return Vec::new() };
        let cause = match self.combine {
            Combine::Race => Cause::RaceLost,
            Combine::Quorum { .. } => Cause::QuorumDone,
        };
        let wins = |task: &TaskId| match &outcome {
            Outcome::Winner(winner) => winner == task,
            Outcome::Agreed { tasks, .. } => tasks.contains(task),
            Outcome::AllFailed | Outcome::NoQuorum { .. } => false,
        };
        let mut orders = Vec::new();
        for (task, entrant) in &mut self.entrants {
            let order = match entrant.state {
                Some(State::Verified) if wins(task) => Order::Settle,
                Some(State::Proposed) | None => Order::Withdraw,
                Some(State::Accepted | State::InProgress) => Order::Cancel,
                Some(State::Delivered | State::Verified) => Order::Supersede(cause),
                Some(_) => continue,
            };
            // A race between an order and the peer's next step moves the task on: then the order
            // for its new state is another one.
            if entrant.ordered != Some(order) {
                entrant.ordered = Some(order);
                orders.push((task.clone(), order));
            }
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acp::did::Secret;
    use crate::identity::entropy::SeededEntropy;

    fn entrants(n: usize) -> Vec<(TaskId, Did)> {
        let mut entropy = SeededEntropy::new(3);
        (0..n)
            .map(|i| {
                let did = Secret::draw(&mut entropy).unwrap().did();
                (TaskId::parse(&format!("task_entrant{i:02}")).unwrap(), did)
            })
            .collect()
    }

    fn output(n: u8) -> Digest {
        Digest::of(&n).unwrap()
    }

    #[test]
    fn the_first_to_pass_wins() {
        let workers = entrants(4);
        let task = |n: usize| workers[n].0.clone();
        let mut multi = Multi::new(Combine::Race, workers.clone()).unwrap();
        assert!(multi.update(&task(0), State::InProgress, None).is_empty());
        assert!(multi.update(&task(1), State::Delivered, None).is_empty());
        assert!(multi.update(&task(3), State::Rejected, None).is_empty());
        let orders = multi.update(&task(1), State::Verified, Some(output(1)));
        assert_eq!(
            orders,
            [(task(0), Order::Cancel), (task(1), Order::Settle), (task(2), Order::Withdraw)]
        );
        assert_eq!(multi.outcome(), Some(&Outcome::Winner(task(1))));
        // The cancelled one delivered at the same moment.
        let orders = multi.update(&task(0), State::Delivered, None);
        assert_eq!(orders, [(task(0), Order::Supersede(Cause::RaceLost))]);
        assert!(multi.update(&task(0), State::Superseded, None).is_empty());
        assert!(multi.update(&task(1), State::Settled, None).is_empty());
    }

    #[test]
    fn nobody_passes() {
        let workers = entrants(2);
        let mut multi = Multi::new(Combine::Race, workers.clone()).unwrap();
        multi.update(&workers[0].0, State::Failed, None);
        assert_eq!(multi.outcome(), None);
        multi.update(&workers[1].0, State::Disputed, None);
        assert_eq!(multi.outcome().and_then(Outcome::code), Some(Code::AllWorkersFailed));
    }

    #[test]
    fn a_quorum_of_equal_outputs() {
        let workers = entrants(5);
        let task = |n: usize| workers[n].0.clone();
        let size = Multi::default_quorum(5);
        assert_eq!((size, Multi::default_quorum(4), Multi::default_quorum(2)), (3, 3, 2));
        let mut multi = Multi::new(Combine::Quorum { size }, workers.clone()).unwrap();
        for (n, vote) in [(0, 1), (1, 2), (2, 1)] {
            assert!(multi.update(&task(n), State::Verified, Some(output(vote))).is_empty());
        }
        multi.update(&task(4), State::InProgress, None);
        let orders = multi.update(&task(3), State::Verified, Some(output(1)));
        assert_eq!(
            orders,
            [
                (task(0), Order::Settle),
                (task(1), Order::Supersede(Cause::QuorumDone)),
                (task(2), Order::Settle),
                (task(3), Order::Settle),
                (task(4), Order::Cancel),
            ]
        );
    }

    #[test]
    fn a_quorum_fails_as_soon_as_it_must() {
        let workers = entrants(3);
        let task = |n: usize| workers[n].0.clone();
        let mut multi = Multi::new(Combine::Quorum { size: 2 }, workers.clone()).unwrap();
        multi.update(&task(0), State::Verified, Some(output(1)));
        multi.update(&task(1), State::Verified, Some(output(2)));
        assert_eq!(multi.outcome(), None);
        let orders = multi.update(&task(2), State::Failed, None);
        let Some(Outcome::NoQuorum { size: 2, votes }) = multi.outcome() else { panic!() };
        assert_eq!(votes.len(), 2);
        assert!(votes.contains(&(output(1), vec![workers[0].1])));
        assert_eq!(orders.len(), 2);
        assert!(orders.iter().all(|(_, order)| *order == Order::Supersede(Cause::QuorumDone)));
    }

    #[test]
    fn one_did_one_vote() {
        let code = |combine, workers| Multi::new(combine, workers).unwrap_err().code();
        let mut workers = entrants(3);
        workers[2].1 = workers[0].1;
        assert_eq!(code(Combine::Race, workers), Code::DuplicateWorker);
        assert_eq!(code(Combine::Race, entrants(1)), Code::BadField);
        assert_eq!(code(Combine::Race, entrants(17)), Code::BadField);
        assert_eq!(code(Combine::Quorum { size: 0 }, entrants(3)), Code::BadField);
        assert_eq!(code(Combine::Quorum { size: 4 }, entrants(3)), Code::BadField);
    }
}
