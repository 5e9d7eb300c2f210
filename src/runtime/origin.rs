//! Who is at the other end of a TCP connection, as far as the operating system tells (decision 5):
//! our own user, another user of this machine, or another machine. Says nothing about devices.
//!
//! Linux tells the owner of one socket when asked (`sock_diag`). Where it may not be asked, it
//! still lists all of them in `/proc/net/tcp` and `tcp6`. Reading that list takes milliseconds, so
//! questions that come while it is being read share the next reading.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{sock_diag, sys};
use crate::mesh::session::Origin;

/// Where Linux lists its TCP sockets.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
/// The list changes while it is read, and an entry may be skipped: a socket that is not found is
/// looked for again.
const READINGS: usize = 3;
/// State column of an established connection.
const ESTABLISHED: &str = "01";

/// Finds the origin of connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Origins(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    uid: u32,
    /// Open from the start, so that somebody who uses up the descriptors cannot blind us.
    tables: Vec<Mutex<File>>,
    blind: AtomicBool,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    reading: bool,
    questions: Vec<Question>,
}

#[derive(Debug)]
struct Question {
    peer: SocketAddr,
    local: SocketAddr,
    answer: oneshot::Sender<Owner>,
}

/// What the table says about a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Uid(u32),
    /// No established connection has that socket at its end (any more).
    Nobody,
    /// There is no table.
    Unknown,
}

impl Default for Origins {
    fn default() -> Self {
        Self::new(sys::uid())
    }
}

impl Origins {
    fn new(uid: u32) -> Self {
        let tables = TABLES.iter().filter_map(|table| File::open(table).ok().map(Mutex::new));
        Self(Arc::new(Inner {
            uid,
            tables: tables.collect(),
            blind: AtomicBool::new(false),
            waiting: Mutex::default(),
        }))
    }

    /// Whether owners could not be told: then every loopback connection counts as our own user's,
    /// and the operator should know.
    #[must_use]
    pub fn is_blind(&self) -> bool {
        self.0.blind.load(Ordering::Relaxed)
    }

    /// The origin of a connection between `local`, our end, and `peer`. Asked after the handshake:
    /// before a server has accepted a connection, nobody owns its end.
    pub async fn of(&self, local: SocketAddr, peer: SocketAddr) -> Origin {
        let (local, peer) = (plain(local), plain(peer));
        if !peer.ip().is_loopback() {
            return Origin::Network;
        }
        match self.owner(local, peer).await {
            Owner::Uid(uid) if uid == self.0.uid => Origin::SameUser,
            Owner::Uid(_) => Origin::OtherUser,
            // Closed already by whoever made it, perhaps so as not to be recognised.
            Owner::Nobody => Origin::OtherUser,
            Owner::Unknown => {
                if !self.0.blind.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        event = "origin_unknown",
                        "this system does not tell who owns a connection; every local one counts \
                         as our own user's"
                    );
                }
                Origin::SameUser
            }
        }
    }

    async fn owner(&self, local: SocketAddr, peer: SocketAddr) -> Owner {
        match sock_diag::uid_of(peer, local) {
            Ok(Some(uid)) => Owner::Uid(uid),
            // A kernel built without the answer says the same as one that knows no such connection.
            Ok(None) | Err(_) => self.listed_owner(local, peer).await,
        }
    }

    async fn listed_owner(&self, local: SocketAddr, peer: SocketAddr) -> Owner {
        for _ in 0..READINGS {
            let (answer, answered) = oneshot::channel();
            let start = {
                let mut waiting = self.0.waiting.lock();
                waiting.questions.push(Question { peer, local, answer });
                !std::mem::replace(&mut waiting.reading, true)
            };
            if start {
                let inner = Arc::clone(&self.0);
                tokio::task::spawn_blocking(move || inner.answer_all());
            }
            match answered.await {
                Ok(Owner::Nobody) => {}
                Ok(owner) => return owner,
                Err(_) => return Owner::Unknown,
            }
        }
        Owner::Nobody
    }
}

impl Inner {
    /// Reads the tables until no question is left.
    fn answer_all(&self) {
        loop {
            let questions = {
                let mut waiting = self.waiting.lock();
                if waiting.questions.is_empty() {
                    waiting.reading = false;
                    return;
                }
                std::mem::take(&mut waiting.questions)
            };
            let ends: Vec<_> = questions.iter().map(|q| (q.peer, q.local)).collect();
            let owners = self.read_tables(&ends);
            for (question, owner) in questions.into_iter().zip(owners) {
                // Nobody waits for the answer when the handshake has been given up.
                let _ = question.answer.send(owner);
            }
        }
    }

    /// The owner of each socket, given by its own and its peer's address.
    fn read_tables(&self, ends: &[(SocketAddr, SocketAddr)]) -> Vec<Owner> {
        if self.tables.is_empty() {
            return vec![Owner::Unknown; ends.len()];
        }
        let mut wanted = HashMap::new();
        for (index, (own, other)) in ends.iter().enumerate() {
            for key in keys(*own, *other) {
                wanted.entry(key).or_insert_with(Vec::new).push(index);
            }
        }
        let mut owners = vec![Owner::Nobody; ends.len()];
        for table in &self.tables {
            let mut table = table.lock();
            let mut text = String::new();
            // Read whole, so that it changes little meanwhile.
            if table.rewind().and_then(|()| table.read_to_string(&mut text)).is_ok() {
                scan(&text, &wanted, &mut owners);
            }
        }
        owners
    }
}

/// IPv4 addresses inside IPv6 ones as what they are.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn scan(table: &str, wanted: &HashMap<(String, String), Vec<usize>>, owners: &mut [Owner]) {
    for line in table.lines() {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let (Some(own), Some(other), Some(ESTABLISHED)) =
            (columns.next(), columns.next(), columns.next())
        else {
            continue;
        };
        // tx/rx queue, timer, retransmissions come before the uid.
        let Some(uid) = columns.nth(3).and_then(|uid| uid.parse().ok()) else { continue };
        let Some(indices) = wanted.get(&(own.to_owned(), other.to_owned())) else { continue };
        for index in indices {
            if let Some(owner) = owners.get_mut(*index) {
                *owner = Owner::Uid(uid);
            }
        }
    }
}

/// How the tables write a socket: an IPv4 connection may be in the IPv6 table too.
fn keys(own: SocketAddr, other: SocketAddr) -> Vec<(String, String)> {
    match (own.ip(), other.ip()) {
        (IpAddr::V4(own_ip), IpAddr::V4(other_ip)) => vec![
            (hex(&own_ip.octets(), own.port()), hex(&other_ip.octets(), other.port())),
            (
                hex6(own_ip.to_ipv6_mapped(), own.port()),
                hex6(other_ip.to_ipv6_mapped(), other.port()),
            ),
        ],
        (own_ip, other_ip) => {
            let ip = |ip| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            vec![(hex6(ip(own_ip), own.port()), hex6(ip(other_ip), other.port()))]
        }
    }
}

fn hex6(ip: Ipv6Addr, port: u16) -> String {
    hex(&ip.octets(), port)
}

/// Words of four bytes in the machine's byte order, then the port.
fn hex(octets: &[u8], port: u16) -> String {
    use std::fmt::Write as _;
    let (words, _) = octets.as_chunks::<4>();
    let mut text = String::new();
    for word in words {
        let _ = write!(text, "{:08X}", u32::from_ne_bytes(*word));
    }
    let _ = write!(text, ":{port:04X}");
    text
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair(bind: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(bind).await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (dialled, listener.accept().await.unwrap().0)
    }

    async fn both(origins: &Origins, (a, b): &(TcpStream, TcpStream)) -> [Origin; 2] {
        let of = |s: &TcpStream| (s.local_addr().unwrap(), s.peer_addr().unwrap());
        let ((a_local, a_peer), (b_local, b_peer)) = (of(a), of(b));
        [origins.of(a_local, a_peer).await, origins.of(b_local, b_peer).await]
    }

    #[tokio::test]
    async fn both_ends_of_our_own_connection_are_ours() {
        let origins = Origins::default();
        let links = pair("127.0.0.1:0").await;
        assert_eq!(both(&origins, &links).await, [Origin::SameUser; 2]);
        assert_eq!(both(&Origins::new(sys::uid() + 1), &links).await, [Origin::OtherUser; 2]);
        assert!(!origins.is_blind());
    }

    #[tokio::test]
    async fn a_connection_from_an_ipv6_socket_to_an_ipv4_listener_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let Ok(dialled) = TcpStream::connect(format!("[::ffff:127.0.0.1]:{port}")).await else {
            // Then it is the machine that has no IPv6.
            assert!(TcpListener::bind("[::1]:0").await.is_err());
            return;
        };
        let accepted = listener.accept().await.unwrap().0;
        assert_eq!(both(&Origins::default(), &(dialled, accepted)).await, [Origin::SameUser; 2]);
    }

    #[tokio::test]
    async fn a_connection_that_is_gone_is_nobodys_of_ours() {
        let (dialled, accepted) = pair("127.0.0.1:0").await;
        let (local, peer) = (accepted.local_addr().unwrap(), accepted.peer_addr().unwrap());
        socket2::SockRef::from(&dialled).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(dialled);
        assert_eq!(Origins::default().of(local, peer).await, Origin::OtherUser);
    }

    #[tokio::test]
    async fn other_machines_are_not_looked_up() {
        let origins = Origins::default();
        let local = "192.0.2.1:1".parse().unwrap();
        assert_eq!(origins.of(local, "192.0.2.7:9".parse().unwrap()).await, Origin::Network);
        assert_eq!(origins.of(local, "[2001:db8::1]:9".parse().unwrap()).await, Origin::Network);
    }

    #[tokio::test]
    async fn the_list_says_the_same() {
        let origins = Origins::default();
        let (dialled, accepted) = pair("127.0.0.1:0").await;
        let (local, peer) = (accepted.local_addr().unwrap(), accepted.peer_addr().unwrap());
        assert_eq!(origins.listed_owner(local, peer).await, Owner::Uid(sys::uid()));
        socket2::SockRef::from(&dialled).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(dialled);
        assert_eq!(origins.listed_owner(local, peer).await, Owner::Nobody);
    }

    #[tokio::test]
    async fn many_questions_share_readings() {
        let origins = Origins::default();
        let mut links = Vec::new();
        for _ in 0..50 {
            links.push(pair("127.0.0.1:0").await);
        }
        let mut asked = tokio::task::JoinSet::new();
        for link in links {
            let origins = origins.clone();
            asked.spawn(async move {
                let (dialled, _accepted) = link;
                let (local, peer) = (dialled.local_addr().unwrap(), dialled.peer_addr().unwrap());
                origins.listed_owner(local, peer).await
            });
        }
        assert!(asked.join_all().await.into_iter().all(|owner| owner == Owner::Uid(sys::uid())));
        let waiting = origins.0.waiting.lock();
        assert!(waiting.questions.is_empty());
    }

    #[test]
    fn rows_are_read_by_state_and_owner() {
        let (own, other) = ("127.0.0.1:41000".parse().unwrap(), "127.0.0.1:19876".parse().unwrap());
        let wanted: HashMap<_, _> =
            keys(own, other).into_iter().map(|key| (key, vec![0])).collect();
        let row = |state: &str| {
            format!(
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n\
                 \x20  7: 0100007F:A028 0100007F:4DA4 {state} 00000000:00000000 00:00000000 00000000  1001        0 99 1\n"
            )
        };
        for (state, expected) in [("01", Owner::Uid(1001)), ("06", Owner::Nobody)] {
            let mut owners = [Owner::Nobody];
            scan(&row(state), &wanted, &mut owners);
            if cfg!(target_endian = "little") {
                assert_eq!(owners, [expected]);
            }
        }
    }
}
