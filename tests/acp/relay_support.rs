//! Hand-made objects for the relay's tests, and a client of bare HTTP that can be as slow and as rude
//! as a test wants it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use commsd::acp::relay::Parcel;
use commsd::codec::time::UnixMillis;
use commsd::runtime::acp_relay::{AcpRelayServer, ServerError, ServerLimits, ServerOptions};
use commsd::runtime::clock::unix_now;
use data_encoding::BASE64URL_NOPAD;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::{Person, jcs};

/// Longer than anything here takes.
pub const HANG: Duration = Duration::from_secs(20);

pub const DAY: u64 = 24 * 3_600_000;

/// An envelope by hand, of at least `bytes` bytes of ciphertext.
pub fn envelope(from: &Person, to: &str, id: &str, at: UnixMillis, bytes: usize) -> Value {
    let body = json!({
        "type": "Envelope", "version": "1.0", "envelopeId": format!("env_{id:0>8}"),
        "from": from.did, "to": to,
        "sentAt": at.iso(), "expiresAt": at.plus(DAY).iso(),
        "suite": "HPKE-0020-0001-0002", "recipientKeyId": "identity",
        "enc": BASE64URL_NOPAD.encode(&[9; 32]), "ciphertext": BASE64URL_NOPAD.encode(&vec![7; bytes]),
    });
    from.sign(body, "envelope", "sender")
}

/// The same as the relay takes it.
pub fn parcel(from: &Person, to: &str, id: &str, at: UnixMillis, bytes: usize) -> Parcel {
    Parcel::read(&jcs(&envelope(from, to, id, at, bytes)), 4 << 20, at).unwrap()
}

/// A token by hand. Every `nonce` is another.
pub fn token(of: &Person, action: &str, audience: &str, at: UnixMillis, nonce: u32) -> String {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&nonce.to_be_bytes());
    let body = json!({
        "type": "RelayAuth", "version": "1.0", "did": of.did, "action": action,
        "audience": audience, "issuedAt": at.iso(), "nonce": BASE64URL_NOPAD.encode(&bytes),
    });
    BASE64URL_NOPAD.encode(&jcs(&of.sign(body, "relay-auth", "recipient")))
}

pub fn card(of: &Person, id: &str, at: UnixMillis, skills: &[&str]) -> Value {
    let body = json!({
        "type": "WorkerCard", "version": "1.0", "cardId": format!("card_{id:0>8}"), "did": of.did,
        "name": "worker", "description": "", "adapters": ["command"], "skills": skills,
        "isolation": [], "relayUrls": ["http://127.0.0.1:8787"], "encryptionKey": null,
        "issuedAt": at.iso(), "expiresAt": at.plus(DAY).iso(),
    });
    of.sign(body, "worker-card", "worker")
}

pub fn notice(of: &Person, kind: &str, target: &str, at: UnixMillis) -> Value {
    let body = json!({
        "type": "RevocationNotice", "version": "1.0", "noticeId": "rev_00000001",
        "issuerDid": of.did, "targetType": kind, "targetId": target, "reason": "",
        "issuedAt": at.iso(), "effectiveAt": at.iso(),
    });
    of.sign(body, "revocation-notice", "issuer")
}

/// A relay over loopback, ended with the value.
pub struct Server {
    pub address: SocketAddr,
    pub origin: String,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

pub fn options(state: &Path) -> ServerOptions {
    ServerOptions { state: state.to_owned(), version: "test", ..ServerOptions::default() }
}

pub fn bind(options: ServerOptions) -> Result<AcpRelayServer, ServerError> {
    AcpRelayServer::bind("127.0.0.1:0".parse().unwrap(), options)
}

pub fn start_with(options: ServerOptions) -> Server {
    let server = bind(options).unwrap();
    let (address, origin) = (server.address(), server.origin().to_owned());
    let stop = CancellationToken::new();
    let task = tokio::spawn(server.serve(stop.clone()));
    Server { address, origin, stop, task }
}

pub fn start(state: &Path, change: impl FnOnce(&mut ServerLimits)) -> Server {
    let mut options = options(state);
    change(&mut options.limits);
    start_with(options)
}

/// What was answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The code of an error.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    fn read(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect();
        Self { status, headers, body: bytes[end + 4..].to_vec() }
    }
}

impl Server {
    /// Ends it in order.
    pub async fn end(self) {
        self.stop.cancel();
        timeout(HANG, self.task).await.expect("an end").unwrap();
    }

    pub fn head(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> String {
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {}\r\n", self.address);
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes as they are and reads until the end.
    pub async fn raw(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        read_to_end(stream).await
    }

    pub async fn ask(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let mut request = self.head(method, target, headers);
        request += &format!("Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        self.raw(&[request.as_bytes(), body].concat()).await
    }

    pub async fn post(&self, envelope: &Value) -> Answer {
        self.ask("POST", "/v1/envelopes", &[], &jcs(envelope)).await
    }

    pub fn bearer(&self, of: &Person, action: &str, nonce: u32) -> String {
        format!("Bearer {}", token(of, action, &self.origin, unix_now(), nonce))
    }

    /// A poll with a token of its own.
    pub async fn poll(&self, of: &Person, query: &str, nonce: u32) -> Answer {
        let target = format!("/v1/mailboxes/{}/envelopes?{query}", of.did);
        let bearer = self.bearer(of, "receive", nonce);
        self.ask("GET", &target, &[("Authorization", &bearer)], b"").await
    }

    /// Cursors and ids of what waits.
    pub async fn waiting(&self, of: &Person, nonce: u32) -> Vec<(String, String)> {
        let answer = self.poll(of, "", nonce).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["envelopes"].as_array().unwrap().iter().map(cursor_and_id).collect()
    }

    /// A stream of events, read by [`Events`].
    pub async fn events(&self, of: &Person, nonce: u32, last: Option<&str>) -> Events {
        let bearer = self.bearer(of, "stream", nonce);
        let mut headers = vec![("Authorization", bearer.as_str())];
        headers.extend(last.map(|last| ("Last-Event-ID", last)));
        let head = self.head("GET", &format!("/v1/mailboxes/{}/stream", of.did), &headers);
        let mut stream = self.connect().await;
        stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
        Events { stream, bytes: Vec::new() }
    }
}

pub fn cursor_and_id(item: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    (text(&item["cursor"]), text(&item["envelope"]["envelopeId"]))
}

pub async fn read_to_end(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A connection that is reset has said what it said.
    let _ = timeout(HANG, stream.read_to_end(&mut bytes)).await.expect("an end");
    Answer::read(&bytes)
}

/// Server-sent events as they come.
pub struct Events {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Events {
    /// The next event: cursor and id of its envelope; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<(String, String)> {
        loop {
            let text = String::from_utf8_lossy(&self.bytes).into_owned();
            if let Some(start) = text.find("event: envelope\n")
                && let Some(length) = text[start..].find("\n\n")
            {
                let event = &text[start..start + length];
                let field = |name: &str| {
                    let line = event.lines().find_map(|line| line.strip_prefix(name));
                    line.unwrap_or_else(|| panic!("no {name} in {event}")).to_owned()
                };
                let envelope: Value = serde_json::from_str(&field("data: ")).unwrap();
                let found = (field("id: "), envelope["envelopeId"].as_str().unwrap().to_owned());
                self.bytes = text.as_bytes()[start + length..].to_vec();
                return Some(found);
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// Reads until `text` has come; `false` at the end of the stream.
    pub async fn until(&mut self, text: &str) -> bool {
        while !String::from_utf8_lossy(&self.bytes).contains(text) {
            if !self.more().await {
                return false;
            }
        }
        true
    }

    async fn more(&mut self) -> bool {
        self.bytes.reserve(256 * 1024);
        let read = timeout(HANG, self.stream.read_buf(&mut self.bytes)).await.expect("something");
        matches!(read, Ok(read) if read > 0)
    }
}

/// Runs all of them at once.
pub async fn all<T: Send + 'static>(
    tasks: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
    let mut done = Vec::new();
    for task in tasks {
        done.push(task.await.unwrap());
    }
    done
}
