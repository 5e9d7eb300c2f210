//! Floors: what the same bytes cost on the same transport when nothing is done with them. The
//! other end is a process of its own, as a daemon is: this program, started again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use commsd::identity::certificate::{Certificate, self_signed};
use commsd::identity::device::DeviceKey;
use commsd::runtime::clock::unix_now;
use commsd::runtime::tls::DeviceTls;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Mutex;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::stats::Samples;

/// Names the floor whose other end this process is.
const ROLE: &str = "COMMSD_BENCH_FLOOR";
/// Says that a connection is one of those that get everything.
const HERE: u8 = 1;
/// Bytes of length before each message.
const HEADER: usize = 4;

/// What stands between the two ends.
#[derive(Clone, Copy)]
enum Kind {
    /// A Unix socket; messages come back.
    Unix,
    /// A Unix socket; a message goes to every other connection.
    Spread,
    /// Mutual TLS over loopback with the mesh's settings; messages come back.
    Tls,
}

impl Kind {
    const ALL: [(&str, Self); 3] =
        [("unix", Self::Unix), ("spread", Self::Spread), ("tls", Self::Tls)];

    fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Spread => "spread",
            Self::Tls => "tls",
        }
    }
}

/// If this process was started as the other end of a floor, serves it until it is killed.
pub async fn serve_if_asked() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let (kind, place) = role.to_str().unwrap().split_once(':').unwrap();
    let (_, kind) = *Kind::ALL.iter().find(|(name, _)| *name == kind).unwrap();
    match kind {
        Kind::Unix => serve_unix(Path::new(place)).await,
        Kind::Spread => serve_spread(Path::new(place)).await,
        Kind::Tls => serve_tls().await,
    }
}

/// Tells the parent where to connect, and ends when the parent does.
fn announce(place: &str) {
    println!("{place}");
    std::io::stdout().flush().unwrap();
    std::thread::spawn(|| {
        let _ = std::io::stdin().lines().next();
        std::process::exit(0);
    });
}

async fn serve_unix(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    announce("");
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(echo(stream));
    }
}

async fn serve_tls() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let acceptor = TlsAcceptor::from(device().server());
    announce(&listener.local_addr().unwrap().port().to_string());
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let acceptor = acceptor.clone();
        tokio::spawn(async move { echo(acceptor.accept(stream).await.unwrap()).await });
    }
}

async fn serve_spread(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    announce("");
    let all: Arc<Mutex<Vec<_>>> = Arc::default();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let own = {
            let mut all = all.lock().await;
            writer.write_all(&[HERE]).await.unwrap();
            all.push(writer);
            all.len() - 1
        };
        let all = Arc::clone(&all);
        tokio::spawn(async move {
            let mut messages = Messages::default();
            while messages.read(&mut reader).await {
                let mut all = all.lock().await;
                for (_, writer) in all.iter_mut().enumerate().filter(|(at, _)| *at != own) {
                    for message in messages.each() {
                        writer.write_all(message).await.unwrap();
                    }
                }
            }
        });
    }
}

async fn echo(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut messages = Messages::default();
    while messages.read(&mut stream).await {
        for message in messages.each() {
            stream.write_all(message).await.unwrap();
        }
        stream.flush().await.unwrap();
    }
}

/// Length-prefixed messages from a stream, as many as have come.
#[derive(Default)]
struct Messages {
    buffer: Vec<u8>,
    complete: usize,
}

impl Messages {
    /// Waits until there is a complete one; `false` at the end.
    async fn read(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> bool {
        self.buffer.drain(..self.complete);
        self.complete = 0;
        while self.complete == 0 {
            self.buffer.reserve(64 * 1024);
            match stream.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return false,
                Ok(_) => {}
            }
            while let Some(header) = self.buffer.get(self.complete..self.complete + HEADER) {
                let length = u32::from_be_bytes(header.try_into().unwrap()) as usize;
                let end = self.complete + HEADER + length;
                if self.buffer.len() < end {
                    break;
                }
                self.complete = end;
            }
        }
        true
    }

    /// The complete ones, each with its length before it.
    fn each(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.buffer[..self.complete];
        std::iter::from_fn(move || {
            let header = rest.first_chunk::<HEADER>()?;
            let (message, after) = rest.split_at(HEADER + u32::from_be_bytes(*header) as usize);
            rest = after;
            Some(message)
        })
    }
}

/// A message of `bytes` besides its length.
fn message(bytes: usize) -> Vec<u8> {
    let mut message = u32::try_from(bytes).unwrap().to_be_bytes().to_vec();
    message.resize(HEADER + bytes, b'x');
    message
}

fn device() -> DeviceTls {
    let key = DeviceKey::generate().unwrap();
    let certificate: Certificate = self_signed(&key, unix_now(), &[1; 16]).unwrap();
    DeviceTls::new(&key, &certificate).unwrap()
}

struct Server {
    child: Child,
    place: String,
    dir: tempfile::TempDir,
}

impl Server {
    fn start(kind: Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("echo");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, format!("{}:{}", kind.name(), path.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut place = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut place).unwrap();
        Self { child, place: place.trim().to_owned(), dir }
    }

    async fn unix(&self) -> UnixStream {
        UnixStream::connect(self.dir.path().join("echo")).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One end of an echo.
pub struct Echo<S> {
    stream: S,
    _server: Server,
}

/// An echo over a Unix socket.
pub async fn unix() -> Echo<UnixStream> {
    let server = Server::start(Kind::Unix);
    Echo { stream: server.unix().await, _server: server }
}

/// An echo over mutual TLS.
pub async fn tls() -> Echo<tokio_rustls::client::TlsStream<TcpStream>> {
    let server = Server::start(Kind::Tls);
    let port: u16 = server.place.parse().unwrap();
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let name = ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
    let stream = TlsConnector::from(device().client()).connect(name, stream).await.unwrap();
    Echo { stream, _server: server }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Echo<S> {
    /// Round trips of messages of `bytes`, one after another.
    pub async fn round_trips(&mut self, bytes: usize, count: usize, samples: &mut Samples) {
        let message = message(bytes);
        let mut messages = Messages::default();
        for _ in 0..count {
            let begun = Instant::now();
            self.stream.write_all(&message).await.unwrap();
            self.stream.flush().await.unwrap();
            assert!(messages.read(&mut self.stream).await);
            samples.push(begun.elapsed());
        }
    }

    /// `count` messages of `bytes`, `window` of them under way at any time, each with a write of
    /// its own at both ends; per second.
    pub async fn pipelined(&mut self, bytes: usize, window: usize, count: usize) -> f64 {
        let message = message(bytes);
        let mut messages = Messages::default();
        let (mut sent, mut came) = (0, 0);
        let begun = Instant::now();
        while came < count {
            while sent < count && sent < came + window {
                self.stream.write_all(&message).await.unwrap();
                sent += 1;
            }
            self.stream.flush().await.unwrap();
            assert!(messages.read(&mut self.stream).await);
            came += messages.each().count();
        }
        count as f64 / begun.elapsed().as_secs_f64()
    }
}

/// One sender and many receivers.
pub struct Spread {
    sender: UnixStream,
    receivers: Vec<UnixStream>,
    _server: Server,
}

impl Spread {
    pub async fn to(receivers: usize) -> Self {
        let server = Server::start(Kind::Spread);
        let mut all = Vec::new();
        for _ in 0..=receivers {
            let mut stream = server.unix().await;
            assert_eq!(stream.read_u8().await.unwrap(), HERE);
            all.push(stream);
        }
        Self { sender: all.remove(0), receivers: all, _server: server }
    }

    /// Time from sending a message of `bytes` to its being read by the last receiver.
    pub async fn send(&mut self, bytes: usize, count: usize, samples: &mut Samples) {
        let message = message(bytes);
        for _ in 0..count {
            let begun = Instant::now();
            self.sender.write_all(&message).await.unwrap();
            let mut buffer = message.clone();
            for receiver in &mut self.receivers {
                receiver.read_exact(&mut buffer).await.unwrap();
            }
            samples.push(begun.elapsed());
        }
    }
}

/// Records of `bytes` appended to a file in `dir` and synced `group` at a time, per second.
pub fn synced_appends(dir: &Path, group: usize, bytes: usize) -> f64 {
    const GROUPS: usize = 200;
    let mut file = std::fs::File::create(dir.join("floor")).unwrap();
    let record = vec![7; bytes];
    let begun = Instant::now();
    for _ in 0..GROUPS {
        for _ in 0..group {
            file.write_all(&record).unwrap();
        }
        file.sync_data().unwrap();
    }
    (GROUPS * group) as f64 / begun.elapsed().as_secs_f64()
}
