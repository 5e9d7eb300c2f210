//! What comes into one mailbox, page by page: for polls, event streams and sockets alike. Nothing is
//! fetched before it is wanted, so a slow reader costs one page.

use std::sync::Arc;

use tokio::task::spawn_blocking;

use super::fault::Fault;
use super::keeper::Desk;
use super::waiters::Waiter;
use crate::acp::did::Did;
use crate::acp::relay::Cursor;
use crate::runtime::clock::unix_now;

/// Envelopes in canonical form with their cursors, oldest first.
pub(super) type Page = Vec<(Cursor, Vec<u8>)>;

pub(super) struct Feed {
    desk: Arc<Desk>,
    did: Did,
    after: Option<Cursor>,
    waiter: Waiter,
    /// Envelopes in a page, and their bytes behind the first.
    page: (usize, u64),
}

impl Feed {
    /// What comes for `did` behind `after`.
    ///
    /// # Errors
    /// `RATE_LIMITED` when too many read this mailbox.
    pub(super) fn open(
        desk: &Arc<Desk>,
        did: Did,
        after: Option<Cursor>,
        page: (usize, u64),
    ) -> Result<Self, Fault> {
        let waiter = desk.waiters.watch(*did.key())?;
        Ok(Self { desk: Arc::clone(desk), did, after, waiter, page })
    }

    /// What waits now; empty when nothing does.
    pub(super) async fn page(&mut self) -> Result<Page, Fault> {
        let (limit, bytes) = self.page;
        let waiting =
            self.desk.with(|relay| relay.waiting(self.did, self.after, limit, bytes, unix_now()));
        let Some(last) = waiting.last().map(|waiting| waiting.cursor) else {
            return Ok(Page::new());
        };
        let desk = Arc::clone(&self.desk);
        let cursors = waiting.into_iter().map(|waiting| waiting.cursor).collect();
        let page = spawn_blocking(move || desk.bodies(cursors))
            .await
            .unwrap_or_else(|_| Err(Fault::busy("the relay is stopping")))?;
        self.after = Some(last);
        Ok(page)
    }

    /// Waits until there is a page. Dropped before it is done, nothing is lost.
    pub(super) async fn next(&mut self) -> Result<Page, Fault> {
        loop {
            let arrived = Arc::clone(&self.waiter.arrived);
            // Made before it is looked, so that what comes in between wakes it.
            let arrival = arrived.notified();
            let page = self.page().await?;
            if !page.is_empty() {
                return Ok(page);
            }
            arrival.await;
        }
    }
}
