//! One authenticated connection: length-prefixed frames in and out, within bounds (`wire.md`,
//! "Framing"; decision 15). Frames are decoded and their signatures checked here, in the
//! connection's own task; what they mean is the node's business.
//!
//! In: a frame waits in the node's queue at most [`LinkLimits::frames_ahead`] deep per link, and
//! nothing more is read until one of them has been handled. Out: the owner never waits; a peer that
//! does not read fast enough is closed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use crate::codec::cbor::Value;
use crate::mesh::checked::Checked;
use crate::mesh::node::Input;
use crate::mesh::session::SessionId;
use crate::mesh::wire::cose::CoseSign1;
use crate::mesh::wire::frame::{Frame, FrameError, Outcome};
use crate::mesh::wire::token::TokenCache;

/// Longest frame of a peer that has not been let in yet: an introduction or connect_request takes a
/// few hundred bytes, an advert a few thousand (decision 15).
pub const MAX_FRAME_QUARANTINED: u32 = 64 * 1024;
/// Longest frame of a peer, and of ours: a reference peer sends its whole state in one
/// (decision 15).
pub const MAX_FRAME: u32 = 64 * 1024 * 1024;
/// Frames from this size on are large: they are read only while few of them are in memory.
pub const LARGE_FRAME: u32 = 64 * 1024;
/// Large frames in memory at the same time, from peers of our own user.
pub const LARGE_FRAMES_SAME_USER: usize = 8;
/// Large frames in memory at the same time, from everybody else: two of the longest.
pub const LARGE_FRAMES_OTHERS: usize = 2;
/// Frames from this size on are decoded beside the network's threads, since that takes milliseconds.
const DECODE_ASIDE: usize = 256 * 1024;
/// First reservation for a body. Beyond it memory doubles with what has really come.
const FIRST_RESERVE: usize = 16 * 1024;
/// Frames after which the tokens of a peer that is not our own user's are forgotten, so that many
/// such links cannot fill the memory with tokens (8 KiB each).
const FORGET_TOKENS_AFTER: u32 = 16;
/// Queued frames are encoded and written together up to this size: four TLS records.
const WRITE_BATCH: usize = 64 * 1024;
/// What a queued frame costs besides its contents.
const FRAME_OVERHEAD: usize = 256;
/// What one value inside a frame costs in memory besides text and bytes.
const VALUE_OVERHEAD: usize = size_of::<Value>();
/// Bytes of length before each frame.
const HEADER: usize = 4;

/// The bounds of a link. The defaults are for use, others for tests.
#[derive(Clone, Debug)]
pub struct LinkLimits {
    /// Frames of one link that the node has not handled yet.
    pub frames_ahead: u32,
    /// A frame once begun must go on coming.
    pub read_stall: Duration,
    /// Least speed of a frame, in bytes a second, beyond the first [`LinkLimits::read_stall`].
    pub read_rate: u32,
    /// A peer must go on reading what we write.
    pub write_stall: Duration,
    /// Frames that wait to be written to one peer.
    pub queued_frames: usize,
    /// Memory of frames that wait to be written to one peer, in bytes.
    pub queued_bytes: usize,
    /// Memory of frames that wait to be written to all peers, in bytes. Beyond it, whoever has more
    /// than [`LinkLimits::queued_share`] waiting is a slow consumer.
    pub queued_bytes_total: usize,
    /// What a peer may have waiting even when the total is used up.
    pub queued_share: usize,
    /// How long a closing link may take to write what is queued and to see the peer's end.
    pub close: Duration,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self {
            // A reference peer pipelines a few; 32 keep the node busy while one is being read.
            frames_ahead: 32,
            read_stall: Duration::from_secs(30),
            // A slow radio link; 64 MiB then take 17 minutes.
            read_rate: 64 * 1024,
            // Longer than a suspended process is usually missed, shorter than the keep-alive.
            write_stall: Duration::from_secs(30),
            // Four times the requests that the node keeps open on a session.
            queued_frames: 4096,
            // One snapshot of a large replica in parts of 1 MiB, as it is in memory.
            queued_bytes: 128 * 1024 * 1024,
            queued_bytes_total: 512 * 1024 * 1024,
            queued_share: 1024 * 1024,
            // A reference peer answers the end of a connection at once; a stopped one never does.
            close: Duration::from_secs(5),
        }
    }
}

/// Why a link has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosedReason {
    /// The peer ended it.
    PeerClosed,
    /// The system reported an error.
    IoError,
    /// The peer's TLS is broken.
    TlsFailed,
    /// The peer announced a frame over the limit.
    FrameTooLarge,
    /// The peer sent what is not canonical CBOR, or an empty frame.
    NotCanonical,
    /// The peer began a frame and did not go on.
    SlowFrame,
    /// The peer did not read what we sent.
    SlowConsumer,
    /// The daemon is leaving.
    Shutdown,
    /// The node wanted it, for this reason.
    Requested(&'static str),
}

impl ClosedReason {
    /// The stable word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PeerClosed => "peer_closed",
            Self::IoError => "io_error",
            Self::TlsFailed => "tls_failed",
            Self::FrameTooLarge => "frame_too_large",
            Self::NotCanonical => "not_canonical",
            Self::SlowFrame => "slow_frame",
            Self::SlowConsumer => "slow_consumer",
            Self::Shutdown => "shutdown",
            Self::Requested(reason) => reason,
        }
    }

    /// Whether what is queued should still reach the peer.
    const fn flushes(self) -> bool {
        matches!(self, Self::Shutdown | Self::Requested(_))
    }

    fn of_error(error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Kind;
        match error.kind() {
            Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => Self::PeerClosed,
            Kind::InvalidData => Self::TlsFailed,
            _ => Self::IoError,
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The node's queue

/// What a queued input holds on to until it has been handled.
#[derive(Debug, Default)]
struct Hold {
    _ahead: Option<OwnedSemaphorePermit>,
    _large: Option<OwnedSemaphorePermit>,
}

struct Item {
    input: Input,
    hold: Hold,
}

/// The way into the node's queue.
#[derive(Clone)]
pub struct InputSender(mpsc::Sender<Item>);

/// The node's end of its queue.
pub struct Inputs {
    queue: mpsc::Receiver<Item>,
    handling: Hold,
}

/// A queue of at most `capacity` inputs.
#[must_use]
pub fn inputs(capacity: usize) -> (InputSender, Inputs) {
    let (sender, queue) = mpsc::channel(capacity);
    (InputSender(sender), Inputs { queue, handling: Hold::default() })
}

impl InputSender {
    /// Waits for room. `false`: nobody will take it any more.
    pub async fn send(&self, input: Input) -> bool {
        self.0.send(Item { input, hold: Hold::default() }).await.is_ok()
    }

    /// Drops the input when there is no room: for what may get lost anyway.
    pub fn offer(&self, input: Input) -> bool {
        self.0.try_send(Item { input, hold: Hold::default() }).is_ok()
    }

    async fn send_holding(&self, input: Input, hold: Hold) -> bool {
        self.0.send(Item { input, hold }).await.is_ok()
    }
}

impl Inputs {
    /// The next input. Asking for it says that the one before has been handled and everything that
    /// came out of it executed: only then does its link read on. Can be dropped and called again.
    pub async fn recv(&mut self) -> Option<Input> {
        self.handling = Hold::default();
        let item = self.queue.recv().await?;
        self.handling = item.hold;
        Some(item.input)
    }

    /// How many inputs wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The next input if there is one; otherwise as [`Inputs::recv`].
    pub fn try_recv(&mut self) -> Option<Input> {
        self.handling = Hold::default();
        let item = self.queue.try_recv().ok()?;
        self.handling = item.hold;
        Some(item.input)
    }
}

// ---------------------------------------------------------------------------------------------
// What the owner holds

/// What all links share.
#[derive(Debug)]
pub struct LinkShared {
    limits: LinkLimits,
    queued_bytes: AtomicUsize,
    large_same_user: Arc<Semaphore>,
    large_others: Arc<Semaphore>,
    frames_dropped: AtomicU64,
}

impl LinkShared {
    /// Nothing open yet.
    #[must_use]
    pub fn new(limits: LinkLimits) -> Self {
        Self {
            limits,
            queued_bytes: AtomicUsize::new(0),
            large_same_user: Arc::new(Semaphore::new(LARGE_FRAMES_SAME_USER)),
            large_others: Arc::new(Semaphore::new(LARGE_FRAMES_OTHERS)),
            frames_dropped: AtomicU64::new(0),
        }
    }

    /// Frames of unknown type or shape, which were ignored as the protocol says.
    #[must_use]
    pub fn frames_dropped(&self) -> u64 {
        self.frames_dropped.load(Ordering::Relaxed)
    }

    /// Memory of all frames that wait to be written, in bytes.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes.load(Ordering::Relaxed)
    }
}

/// A link as its owner sees it: nothing here waits.
#[derive(Debug)]
pub struct Link {
    id: SessionId,
    shared: Arc<LinkShared>,
    same_user: bool,
    frame_limit: AtomicU32,
    queue: Mutex<Queue>,
    /// Frames that the node has not handled yet take from it.
    ahead: Arc<Semaphore>,
    /// A frame has been begun and its rest is awaited.
    awaiting_rest: AtomicBool,
    /// Wakes the writer.
    filled: Notify,
    /// Wakes the link itself.
    closed: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<(Frame, usize)>,
    bytes: usize,
    closing: Option<ClosedReason>,
}

impl Link {
    /// A link that nobody has been let in by yet.
    #[must_use]
    pub fn new(id: SessionId, same_user: bool, shared: &Arc<LinkShared>) -> Self {
        let frames_ahead = usize::try_from(shared.limits.frames_ahead).unwrap_or(1);
        Self {
            id,
            shared: Arc::clone(shared),
            same_user,
            frame_limit: AtomicU32::new(MAX_FRAME_QUARANTINED),
            queue: Mutex::default(),
            ahead: Arc::new(Semaphore::new(frames_ahead)),
            awaiting_rest: AtomicBool::new(false),
            filled: Notify::new(),
            closed: Notify::new(),
        }
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Whether the other end runs under our own user.
    #[must_use]
    pub fn is_same_user(&self) -> bool {
        self.same_user
    }

    /// The peer has been let in: it may send long frames.
    pub fn admit(&self) {
        self.frame_limit.store(MAX_FRAME, Ordering::Release);
    }

    /// Queues a frame. When too much waits already the link closes instead.
    pub fn send(&self, frame: Frame) {
        let limits = &self.shared.limits;
        let weight = weight(&frame);
        {
            let mut queue = self.queue.lock();
            if queue.closing.is_some() {
                return;
            }
            let total = self.shared.queued_bytes.load(Ordering::Relaxed) + weight;
            let fits = queue.frames.len() < limits.queued_frames
                && queue.bytes + weight <= limits.queued_bytes
                && (total <= limits.queued_bytes_total
                    || queue.bytes + weight <= limits.queued_share);
            if fits {
                queue.bytes += weight;
                self.shared.queued_bytes.fetch_add(weight, Ordering::Relaxed);
                queue.frames.push_back((frame, weight));
                drop(queue);
                self.filled.notify_one();
                return;
            }
        }
        self.close(ClosedReason::SlowConsumer);
    }

    /// Takes no more frames, and ends once what is queued has been written, or at once when the
    /// reason is a fault. Only the first call counts.
    pub fn close(&self, reason: ClosedReason) {
        let mut queue = self.queue.lock();
        if queue.closing.is_some() {
            return;
        }
        queue.closing = Some(reason);
        if !reason.flushes() {
            self.forget_queue(&mut queue);
        }
        drop(queue);
        self.filled.notify_one();
        self.closed.notify_one();
    }

    /// Whether the rest of a frame is awaited; says so once for each frame.
    pub(super) fn take_awaiting_rest(&self) -> bool {
        self.awaiting_rest.swap(false, Ordering::Relaxed)
    }

    fn forget_queue(&self, queue: &mut Queue) {
        queue.frames = VecDeque::new();
        self.shared.queued_bytes.fetch_sub(std::mem::take(&mut queue.bytes), Ordering::Relaxed);
    }

    /// Waits until somebody closes; returns why. For one waiter.
    async fn closing(&self) -> ClosedReason {
        loop {
            if let Some(reason) = self.queue.lock().closing {
                return reason;
            }
            self.closed.notified().await;
        }
    }

    fn pop(&self) -> Option<Frame> {
        let mut queue = self.queue.lock();
        let (frame, weight) = queue.frames.pop_front()?;
        if queue.frames.is_empty() {
            // An idle link keeps no memory.
            queue.frames = VecDeque::new();
        }
        queue.bytes -= weight;
        self.shared.queued_bytes.fetch_sub(weight, Ordering::Relaxed);
        Some(frame)
    }

    /// What is queued, encoded, up to [`WRITE_BATCH`]; waits for something. `None` once closing and
    /// empty. For one writer.
    async fn next_batch(&self) -> Option<Vec<u8>> {
        loop {
            let mut batch = Vec::new();
            while batch.len() < WRITE_BATCH
                && let Some(frame) = self.pop()
            {
                self.append(&frame, &mut batch);
            }
            if !batch.is_empty() {
                return Some(batch);
            }
            {
                let queue = self.queue.lock();
                if queue.closing.is_some() && queue.frames.is_empty() {
                    return None;
                }
            }
            self.filled.notified().await;
        }
    }

    fn is_queue_empty(&self) -> bool {
        self.queue.lock().frames.is_empty()
    }

    fn append(&self, frame: &Frame, batch: &mut Vec<u8>) {
        let body = frame.encode();
        match u32::try_from(body.len()) {
            Ok(length) if length <= MAX_FRAME => {
                batch.extend_from_slice(&length.to_be_bytes());
                batch.extend_from_slice(&body);
            }
            _ => {
                tracing::warn!(
                    event = "frame_not_sent",
                    session = self.id.0,
                    bytes = body.len(),
                    "a frame is over the limit of 64 MiB and was not sent"
                );
            }
        }
    }

    fn large_frames(&self) -> Arc<Semaphore> {
        let shared = &self.shared;
        Arc::clone(if self.same_user { &shared.large_same_user } else { &shared.large_others })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let bytes = self.queue.get_mut().bytes;
        self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Roughly what a frame takes in memory, in bytes.
fn weight(frame: &Frame) -> usize {
    let contents = match frame {
        Frame::ManageRequest(request) => {
            request.command.verb.len()
                + weight_of(&request.command.params)
                + request.token.as_ref().map_or(0, weight_of_token)
        }
        Frame::ManageResponse(response) => match &response.outcome {
            Outcome::Ok(members) => weight_of(members),
            Outcome::Error { code, message } => {
                code.len() + message.as_ref().map_or(0, String::len)
            }
        },
        Frame::Gossip { peers } => peers
            .iter()
            .map(|advert| {
                let addresses: usize = advert.addresses.iter().map(String::len).sum();
                FRAME_OVERHEAD + addresses + weight_of_pairs(&advert.extensions)
            })
            .sum(),
        Frame::RevocationAnnounce { entries } => entries.iter().map(weight_of_token).sum(),
        Frame::DataEntries { entries, .. } => {
            entries.iter().map(|entry| VALUE_OVERHEAD + entry.len()).sum()
        }
        Frame::RelayData { payload: bytes, .. }
        | Frame::SecureData { ciphertext: bytes, .. }
        | Frame::StreamData { bytes, .. }
        | Frame::BulkData { bytes, .. } => bytes.len(),
        _ => 0,
    };
    FRAME_OVERHEAD + contents
}

fn weight_of(value: &Value) -> usize {
    let contents = match value {
        Value::Bytes(bytes) => bytes.len(),
        Value::Text(text) => text.len(),
        Value::Array(elements) => elements.iter().map(weight_of).sum(),
        Value::Map(entries) => weight_of_pairs(entries),
        Value::Tag(_, content) => weight_of(content),
        _ => 0,
    };
    VALUE_OVERHEAD + contents
}

fn weight_of_pairs(entries: &[(Value, Value)]) -> usize {
    entries.iter().map(|(key, value)| weight_of(key) + weight_of(value)).sum()
}

fn weight_of_token(token: &CoseSign1) -> usize {
    FRAME_OVERHEAD + token.protected.len() + token.payload.as_ref().map_or(0, Vec::len)
}

// ---------------------------------------------------------------------------------------------
// The link's task

/// Runs a link until it ends, and returns why. `announce` is what the node hears first.
///
/// The peer's frames are read only after `announce` is in the node's queue; the caller reports the
/// end, once.
pub async fn run<S>(stream: S, link: &Link, announce: Input, inputs: &InputSender) -> ClosedReason
where
    S: AsyncRead + AsyncWrite + Send,
{
    let hold = Hold { _ahead: Arc::clone(&link.ahead).acquire_owned().await.ok(), _large: None };
    if !inputs.send_holding(announce, hold).await {
        return ClosedReason::Shutdown;
    }
    let (mut read_half, write_half) = tokio::io::split(stream);
    let mut writing = std::pin::pin!(write_frames(write_half, link));
    let mut written = false;
    let reason = tokio::select! {
        reason = read_frames(&mut read_half, link, inputs) => return reason,
        result = &mut writing => match result {
            Err(reason) => return reason,
            Ok(()) => {
                written = true;
                link.closing().await
            }
        },
        reason = link.closing() => reason,
    };
    if reason.flushes() {
        // Reading on until the peer has seen the end: closing a socket with unread bytes would
        // reset it, and the peer could lose what was written last.
        let last_words = async {
            if !written {
                // A peer that no longer takes them has gone, for whatever reason.
                let _ = writing.await;
            }
        };
        let _ = timeout(link.shared.limits.close, async {
            tokio::join!(last_words, discard(&mut read_half));
        })
        .await;
    }
    reason
}

async fn discard(reader: &mut (impl AsyncRead + Unpin)) {
    let mut sink = [0; 1024];
    while let Ok(1..) = reader.read(&mut sink).await {}
}

/// Writes until the link is closing and everything queued before has been written.
async fn write_frames(
    mut writer: impl AsyncWrite + Unpin,
    link: &Link,
) -> Result<(), ClosedReason> {
    let stall = link.shared.limits.write_stall;
    while let Some(batch) = link.next_batch().await {
        let mut rest = batch.as_slice();
        while !rest.is_empty() {
            match timeout(stall, writer.write(rest)).await {
                Err(_) => return Err(ClosedReason::SlowConsumer),
                Ok(Ok(0)) => return Err(ClosedReason::IoError),
                Ok(Ok(written)) => rest = rest.get(written..).unwrap_or_default(),
                Ok(Err(error)) => return Err(ClosedReason::of_error(&error)),
            }
        }
        if link.is_queue_empty() {
            match timeout(stall, writer.flush()).await {
                Err(_) => return Err(ClosedReason::SlowConsumer),
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(ClosedReason::of_error(&error)),
            }
        }
    }
    let _ = timeout(stall, writer.shutdown()).await;
    Ok(())
}

/// Reads, decodes, checks and hands over frames until one cannot be.
async fn read_frames(
    reader: &mut (impl AsyncRead + Unpin),
    link: &Link,
    inputs: &InputSender,
) -> ClosedReason {
    let mut tokens = TokenCache::new();
    let mut frames = 0_u32;
    loop {
        frames = frames.wrapping_add(1);
        if !link.same_user && frames.is_multiple_of(FORGET_TOKENS_AFTER) {
            tokens = TokenCache::new();
        }
        let (body, large) = match read_frame(reader, link).await {
            Ok(read) => read,
            Err(reason) => return reason,
        };
        let Ok(ahead) = Arc::clone(&link.ahead).acquire_owned().await else {
            return ClosedReason::Shutdown;
        };
        let checked = if body.len() < DECODE_ASIDE {
            check(&body, &mut tokens)
        } else {
            let mut cache = std::mem::take(&mut tokens);
            let aside = tokio::task::spawn_blocking(move || (check(&body, &mut cache), cache));
            let Ok((checked, cache)) = aside.await else { return ClosedReason::IoError };
            tokens = cache;
            checked
        };
        match checked {
            Ok(frame) => {
                let input = Input::Frame { session: link.id, frame };
                let hold = Hold { _ahead: Some(ahead), _large: large };
                if !inputs.send_holding(input, hold).await {
                    // The node has left. What it said last is still to be written; whoever runs
                    // the transport ends the link.
                    return std::future::pending().await;
                }
            }
            Err(error) if error.ends_connection() => return ClosedReason::NotCanonical,
            Err(error) => {
                link.shared.frames_dropped.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(
                    event = "frame_dropped",
                    session = link.id.0,
                    reason = error.code()
                );
            }
        }
    }
}

fn check(body: &[u8], tokens: &mut TokenCache) -> Result<Checked, FrameError> {
    Frame::decode(body).map(|frame| Checked::check(frame, tokens))
}

/// One frame's body, and the place it takes among the large ones.
async fn read_frame(
    reader: &mut (impl AsyncRead + Unpin),
    link: &Link,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ClosedReason> {
    let limits = &link.shared.limits;
    let mut header = [0; HEADER];
    // Between frames a peer may be silent; whether it is still there is the node's question.
    let first = read_some(reader, &mut header).await?;
    let begun = Instant::now();
    let rest = header.get_mut(first..).unwrap_or_default();
    if !rest.is_empty() {
        match timeout(limits.read_stall, reader.read_exact(rest)).await {
            Err(_) => return Err(ClosedReason::SlowFrame),
            Ok(Err(error)) => return Err(ClosedReason::of_error(&error)),
            Ok(Ok(_)) => {}
        }
    }
    let length = u32::from_be_bytes(header);
    if length == 0 {
        return Err(ClosedReason::NotCanonical);
    }
    if length > link.frame_limit.load(Ordering::Acquire) {
        // The node may be about to let the peer in: what came before decides.
        if length > MAX_FRAME || link.ahead.acquire_many(limits.frames_ahead).await.is_err() {
            return Err(ClosedReason::FrameTooLarge);
        }
        if length > link.frame_limit.load(Ordering::Acquire) {
            return Err(ClosedReason::FrameTooLarge);
        }
    }
    let (large, begun) = if length >= LARGE_FRAME {
        // The time spent waiting here is not the peer's.
        (link.large_frames().acquire_owned().await.ok(), Instant::now())
    } else {
        (None, begun)
    };
    let at_rate = Duration::from_secs(u64::from(length / limits.read_rate.max(1)));
    let deadline = begun + limits.read_stall + at_rate;
    let length = usize::try_from(length).map_err(|_| ClosedReason::FrameTooLarge)?;
    let mut body = Vec::new();
    link.awaiting_rest.store(true, Ordering::Relaxed);
    while body.len() < length {
        let missing = length - body.len();
        make_room(&mut body, length);
        let stalled = (Instant::now() + limits.read_stall).min(deadline);
        let mut rest = (&mut *reader).take(missing as u64);
        match timeout_at(stalled, rest.read_buf(&mut body)).await {
            Err(_) => return Err(ClosedReason::SlowFrame),
            Ok(Ok(0)) => return Err(ClosedReason::PeerClosed),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(ClosedReason::of_error(&error)),
        }
    }
    link.awaiting_rest.store(false, Ordering::Relaxed);
    Ok((body, large))
}

/// Room for the next bytes of a body of `length`, when there is none.
fn make_room(body: &mut Vec<u8>, length: usize) {
    if body.len() == body.capacity() {
        body.reserve_exact((length - body.len()).min(body.len().max(FIRST_RESERVE)));
    }
}

async fn read_some(
    reader: &mut (impl AsyncRead + Unpin),
    buffer: &mut [u8],
) -> Result<usize, ClosedReason> {
    match reader.read(buffer).await {
        Ok(0) => Err(ClosedReason::PeerClosed),
        Ok(read) => Ok(read),
        Err(error) => Err(ClosedReason::of_error(&error)),
    }
}

#[cfg(test)]
mod tests;
