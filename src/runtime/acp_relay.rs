//! The ACP relay's server: HTTP/1.1 with or without TLS, a task for each connection, bounds on
//! everything a client can do. What is decided is `acp::relay`'s, what is stored `store::acp_relay`'s;
//! no envelope is looked into, and neither path nor query nor token of a request is logged.

mod answer;
mod fault;
mod feed;
mod keeper;
mod socket;
mod stream;
mod waiters;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::fault::Fault;
use self::keeper::{Desk, Job, Keeper};
use super::clock::{Clock, unix_now};
use super::http::{CertificateError, acceptor};
use super::listener::{BindError, SourceGuard, Sources, bind, source_of, tune};
use super::stall::Stalling;
use super::tls::MAX_TLS_BUFFER;
use crate::acp::endpoint::{Endpoint, EndpointPolicy, Host};
use crate::acp::relay::rate::Allowance;
use crate::acp::relay::{Limits, Parcel, Taken, Who};
use crate::acp::value::EnvelopeId;
use crate::store::StoreError;

/// Bytes of a request's head: a token of 2 KiB may be in it twice.
const MAX_HEAD: usize = 16 * 1024;
/// Headers of a request.
const MAX_HEADERS: usize = 64;
/// How long accepting rests when the system is out of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The bounds of the server. The defaults are for use, others for tests and benches.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Bounds of what is kept, and of how often somebody may ask.
    pub tables: Limits,
    /// Connections.
    pub connections: usize,
    /// Connections of one address (IPv6: of one /64): a team behind one router.
    pub per_source: usize,
    /// For TLS, and for a request's head; also how long a connection may be idle between requests.
    pub head: Duration,
    /// For a request's body.
    pub body: Duration,
    /// Bytes of bodies that are being read or wait to be stored.
    pub bodies: usize,
    /// A client must go on reading.
    pub write_stall: Duration,
    /// How long a stream or socket stays authorised (design 11.2).
    pub stream_life: Duration,
    /// How long clients may take to hear that the relay is leaving.
    pub close: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            tables: Limits::default(),
            connections: 4_096,
            per_source: 128,
            head: Duration::from_secs(30),
            body: Duration::from_secs(30),
            bodies: 64 << 20,
            write_stall: Duration::from_secs(30),
            stream_life: Duration::from_secs(3_600),
            close: Duration::from_secs(2),
        }
    }
}

/// How the relay is served.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// Directory of the store. One relay a directory.
    pub state: PathBuf,
    /// Certificate chain and key, PEM; without them plain HTTP, for loopback or behind a proxy.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// By which origins clients reach it, as tokens name them in `audience`: needed behind a proxy and
    /// when it listens on all addresses. Without any, it is its address.
    pub origins: Vec<String>,
    /// Tokens are not taken from the query.
    pub no_query_auth: bool,
    /// A proxy tells in `X-Forwarded-For` whom it speaks for.
    pub behind_proxy: bool,
    /// Shown by `/v1/health`.
    pub version: &'static str,
    /// Bounds.
    pub limits: ServerLimits,
}

/// The relay cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Certificate or key.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The thread that stores.
    #[error("the thread that stores cannot be started: {0}")]
    Thread(io::Error),
    /// What clients call it is not known.
    #[error("{0} is every address of this machine: no token can name it")]
    NoOrigin(SocketAddr),
    /// What clients call it is no origin.
    #[error("{0:?} is no origin like https://relay.example.org")]
    BadOrigin(String),
    /// A bound that is zero or above its ceiling.
    #[error("the limit {0} is zero or higher than it may be")]
    BadLimit(&'static str),
}

impl ServerError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bind(error) => error.code(),
            Self::Certificate(error) => error.code(),
            Self::Store(error) => error.code(),
            Self::Thread(_) => "thread_failed",
            Self::NoOrigin(_) => "relay_origin_missing",
            Self::BadOrigin(_) => "relay_origin_malformed",
            Self::BadLimit(_) => "relay_limit_out_of_range",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> String {
        match self {
            Self::Bind(_) => "free the address, or choose another with --port or --host".into(),
            Self::Certificate(_) => {
                "give a PEM certificate chain with --tls-cert and its key with --tls-key".into()
            }
            Self::Store(StoreError::Locked { .. }) => {
                "end the other relay, or give this one a --state directory of its own".into()
            }
            Self::Store(StoreError::Corrupt(_)) => {
                "nothing was changed: put back a copy, or move relay.redb away to begin with an empty \
                 relay (senders send again what was not delivered)"
                    .into()
            }
            Self::Store(StoreError::Newer { .. }) => {
                "run the newer commsd, or give this one a --state directory of its own".into()
            }
            Self::Store(_) | Self::Thread(_) => {
                "check the disk, its free space, and the permissions of the --state directory".into()
            }
            Self::NoOrigin(_) | Self::BadOrigin(_) => {
                "say with --origin by which URL clients reach the relay, without a path".into()
            }
            Self::BadLimit(_) => "choose a lower limit (docs/acp.md lists the ceilings)".into(),
        }
    }
}

/// A relay that listens.
pub struct AcpRelayServer {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// How often each may ask.
struct Rates {
    senders: Allowance<Who>,
    writes: Allowance<IpAddr>,
    reads: Allowance<IpAddr>,
}

struct Shared {
    desk: Arc<Desk>,
    keeper: Keeper,
    rates: Mutex<Rates>,
    clock: Clock,
    /// The first is shown.
    origins: Vec<String>,
    /// Those that were configured: a page there may ask.
    pages: Vec<String>,
    hosts: Vec<String>,
    query_auth: bool,
    behind_proxy: bool,
    version: &'static str,
    limits: ServerLimits,
    sources: Arc<Sources>,
    connections: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
    refused: AtomicU64,
    stop: CancellationToken,
    tracker: TaskTracker,
}

/// What a connection holds; a socket that it has become holds on to it.
struct Held {
    _source: Option<SourceGuard>,
    _place: OwnedSemaphorePermit,
}

impl AcpRelayServer {
    /// Reads the certificate, opens the store and binds. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is bound then.
    pub fn bind(address: SocketAddr, options: ServerOptions) -> Result<Self, ServerError> {
        let ServerOptions { state, tls, origins: given, limits, .. } = options;
        if let Some(name) = limits.tables.fault() {
            return Err(ServerError::BadLimit(name));
        }
        let secure = tls.is_some();
        let tls = tls.map(|(certificate, key)| acceptor(&certificate, &key)).transpose()?;
        let pages = given.iter().map(|text| origin(text)).collect::<Result<Vec<_>, _>>()?;
        if pages.is_empty() && address.ip().is_unspecified() {
            return Err(ServerError::NoOrigin(address));
        }
        let desk = Arc::new(Desk::open(&state, limits.tables.clone())?);
        let listener = bind(address)?;
        let address =
            listener.local_addr().map_err(|error| BindError::Failed { address, error })?;
        let origins = if pages.is_empty() { own_origins(address, secure)? } else { pages.clone() };
        let (keeper, thread) = Keeper::start(Arc::clone(&desk)).map_err(ServerError::Thread)?;
        let tables = &limits.tables;
        let rates = Rates {
            senders: Allowance::new(tables.did_per_minute),
            writes: Allowance::new(tables.address_per_minute),
            reads: Allowance::new(tables.reads_per_minute),
        };
        let shared = Shared {
            desk,
            keeper,
            rates: Mutex::new(rates),
            clock: Clock::start(),
            hosts: origins.iter().filter_map(|origin| host_name(origin)).collect(),
            origins,
            pages,
            query_auth: !options.no_query_auth,
            behind_proxy: options.behind_proxy,
            version: options.version,
            sources: Sources::new(limits.per_source),
            connections: Arc::new(Semaphore::new(limits.connections)),
            bodies: Arc::new(Semaphore::new(limits.bodies)),
            refused: AtomicU64::new(0),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
            limits,
        };
        Ok(Self { listener, address, tls, shared: Arc::new(shared), thread })
    }

    /// What is bound.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How clients name it in their tokens.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.shared.origins.first().map_or("", String::as_str)
    }

    /// Serves until `stop` is cancelled; then requests under way are answered, streams ended, and
    /// what was answered is on disk.
    pub async fn serve(self, stop: CancellationToken) {
        let Self { listener, tls, shared, thread, .. } = self;
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let Ok(place) = Arc::clone(&shared.connections).try_acquire_owned() else {
                        shared.refuse(peer.ip(), "too_many_connections");
                        continue;
                    };
                    let (tls, served) = (tls.clone(), Arc::clone(&shared));
                    shared.tracker.spawn(connection(stream, peer.ip(), tls, place, served));
                }
                Err(error) => {
                    tracing::warn!(event = "acp_relay_accept_failed", error = %error);
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
        // The connections' own bounds end them.
        let _ = timeout(2 * shared.limits.close, shared.tracker.wait()).await;
        // The last who could ask: the thread ends when everything is written.
        drop(shared);
        let _ =
            timeout(Duration::from_secs(10), tokio::task::spawn_blocking(|| thread.join())).await;
    }
}

/// A configured origin, as tokens name it.
fn origin(text: &str) -> Result<String, ServerError> {
    let bad = || ServerError::BadOrigin(text.to_owned());
    let policy = EndpointPolicy { allow_private: true, allow_insecure: true };
    let endpoint = Endpoint::parse(text, policy).map_err(|_| bad())?;
    if endpoint.path == "/" { Ok(endpoint.origin()) } else { Err(bad()) }
}

/// The origins of an address that clients dial as it is.
fn own_origins(address: SocketAddr, secure: bool) -> Result<Vec<String>, ServerError> {
    let scheme = if secure { "https" } else { "http" };
    let mut origins = vec![origin(&format!("{scheme}://{address}"))?];
    if address.ip().is_loopback() {
        origins.push(origin(&format!("{scheme}://localhost:{}", address.port()))?);
    }
    Ok(origins)
}

/// The name in an origin, if it is no address.
fn host_name(origin: &str) -> Option<String> {
    let policy = EndpointPolicy { allow_private: true, allow_insecure: true };
    match Endpoint::parse(origin, policy).ok()?.host {
        Host::Name(name) => Some(name),
        Host::Address(_) => None,
    }
}

impl Shared {
    /// One line per doubling: a flood is visible and does not flood the log.
    fn refuse(&self, source: IpAddr, reason: &'static str) {
        let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if count < 32 || count.is_power_of_two() {
            tracing::warn!(event = "acp_relay_connection_refused", source = %source, reason, count);
        }
    }

    fn mono(&self) -> u64 {
        self.clock.now().mono
    }

    /// Counts a request that changes something, or that anybody may make.
    fn charge_write(&self, from: IpAddr) -> Result<(), Fault> {
        Ok(self.rates.lock().writes.take(source_of(from), self.mono())?)
    }

    /// Counts a request with a token.
    fn charge_read(&self, from: IpAddr) -> Result<(), Fault> {
        Ok(self.rates.lock().reads.take(source_of(from), self.mono())?)
    }

    /// Counts what somebody has signed.
    fn charge_sender(&self, who: Who) -> Result<(), Fault> {
        Ok(self.rates.lock().senders.take(who, self.mono())?)
    }

    /// Makes room for bytes of a body, for as long as the permit is held.
    fn hold(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Fault> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.bodies)
            .try_acquire_many_owned(bytes)
            .map_err(|_| Fault::busy("too much is being sent to the relay"))
    }

    /// Checks an envelope and has it stored.
    async fn send(&self, bytes: &[u8]) -> Result<(EnvelopeId, Taken), Fault> {
        let parcel = Parcel::read(bytes, self.limits.tables.envelope_bytes, unix_now())?;
        let id = parcel.id.clone();
        // Only now it is known that the sender has sent it.
        self.charge_sender(parcel.from)?;
        let taken = self.keeper.ask(Job::Send(parcel)).await?;
        taken.map(|taken| (id, taken)).ok_or_else(|| Fault::busy("the relay is stopping"))
    }
}

/// One connection until it has ended or become a socket.
async fn connection(
    stream: TcpStream,
    peer: IpAddr,
    tls: Option<TlsAcceptor>,
    place: OwnedSemaphorePermit,
    shared: Arc<Shared>,
) {
    // Behind a proxy all come from one address.
    let source = if shared.behind_proxy { None } else { shared.sources.admit(peer) };
    if source.is_none() && !shared.behind_proxy {
        return shared.refuse(peer, "too_many_of_source");
    }
    if tune(&stream, true).is_err() {
        return;
    }
    let held = Arc::new(Held { _source: source, _place: place });
    let stream = Stalling::new(stream, shared.limits.write_stall);
    match tls {
        None => requests(stream, peer, &held, &shared).await,
        Some(tls) => {
            let accept = tls.accept_with(stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)));
            let accepted = tokio::select! {
                () = shared.stop.cancelled() => return,
                accepted = timeout(shared.limits.head, accept) => accepted,
            };
            match accepted {
                Ok(Ok(stream)) => requests(stream, peer, &held, &shared).await,
                Ok(Err(_)) => shared.refuse(peer, "tls_failed"),
                Err(_) => shared.refuse(peer, "timeout"),
            }
        }
    }
}

/// Answers the requests of a connection, one after the other.
async fn requests(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: IpAddr,
    held: &Arc<Held>,
    shared: &Arc<Shared>,
) {
    let service = service_fn(|request| answer::answer(request, peer, held, shared));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(shared.limits.head)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS);
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = shared.stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            match timeout(shared.limits.close, served).await {
                Ok(ended) => ended,
                Err(_) => return,
            }
        }
    };
    // A client that has gone, or has been idle, is no news.
    if ended.is_err_and(|error| error.is_parse()) {
        shared.refuse(peer, "not_http");
    }
}
