//! What is on its way: per-agent mailboxes, the sender's retry queues, and copies held for
//! absent recipients (`rooms.md` 1.9, 1.10; decisions 1 to 3). Queues and their bounds; sends
//! nothing itself.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

use super::events::{DeliveryEvent, DeliveryState};
use super::replica::Message as _;
use super::session::APPROVAL_WINDOW_MS;
use super::wire::room_path::RoomPath;
use crate::codec::cbor::{self, Value};
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Unacknowledged events per agent. A model that reads one a second needs three hours for them.
pub const MAX_MAILBOX_EVENTS: usize = 10_000;
/// Bytes of unacknowledged events per agent.
pub const MAX_MAILBOX_BYTES: usize = 16 * 1024 * 1024;
/// Message ids remembered as shown, per agent: longer than any retry or replay reaches back.
pub const MAX_SEEN: usize = 16_384;
/// Requests queued per recipient. (The reference, which keeps them in memory, has 100.)
pub const MAX_QUEUED: usize = 1000;
/// Recipients with a queue, per agent.
pub const MAX_QUEUES: usize = 1024;
/// Age after which a queued message expires (the reference's bound).
pub const MAX_QUEUED_MS: u64 = 24 * 3600 * 1000;
/// Copies held per absent recipient (the reference's bound on replicated queues).
pub const MAX_COPIES: usize = 100;
/// Recipients for whom copies are held.
pub const MAX_COPY_RECIPIENTS: usize = 1024;
/// Refusals of a copy by its recipient after which it is given up.
pub const MAX_REFUSALS: u32 = 3;
/// Undelivered events of one agent that ride in a snapshot (the reference's bound).
pub const MAX_REPLICATED: usize = 100;
/// Numbers of events begin this far above those of the run before. Events are shown before they
/// are stored: a number that an agent has seen never stands for another event, though as many were
/// shown and not stored.
pub const RUN_SEQ_STEP: u64 = 1_000_000;

/// An event with its number.
#[derive(Clone, Debug)]
pub struct Numbered {
    /// Its number within the agent's mailbox.
    pub seq: u64,
    /// The event.
    pub event: Arc<DeliveryEvent>,
    /// When it came.
    pub at: UnixMillis,
    bytes: usize,
}

/// No room: the sender keeps the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the agent's mailbox is full")]
pub struct MailboxFull;

/// One agent's numbered, unacknowledged events.
#[derive(Debug)]
pub struct Mailbox {
    next_seq: u64,
    acknowledged: u64,
    bytes: usize,
    events: VecDeque<Numbered>,
    seen: HashSet<(DeviceId, String)>,
    seen_order: VecDeque<(u64, (DeviceId, String))>,
    losses: Losses,
}

/// What a mailbox has let go of by itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Events given up or taken back.
    pub events: Vec<u64>,
    /// Messages forgotten as seen, up to the event that carried them.
    pub unseen: Option<u64>,
}

impl Default for Mailbox {
    fn default() -> Self {
        Self {
            next_seq: 1,
            acknowledged: 0,
            bytes: 0,
            events: VecDeque::new(),
            seen: HashSet::new(),
            seen_order: VecDeque::new(),
            losses: Losses::default(),
        }
    }
}

impl Mailbox {
    /// An empty mailbox whose numbers begin above `floor`.
    #[must_use]
    pub fn above(floor: u64) -> Self {
        Self { next_seq: floor + 1, ..Self::default() }
    }

    /// A mailbox as it was stored: how far it was acknowledged, what had been acknowledged lately,
    /// and what waits (with when it came), both by rising numbers.
    #[must_use]
    pub fn restored(
        floor: u64,
        acknowledged: u64,
        seen: Vec<(u64, (DeviceId, String))>,
        waiting: Vec<(u64, UnixMillis, DeliveryEvent)>,
    ) -> Self {
        let highest = seen.iter().map(|(seq, _)| *seq).chain(waiting.iter().map(|w| w.0)).max();
        let mut mailbox = Self { acknowledged, ..Self::default() };
        for (seq, key) in seen {
            mailbox.note_seen(seq, key);
        }
        for (seq, at, event) in waiting {
            let bytes = weight(&event);
            if let Some(key) = event.message_key() {
                mailbox.note_seen(seq, key);
            }
            mailbox.bytes += bytes;
            mailbox.events.push_back(Numbered { seq, event: Arc::new(event), at, bytes });
        }
        mailbox.next_seq = highest.unwrap_or(0).max(acknowledged).max(floor) + 1;
        mailbox
    }

    /// What it has let go of since this was asked last.
    pub fn take_losses(&mut self) -> Losses {
        std::mem::take(&mut self.losses)
    }

    /// Acknowledged messages that it still knows, by rising numbers.
    pub fn seen(&self) -> impl Iterator<Item = &(u64, (DeviceId, String))> {
        self.seen_order.iter().filter(|(seq, _)| *seq <= self.acknowledged)
    }

    /// Takes an event. Full: informational events make room for messages, oldest first; when only
    /// messages are left, the new one is refused.
    pub fn push(&mut self, event: Arc<DeliveryEvent>, at: UnixMillis) -> Result<u64, MailboxFull> {
        let bytes = weight(&event);
        while self.events.len() >= MAX_MAILBOX_EVENTS || self.bytes + bytes > MAX_MAILBOX_BYTES {
            let informational = self.events.iter().position(|held| !is_kept(held, at));
            match informational.and_then(|index| self.events.remove(index)) {
                Some(dropped) => {
                    self.bytes -= dropped.bytes;
                    self.losses.events.push(dropped.seq);
                    if let Some(key) = dropped.event.question_key() {
                        // Not acknowledged: it may be shown again.
                        self.forget(&key);
                    }
                }
                None => return Err(MailboxFull),
            }
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        if let Some(key) = event.message_key().or_else(|| event.question_key()) {
            self.note_seen(seq, key);
        }
        self.bytes += bytes;
        self.events.push_back(Numbered { seq, event, at, bytes });
        Ok(seq)
    }

    /// The unacknowledged event that carries this message.
    #[must_use]
    pub fn waiting(&self, key: &(DeviceId, String)) -> Option<&Numbered> {
        self.events.iter().rev().find(|held| {
            held.event.message_id() == Some(&key.1)
                && held.event.message_key().as_ref() == Some(key)
        })
    }

    /// Whether the same event is waiting.
    #[must_use]
    pub fn holds(&self, event: &DeliveryEvent) -> bool {
        self.events.iter().any(|held| *held.event == *event)
    }

    /// Takes an event back, which the agent has dealt with without acknowledging it.
    pub fn withdraw(&mut self, event: &DeliveryEvent) {
        if let Some(index) = self.events.iter().position(|held| *held.event == *event)
            && let Some(held) = self.events.remove(index)
        {
            self.bytes -= held.bytes;
            self.losses.events.push(held.seq);
        }
    }

    /// A question is over: asked again, it is another one. True when it had been acknowledged.
    pub fn forget(&mut self, key: &(DeviceId, String)) -> bool {
        if !self.seen.remove(key) {
            return false;
        }
        let at = self.seen_order.iter().position(|(_, held)| held == key);
        let forgotten = at.and_then(|at| self.seen_order.remove(at));
        forgotten.is_some_and(|(seq, _)| seq <= self.acknowledged)
    }

    /// Whether this message or question was taken before (decision 1: by ids, never by history).
    #[must_use]
    pub fn has_seen(&self, key: &(DeviceId, String)) -> bool {
        self.seen.contains(key)
    }

    fn note_seen(&mut self, seq: u64, key: (DeviceId, String)) {
        if self.seen.insert(key.clone()) {
            self.seen_order.push_back((seq, key));
            if self.seen_order.len() > MAX_SEEN
                && let Some((seq, oldest)) = self.seen_order.pop_front()
            {
                self.seen.remove(&oldest);
                self.losses.unseen = Some(seq);
            }
        }
    }

    /// Acknowledges everything up to `seq`; returns the events this releases.
    pub fn acknowledge(&mut self, seq: u64) -> Vec<Numbered> {
        let mut released = Vec::new();
        while self.events.front().is_some_and(|held| held.seq <= seq) {
            if let Some(held) = self.events.pop_front() {
                self.bytes -= held.bytes;
                released.push(held);
            }
        }
        self.acknowledged = self.acknowledged.max(seq.min(self.next_seq - 1));
        released
    }

    /// Unacknowledged events above `after`, oldest first.
    pub fn after(&self, after: u64) -> impl Iterator<Item = &Numbered> {
        self.events.iter().filter(move |held| held.seq > after)
    }

    /// The highest number given so far.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.next_seq - 1
    }

    /// Everything up to here has been acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Number of unacknowledged events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// When the oldest waiting event came.
    #[must_use]
    pub fn oldest(&self) -> Option<UnixMillis> {
        self.events.front().map(|held| held.at)
    }
}

/// Events that are not given up to make room: messages, what somebody still waits to have
/// answered, and bad news of a message of one's own.
fn is_kept(held: &Numbered, now: UnixMillis) -> bool {
    match &*held.event {
        DeliveryEvent::RoomMessage { .. }
        | DeliveryEvent::Dm { .. }
        | DeliveryEvent::RoomInvite { .. } => true,
        // Whoever asked has had its answer by then: new keys cannot fill the mailbox by asking.
        DeliveryEvent::RoomJoinRequest { .. }
        | DeliveryEvent::ConnectionRequest { .. }
        | DeliveryEvent::CapabilityRequest { .. } => now.since(held.at) <= APPROVAL_WINDOW_MS,
        DeliveryEvent::DeliveryStatus { delivery, .. } => {
            !matches!(delivery, DeliveryState::Delivered | DeliveryState::Read)
        }
        _ => false,
    }
}

/// About what an event weighs in memory, for the bounds. Messages, which come by the ten thousand,
/// are not encoded for it.
fn weight(event: &DeliveryEvent) -> usize {
    /// Ids and what holds it all together.
    const FIXED: usize = 512;
    match event {
        DeliveryEvent::RoomMessage { message } => FIXED + message.room.len() + message.weight(),
        DeliveryEvent::Dm { message } => FIXED + message.weight(),
        other => event_bytes(other).len(),
    }
}

/// An event as it is stored.
#[must_use]
pub fn event_bytes(event: &DeliveryEvent) -> Vec<u8> {
    cbor::to_value(event).map(|value| value.encode()).unwrap_or_default()
}

/// A request kept for retry.
#[derive(Clone, Debug, PartialEq)]
pub struct Queued {
    /// Order number within the sending agent.
    pub number: u64,
    /// Room or DM path.
    pub path: RoomPath,
    /// Request params.
    pub params: Value,
    /// Hex id when it is a message: only then is its fate reported.
    pub message_id: Option<String>,
    /// First queued at; kept across failed retries.
    pub queued_at: UnixMillis,
    /// Why the last attempt got no answer.
    pub reason: &'static str,
    /// It is stored, and stays so until its fate is known.
    pub kept: bool,
}

/// One agent's retry queues.
#[derive(Debug, Default)]
pub struct Outgoing {
    next_number: u64,
    queues: BTreeMap<DeviceId, VecDeque<Queued>>,
    busy: BTreeSet<DeviceId>,
}

impl Outgoing {
    /// Lets go of everything that waits. Numbers go on.
    pub fn clear(&mut self) {
        *self = Self { next_number: self.next_number, ..Self::default() };
    }

    /// Numbers go on above this one.
    pub fn skip_to(&mut self, number: u64) {
        self.next_number = self.next_number.max(number);
    }

    /// A fresh order number.
    pub fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Queues a request at the end, or at the front when it is a failed retry; returns what the
    /// bound pushed out.
    pub fn queue(&mut self, recipient: DeviceId, entry: Queued) -> Option<Queued> {
        if !self.queues.contains_key(&recipient) && self.queues.len() >= MAX_QUEUES {
            return Some(entry);
        }
        let queue = self.queues.entry(recipient).or_default();
        let at = queue.partition_point(|held| held.number < entry.number);
        queue.insert(at, entry);
        if queue.len() > MAX_QUEUED { queue.pop_front() } else { None }
    }

    /// Whether requests wait for this recipient, or one is being retried: a new one must queue
    /// behind them to keep the order.
    #[must_use]
    pub fn is_waiting(&self, recipient: &DeviceId) -> bool {
        self.busy.contains(recipient) || self.queues.contains_key(recipient)
    }

    /// Takes the next request to retry; one at a time per recipient.
    pub fn start_retry(&mut self, recipient: &DeviceId) -> Option<Queued> {
        if self.busy.contains(recipient) {
            return None;
        }
        let queue = self.queues.get_mut(recipient)?;
        let entry = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(recipient);
        }
        if entry.is_some() {
            self.busy.insert(*recipient);
        }
        entry
    }

    /// A retry has its outcome.
    pub fn finish_retry(&mut self, recipient: &DeviceId) {
        self.busy.remove(recipient);
    }

    /// Takes everything older than the age bound.
    pub fn expire(&mut self, now: UnixMillis) -> Vec<(DeviceId, Queued)> {
        let mut expired = Vec::new();
        self.queues.retain(|recipient, queue| {
            queue.retain(|entry| {
                let live = now.since(entry.queued_at) < MAX_QUEUED_MS;
                if !live {
                    expired.push((*recipient, entry.clone()));
                }
                live
            });
            !queue.is_empty()
        });
        expired
    }

    /// Takes a queued message, which has reached its recipient by another way.
    pub fn take_message(&mut self, recipient: &DeviceId, message_id: &str) -> Option<Queued> {
        let queue = self.queues.get_mut(recipient)?;
        let index =
            queue.iter().position(|entry| entry.message_id.as_deref() == Some(message_id))?;
        let taken = queue.remove(index);
        if queue.is_empty() {
            self.queues.remove(recipient);
        }
        taken
    }

    /// Queued requests, with their recipients.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &Queued)> {
        self.queues
            .iter()
            .flat_map(|(recipient, queue)| queue.iter().map(move |entry| (recipient, entry)))
    }

    /// Recipients with something waiting.
    pub fn recipients(&self) -> impl Iterator<Item = &DeviceId> {
        self.queues.keys()
    }
}

/// A copy of somebody else's message, held because its recipient is away.
#[derive(Clone, Debug)]
pub struct HeldCopy {
    /// The event to hand over.
    pub event: DeliveryEvent,
    /// Held since.
    pub since: UnixMillis,
    /// How often the recipient has refused it.
    refusals: u32,
}

/// Copies by recipient, then author and message id.
#[derive(Debug, Default)]
pub struct Copies {
    by_recipient: BTreeMap<DeviceId, BTreeMap<(DeviceId, String), HeldCopy>>,
}

impl Copies {
    /// Holds a copy. False when known already, not a message, or over a bound.
    pub fn hold(&mut self, recipient: DeviceId, event: DeliveryEvent, now: UnixMillis) -> bool {
        let Some(key) = event.message_key() else { return false };
        if !self.by_recipient.contains_key(&recipient)
            && self.by_recipient.len() >= MAX_COPY_RECIPIENTS
        {
            return false;
        }
        let held = self.by_recipient.entry(recipient).or_default();
        if held.contains_key(&key) || held.len() >= MAX_COPIES {
            return false;
        }
        held.insert(key, HeldCopy { event, since: now, refusals: 0 });
        true
    }

    /// Copies for a recipient, oldest first.
    #[must_use]
    pub fn for_recipient(&self, recipient: &DeviceId) -> Vec<((DeviceId, String), HeldCopy)> {
        let mut copies: Vec<_> = self
            .by_recipient
            .get(recipient)
            .into_iter()
            .flatten()
            .map(|(key, copy)| (key.clone(), copy.clone()))
            .collect();
        copies.sort_by_key(|(_, copy)| copy.since);
        copies
    }

    /// Lets one go; `None` when it was not held.
    pub fn release(&mut self, recipient: &DeviceId, key: &(DeviceId, String)) -> Option<HeldCopy> {
        let held = self.by_recipient.get_mut(recipient)?;
        let copy = held.remove(key);
        if held.is_empty() {
            self.by_recipient.remove(recipient);
        }
        copy
    }

    /// The recipient refused one. True when it has done so often enough to be believed.
    pub fn refused(&mut self, recipient: &DeviceId, key: &(DeviceId, String)) -> bool {
        match self.by_recipient.get_mut(recipient).and_then(|held| held.get_mut(key)) {
            Some(copy) => {
                copy.refusals += 1;
                copy.refusals >= MAX_REFUSALS
            }
            None => false,
        }
    }

    /// Takes every copy older than the age bound.
    pub fn expire(&mut self, now: UnixMillis) -> Vec<(DeviceId, (DeviceId, String))> {
        let mut expired = Vec::new();
        self.by_recipient.retain(|recipient, held| {
            held.retain(|key, copy| {
                let live = now.since(copy.since) < MAX_QUEUED_MS;
                if !live {
                    expired.push((*recipient, key.clone()));
                }
                live
            });
            !held.is_empty()
        });
        expired
    }

    /// Number of copies held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_recipient.values().map(BTreeMap::len).sum()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_recipient.is_empty()
    }

    /// Every copy.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &(DeviceId, String), &HeldCopy)> {
        self.by_recipient.iter().flat_map(|(recipient, held)| {
            held.iter().map(move |(key, copy)| (recipient, key, copy))
        })
    }

    /// Whether this one is held.
    #[must_use]
    pub fn holds(&self, recipient: &DeviceId, key: &(DeviceId, String)) -> bool {
        self.by_recipient.get(recipient).is_some_and(|held| held.contains_key(key))
    }

    /// Recipients for whom something is held.
    pub fn recipients(&self) -> impl Iterator<Item = &DeviceId> {
        self.by_recipient.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::records::{AgentStatus, DmMessage};

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn dm(n: u64) -> DeliveryEvent {
        DeliveryEvent::Dm {
            message: DmMessage {
                id: format!("{n:032x}"),
                from: id(1),
                to: id(2),
                content: "x".into(),
                timestamp: String::new(),
                reply_to: None,
                read_by: vec![],
                streaming_behavior: None,
            },
        }
    }

    fn info() -> DeliveryEvent {
        DeliveryEvent::MemberStatus { room: "r".into(), agent: id(1), status: AgentStatus::Idle }
    }

    fn queued(number: u64, at: u64) -> Queued {
        Queued {
            number,
            path: RoomPath::dm(id(1), id(2)).unwrap(),
            params: Value::Map(Vec::new()),
            message_id: None,
            queued_at: UnixMillis(at),
            reason: "timeout",
            kept: false,
        }
    }

    #[test]
    fn numbers_rise_and_acknowledging_releases_in_order() {
        let mut mailbox = Mailbox::default();
        for n in 0..3 {
            assert_eq!(mailbox.push(Arc::new(dm(n)), UnixMillis(n)), Ok(n + 1));
        }
        assert!(mailbox.has_seen(&(id(1), format!("{:032x}", 0))));
        assert_eq!(mailbox.acknowledge(2).len(), 2);
        assert_eq!(mailbox.after(0).map(|held| held.seq).collect::<Vec<_>>(), vec![3]);
        assert_eq!(mailbox.acknowledge(99).len(), 1);
        assert_eq!(mailbox.acknowledged(), 3);
        assert_eq!(mailbox.push(Arc::new(dm(9)), UnixMillis(9)), Ok(4));
    }

    #[test]
    fn a_full_mailbox_gives_up_news_but_never_messages() {
        let mut mailbox = Mailbox::default();
        mailbox.push(Arc::new(info()), UnixMillis(0)).unwrap();
        for n in 0..MAX_MAILBOX_EVENTS as u64 {
            mailbox.push(Arc::new(dm(n)), UnixMillis(n)).unwrap();
        }
        assert_eq!(mailbox.len(), MAX_MAILBOX_EVENTS);
        assert_eq!(mailbox.push(Arc::new(dm(1 << 40)), UnixMillis(0)), Err(MailboxFull));
        // Or too many bytes.
        let text = 64 * 1024;
        let mut mailbox = Mailbox::default();
        let large = |n: u64| match dm(n) {
            DeliveryEvent::Dm { message } => {
                DeliveryEvent::Dm { message: DmMessage { content: "x".repeat(text), ..message } }
            }
            other => other,
        };
        let taken = (0..).take_while(|n| mailbox.push(Arc::new(large(*n)), UnixMillis(0)).is_ok());
        let taken = taken.count();
        let bound = MAX_MAILBOX_BYTES / text;
        assert!(taken < bound && taken > bound * 9 / 10, "{taken} of {bound}");
    }

    #[test]
    fn a_full_mailbox_gives_up_questions_that_nobody_waits_for() {
        let ask = |n: usize| DeliveryEvent::RoomJoinRequest {
            room: format!("room {n}"),
            requester_id: id(1),
        };
        let mut mailbox = Mailbox::default();
        for n in 0..MAX_MAILBOX_EVENTS {
            mailbox.push(Arc::new(ask(n)), UnixMillis(n as u64)).unwrap();
        }
        let open = UnixMillis(APPROVAL_WINDOW_MS);
        assert_eq!(mailbox.push(Arc::new(dm(1)), open), Err(MailboxFull));
        mailbox.push(Arc::new(dm(1)), UnixMillis(open.0 + 1)).unwrap();
        assert!(!mailbox.holds(&ask(0)) && mailbox.holds(&ask(1)) && mailbox.holds(&dm(1)));
    }

    #[test]
    fn a_message_waits_until_it_is_acknowledged_and_stays_seen() {
        let mut mailbox = Mailbox::default();
        let seq = mailbox.push(Arc::new(dm(1)), UnixMillis(0)).unwrap();
        let key = (id(1), format!("{:032x}", 1));
        assert_eq!(mailbox.waiting(&key).map(|held| held.seq), Some(seq));
        mailbox.acknowledge(seq);
        assert!(mailbox.waiting(&key).is_none() && mailbox.has_seen(&key));
    }

    #[test]
    fn an_event_taken_back_makes_room() {
        let mut mailbox = Mailbox::default();
        mailbox.push(Arc::new(dm(1)), UnixMillis(0)).unwrap();
        let before = mailbox.bytes;
        mailbox.push(Arc::new(info()), UnixMillis(0)).unwrap();
        assert!(mailbox.bytes > before);
        mailbox.withdraw(&info());
        assert!(!mailbox.holds(&info()));
        assert_eq!((mailbox.len(), mailbox.bytes), (1, before));
        assert_eq!(mailbox.push(Arc::new(info()), UnixMillis(0)), Ok(3));
    }

    #[test]
    fn a_restored_mailbox_goes_on_above_every_number_and_knows_what_was_seen() {
        let key = |n: u64| (id(1), format!("{n:032x}"));
        let mut mailbox = Mailbox::restored(
            RUN_SEQ_STEP,
            5,
            vec![(3, key(3)), (5, key(5))],
            vec![(7, UnixMillis(70), dm(7)), (8, UnixMillis(80), info())],
        );
        assert_eq!(mailbox.acknowledged(), 5);
        assert!([3, 5, 7].iter().all(|n| mailbox.has_seen(&key(*n))) && !mailbox.has_seen(&key(4)));
        assert_eq!(mailbox.after(0).map(|held| held.seq).collect::<Vec<_>>(), vec![7, 8]);
        assert_eq!(mailbox.oldest(), Some(UnixMillis(70)));
        let mut same = Mailbox::default();
        for event in [dm(7), info()] {
            same.push(Arc::new(event), UnixMillis(70)).unwrap();
        }
        assert_eq!(mailbox.bytes, same.bytes);
        assert_eq!(mailbox.push(Arc::new(dm(9)), UnixMillis(90)), Ok(RUN_SEQ_STEP + 1));
        // Acknowledged and nothing left: the numbers still do not begin anew.
        let mut empty = Mailbox::restored(0, 5, Vec::new(), Vec::new());
        assert_eq!(empty.push(Arc::new(dm(9)), UnixMillis(90)), Ok(6));
    }

    #[test]
    fn what_a_mailbox_lets_go_of_is_told_once() {
        let mut mailbox = Mailbox::default();
        mailbox.push(Arc::new(info()), UnixMillis(0)).unwrap();
        for n in 0..MAX_SEEN as u64 + 2 {
            let seq = mailbox.push(Arc::new(dm(n)), UnixMillis(n)).unwrap();
            mailbox.acknowledge(seq);
        }
        mailbox.push(Arc::new(info()), UnixMillis(0)).unwrap();
        mailbox.withdraw(&info());
        let losses = mailbox.take_losses();
        assert_eq!(losses.unseen, Some(3), "the two oldest messages were the events 2 and 3");
        assert_eq!(losses.events, vec![MAX_SEEN as u64 + 4]);
        assert_eq!(mailbox.take_losses(), Losses::default());
        assert_eq!(mailbox.seen().count(), MAX_SEEN);
    }

    #[test]
    fn retries_keep_the_order_and_go_one_at_a_time() {
        let mut out = Outgoing::default();
        out.queue(id(2), queued(1, 0));
        out.queue(id(2), queued(2, 0));
        let first = out.start_retry(&id(2)).unwrap();
        assert_eq!(first.number, 1);
        assert!(out.start_retry(&id(2)).is_none());
        out.queue(id(2), first);
        out.finish_retry(&id(2));
        assert_eq!(out.start_retry(&id(2)).unwrap().number, 1);
        assert!(out.is_waiting(&id(2)));
    }

    #[test]
    fn queues_are_bounded_in_number_and_age() {
        let mut out = Outgoing::default();
        for n in 1..=MAX_QUEUED as u64 {
            assert!(out.queue(id(2), queued(n, n)).is_none());
        }
        assert_eq!(out.queue(id(2), queued(1000, 1000)).unwrap().number, 1);
        let expired = out.expire(UnixMillis(MAX_QUEUED_MS + 3));
        assert_eq!(expired.iter().map(|(_, e)| e.number).collect::<Vec<_>>(), vec![2, 3]);
    }

    #[test]
    fn copies_are_held_once_and_expire() {
        let mut copies = Copies::default();
        assert!(copies.hold(id(2), dm(1), UnixMillis(5)));
        assert!(!copies.hold(id(2), dm(1), UnixMillis(6)));
        assert!(!copies.hold(id(2), info(), UnixMillis(6)));
        assert_eq!(copies.for_recipient(&id(2)).len(), 1);
        assert!(copies.release(&id(2), &(id(1), format!("{:032x}", 1))).is_some());
        assert!(copies.is_empty());
        copies.hold(id(2), dm(1), UnixMillis(5));
        assert_eq!(copies.expire(UnixMillis(5 + MAX_QUEUED_MS)).len(), 1);
    }
}
