//! Tasks that have ended are kept for a while and up to a number, and then forgotten with all that was
//! stored of them. Whoever wants a log for longer exports it, or writes audit files.

use std::collections::BTreeSet;

use super::{File, Owner, Turn};
use crate::acp::value::Digest;
use crate::codec::time::UnixMillis;

/// How long a task is kept after its end, ms: a month, as long as revocations of what it used.
pub const KEEP_MS: u64 = 30 * 24 * 3_600_000;

/// Ended tasks that are kept. Each has about 30 records and 30 KiB on disk, more with its input and
/// result.
pub const MAX_ENDED: usize = 4096;

/// How long a proposal is kept that this worker has not accepted, ms: for its owner to look at.
pub const KEEP_REFUSED_MS: u64 = 3_600_000;

/// Such proposals that are kept: others make them, they cost nothing to make, and each may hold an
/// input of 512 KiB.
pub const MAX_REFUSED: usize = 64;

/// How often those that are old are looked for, ms.
const LOOK_MS: u64 = 600_000;

/// So many more have ended before it is looked whether there are too many: the store is read through
/// when some are forgotten.
const SLACK: usize = 32;

/// A task that has ended, or was stopped.
struct Ended {
    at: UnixMillis,
    task: Digest,
    contract: bool,
}

impl Owner {
    /// Tasks that have ended and that nothing here waits for.
    fn ended(&self) -> impl Iterator<Item = Ended> {
        let group = |file: &File| file.order.as_ref().and_then(|order| order.group.clone());
        // A group is judged by all of its tasks.
        let open: BTreeSet<String> = self
            .files
            .iter()
            .filter(|(task, _)| self.task(task).is_some_and(|log| !log.is_over()))
            .filter_map(|(_, file)| group(file).map(|group| group.id))
            .collect();
        let over = self.gateway.tasks().filter(|(_, log)| log.is_over());
        over.filter_map(move |(task, log)| {
            let of_group = self.files.get(task).and_then(group);
            let needed = of_group.is_some_and(|group| open.contains(&group.id));
            let at = log.view().last_at().millis();
            let ended = Ended { at, task: *task, contract: log.is_contract() };
            (!needed && !self.is_running(task)).then_some(ended)
        })
    }

    /// When tasks are to be forgotten next; `None` when none has ended.
    pub(super) fn next_forgetting(&self) -> Option<UnixMillis> {
        if self.ended_since < SLACK { self.look_at } else { Some(UnixMillis(0)) }
    }

    /// A task has ended.
    pub(super) fn has_ended(&mut self, now: UnixMillis) {
        self.ended_since += 1;
        self.look_at.get_or_insert(now.plus(LOOK_MS));
    }

    /// Forgets what is old, and the oldest of what is too much.
    pub(super) fn forget_ended(&mut self, turn: &mut Turn<'_>) {
        if self.next_forgetting().is_none_or(|due| turn.now < due) {
            return;
        }
        self.ended_since = 0;
        let (contracts, refused): (Vec<_>, Vec<_>) = self.ended().partition(|task| task.contract);
        for (mut tasks, keep_ms, most) in
            [(contracts, KEEP_MS, MAX_ENDED), (refused, KEEP_REFUSED_MS, MAX_REFUSED)]
        {
            tasks.sort_unstable_by_key(|ended| ended.at);
            let too_many = tasks.len().saturating_sub(most);
            for (number, ended) in tasks.into_iter().enumerate() {
                if number < too_many || ended.at.plus(keep_ms) <= turn.now {
                    self.forget(ended.task, turn);
                }
            }
        }
        turn.out.rows.extend(self.gateway.forgotten.prune(turn.now));
        let something = !self.gateway.forgotten.is_empty()
            || self.gateway.tasks().any(|(_, log)| log.is_over());
        self.look_at = something.then(|| turn.now.plus(LOOK_MS));
    }

    fn forget(&mut self, task: Digest, turn: &mut Turn<'_>) {
        let grants = self.view(&task).map(|view| view.grants().to_vec()).unwrap_or_default();
        let Some((rows, key)) = self.gateway.forget(&task, turn.now) else { return };
        for token in grants {
            self.counters.forget(&token.digest);
        }
        self.files.remove(&task);
        turn.out.rows.extend(rows);
        turn.out.spent.extend(key);
        turn.out.forgotten.push(task);
    }
}
