//! The relay hub's server: HTTP with two answers (the WebSocket at `/`, the state at `/health`), a
//! task for each link, bounds on everything a client can do. What goes where is decided in
//! `mesh::relay_hub`; nothing in a payload is looked at, kept or logged.
//!
//! A slow client loses frames, and then its link; it never makes anybody else wait. A fast one is
//! read no faster than its allowance.

mod queue;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Error as WsError, Message};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::queue::{Queue, QueueLimits, Total};
use super::clock::Clock;
use super::http::{CertificateError, acceptor, forwarded_for, host_is_ours, websocket_accept};
use super::listener::{BindError, SourceGuard, Sources, bind, source_of, tune};
use super::tls::MAX_TLS_BUFFER;
use crate::mesh::relay_hub::{HubFrame, Limits, LinkId, RelayHub};
use crate::mesh::wire::frame::Frame;

/// Longest message: what the largest answer of a shared vault takes, sealed, with room to spare.
pub const MAX_MESSAGE: usize = 1024 * 1024 + 256 * 1024;
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 * 1024;
/// Headers of a request.
const MAX_HEADERS: usize = 64;
/// How long accepting rests when the system is out of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Adverts in a frame from this number on are verified beside the network's threads, since that
/// takes milliseconds.
const VERIFY_ASIDE: usize = 8;

/// The bounds of the server. The defaults are for use, others for tests.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Bounds of the tables.
    pub tables: Limits,
    /// Links.
    pub links: usize,
    /// Connections that are no links yet, in all.
    pub handshakes: usize,
    /// Of these, of one address; behind a proxy, which has its own bound, all places are one's.
    pub handshakes_of_source: usize,
    /// Connections of one address (IPv6: of one /64): a team behind one router.
    pub per_source: usize,
    /// For TLS, and for a request's head.
    pub handshake: Duration,
    /// A link without any device after this is closed.
    pub register: Duration,
    /// A message must have come within this. Clients gossip every 20 s.
    pub idle: Duration,
    /// A client must go on reading.
    pub write_stall: Duration,
    /// Bytes that wait for one link. All adverts fit twice.
    pub queue: usize,
    /// Of these, bytes of one sender: the longest message fits.
    pub queue_share: usize,
    /// Bytes that wait for all links.
    pub queues: usize,
    /// Bytes a link may send each second, and at once.
    pub bytes: (u64, u64),
    /// Messages a link may send each second, and at once.
    pub messages: (u64, u64),
    /// How long links may take to hear that the hub is leaving.
    pub close: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            tables: Limits::default(),
            links: 1024,
            handshakes: 256,
            // A team behind one router that connects again at the same moment; who finds no place
            // comes again a second later.
            handshakes_of_source: 32,
            per_source: 64,
            handshake: Duration::from_secs(10),
            register: Duration::from_secs(60),
            idle: Duration::from_secs(120),
            write_stall: Duration::from_secs(30),
            queue: 8 * 1024 * 1024,
            queue_share: 2 * 1024 * 1024,
            queues: 512 * 1024 * 1024,
            bytes: (2 * 1024 * 1024, 8 * 1024 * 1024),
            messages: (1000, 4000),
            close: Duration::from_secs(2),
        }
    }
}

/// How the hub is served.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// Certificate chain and key, PEM; without them plain HTTP, for a proxy that has them.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Host names it answers to, beside addresses and `localhost`.
    pub hosts: Vec<String>,
    /// A proxy tells in `X-Forwarded-For` whom it speaks for.
    pub behind_proxy: bool,
    /// Shown by `/health`.
    pub version: &'static str,
    /// Bounds.
    pub limits: ServerLimits,
}

/// The hub cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Certificate or key.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

impl ServerError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bind(error) => error.code(),
            Self::Certificate(CertificateError::Pem { .. }) => "hub_certificate",
            Self::Certificate(CertificateError::Tls(_)) => "hub_tls",
        }
    }
}

/// A hub that listens.
pub struct RelayServer {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
}

struct Tables {
    hub: RelayHub,
    queues: HashMap<LinkId, Arc<Queue>>,
}

struct Shared {
    tables: Mutex<Tables>,
    clock: Clock,
    options: ServerOptions,
    sources: Arc<Sources>,
    shaking: Arc<Sources>,
    total: Arc<Total>,
    handshakes: AtomicUsize,
    links: AtomicUsize,
    next_link: AtomicU64,
    refused: AtomicU64,
    /// Frames that found no room.
    lost: AtomicU64,
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl RelayServer {
    /// Reads the certificate and binds. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is bound then.
    pub fn bind(address: SocketAddr, options: ServerOptions) -> Result<Self, ServerError> {
        let tls = match &options.tls {
            Some((certificate, key)) => Some(acceptor(certificate, key)?),
            None => None,
        };
        let listener = bind(address)?;
        let address =
            listener.local_addr().map_err(|error| BindError::Failed { address, error })?;
        let limits = &options.limits;
        let shared = Shared {
            tables: Mutex::new(Tables {
                hub: RelayHub::new(limits.tables.clone()),
                queues: HashMap::new(),
            }),
            clock: Clock::start(),
            sources: Sources::new(limits.per_source),
            shaking: Sources::new(limits.handshakes_of_source),
            total: Arc::default(),
            handshakes: AtomicUsize::new(0),
            links: AtomicUsize::new(0),
            next_link: AtomicU64::new(1),
            refused: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
            options,
        };
        Ok(Self { listener, address, tls, shared: Arc::new(shared) })
    }

    /// What is bound.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is cancelled; then links are told and ended.
    pub async fn serve(self, stop: CancellationToken) {
        let Self { listener, tls, shared, .. } = self;
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let places = &shared.options.limits;
                    let running = shared.handshakes.load(Ordering::Relaxed);
                    if running >= places.handshakes {
                        shared.refuse(peer.ip(), "too_many_handshakes");
                        continue;
                    }
                    let of_source = if shared.options.behind_proxy {
                        None
                    } else if let Some(guard) = shared.shaking.admit(peer.ip()) {
                        Some(guard)
                    } else {
                        shared.refuse(peer.ip(), "too_many_handshakes_of_source");
                        continue;
                    };
                    let count = Counted::new(&shared, |shared| &shared.handshakes);
                    let place = Place { _count: count, _of_source: of_source };
                    let (tls, served) = (tls.clone(), Arc::clone(&shared));
                    shared.tracker.spawn(async move {
                        tokio::select! {
                            () = served.stop.cancelled() => {}
                            () = connection(stream, peer.ip(), tls, place, &served) => {}
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(event = "hub_accept_failed", error = %error);
                    tokio::select! {
                        () = stop.cancelled() => break,
                        () = sleep(ACCEPT_BACKOFF) => {}
                    }
                }
            }
        }
        drop(listener);
        shared.stop.cancel();
        shared.tracker.close();
        // The links' own bounds end them.
        let _ = timeout(2 * shared.options.limits.close, shared.tracker.wait()).await;
    }
}

/// One of something counted; given back when dropped.
struct Counted {
    shared: Arc<Shared>,
    count: fn(&Shared) -> &AtomicUsize,
}

impl Counted {
    fn new(shared: &Arc<Shared>, count: fn(&Shared) -> &AtomicUsize) -> Self {
        count(shared).fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::clone(shared), count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.count)(&self.shared).fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection's place while it is no link yet.
struct Place {
    _count: Counted,
    _of_source: Option<SourceGuard>,
}

impl Shared {
    /// One line per doubling: a flood is visible and does not flood the log.
    fn refuse(&self, source: IpAddr, reason: &'static str) {
        let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if count < 32 || count.is_power_of_two() {
            tracing::warn!(event = "hub_connection_refused", source = %source, reason, count);
        }
    }

    /// Carries out what the hub wants. With the tables locked, so that each link gets frames in
    /// the order in which they were decided.
    fn carry_out(&self, tables: &mut Tables) {
        while let Some(out) = tables.hub.poll_output() {
            let message = Bytes::from(out.frame.encode());
            for to in &out.to {
                let queue = tables.queues.get(to);
                if !queue.is_some_and(|queue| queue.push(message.clone(), out.from)) {
                    self.lost.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn health(&self) -> String {
        let stats = self.tables.lock().hub.stats();
        serde_json::json!({
            "status": "ok",
            "version": self.options.version,
            "uptimeMs": self.clock.now().mono,
            "links": stats.links,
            "devices": stats.devices,
            "pairs": stats.pairs,
            "relayed": stats.relayed,
            "undeliverable": stats.undeliverable,
            "overBounds": stats.over_bounds,
            "lost": self.lost.load(Ordering::Relaxed),
            "refused": self.refused.load(Ordering::Relaxed),
            "queuedBytes": self.total.bytes(),
        })
        .to_string()
    }
}

// ---------------------------------------------------------------------------------------------
// HTTP

/// One connection until it has become a link or has been answered.
async fn connection(
    stream: TcpStream,
    peer: IpAddr,
    tls: Option<TlsAcceptor>,
    place: Place,
    shared: &Arc<Shared>,
) {
    // Behind a proxy all come from one address; the request tells.
    let source = if shared.options.behind_proxy { None } else { shared.sources.admit(peer) };
    if source.is_none() && !shared.options.behind_proxy {
        return shared.refuse(peer, "too_many_of_source");
    }
    if tune(&stream, true).is_err() {
        return;
    }
    let within = shared.options.limits.handshake;
    match tls {
        None => requests(stream, peer, source, place, shared).await,
        Some(tls) => {
            let accept = tls.accept_with(stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)));
            match timeout(within, accept).await {
                Ok(Ok(stream)) => requests(stream, peer, source, place, shared).await,
                Ok(Err(_)) => shared.refuse(peer, "tls_failed"),
                Err(_) => shared.refuse(peer, "timeout"),
            }
        }
    }
}

/// Reads one request and answers it.
async fn requests(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: IpAddr,
    source: Option<SourceGuard>,
    place: Place,
    shared: &Arc<Shared>,
) {
    let within = shared.options.limits.handshake;
    let link = Mutex::new(Some((source, place)));
    let service = service_fn(|request: Request<Incoming>| {
        let taken = link.lock().take();
        let answer = answer(request, peer, taken, shared);
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(within)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS);
    let served = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
    match timeout(2 * within, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.is_timeout() => shared.refuse(peer, "timeout"),
        Ok(Err(_)) => shared.refuse(peer, "not_http"),
        Err(_) => shared.refuse(peer, "timeout"),
    }
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    // One question each: whoever has more of them connects again.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The answer to a request; for a WebSocket also the task that serves it.
fn answer(
    mut request: Request<Incoming>,
    peer: IpAddr,
    taken: Option<(Option<SourceGuard>, Place)>,
    shared: &Arc<Shared>,
) -> Response<Full<Bytes>> {
    let refuse = |status: StatusCode, reason: &'static str| {
        shared.refuse(peer, reason);
        plain(status, format!("{reason}\n"))
    };
    let headers = request.headers();
    if !host_is_ours(headers, &shared.options.hosts) {
        return refuse(StatusCode::FORBIDDEN, "host_not_allowed");
    }
    // No web page has business here, and browsers always say where they come from.
    if headers.contains_key(header::ORIGIN) {
        return refuse(StatusCode::FORBIDDEN, "origin_not_allowed");
    }
    if request.method() != Method::GET {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
    }
    match request.uri().path() {
        "/health" => {
            let mut response = plain(StatusCode::OK, shared.health());
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
                .headers_mut()
                .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        "/" => {
            let Some(accept) = websocket_accept(headers) else {
                let mut response = refuse(StatusCode::UPGRADE_REQUIRED, "websocket_wanted");
                let websocket = HeaderValue::from_static("websocket");
                response.headers_mut().insert(header::UPGRADE, websocket);
                return response;
            };
            let source = forwarded_for(headers).filter(|_| shared.options.behind_proxy);
            let source_ip = source.unwrap_or(peer);
            let Some((guard, place)) = taken else {
                return refuse(StatusCode::BAD_REQUEST, "one_request_each");
            };
            let Some(guard) = guard.or_else(|| shared.sources.admit(source_ip)) else {
                return refuse(StatusCode::TOO_MANY_REQUESTS, "too_many_of_source");
            };
            if shared.links.load(Ordering::Relaxed) >= shared.options.limits.links {
                return refuse(StatusCode::SERVICE_UNAVAILABLE, "too_many_links");
            }
            let link = Counted::new(shared, |shared| &shared.links);
            let upgrade = hyper::upgrade::on(&mut request);
            let served = Arc::clone(shared);
            shared.tracker.spawn(async move {
                let upgraded = timeout(served.options.limits.handshake, upgrade).await;
                drop(place);
                if let Ok(Ok(upgraded)) = upgraded {
                    serve_link(TokioIo::new(upgraded), source_ip, &served).await;
                }
                drop((guard, link));
            });
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            let headers = response.headers_mut();
            headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
            response
        }
        _ => refuse(StatusCode::NOT_FOUND, "not_found"),
    }
}

// ---------------------------------------------------------------------------------------------
// Links

/// What a link may still send, in units a second.
struct Allowance {
    rate: u64,
    most: u64,
    left: u64,
    at: Instant,
}

impl Allowance {
    fn new((rate, most): (u64, u64)) -> Self {
        Self { rate: rate.max(1), most, left: most, at: Instant::now() }
    }

    /// Takes so much, and says when the next may be read.
    fn take(&mut self, amount: u64) -> Instant {
        let now = Instant::now();
        let since = u64::try_from(now.saturating_duration_since(self.at).as_millis());
        let gained = since.unwrap_or(u64::MAX).saturating_mul(self.rate) / 1000;
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(self.most);
            self.at = now;
        }
        if amount <= self.left {
            self.left -= amount;
            return now;
        }
        // What is missing is earned before anything else is read.
        let missing = amount - self.left;
        self.left = 0;
        let wait = Duration::from_millis(missing.saturating_mul(1000) / self.rate);
        self.at = now + wait;
        self.at
    }
}

/// A stream that is read no faster than an allowance in bytes. Below the frames of WebSocket, since
/// not all of them make a message.
struct Metered<S> {
    inner: S,
    allowance: Allowance,
    rest: Option<Pin<Box<Sleep>>>,
}

impl<S> Metered<S> {
    fn new(inner: S, bytes: (u64, u64)) -> Self {
        Self { inner, allowance: Allowance::new(bytes), rest: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(rest) = &mut this.rest {
            ready!(rest.as_mut().poll(context));
            this.rest = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(context, buffer))?;
        let next = this.allowance.take((buffer.filled().len() - before) as u64);
        if next > Instant::now() {
            this.rest = Some(Box::pin(sleep_until(next)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

type Reason = &'static str;

async fn serve_link(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    source: IpAddr,
    shared: &Arc<Shared>,
) {
    let limits = &shared.options.limits;
    // Small buffers: there are many links, and messages are flushed one by one.
    let config = WebSocketConfig::default()
        .read_buffer_size(8 * 1024)
        .write_buffer_size(0)
        .max_write_buffer_size(MAX_MESSAGE + 64 * 1024)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let stream = Metered::new(stream, limits.bytes);
    let socket = WebSocketStream::from_raw_socket(stream, Role::Server, Some(config)).await;
    let id = LinkId(shared.next_link.fetch_add(1, Ordering::Relaxed));
    let bounds = QueueLimits {
        most: limits.queue,
        share: limits.queue_share,
        total: limits.queues,
        least: 64 * 1024,
    };
    let queue = Arc::new(Queue::new(id, bounds, Arc::clone(&shared.total)));
    {
        let mut tables = shared.tables.lock();
        tables.queues.insert(id, Arc::clone(&queue));
        tables.hub.opened(id, source_of(source), shared.clock.now());
    }
    tracing::debug!(event = "hub_link_opened", link = id.0, source = %source);
    let (mut sink, mut stream) = socket.split();
    let mut read = Read { frames: 0, bytes: 0 };
    let reason = {
        let writing = async {
            while let Some(message) = queue.next().await {
                let sent = sink.feed(Message::Binary(message));
                match timeout(limits.write_stall, sent).await {
                    Err(_) => return "slow_consumer",
                    Ok(Err(_)) => return "io_error",
                    Ok(Ok(())) => {}
                }
                if queue.is_empty() {
                    match timeout(limits.write_stall, sink.flush()).await {
                        Err(_) => return "slow_consumer",
                        Ok(Err(_)) => return "io_error",
                        Ok(Ok(())) => {}
                    }
                }
            }
            "closed"
        };
        tokio::select! {
            reason = read_link(&mut stream, id, &mut read, shared) => reason,
            reason = writing => reason,
            () = shared.stop.cancelled() => "shutdown",
        }
    };
    {
        let mut tables = shared.tables.lock();
        tables.queues.remove(&id);
        tables.hub.closed(id);
    }
    queue.close();
    let code = match reason {
        "shutdown" => Some(CloseCode::Away),
        "not_canonical" | "text_message" => Some(CloseCode::Protocol),
        "message_too_large" => Some(CloseCode::Size),
        "idle" | "not_registered" => Some(CloseCode::Policy),
        _ => None,
    };
    if let Some(code) = code {
        let frame = CloseFrame { code, reason: reason.into() };
        let _ = timeout(limits.close, async {
            let _ = sink.send(Message::Close(Some(frame))).await;
            // Read on until the client has seen it: closing with unread bytes would reset the
            // connection, and the client could lose it.
            while let Some(Ok(_)) = stream.next().await {}
        })
        .await;
    }
    tracing::info!(
        event = "hub_link_closed",
        link = id.0,
        source = %source,
        reason,
        frames = read.frames,
        bytes = read.bytes,
    );
}

/// What has come over a link.
struct Read {
    frames: u64,
    bytes: u64,
}

async fn read_link<S>(
    stream: &mut futures_util::stream::SplitStream<WebSocketStream<S>>,
    id: LinkId,
    read: &mut Read,
    shared: &Arc<Shared>,
) -> Reason
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let limits = &shared.options.limits;
    let register_by = Instant::now() + limits.register;
    let mut registered = false;
    let mut messages = Allowance::new(limits.messages);
    loop {
        let idle = Instant::now() + limits.idle;
        let until = if registered { idle } else { idle.min(register_by) };
        let message = match tokio::time::timeout_at(until, stream.next()).await {
            Err(_) if registered || idle <= register_by => return "idle",
            Err(_) => return "not_registered",
            Ok(None | Some(Ok(Message::Close(_)))) => return "peer_closed",
            Ok(Some(Err(error))) => return reason_of(&error),
            Ok(Some(Ok(message))) => message,
        };
        read.frames += 1;
        read.bytes += message.len() as u64;
        let next = messages.take(1);
        let body = match message {
            Message::Binary(body) => body,
            Message::Text(_) => return "text_message",
            _ => {
                sleep_until(next).await;
                continue;
            }
        };
        match Frame::decode(&body) {
            Ok(frame) => {
                take_frame(id, frame, shared).await;
                registered = registered || shared.tables.lock().hub.is_registered(id);
            }
            Err(error) if error.ends_connection() => return "not_canonical",
            Err(_) => {}
        }
        sleep_until(next).await;
    }
}

fn reason_of(error: &WsError) -> Reason {
    match error {
        WsError::Capacity(_) => "message_too_large",
        WsError::Protocol(_) | WsError::Utf8(_) | WsError::AttackAttempt => "not_websocket",
        WsError::Io(error) if error.kind() == io::ErrorKind::InvalidData => "tls_failed",
        _ => "peer_closed",
    }
}

async fn take_frame(id: LinkId, frame: Frame, shared: &Arc<Shared>) {
    let adverts = match &frame {
        Frame::Gossip { peers } => peers.len(),
        _ => 0,
    };
    if adverts > 0 {
        let now = shared.clock.now();
        if !shared.tables.lock().hub.may_gossip(id, adverts, now) {
            return;
        }
    }
    let frame = if adverts < VERIFY_ASIDE {
        HubFrame::check(frame)
    } else {
        match tokio::task::spawn_blocking(move || HubFrame::check(frame)).await {
            Ok(frame) => frame,
            Err(_) => return,
        }
    };
    let mut tables = shared.tables.lock();
    tables.hub.frame(id, frame, shared.clock.now());
    shared.carry_out(&mut tables);
}

#[cfg(test)]
mod tests;
