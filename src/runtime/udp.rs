//! UDP first contact (`transport.md` 4.1): one socket that shares its port with every other peer of
//! the machine, a multicast group on loopback, and broadcast. Datagrams are only carried here.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::UdpSocket;
use tokio::time::{Instant, interval};
use tokio_util::sync::CancellationToken;

use super::link::InputSender;
use crate::mesh::first_contact::{Datagram, GROUP, MAX_DATAGRAM};
use crate::mesh::node::Input;

/// Time between looks at the machine's addresses.
pub const ADDRESSES_INTERVAL: Duration = Duration::from_secs(30);
/// Datagrams heeded at once, from this machine and from others each: more peers than a machine has
/// at its start.
const BURST: u32 = 256;
/// Datagrams heeded per second after that.
const RATE: u32 = 64;
/// Pause after a receive error, so that a broken socket does not spin.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// First contact cannot run.
#[derive(Debug, thiserror::Error)]
pub enum UdpError {
    /// The socket.
    #[error("UDP port {port} cannot be bound: {error}; first contact is off")]
    Bind {
        /// Which port.
        port: u16,
        /// What the system says.
        error: io::Error,
    },
}

impl UdpError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bind { .. } => "udp_bind",
        }
    }
}

/// The first-contact socket.
#[derive(Debug)]
pub(super) struct FirstContact {
    socket: UdpSocket,
    port: u16,
    /// Whether the group is joined and what we send to it stays on loopback.
    pub(super) group: bool,
    broadcast: bool,
}

impl FirstContact {
    /// Binds `port` on all addresses and joins the group on loopback; without the group it goes on
    /// with broadcast alone. `broadcast: false`: nothing ever leaves the machine. Needs a tokio
    /// runtime.
    pub(super) fn bind(port: u16, broadcast: bool) -> Result<Self, UdpError> {
        let bound = || {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
            socket.set_reuse_address(true)?;
            // Elsewhere sharing a port for multicast takes this; on Linux it would keep peers out
            // that only ask for the other.
            #[cfg(not(target_os = "linux"))]
            socket.set_reuse_port(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
            Ok(socket)
        };
        let socket = bound().map_err(|error| UdpError::Bind { port, error })?;
        let group = join(&socket);
        if let Err(error) = &group {
            tracing::warn!(event = "multicast_unavailable", %error);
        }
        let broadcast = broadcast && {
            let allowed = socket.set_broadcast(true);
            if let Err(error) = &allowed {
                tracing::warn!(event = "broadcast_unavailable", %error);
            }
            allowed.is_ok()
        };
        let socket =
            UdpSocket::from_std(socket.into()).map_err(|error| UdpError::Bind { port, error })?;
        let port = socket.local_addr().map_or(port, |address| address.port());
        Ok(Self { socket, port, group: group.is_ok(), broadcast })
    }

    /// The port.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Sends at once or not at all: datagrams may get lost anyway. An empty one is none.
    pub(super) fn send(&self, group: &[u8], broadcast: &[u8]) {
        if self.group && !group.is_empty() {
            self.send_to(group, GROUP);
        }
        if self.broadcast && !broadcast.is_empty() {
            self.send_to(broadcast, Ipv4Addr::BROADCAST);
        }
    }

    fn send_to(&self, bytes: &[u8], ip: Ipv4Addr) {
        // Past tokio, which takes a socket for unwritable until it has waited on it once.
        let socket = SockRef::from(&self.socket);
        if let Err(error) = socket.send_to(bytes, &SocketAddr::from((ip, self.port)).into()) {
            tracing::debug!(event = "datagram_not_sent", to = %ip, %error);
        }
    }

    /// Hands over what comes until `stop`.
    pub(super) async fn receive(self: Arc<Self>, inputs: InputSender, stop: CancellationToken) {
        // One byte more than is heeded, to recognise what is longer.
        let mut buffer = [0; MAX_DATAGRAM + 1];
        let now = Instant::now();
        let (mut near, mut far) = (Bucket::full(now), Bucket::full(now));
        loop {
            let received = tokio::select! {
                () = stop.cancelled() => return,
                received = self.socket.recv_from(&mut buffer) => received,
            };
            let (length, from) = match received {
                Ok(received) => received,
                Err(error) => {
                    tracing::debug!(event = "datagram_not_received", %error);
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(ERROR_PAUSE) => continue,
                    }
                }
            };
            let bucket = if from.ip().is_loopback() { &mut near } else { &mut far };
            let bytes = buffer.get(..length).unwrap_or_default();
            if bucket.take(Instant::now()) && Datagram::parse(bytes).is_some() {
                inputs.offer(Input::Datagram { from: from.ip(), bytes: bytes.to_vec() });
            }
        }
    }
}

/// Everything sent to the group goes out on loopback only, or the group is not used.
fn join(socket: &Socket) -> io::Result<()> {
    socket.set_multicast_if_v4(&Ipv4Addr::LOCALHOST)?;
    socket.set_multicast_loop_v4(true)?;
    socket.set_multicast_ttl_v4(1)?;
    socket.join_multicast_v4(&GROUP, &Ipv4Addr::LOCALHOST)
}

/// A token bucket of [`BURST`], refilled at [`RATE`].
#[derive(Debug)]
struct Bucket {
    left: u32,
    since: Instant,
}

impl Bucket {
    fn full(now: Instant) -> Self {
        Self { left: BURST, since: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let each = Duration::from_secs(1) / RATE;
        while self.left < BURST && now.duration_since(self.since) >= each {
            self.left += 1;
            self.since += each;
        }
        if self.left == BURST {
            self.since = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }
}

/// Tells the node the machine's addresses, at once and whenever they have changed, until `stop`.
pub(super) async fn watch_addresses(inputs: InputSender, stop: CancellationToken) {
    let mut known: Option<BTreeSet<IpAddr>> = None;
    let mut look = interval(ADDRESSES_INTERVAL);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = look.tick() => {}
        }
        let addresses = match if_addrs::get_if_addrs() {
            Ok(interfaces) => interfaces.iter().map(if_addrs::Interface::ip).collect(),
            Err(error) => {
                tracing::debug!(event = "addresses_unknown", %error);
                continue;
            }
        };
        if known.as_ref() != Some(&addresses) {
            if !inputs.send(Input::LocalAddresses(addresses.clone())).await {
                return;
            }
            known = Some(addresses);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_datagrams_is_heeded_at_the_rate_only() {
        let begin = Instant::now();
        let mut bucket = Bucket::full(begin);
        let heeded =
            |bucket: &mut Bucket, at: Instant| (0..1000).filter(|_| bucket.take(at)).count();
        assert_eq!(heeded(&mut bucket, begin), BURST as usize);
        assert_eq!(heeded(&mut bucket, begin), 0);
        assert_eq!(heeded(&mut bucket, begin + Duration::from_secs(1)), RATE as usize);
        // What is looked at more often does not earn more.
        let heeded: usize =
            (0..1000).map(|ms| heeded(&mut bucket, begin + Duration::from_millis(1000 + ms))).sum();
        assert!(heeded <= RATE as usize && heeded > RATE as usize - 2, "{heeded}");
        assert_eq!(
            (0..1000).filter(|_| bucket.take(begin + Duration::from_hours(9))).count(),
            BURST as usize
        );
    }

    #[tokio::test]
    async fn the_first_datagram_leaves_at_once() {
        let a = FirstContact::bind(0, false).unwrap();
        let b = FirstContact::bind(a.port(), false).unwrap();
        if !b.group {
            // Then it is the machine that has no multicast on its loopback.
            assert!(!a.group);
            return;
        }
        a.send(b"first", b"never");
        let mut buffer = [0; 16];
        let received = tokio::time::timeout(Duration::from_secs(20), b.socket.recv(&mut buffer));
        assert_eq!(received.await.expect("nothing came").unwrap(), 5);
        assert_eq!(&buffer[..5], b"first");
    }

    #[tokio::test]
    async fn a_port_that_is_taken_alone_is_an_error() {
        let taken = UdpSocket::bind("0.0.0.0:0").await.unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(FirstContact::bind(port, false).unwrap_err().code(), "udp_bind");
    }
}
