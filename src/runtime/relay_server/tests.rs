use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use super::*;
use crate::codec::cbor::Value;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::mesh::wire::advert::PeerAdvert;
use crate::runtime::clock::unix_now;

/// Longer than anything here takes; what is waited for longer does not come.
const HANG: Duration = Duration::from_secs(20);

type Client = WebSocketStream<TcpStream>;

struct Hub {
    address: SocketAddr,
    stop: CancellationToken,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

fn start(limits: ServerLimits) -> Hub {
    start_with(ServerOptions { limits, version: "test", ..ServerOptions::default() })
}

fn start_with(options: ServerOptions) -> Hub {
    let server = RelayServer::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let (address, shared) = (server.address(), Arc::clone(&server.shared));
    let stop = CancellationToken::new();
    let task = tokio::spawn(server.serve(stop.clone()));
    Hub { address, stop, shared, task }
}

impl Hub {
    async fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (client, response) =
            client_async(format!("ws://{}/", self.address), stream).await.unwrap();
        assert_eq!(response.status(), 101);
        client
    }

    /// Sends bytes as they are and reads what is answered until the end.
    async fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(HANG, stream.read_to_end(&mut answer)).await.expect("an end");
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn health(&self) -> serde_json::Value {
        let answer = self.raw("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap()
    }
}

fn advert(key: &DeviceKey) -> Frame {
    let seconds = i64::try_from(unix_now().seconds()).unwrap();
    Frame::Gossip { peers: vec![PeerAdvert::sign(key, Vec::new(), seconds, Vec::new())] }
}

async fn send(client: &mut Client, frame: &Frame) {
    client.send(Message::Binary(frame.encode().into())).await.unwrap();
}

async fn next(client: &mut Client) -> Frame {
    match timeout(HANG, client.next()).await.expect("a frame").expect("no end").unwrap() {
        Message::Binary(body) => Frame::decode(&body).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// The code with which the hub closes; `None` when it just ends.
async fn closed(client: &mut Client) -> Option<(u16, String)> {
    loop {
        match timeout(HANG, client.next()).await.expect("an end") {
            Some(Ok(Message::Close(frame))) => {
                return frame.map(|frame| (frame.code.into(), frame.reason.to_string()));
            }
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return None,
        }
    }
}

async fn register(client: &mut Client, key: &DeviceKey) {
    send(client, &advert(key)).await;
    // The answer to a ping comes behind whatever the advert caused.
    send(client, &Frame::Ping).await;
    while next(client).await != Frame::Pong {}
}

fn relay(payload: Vec<u8>, to: DeviceId) -> Frame {
    Frame::RelayData { payload, to_device: Some(to), from_device: None }
}

#[tokio::test]
async fn two_clients_talk_and_the_health_tells_of_them() {
    let hub = start(ServerLimits::default());
    let (a, b) = (DeviceKey::generate().unwrap(), DeviceKey::generate().unwrap());
    let (mut one, mut two) = (hub.connect().await, hub.connect().await);
    register(&mut one, &a).await;
    register(&mut two, &b).await;
    let Frame::Gossip { peers } = next(&mut one).await else { panic!() };
    assert_eq!(peers[0].device, b.id());
    let connect = Frame::RelayConnect { target_device: b.id(), source_device: None };
    send(&mut one, &connect).await;
    assert!(matches!(
        next(&mut two).await,
        Frame::RelayInbound { source_device, .. } if source_device == a.id()
    ));
    send(&mut one, &relay(b"sealed".to_vec(), b.id())).await;
    let Frame::RelayData { payload, from_device, .. } = next(&mut two).await else { panic!() };
    assert_eq!((payload.as_slice(), from_device), (&b"sealed"[..], Some(a.id())));
    let health = hub.health().await;
    let numbers = ["links", "devices", "pairs", "relayed"].map(|name| health[name].as_u64());
    assert_eq!(numbers, [Some(2), Some(2), Some(1), Some(1)]);
    // A client that has gone is forgotten, and its end disturbs nobody.
    drop(two);
    while hub.health().await["devices"] != 1 {}
    send(&mut one, &relay(b"lost".to_vec(), b.id())).await;
    send(&mut one, &Frame::Ping).await;
    assert_eq!(next(&mut one).await, Frame::Pong);
    // The end is told.
    hub.stop.cancel();
    assert_eq!(closed(&mut one).await, Some((1001, "shutdown".into())));
    drop(one);
    timeout(HANG, hub.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn requests_that_are_no_business_of_the_hub_are_refused() {
    let hub =
        start_with(ServerOptions { hosts: vec!["hub.example".into()], ..ServerOptions::default() });
    let upgrade = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
                   Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    for (request, status) in [
        ("GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(), 403),
        ("GET /health HTTP/1.1\r\n\r\n".to_owned(), 403),
        ("GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n".to_owned(), 403),
        ("GET /health HTTP/1.1\r\nHost: HUB.example:1\r\n\r\n".to_owned(), 200),
        ("GET /health HTTP/1.1\r\nHost: [::1]:80\r\n\r\n".to_owned(), 200),
        ("POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".to_owned(), 405),
        ("GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 404),
        ("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 426),
        (format!("GET / HTTP/1.1\r\nHost: evil.example\r\n{upgrade}"), 403),
        (
            format!("GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n{upgrade}"),
            403,
        ),
        (format!("GET / HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: b\r\n".repeat(100)), 431),
        ("\u{0}\u{1}nonsense\r\n\r\n".to_owned(), 400),
    ] {
        let answer = hub.raw(&request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}\n{answer}");
    }
    // The example of RFC 6455, 1.3.
    let mut stream = TcpStream::connect(hub.address).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{upgrade}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 512];
    let length = stream.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]).to_lowercase();
    assert!(answer.starts_with("http/1.1 101"), "{answer}");
    assert!(answer.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{answer}");
}

#[tokio::test]
async fn slow_and_silent_connections_are_let_go() {
    let short = Duration::from_millis(200);
    let limits = ServerLimits {
        handshake: short,
        register: 2 * short,
        idle: 4 * short,
        ..ServerLimits::default()
    };
    let hub = start(limits);
    // A head that never ends, also when it goes on byte by byte.
    let mut slow = TcpStream::connect(hub.address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ").await.unwrap();
    let (mut reading, mut writing) = slow.into_split();
    let dripping = tokio::spawn(async move {
        while writing.write_all(b"x").await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    });
    let mut rest = Vec::new();
    let _ = timeout(HANG, reading.read_to_end(&mut rest)).await.expect("an end");
    dripping.abort();
    assert!(!String::from_utf8_lossy(&rest).contains("101"));
    // A link that says nothing, one that never says who it is, and one that falls silent.
    let mut silent = hub.connect().await;
    assert_eq!(closed(&mut silent).await, Some((1008, "not_registered".into())));
    let mut client = hub.connect().await;
    register(&mut client, &DeviceKey::generate().unwrap()).await;
    assert_eq!(closed(&mut client).await, Some((1008, "idle".into())));
    while hub.health().await["links"] != 0 {}
    assert_eq!(hub.shared.handshakes.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn garbage_ends_a_link_and_the_unknown_is_dropped() {
    let limits = ServerLimits::default();
    let hub = start(limits);
    for (message, code, reason) in [
        (Message::text("{}"), 1002, "text_message"),
        (Message::Binary(vec![0xff; 4].into()), 1002, "not_canonical"),
        (Message::Binary(Bytes::new()), 1002, "not_canonical"),
        (Message::Binary(vec![0; MAX_MESSAGE + 1].into()), 1009, "message_too_large"),
    ] {
        let mut client = hub.connect().await;
        // The hub may have closed before all of a long message is written.
        let _ = client.send(message).await;
        if let Some(told) = closed(&mut client).await {
            assert_eq!(told, (code, reason.to_owned()));
        } else {
            assert_eq!(reason, "message_too_large", "told in all other cases");
        }
    }
    // Canonical, but no frame that is known.
    let mut client = hub.connect().await;
    let unknown = Value::map([("type", Value::Text("later".into()))]).encode();
    client.send(Message::Binary(unknown.into())).await.unwrap();
    send(&mut client, &Frame::Ping).await;
    assert_eq!(next(&mut client).await, Frame::Pong);
    assert_eq!(hub.health().await["links"], 1);
}

#[tokio::test]
async fn no_address_and_no_crowd_takes_all_places() {
    let hub = start(ServerLimits { per_source: 2, ..ServerLimits::default() });
    let (one, two) = (hub.connect().await, hub.connect().await);
    let mut third = TcpStream::connect(hub.address).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(HANG, third.read_to_end(&mut rest)).await.expect("an end");
    assert!(rest.is_empty());
    drop((one, two));
    // Nor the places of those that are no links yet.
    let hub = start(ServerLimits { handshakes_of_source: 2, ..ServerLimits::default() });
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(TcpStream::connect(hub.address).await.unwrap());
    }
    let mut third = TcpStream::connect(hub.address).await.unwrap();
    let _ = timeout(HANG, third.read_to_end(&mut rest)).await.expect("an end");
    assert!(rest.is_empty());
    drop(waiting);
    let hub = start(ServerLimits { links: 1, ..ServerLimits::default() });
    let _one = hub.connect().await;
    let stream = TcpStream::connect(hub.address).await.unwrap();
    let refused = client_async(format!("ws://{}/", hub.address), stream).await.unwrap_err();
    assert!(matches!(refused, WsError::Http(answer) if answer.status() == 503));
    // Behind a proxy the last address that it names counts, not its own.
    let limits = ServerLimits { per_source: 1, ..ServerLimits::default() };
    let hub = start_with(ServerOptions { behind_proxy: true, limits, ..ServerOptions::default() });
    let mut links = Vec::new();
    for (from, status) in [("192.0.2.1", 101), ("192.0.2.2", 101), ("spoofed, 192.0.2.1", 429)] {
        let mut request = format!("ws://{}/", hub.address).into_client_request().unwrap();
        request.headers_mut().insert("x-forwarded-for", from.parse().unwrap());
        let stream = TcpStream::connect(hub.address).await.unwrap();
        match client_async(request, stream).await {
            Ok((link, _)) => {
                links.push(link);
                assert_eq!(status, 101);
            }
            Err(WsError::Http(answer)) => assert_eq!(answer.status(), status),
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(links.len(), 2);
}

#[tokio::test]
async fn who_does_not_read_loses_frames_and_nobody_waits_for_it() {
    let limits = ServerLimits {
        queue: 256 * 1024,
        queue_share: 128 * 1024,
        write_stall: Duration::from_millis(500),
        ..ServerLimits::default()
    };
    let hub = start(limits);
    let keys = [0; 3].map(|_| DeviceKey::generate().unwrap());
    let mut clients = Vec::new();
    for key in &keys {
        let mut client = hub.connect().await;
        register(&mut client, key).await;
        clients.push(client);
    }
    let [mut one, mut deaf, mut three] = <[Client; 3]>::try_from(clients).unwrap();
    for to in [&keys[1], &keys[2]] {
        let connect = Frame::RelayConnect { target_device: to.id(), source_device: None };
        send(&mut one, &connect).await;
    }
    // More than the queue and the sockets' buffers hold.
    let before = hub.health().await["links"].clone();
    for _ in 0..200 {
        send(&mut one, &relay(vec![0; 64 * 1024], keys[1].id())).await;
    }
    send(&mut one, &relay(b"heard".to_vec(), keys[2].id())).await;
    loop {
        if let Frame::RelayData { payload, .. } = next(&mut three).await {
            assert_eq!(payload, b"heard");
            break;
        }
    }
    assert!(hub.shared.lost.load(Ordering::Relaxed) > 0);
    assert_eq!(before, 3);
    // It is closed for it, and what waited for it is forgotten.
    while hub.health().await["links"] != 2 {}
    assert_eq!(hub.shared.total.bytes(), 0);
    while let Some(Ok(_)) = timeout(HANG, deaf.next()).await.expect("an end") {}
}

#[tokio::test]
async fn a_fast_sender_is_read_no_faster_than_its_allowance() {
    let mut allowance = Allowance::new((1000, 100));
    let begun = Instant::now();
    assert!(allowance.take(100) <= Instant::now());
    // 400 more take 400 ms; the time that has passed meanwhile counts.
    let until = allowance.take(400);
    assert!(until - begun >= Duration::from_millis(399), "{:?}", until - begun);
    sleep_until(until + Duration::from_millis(50)).await;
    let until = allowance.take(50);
    assert!(until <= Instant::now() + Duration::from_millis(10));

    let hub = start(ServerLimits { messages: (100, 10), ..ServerLimits::default() });
    let mut client = hub.connect().await;
    let begun = Instant::now();
    for _ in 0..60 {
        send(&mut client, &Frame::Ping).await;
    }
    for _ in 0..60 {
        assert_eq!(next(&mut client).await, Frame::Pong);
    }
    assert!(begun.elapsed() >= Duration::from_millis(480), "{:?}", begun.elapsed());

    // What makes no message counts as well: 10,000 parts of one, without content.
    let hub = start(ServerLimits { bytes: (100_000, 10_000), ..ServerLimits::default() });
    let mut client = hub.connect().await;
    let part = |opcode: u8| [opcode, 0x80, 0, 0, 0, 0];
    let begun = Instant::now();
    let mut bytes = part(0x02).to_vec();
    bytes.extend(std::iter::repeat_n(part(0x00), 10_000).flatten());
    bytes.extend(part(0x80));
    client.get_mut().write_all(&bytes).await.unwrap();
    // What was read last need not be waited for: a buffer full of it.
    assert_eq!(closed(&mut client).await.unwrap().1, "not_canonical");
    assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn tls_needs_a_certificate_with_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let (chain, key) = (dir.path().join("chain.pem"), dir.path().join("key.pem"));
    let bind = |tls| {
        let options = ServerOptions { tls: Some(tls), ..ServerOptions::default() };
        RelayServer::bind("127.0.0.1:0".parse().unwrap(), options).map(|_| ())
    };
    let missing = bind((chain.clone(), key.clone())).unwrap_err();
    assert_eq!(missing.code(), "hub_certificate");
    assert!(missing.to_string().contains("chain.pem"));
    let made = rcgen::generate_simple_self_signed(["hub.example".to_owned()]).unwrap();
    std::fs::write(&chain, made.cert.pem()).unwrap();
    std::fs::write(&key, "nothing").unwrap();
    assert!(bind((chain.clone(), key.clone())).unwrap_err().to_string().contains("key.pem"));
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    bind((chain.clone(), key.clone())).unwrap();
    let other = rcgen::generate_simple_self_signed(["hub.example".to_owned()]).unwrap();
    std::fs::write(&key, other.signing_key.serialize_pem()).unwrap();
    assert_eq!(bind((chain, key)).unwrap_err().code(), "hub_tls");
}
