//! Mail that leaves: one queue per way, in order, tried again while that makes sense. What is lost
//! here is sent again by the log of its task, so nothing of it is stored.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{Transports, office::Told};
use crate::acp::code::{Code, Error};
use crate::acp::objects::{Envelope, RevocationNotice};
use crate::acp::owner::{Route, Send};
use crate::daemon::logging::{emit, event};

/// Envelopes that wait on one way. The logs resend what does not fit.
const MAX_QUEUED: usize = 512;

/// Ways that are kept open at once: peers are on few relays.
const MAX_WAYS: usize = 256;

/// How often one envelope is tried before its log has to send it again, and the wait before the
/// second try; each further one is twice as long (design 18).
const TRIES: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// What is sent.
enum Item {
    Envelope(Box<Envelope>),
    Notice(Box<RevocationNotice>),
}

/// The queues.
#[derive(Clone)]
pub(super) struct Outbox {
    shared: Arc<Shared>,
}

struct Shared {
    transports: Transports,
    told: broadcast::Sender<Told>,
    stop: CancellationToken,
    ways: Mutex<BTreeMap<Route, mpsc::Sender<Item>>>,
    /// Items that were not handed over yet.
    open: watch::Sender<usize>,
}

impl Outbox {
    pub(super) fn new(
        transports: Transports,
        told: broadcast::Sender<Told>,
        stop: CancellationToken,
    ) -> Self {
        let shared = Shared {
            transports,
            told,
            stop,
            ways: Mutex::new(BTreeMap::new()),
            open: watch::Sender::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Puts an envelope into the queue of its way.
    pub(super) fn send(&self, send: Send) {
        self.put(send.route, Item::Envelope(Box::new(send.envelope)));
    }

    /// Tells all own relays that something was taken back.
    pub(super) fn publish(&self, notice: RevocationNotice) {
        for url in self.shared.transports.relays() {
            let route = Route::Relays { urls: vec![url] };
            self.put(route, Item::Notice(Box::new(notice.clone())));
        }
    }

    fn put(&self, route: Route, item: Item) {
        let mut ways = self.shared.ways.lock();
        if ways.len() >= MAX_WAYS && !ways.contains_key(&route) {
            // Those that are idle make room.
            ways.retain(|_, way| way.capacity() < MAX_QUEUED);
        }
        let way = ways.entry(route.clone()).or_insert_with(|| self.open(route));
        self.shared.open.send_modify(|open| *open += 1);
        if way.try_send(item).is_err() {
            self.shared.open.send_modify(|open| *open -= 1);
            emit(&event("acp_outbox_full").with("queued", MAX_QUEUED));
        }
    }

    fn open(&self, route: Route) -> mpsc::Sender<Item> {
        let (way, items) = mpsc::channel(MAX_QUEUED);
        tokio::spawn(carry(Arc::clone(&self.shared), route, items));
        way
    }

    /// Waits until nothing is on its way.
    pub(super) async fn flushed(&self) {
        let mut open = self.shared.open.subscribe();
        // The sender lives as long as this.
        let _ = open.wait_for(|open| *open == 0).await;
    }
}

async fn carry(shared: Arc<Shared>, route: Route, mut items: mpsc::Receiver<Item>) {
    loop {
        let item = tokio::select! {
            () = shared.stop.cancelled() => break,
            item = items.recv() => item,
        };
        let Some(item) = item else { break };
        tokio::select! {
            () = shared.stop.cancelled() => {}
            () = hand_over(&shared, &route, &item) => {}
        }
        shared.open.send_modify(|open| *open -= 1);
    }
    items.close();
    while items.recv().await.is_some() {
        shared.open.send_modify(|open| *open -= 1);
    }
}

async fn hand_over(shared: &Shared, route: &Route, item: &Item) {
    let mut wait = FIRST_WAIT;
    let mut in_doubt = false;
    for attempt in 1..=TRIES {
        let tried = match item {
            Item::Envelope(envelope) => shared.transports.post(route, envelope).await,
            Item::Notice(notice) => shared.transports.publish(route, notice).await,
        };
        let failure = match tried {
            Ok(()) => return,
            Err(failure) => failure,
        };
        in_doubt |= failure.in_doubt;
        let over = attempt == TRIES || !failure.retry;
        if attempt == 1 || over {
            emit(
                &event("acp_undelivered")
                    .with("code", failure.error.code().as_str())
                    .with("final", over),
            );
        }
        if over {
            if let Item::Envelope(envelope) = item {
                let told = Told::Undelivered { to: envelope.to, error: failure.error, in_doubt };
                let _ = shared.told.send(told);
            }
            return;
        }
        tokio::time::sleep(failure.after.unwrap_or(wait)).await;
        wait = wait.saturating_mul(2);
    }
}

/// Why something could not be handed over.
pub(super) struct Failure {
    pub(super) error: Error,
    /// Whether it makes sense to try again.
    pub(super) retry: bool,
    /// When, where the other side said so.
    pub(super) after: Option<Duration>,
    /// Whether it may have been handed over all the same.
    pub(super) in_doubt: bool,
}

impl Failure {
    pub(super) fn nowhere() -> Self {
        let error = Error::new(Code::RelayUnreachable, "there is no way to this peer from here")
            .with_todo("order it again another way: by an invite, a relay, or a name in the mesh");
        Self { error, retry: false, after: None, in_doubt: false }
    }

    /// This failure and, after it, that of another way: nothing of what either means gets lost.
    pub(super) fn and(self, next: Self) -> Self {
        Self { retry: self.retry || next.retry, in_doubt: self.in_doubt || next.in_doubt, ..next }
    }
}
