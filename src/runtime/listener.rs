//! Accepting connections for a device: TLS handshakes within bounds, then who is there. What a
//! session may do is the node's business.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::{TlsAcceptor, TlsStream};
use tokio_util::sync::CancellationToken;

use super::hub::Context;
use super::link::Link;
use super::tls::{DeviceTls, MAX_TLS_BUFFER, peer_device};
use crate::identity::device::DeviceId;
use crate::mesh::node::Input;
use crate::mesh::session::{Origin, SessionKind};

/// Connections that wait for the accept loop; the system cuts it down to its own maximum.
const LISTEN_BACKLOG: u32 = 1024;
/// How long accepting rests when the system is out of descriptors or memory: long enough not to
/// spin, short enough that nobody notices once something has been closed.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Silence after which the system asks a peer on another machine for a sign of life.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Pause between such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How long another machine may leave what we sent unacknowledged.
#[cfg(target_os = "linux")]
const USER_TIMEOUT: Duration = Duration::from_secs(90);

/// A socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody has the port.
    #[error("{0} is in use by another process")]
    InUse(SocketAddr),
    /// Anything else.
    #[error("{address} cannot be bound: {error}")]
    Failed {
        /// What was asked for.
        address: SocketAddr,
        /// What the system says.
        error: io::Error,
    },
}

impl BindError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::InUse(_) => "port_in_use",
            Self::Failed { .. } => "bind_failed",
        }
    }

    /// Whether somebody else has the port.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse(_))
    }
}

/// Binds as the reference does: an address that lingers from closed connections is free, one with
/// a listener is not. Needs a tokio runtime.
pub(super) fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    let listener = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(LISTEN_BACKLOG)
    };
    listener().map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => BindError::InUse(address),
        _ => BindError::Failed { address, error },
    })
}

/// Frames leave at once; connections to other machines notice when those have gone.
pub(super) fn tune(stream: &TcpStream, network: bool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if network {
        let socket = socket2::SockRef::from(stream);
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL);
        socket.set_tcp_keepalive(&keepalive)?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    }
    Ok(())
}

/// A connection that has the system acknowledge the beginning of a frame at once when the rest is
/// still to come. The reference writes a frame's length and body apart and holds the body back until
/// the length has been acknowledged, which takes 40 ms by default.
pub(super) struct Prompt {
    stream: TlsStream<TcpStream>,
    link: Arc<Link>,
}

impl Prompt {
    pub(super) fn new(stream: TlsStream<TcpStream>, link: Arc<Link>) -> Self {
        Self { stream, link }
    }

    #[cfg(target_os = "linux")]
    fn acknowledge(&self) {
        // Only a delay is lost when the system refuses.
        let _ = socket2::SockRef::from(self.stream.get_ref().0).set_tcp_quickack(true);
    }

    #[cfg(not(target_os = "linux"))]
    fn acknowledge(&self) {}
}

impl AsyncRead for Prompt {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_pending() && self.link.take_awaiting_rest() {
            self.acknowledge();
        }
        read
    }
}

impl AsyncWrite for Prompt {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

// ---------------------------------------------------------------------------------------------
// Bounds

/// Connections whose handshake has not ended. When all places are taken, one that has had its time
/// makes room for a newcomer, so that silent connections cannot lock others out.
#[derive(Debug)]
pub(super) struct Handshakes {
    places: usize,
    own_time: Duration,
    state: Mutex<HandshakeState>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct HandshakeState {
    next: u64,
    running: VecDeque<(u64, Instant, CancellationToken)>,
}

/// A place among the handshakes; given back when dropped.
#[derive(Debug)]
pub(super) struct Place {
    id: u64,
    /// Cancelled when the place is taken away.
    pub(super) evicted: CancellationToken,
    handshakes: Arc<Handshakes>,
}

impl Handshakes {
    pub(super) fn new(places: usize, own_time: Duration) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { places, own_time, state, freed: Notify::new() })
    }

    pub(super) fn running(&self) -> usize {
        self.state.lock().running.len()
    }

    pub(super) async fn place(self: &Arc<Self>) -> Place {
        loop {
            let freed = self.freed.notified();
            let next_eviction = {
                let mut state = self.state.lock();
                let now = Instant::now();
                let oldest = match state.running.front() {
                    Some((_, since, _)) if state.running.len() >= self.places => {
                        Some(*since + self.own_time)
                    }
                    _ => None,
                };
                match oldest {
                    Some(at) if at > now => at,
                    over_time => {
                        if over_time.is_some()
                            && let Some((_, _, evicted)) = state.running.pop_front()
                        {
                            evicted.cancel();
                        }
                        let evicted = CancellationToken::new();
                        let id = state.next;
                        state.next += 1;
                        state.running.push_back((id, now, evicted.clone()));
                        return Place { id, evicted, handshakes: Arc::clone(self) };
                    }
                }
            };
            tokio::select! {
                () = freed => {}
                () = sleep_until(next_eviction) => {}
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.handshakes.state.lock();
        if let Some(at) = state.running.iter().position(|(id, ..)| *id == self.id) {
            state.running.remove(at);
        }
        drop(state);
        self.handshakes.freed.notify_one();
    }
}

/// Connections by the machine they come from.
#[derive(Debug)]
pub(super) struct Sources {
    most: usize,
    open: Mutex<HashMap<IpAddr, usize>>,
}

/// One connection of a source; given back when dropped.
#[derive(Debug)]
pub(super) struct SourceGuard {
    source: IpAddr,
    sources: Arc<Sources>,
}

impl Sources {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default() })
    }

    pub(super) fn admit(self: &Arc<Self>, ip: IpAddr) -> Option<SourceGuard> {
        let source = source_of(ip);
        let mut open = self.open.lock();
        let count = open.entry(source).or_insert(0);
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(SourceGuard { source, sources: Arc::clone(self) })
    }
}

impl Drop for SourceGuard {
    fn drop(&mut self) {
        let mut open = self.sources.open.lock();
        if let Some(count) = open.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.source);
            }
        }
    }
}

/// One machine has as many IPv6 addresses as it likes within its network's 64 bits.
pub(super) fn source_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

// ---------------------------------------------------------------------------------------------
// Accepting

/// A listener and what it accepts for.
pub(super) struct Door {
    pub(super) listener: TcpListener,
    pub(super) tls: DeviceTls,
    pub(super) kind: SessionKind,
    /// Ends accepting, and the handshakes under way.
    pub(super) closed: CancellationToken,
}

/// Accepts until the door is closed; then the port is free.
pub(super) async fn accept(door: Door, context: Arc<Context>) {
    let Door { listener, tls, kind, closed } = door;
    let network = matches!(kind, SessionKind::NetworkAccepted(_));
    let handshakes = if network { &context.network_handshakes } else { &context.local_handshakes };
    let mut resting = false;
    loop {
        let accepted = tokio::select! {
            () = closed.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_the_connection(&error) => continue,
            Err(error) => {
                if !resting {
                    tracing::warn!(event = "accept_paused", kind = kind.as_str(), %error);
                }
                resting = true;
                tokio::select! {
                    () = closed.cancelled() => return,
                    () = sleep(ACCEPT_BACKOFF) => continue,
                }
            }
        };
        if std::mem::take(&mut resting) {
            tracing::info!(event = "accept_resumed", kind = kind.as_str());
        }
        if !context.has_room() {
            context.refused(kind, "full");
            continue;
        }
        let source = if network {
            let Some(guard) = context.sources.admit(peer.ip()) else {
                context.refused(kind, "too_many_of_source");
                continue;
            };
            Some(guard)
        } else {
            None
        };
        let place = tokio::select! {
            () = closed.cancelled() => return,
            place = handshakes.place() => place,
        };
        let greeting = Greeting { tls: tls.clone(), kind, peer, source };
        let (context, closed) = (Arc::clone(&context), closed.clone());
        let tracker = context.tracker.clone();
        tracker.spawn(async move {
            let evicted = place.evicted.clone();
            let greeted = tokio::select! {
                () = closed.cancelled() => Err("listener_closed"),
                () = evicted.cancelled() => Err("handshake_evicted"),
                greeted = greeting.greet(stream, &context) => greeted,
            };
            drop(place);
            if let Err(reason) = greeted {
                context.refused(kind, reason);
            }
        });
    }
}

/// Errors that are the fault of a connection which died while waiting to be accepted.
fn is_of_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::ConnectionAborted
            | Kind::ConnectionReset
            | Kind::ConnectionRefused
            | Kind::Interrupted
    )
}

struct Greeting {
    tls: DeviceTls,
    kind: SessionKind,
    peer: SocketAddr,
    source: Option<SourceGuard>,
}

impl Greeting {
    async fn greet(self, stream: TcpStream, context: &Arc<Context>) -> Result<(), &'static str> {
        let network = matches!(self.kind, SessionKind::NetworkAccepted(_));
        tune(&stream, network).map_err(|_| "io_error")?;
        let local = stream.local_addr().map_err(|_| "io_error")?;
        let acceptor = TlsAcceptor::from(self.tls.server());
        let handshake =
            acceptor.accept_with(stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)));
        let mut stream = match timeout(context.limits.handshake, handshake).await {
            Err(_) => return Err("handshake_timeout"),
            Ok(Err(_)) => return Err("tls_failed"),
            Ok(Ok(stream)) => stream,
        };
        let Some(remote) = peer_device(stream.get_ref().1.peer_certificates()) else {
            // As the reference: TLS comes up, then the end, without a word in between.
            let _ = timeout(context.limits.handshake, stream.shutdown()).await;
            return Err("no_certificate");
        };
        // What comes in by the network's door is never machine-local, wherever it started
        // (decision 14).
        let origin =
            if network { Origin::Network } else { context.origins.of(local, self.peer).await };
        if origin != Origin::SameUser && !context.has_room_for_others() {
            return Err("full");
        }
        let (device, kind) = (self.tls.id(), self.kind);
        context.open(TlsStream::from(stream), origin, self.source, |session| {
            accepted(session, device, remote, kind, origin)
        });
        Ok(())
    }
}

fn accepted(
    session: crate::mesh::session::SessionId,
    local: DeviceId,
    remote: DeviceId,
    kind: SessionKind,
    origin: Origin,
) -> Input {
    Input::Accepted { session, local, remote, kind, origin }
}
