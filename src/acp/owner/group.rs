//! The same work given to several workers (design 13): tells the group how each task stands, and does
//! what the group decides.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Owner, Turn};
use crate::acp::code::{Code, Error, Result};
use crate::acp::log::{TaskLog, View};
use crate::acp::multi::{Combine, Multi, Order as GroupOrder, Outcome as GroupOutcome};
use crate::acp::objects::State;
use crate::acp::steps;
use crate::acp::value::{Digest, TaskId};

/// The group that a task is part of: its id (`metadata.multiId`), how many workers there are, and how
/// their results are combined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Group {
    /// Which.
    pub id: String,
    /// How many workers are in it; it decides nothing before all are known.
    pub workers: usize,
    /// How many equal results are asked for; `None` for a race.
    pub quorum: Option<usize>,
}

impl Owner {
    fn members(&self, id: &str) -> Vec<Digest> {
        let of = |file: &super::File| {
            file.order.as_ref().and_then(|order| order.group.as_ref()).is_some_and(|g| g.id == id)
        };
        self.files.iter().filter(|(_, file)| of(file)).map(|(task, _)| *task).collect()
    }

    /// How a group stands, computed from the logs of its tasks: nothing of it is stored, so it cannot
    /// be at odds with them.
    ///
    /// # Errors
    /// `UNKNOWN_TASK` while not every worker's task is known.
    fn group(&self, group: &Group) -> Result<(Multi, Vec<(TaskId, GroupOrder)>)> {
        let members = self.members(&group.id);
        if members.len() < group.workers {
            return Err(Error::new(
                Code::UnknownTask,
                "not all workers of the group are asked yet",
            ));
        }
        let mut workers = Vec::new();
        let mut states: Vec<(TaskId, State, Option<Digest>, u64)> = Vec::new();
        for task in members {
            let Some(log) = self.gateway.task(&task) else { continue };
            let view = log.view();
            workers.push((view.task_id().clone(), log.peer()));
            // Of a worker that signed two things at one place nothing is to be had, no vote either.
            let (state, vote) = if log.is_forked() && !view.is_sealed() {
                (Some(State::Failed), None)
            } else {
                (view.state(), vote(view))
            };
            if let Some(state) = state {
                states.push((view.task_id().clone(), state, vote, view.last_at().millis().0));
            }
        }
        let combine = group.quorum.map_or(Combine::Race, |size| Combine::Quorum { size });
        let mut multi = Multi::new(combine, workers)?;
        // In the order of time, so that after a restart the same one is the first. Settled ones won.
        states.sort_by_key(|(_, state, _, at)| (*state != State::Settled, *at));
        // What is ordered while only some states are told is overtaken by what is ordered later.
        let mut orders = BTreeMap::new();
        for (task, state, vote, _) in states {
            if vote.is_some() {
                orders.extend(multi.update(&task, State::Verified, vote));
            }
            orders.extend(multi.update(&task, state, vote));
        }
        Ok((multi, orders.into_iter().collect()))
    }

    /// How the group of a task ended, once it has.
    #[must_use]
    pub fn group_outcome(&self, group: &Group) -> Option<GroupOutcome> {
        self.group(group).ok().and_then(|(multi, _)| multi.outcome().cloned())
    }

    /// A task of a group has moved: does what the group now orders.
    pub(super) fn join_group(&mut self, task: Digest, turn: &mut Turn<'_>) {
        let order = self.files.get(&task).and_then(|file| file.order.as_ref());
        let Some(group) = order.and_then(|order| order.group.clone()) else { return };
        let Ok((_, orders)) = self.group(&group) else { return };
        for (id, order) in orders {
            let Ok(member) = self.find(&id) else { continue };
            if self.gateway.task(&member).is_none_or(TaskLog::is_over) {
                continue;
            }
            if let Err(error) = self.obey(member, order, turn) {
                self.trouble(member, None, error, turn);
            }
        }
    }

    fn obey(&mut self, task: Digest, order: GroupOrder, turn: &mut Turn<'_>) -> Result<()> {
        let view = self.view(&task)?;
        let file = self.files.entry(task).or_default();
        if order == GroupOrder::Settle {
            file.settle = true;
            self.consider(task, turn);
            return Ok(());
        }
        // Once per state: an order that waits behind a pending entry is not given again.
        if file.obeyed == view.state() {
            return Ok(());
        }
        file.obeyed = view.state();
        match order {
            GroupOrder::Settle => Ok(()),
            GroupOrder::Cancel | GroupOrder::Withdraw => {
                self.cancel_in(task, "another worker's result was taken", turn)
            }
            GroupOrder::Supersede(cause) => {
                let key = self.key.clone();
                let wish = steps::supersede(&Self::cx(&key, turn), &view, cause)?;
                self.act(task, wish, turn)
            }
        }
    }
}

/// The output that a task votes for: one that has passed verification, also where the group has let
/// it go afterwards. What its owner declined is no vote.
fn vote(view: &View) -> Option<Digest> {
    let passed = match view.state() {
        Some(State::Verified | State::Settled) => true,
        Some(State::Superseded) => view.report().is_some_and(|kept| kept.object.passed),
        _ => false,
    };
    view.deliverable().filter(|_| passed).map(|kept| kept.object.output_digest)
}
