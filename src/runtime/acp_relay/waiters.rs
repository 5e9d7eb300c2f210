//! Who waits for something to come into a mailbox. Only those are woken whose mailbox it is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::acp::code::{Code, Error, Result};
use crate::acp::relay::Who;

/// Polls, streams and sockets of one mailbox at the same time: several gateways of one owner, each
/// coming back before the relay has noticed that it was gone.
const MAX_OF_MAILBOX: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Waiters(Mutex<HashMap<Who, (usize, Arc<Notify>)>>);

/// One that waits; gone when dropped.
#[derive(Debug)]
pub(super) struct Waiter {
    who: Who,
    pub(super) arrived: Arc<Notify>,
    waiters: Arc<Waiters>,
}

impl Waiters {
    /// Begins to wait.
    ///
    /// # Errors
    /// `RATE_LIMITED` when too many wait for the same mailbox.
    pub(super) fn watch(self: &Arc<Self>, who: Who) -> Result<Waiter> {
        let mut all = self.0.lock();
        let (count, arrived) = all.entry(who).or_default();
        if *count >= MAX_OF_MAILBOX {
            return Err(Error::new(Code::RateLimited, "too many read this mailbox already"));
        }
        *count += 1;
        Ok(Waiter { who, arrived: Arc::clone(arrived), waiters: Arc::clone(self) })
    }

    /// Something has come.
    pub(super) fn wake(&self, who: Who) {
        if let Some((_, arrived)) = self.0.lock().get(&who) {
            arrived.notify_waiters();
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut all = self.waiters.0.lock();
        if let Some((count, _)) = all.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.who);
            }
        }
    }
}
