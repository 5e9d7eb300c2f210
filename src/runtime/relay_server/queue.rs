//! What waits to be written to one link of the relay hub. Nobody waits for room: what does not fit
//! is lost, as the protocol allows, and the link that sent it cannot push out what others sent.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_tungstenite::tungstenite::Bytes;

use crate::mesh::relay_hub::LinkId;

/// Messages that wait for one link; most are small.
const MAX_MESSAGES: usize = 16_384;
/// What a message costs beside its bytes, so that many small ones count.
const OVERHEAD: usize = 64;

/// Bytes that wait for all links.
#[derive(Debug, Default)]
pub(super) struct Total(AtomicUsize);

impl Total {
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// The bounds of a queue, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimits {
    /// In one queue.
    pub most: usize,
    /// Of one sender in somebody else's queue.
    pub share: usize,
    /// In all queues; beyond it each may still hold `least`.
    pub total: usize,
    /// See `total`.
    pub least: usize,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<(Bytes, LinkId)>,
    bytes: usize,
    shares: HashMap<LinkId, usize>,
    closed: bool,
}

/// The queue of one link. For one reader.
#[derive(Debug)]
pub(super) struct Queue {
    owner: LinkId,
    limits: QueueLimits,
    total: Arc<Total>,
    waiting: Mutex<Waiting>,
    filled: Notify,
}

impl Queue {
    pub(super) fn new(owner: LinkId, limits: QueueLimits, total: Arc<Total>) -> Self {
        Self { owner, limits, total, waiting: Mutex::default(), filled: Notify::new() }
    }

    /// Whether the message found room.
    pub(super) fn push(&self, message: Bytes, from: LinkId) -> bool {
        let cost = message.len() + OVERHEAD;
        let QueueLimits { most, share, total, least } = self.limits;
        let mut waiting = self.waiting.lock();
        let of_sender = waiting.shares.get(&from).copied().unwrap_or(0);
        // What the hub says to the link on its own is not what another link sent.
        let over_share = from != self.owner && of_sender + cost > share;
        let over_total = self.total.bytes() + cost > total && waiting.bytes + cost > least;
        if waiting.closed
            || over_share
            || over_total
            || waiting.bytes + cost > most
            || waiting.messages.len() >= MAX_MESSAGES
        {
            return false;
        }
        waiting.bytes += cost;
        waiting.shares.insert(from, of_sender + cost);
        waiting.messages.push_back((message, from));
        self.total.0.fetch_add(cost, Ordering::Relaxed);
        drop(waiting);
        self.filled.notify_one();
        true
    }

    /// The next message; `None` once closed and empty.
    pub(super) async fn next(&self) -> Option<Bytes> {
        loop {
            {
                let mut waiting = self.waiting.lock();
                if let Some((message, from)) = waiting.messages.pop_front() {
                    let cost = message.len() + OVERHEAD;
                    waiting.bytes -= cost;
                    self.total.0.fetch_sub(cost, Ordering::Relaxed);
                    if let Some(share) = waiting.shares.get_mut(&from) {
                        *share -= cost;
                        if *share == 0 {
                            waiting.shares.remove(&from);
                        }
                    }
                    return Some(message);
                }
                if waiting.closed {
                    return None;
                }
            }
            self.filled.notified().await;
        }
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.lock().messages.is_empty()
    }

    /// Takes no more.
    pub(super) fn close(&self) {
        self.waiting.lock().closed = true;
        self.filled.notify_one();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let bytes = self.waiting.get_mut().bytes;
        self.total.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits { most: 1000, share: 300, total: 1500, least: 200 };

    fn message(cost: usize) -> Bytes {
        Bytes::from(vec![0; cost - OVERHEAD])
    }

    #[tokio::test]
    async fn one_sender_cannot_fill_it() {
        let total = Arc::new(Total::default());
        let queue = Queue::new(LinkId(0), LIMITS, Arc::clone(&total));
        assert!(queue.push(message(300), LinkId(1)));
        assert!(!queue.push(message(100), LinkId(1)));
        assert!(queue.push(message(300), LinkId(2)));
        // The hub's own word may take the rest, and no more.
        assert!(queue.push(message(400), LinkId(0)));
        assert!(!queue.push(message(100), LinkId(0)));
        assert_eq!(queue.next().await.unwrap().len(), 300 - OVERHEAD);
        assert!(queue.push(message(100), LinkId(1)));
        // All queues together: each still has its little.
        let other = Queue::new(LinkId(5), LIMITS, Arc::clone(&total));
        assert!(other.push(message(300), LinkId(1)) && other.push(message(300), LinkId(2)));
        assert!(!other.push(message(300), LinkId(3)));
        let third = Queue::new(LinkId(6), LIMITS, Arc::clone(&total));
        assert!(third.push(message(200), LinkId(1)) && !third.push(message(100), LinkId(2)));
        drop((other, third));
        queue.close();
        assert!(!queue.push(message(100), LinkId(9)));
        while queue.next().await.is_some() {}
        assert_eq!(total.bytes(), 0);
    }
}
