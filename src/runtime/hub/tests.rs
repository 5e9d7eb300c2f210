//! Hubs over real loopback sockets, without a node: each test reads the inputs itself.

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::certificate::self_signed;
use crate::mesh::checked::Checked;
use crate::mesh::wire::frame::{Command, Frame, ManageRequest, ManageResponse, Outcome};
use crate::mesh::wire::scope::Scope;

/// Longest wait for anything that must come; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Some moment at which certificates are made.
const NOW: UnixMillis = UnixMillis(1_795_989_097_142);

fn device(seed: u8) -> (DeviceKey, Certificate) {
    let key = DeviceKey::from_scalar(&[seed; 32]).unwrap();
    let certificate = self_signed(&key, NOW, &[seed; 16]).unwrap();
    (key, certificate)
}

/// A hub with one device.
struct End {
    hub: Hub,
    inputs: Inputs,
    id: DeviceId,
    port: u16,
}

impl End {
    fn new(seed: u8) -> Self {
        Self::with(seed, TransportLimits::default())
    }

    fn with(seed: u8, limits: TransportLimits) -> Self {
        let (key, certificate) = device(seed);
        let (hub, inputs) = Hub::new(HubOptions { daemon: key.id(), port: 0, relay: None, limits });
        let port = hub.add_device(&key, &certificate).unwrap();
        Self { hub, inputs, id: key.id(), port }
    }

    async fn next(&mut self) -> Input {
        timeout(PATIENCE, self.inputs.recv()).await.expect("nothing came").unwrap()
    }

    fn dial(&self, port: u16) {
        let target = DialTarget::Loopback(port);
        let dial = Output::Dial { dial: DialId(1), local: self.id, target, expect: None };
        assert!(self.hub.execute(dial).is_none());
    }

    fn send(&self, session: SessionId, frame: Frame) {
        assert!(self.hub.execute(Output::Send { session, frame }).is_none());
    }

    fn close(&self, session: SessionId, reason: &'static str) {
        assert!(self.hub.execute(Output::Close { session, reason }).is_none());
    }

    fn admit(&self, session: SessionId) {
        assert!(self.hub.execute(Output::Admitted { session }).is_none());
    }

    async fn accepted(&mut self) -> (SessionId, DeviceId, SessionKind, Origin) {
        match self.next().await {
            Input::Accepted { session, local, remote, kind, origin } => {
                assert_eq!(local, self.id);
                (session, remote, kind, origin)
            }
            other => panic!("{}", name(&other)),
        }
    }

    async fn dialled(&mut self) -> (SessionId, DeviceId, Origin) {
        match self.next().await {
            Input::Dialled { dial: DialId(1), session, remote, origin } => {
                (session, remote, origin)
            }
            other => panic!("{}", name(&other)),
        }
    }

    async fn frame(&mut self) -> (SessionId, Checked) {
        match self.next().await {
            Input::Frame { session, frame } => (session, frame),
            other => panic!("{}", name(&other)),
        }
    }

    async fn closed(&mut self) -> (SessionId, &'static str) {
        match self.next().await {
            Input::Closed { session, reason } => (session, reason),
            other => panic!("{}", name(&other)),
        }
    }

    async fn dial_failed(&mut self) -> &'static str {
        match self.next().await {
            Input::DialFailed { dial: DialId(1), reason } => reason,
            other => panic!("{}", name(&other)),
        }
    }
}

fn name(input: &Input) -> String {
    match input {
        Input::Accepted { .. } => "Accepted".into(),
        Input::Dialled { .. } => "Dialled".into(),
        Input::DialFailed { reason, .. } => format!("DialFailed {reason}"),
        Input::Frame { frame, .. } => format!("Frame {frame:?}"),
        Input::Closed { reason, .. } => format!("Closed {reason}"),
        Input::PortBound => "PortBound".into(),
        Input::PortBindFailed { in_use } => format!("PortBindFailed {in_use}"),
        Input::Datagram { .. } => "Datagram".into(),
        Input::LocalAddresses(_) => "LocalAddresses".into(),
        _ => "another input".into(),
    }
}

/// Two hubs with a link from the first to the second.
async fn linked(limits: TransportLimits) -> (End, SessionId, End, SessionId) {
    let (mut a, mut b) = (End::with(1, limits.clone()), End::with(2, limits));
    a.dial(b.port);
    let (a_session, remote, origin) = a.dialled().await;
    assert_eq!((remote, origin), (b.id, Origin::SameUser));
    let (b_session, remote, kind, origin) = b.accepted().await;
    assert_eq!((remote, kind, origin), (a.id, SessionKind::DataAccepted, Origin::SameUser));
    (a, a_session, b, b_session)
}

fn request(id: u64, text: String) -> Frame {
    Frame::ManageRequest(ManageRequest {
        request_id: id,
        command: Command {
            verb: "room:member".into(),
            params: Value::map([("text", Value::Text(text))]),
        },
        scope: Scope { kind: "room".into(), path: None },
        token: None,
    })
}

fn text_of(frame: Checked) -> (u64, String) {
    match frame {
        Checked::Request { id, params, .. } => {
            (id, params.get("text").unwrap().as_text().unwrap().to_owned())
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn two_hubs_exchange_frames() {
    let (mut a, a_session, mut b, b_session) = linked(TransportLimits::default()).await;
    a.send(a_session, request(7, "hello".into()));
    let (session, frame) = b.frame().await;
    assert_eq!(session, b_session);
    assert_eq!(text_of(frame), (7, "hello".to_owned()));
    let outcome = Outcome::error("no", None);
    b.send(b_session, Frame::ManageResponse(ManageResponse { request_id: 7, outcome }));
    let (session, frame) = a.frame().await;
    assert_eq!(session, a_session);
    let Checked::Response { id: 7, outcome: Outcome::Error { code, .. } } = frame else {
        panic!("{frame:?}")
    };
    assert_eq!(code, "no");
    b.close(b_session, "enough");
    assert_eq!(b.closed().await, (b_session, "enough"));
    assert_eq!(a.closed().await, (a_session, "peer_closed"));
    assert_eq!(a.hub.status().links, 0);
    a.hub.shutdown(PATIENCE).await;
    b.hub.shutdown(PATIENCE).await;
}

// ---------------------------------------------------------------------------------------------
// Peers that are not hubs

/// A TLS client as some other program might have it.
async fn raw_client(
    port: u16,
    configure: impl FnOnce(
        rustls::ConfigBuilder<rustls::ClientConfig, rustls::client::WantsClientCert>,
    ) -> rustls::ClientConfig,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let (key, certificate) = device(250);
    // Its verifier is ours; only what it shows differs.
    let verifier = DeviceTls::new(&key, &certificate).unwrap().verifier();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let config = Arc::new(configure(builder));
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    let name = std::net::IpAddr::from(Ipv4Addr::LOCALHOST).into();
    tokio_rustls::TlsConnector::from(config).connect(name, stream).await
}

/// As device `seed`.
async fn raw_device(port: u16, seed: u8) -> tokio_rustls::client::TlsStream<TcpStream> {
    let (key, certificate) = device(seed);
    raw_client(port, |builder| {
        builder.with_client_auth_cert(chain(&certificate), private(&key)).unwrap()
    })
    .await
    .unwrap()
}

fn chain(certificate: &Certificate) -> Vec<CertificateDer<'static>> {
    vec![certificate.der().to_vec().into()]
}

fn private(key: &DeviceKey) -> PrivateKeyDer<'static> {
    PrivatePkcs8KeyDer::from(key.to_pkcs8_der().unwrap().to_vec()).into()
}

/// Shows one device's certificate and signs with another's key.
#[derive(Debug)]
struct Impostor(Arc<CertifiedKey>);

impl Impostor {
    fn new(shown: u8, held: u8) -> Arc<Self> {
        let ((_, certificate), (key, _)) = (device(shown), device(held));
        let key = rustls::crypto::ring::sign::any_ecdsa_type(&private(&key)).unwrap();
        Arc::new(Self(Arc::new(CertifiedKey::new(chain(&certificate), key))))
    }
}

impl rustls::client::ResolvesClientCert for Impostor {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl rustls::server::ResolvesServerCert for Impostor {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// Waits until the listener has turned `count` connections away.
async fn refused(end: &End, count: u64) {
    timeout(PATIENCE, async {
        while end.hub.status().refused < count {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("nobody was refused");
    assert_eq!(end.hub.status().refused, count);
}

/// Reads until the other side ends; what comes in before.
async fn read_out(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> std::io::Result<Vec<u8>> {
    let mut all = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut all)).await.expect("no end came")?;
    Ok(all)
}

#[tokio::test]
async fn a_client_without_certificate_is_closed_without_a_word() {
    let mut end = End::new(1);
    let mut client = raw_client(end.port, |builder| builder.with_no_client_auth()).await.unwrap();
    assert_eq!(read_out(&mut client).await.unwrap(), b"");
    refused(&end, 1).await;
    // The node hears nothing of it.
    let _client = raw_device(end.port, 3).await;
    assert_eq!(end.accepted().await.1, device(3).0.id());
}

#[tokio::test]
async fn an_impostor_gets_nowhere() {
    let end = End::new(1);
    let mut client =
        raw_client(end.port, |builder| builder.with_client_cert_resolver(Impostor::new(3, 4)))
            .await
            .unwrap();
    // TLS 1.3 clients learn of it after their handshake.
    assert!(read_out(&mut client).await.is_err());
    refused(&end, 1).await;
    // The honest pair of the same parts is let in.
    let mut end = end;
    let _client =
        raw_client(end.port, |builder| builder.with_client_cert_resolver(Impostor::new(3, 3)))
            .await
            .unwrap();
    assert_eq!(end.accepted().await.1, device(3).0.id());
}

#[tokio::test]
async fn odd_certificates_and_other_protocols_are_refused() {
    let end = End::new(1);
    for (count, algorithm) in [(1, &rcgen::PKCS_ED25519), (2, &rcgen::PKCS_ECDSA_P384_SHA384)] {
        let key = rcgen::KeyPair::generate_for(algorithm).unwrap();
        let odd = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let client = raw_client(end.port, |builder| {
            let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
            builder.with_client_auth_cert(vec![odd.der().clone()], key).unwrap()
        })
        .await;
        // A client whose key fits no scheme that we offer shows no certificate at all.
        if let Ok(mut client) = client {
            let _ = read_out(&mut client).await;
        }
        refused(&end, count).await;
    }
    for (count, bytes) in [(3, &b"GET / HTTP/1.1\r\n\r\n"[..]), (4, &[0x16, 3, 1, 0, 5]), (5, b"")]
    {
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, end.port)).await.unwrap();
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
        let _ = read_out(&mut client).await;
        refused(&end, count).await;
    }
}

#[tokio::test]
async fn a_dial_fails_with_its_reason() {
    let limits =
        TransportLimits { dial_loopback: Duration::from_millis(300), ..TransportLimits::default() };
    let mut end = End::with(1, limits);
    // Nobody there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    end.dial(port);
    assert_eq!(end.dial_failed().await, "refused");
    // Somebody who never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    end.dial(silent.local_addr().unwrap().port());
    assert_eq!(end.dial_failed().await, "timeout");
    // Somebody who speaks something else, or hangs up.
    for (bytes, reason) in [(&b"220 welcome\r\n"[..], "tls_failed"), (b"", "peer_closed")] {
        let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        end.dial(other.local_addr().unwrap().port());
        let (mut stream, _) = other.accept().await.unwrap();
        let mut hello = [0; 64];
        stream.read_exact(&mut hello).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(end.dial_failed().await, reason);
    }
    // A device that we do not have.
    let target = DialTarget::Loopback(port);
    let dial = Output::Dial { dial: DialId(1), local: DeviceId([9; 32]), target, expect: None };
    end.hub.execute(dial);
    assert_eq!(end.dial_failed().await, "not_in_service");
}

#[tokio::test]
async fn a_server_must_hold_the_key_it_shows() {
    let mut end = End::new(1);
    for (held, honest) in [(4, false), (3, true)] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Impostor::new(3, held));
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        end.dial(server.local_addr().unwrap().port());
        let (stream, _) = server.accept().await.unwrap();
        let accepted = tokio_rustls::TlsAcceptor::from(Arc::new(config)).accept(stream).await;
        assert_eq!(accepted.is_ok(), honest);
        if honest {
            assert_eq!(end.dialled().await.1, device(3).0.id());
        } else {
            assert_eq!(end.dial_failed().await, "tls_failed");
        }
    }
}

#[tokio::test]
async fn bytes_that_are_no_frames_end_the_link_with_their_reason() {
    let mut end = End::new(1);
    for (bytes, reason) in [
        (&b"\0\0\0\0"[..], "not_canonical"),
        (b"\0\0\0\x02\xbf\xff", "not_canonical"),
        (b"\0\x01\0\x01", "frame_too_large"),
        (b"\xff\xff\xff\xff", "frame_too_large"),
        (b"", "peer_closed"),
        (b"\0\0\0\x09abc", "peer_closed"),
    ] {
        let mut client = raw_device(end.port, 3).await;
        let (session, ..) = end.accepted().await;
        client.write_all(bytes).await.unwrap();
        if reason == "peer_closed" {
            client.shutdown().await.unwrap();
        }
        assert_eq!(end.closed().await, (session, reason), "{bytes:?}");
    }
}

#[tokio::test]
async fn a_connection_that_just_breaks_is_the_peers_end() {
    let mut end = End::new(1);
    let client = raw_device(end.port, 3).await;
    let (session, ..) = end.accepted().await;
    socket2::SockRef::from(client.get_ref().0).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    assert_eq!(end.closed().await, (session, "peer_closed"));
}

#[tokio::test]
async fn large_frames_travel_once_the_peer_is_let_in() {
    let (a, a_session, mut b, b_session) = linked(TransportLimits::default()).await;
    b.admit(b_session);
    let text = "x".repeat(5 * 1024 * 1024);
    a.send(a_session, request(1, text.clone()));
    let (_, frame) = b.frame().await;
    assert!(text_of(frame) == (1, text));
}

#[tokio::test]
async fn a_peer_over_tls_that_does_not_read_is_closed() {
    let mut limits = TransportLimits::default();
    limits.link.write_stall = Duration::from_millis(200);
    let mut end = End::with(1, limits);
    let client = raw_device(end.port, 3).await;
    let (session, ..) = end.accepted().await;
    // More than the system's buffers take.
    for id in 0..32 {
        end.send(session, request(id, "x".repeat(1024 * 1024)));
    }
    assert_eq!(end.closed().await, (session, "slow_consumer"));
    drop(client);
    assert_eq!(end.hub.status().queued_bytes, 0);
}

#[tokio::test]
async fn half_a_frame_over_tls_is_not_waited_for() {
    let mut limits = TransportLimits::default();
    limits.link.read_stall = Duration::from_millis(100);
    let mut end = End::with(1, limits);
    let mut client = raw_device(end.port, 3).await;
    let (session, ..) = end.accepted().await;
    client.write_all(b"\0\0\0\x09abc").await.unwrap();
    assert_eq!(end.closed().await, (session, "slow_frame"));
    assert!(read_out(&mut client).await.is_err(), "the link ends without goodbye");
}

#[tokio::test]
async fn a_closing_link_writes_what_was_queued() {
    let (a, a_session, mut b, b_session) = linked(TransportLimits::default()).await;
    // The peer is busy sending at the same time, so that unread bytes lie around at the end.
    for id in 0..100 {
        b.send(b_session, request(id, "y".repeat(10_000)));
        a.send(a_session, request(id, "x".repeat(10_000)));
    }
    a.close(a_session, "enough");
    for expected in 0..100 {
        let (_, frame) = b.frame().await;
        assert_eq!(text_of(frame).0, expected);
    }
    assert_eq!(b.closed().await, (b_session, "peer_closed"));
    let mut a = a;
    let reason = loop {
        match a.next().await {
            Input::Frame { .. } => {}
            Input::Closed { session, reason } => {
                assert_eq!(session, a_session);
                break reason;
            }
            other => panic!("{}", name(&other)),
        }
    };
    assert_eq!(reason, "enough");
    // Once.
    a.hub.shutdown(PATIENCE).await;
    assert!(a.inputs.try_recv().is_none());
}

#[tokio::test]
async fn silent_connections_do_not_lock_others_out() {
    let limits = TransportLimits {
        local_handshakes: 16,
        handshake_own_time: Duration::from_millis(2),
        ..TransportLimits::default()
    };
    let mut end = End::with(1, limits);
    let mut silent = Vec::new();
    for _ in 0..1000 {
        silent.push(TcpStream::connect((Ipv4Addr::LOCALHOST, end.port)).await.unwrap());
        assert!(end.hub.status().handshakes <= 16);
    }
    let _client = timeout(PATIENCE, raw_device(end.port, 3)).await.unwrap();
    assert_eq!(end.accepted().await.1, device(3).0.id());
    assert!(end.hub.status().handshakes <= 16);
}

#[tokio::test]
async fn nothing_is_accepted_beyond_the_bound_and_something_again_below_it() {
    let limits = TransportLimits { links: 2, ..TransportLimits::default() };
    let mut end = End::with(1, limits);
    let first = raw_device(end.port, 3).await;
    let (session, ..) = end.accepted().await;
    let _second = raw_device(end.port, 4).await;
    end.accepted().await;
    let mut third = TcpStream::connect((Ipv4Addr::LOCALHOST, end.port)).await.unwrap();
    assert_eq!(read_out(&mut third).await.unwrap(), b"");
    drop(first);
    assert_eq!(end.closed().await, (session, "peer_closed"));
    let _fourth = raw_device(end.port, 5).await;
    end.accepted().await;
}

#[tokio::test]
async fn the_well_known_port_is_bound_once_and_free_at_once() {
    let foreign = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = foreign.local_addr().unwrap().port();
    let hub = |seed: u8| {
        let mut end = End::new(seed);
        end.hub.well_known = port;
        end
    };
    let (mut a, mut b) = (hub(1), hub(2));
    a.hub.execute(Output::BindPort);
    assert!(matches!(a.next().await, Input::PortBindFailed { in_use: true }));
    drop(foreign);
    a.hub.execute(Output::BindPort);
    assert!(matches!(a.next().await, Input::PortBound));
    b.hub.execute(Output::BindPort);
    assert!(matches!(b.next().await, Input::PortBindFailed { in_use: true }));
    b.dial(port);
    let (b_session, found, _) = b.dialled().await;
    assert_eq!(found, a.id);
    let (session, remote, kind, _) = a.accepted().await;
    assert_eq!((remote, kind), (b.id, SessionKind::PortAccepted));
    // Released and bound again by the same hub, without a gap in the order of things.
    a.hub.execute(Output::ReleasePort);
    a.hub.execute(Output::BindPort);
    assert!(matches!(a.next().await, Input::PortBound));
    a.hub.execute(Output::ReleasePort);
    timeout(PATIENCE, async {
        loop {
            b.hub.execute(Output::BindPort);
            match b.next().await {
                Input::PortBound => break,
                Input::PortBindFailed { in_use: true } => tokio::task::yield_now().await,
                other => panic!("{}", name(&other)),
            }
        }
    })
    .await
    .unwrap();
    // Sessions that came in by the port live on.
    b.close(b_session, "enough");
    assert_eq!(a.closed().await, (session, "peer_closed"));
}

#[tokio::test]
async fn a_removed_device_is_gone_and_can_come_back() {
    let (mut a, mut b) = (End::new(1), End::new(2));
    let (key, certificate) = device(2);
    assert!(matches!(b.hub.add_device(&key, &certificate), Err(AddDeviceError::Known)));
    b.hub.remove_device(&b.id);
    let closed = async {
        loop {
            a.dial(b.port);
            match a.next().await {
                Input::DialFailed { reason: "refused", .. } => break,
                Input::DialFailed { .. } => tokio::task::yield_now().await,
                other => panic!("{}", name(&other)),
            }
        }
    };
    timeout(PATIENCE, closed).await.unwrap();
    b.port = b.hub.add_device(&key, &certificate).unwrap();
    assert_eq!(b.hub.data_port(&b.id), Some(b.port));
    a.dial(b.port);
    assert_eq!(a.dialled().await.1, b.id);
    b.accepted().await;
}

#[tokio::test]
async fn the_network_listener_is_never_machine_local_and_counts_by_source() {
    let limits = TransportLimits { per_source: 2, ..TransportLimits::default() };
    let mut end = End::with(1, limits);
    let address = end.hub.listen_network("127.0.0.1:0".parse().unwrap()).unwrap();
    let first = raw_device(address.port(), 3).await;
    let (session, _, kind, origin) = end.accepted().await;
    assert_eq!((kind, origin), (SessionKind::NetworkAccepted(Policy::Full), Origin::Network));
    let _second = raw_device(address.port(), 4).await;
    end.accepted().await;
    let mut third = TcpStream::connect(address).await.unwrap();
    assert_eq!(read_out(&mut third).await.unwrap(), b"");
    drop(first);
    assert_eq!(end.closed().await, (session, "peer_closed"));
    let _fourth = raw_device(address.port(), 5).await;
    end.accepted().await;
    let taken = end.hub.listen_network(address).unwrap_err();
    assert_eq!(taken.code(), "port_in_use");
}

#[tokio::test]
async fn datagrams_reach_every_socket_of_the_port_on_loopback() {
    let (mut a, mut b) = (End::new(1), End::new(2));
    let port = a.hub.start_first_contact(0, false).unwrap();
    assert_eq!(b.hub.start_first_contact(port, false).unwrap(), port);
    if !a.hub.status().multicast {
        eprintln!("skipped: no multicast on loopback here");
        return;
    }
    for end in [&mut a, &mut b] {
        let Input::LocalAddresses(addresses) = end.next().await else { panic!("no addresses") };
        assert!(addresses.contains(&Ipv4Addr::LOCALHOST.into()));
    }
    let group = b"{\"type\":\"agent-comms-probe\"}".to_vec();
    for _ in 0..2 {
        let broadcast = b"{\"type\":\"agent-comms-probe\",\"to\":\"network\"}".to_vec();
        a.hub.execute(Output::Datagram { group: b"garbage".to_vec(), broadcast: Vec::new() });
        a.hub.execute(Output::Datagram { group: group.clone(), broadcast });
        // The sender hears itself, as the reference does.
        for end in [&mut a, &mut b] {
            let Input::Datagram { from, bytes } = end.next().await else { panic!("no datagram") };
            assert_eq!((from, &bytes), (Ipv4Addr::LOCALHOST.into(), &group));
        }
    }
}

#[tokio::test]
async fn shutting_down_says_goodbye_and_ends() {
    let (mut a, a_session, mut b, b_session) = linked(TransportLimits::default()).await;
    a.send(a_session, request(1, "last".into()));
    let shutdown = a.hub.shutdown(PATIENCE);
    let (frame, ()) = tokio::join!(b.frame(), shutdown);
    assert_eq!(text_of(frame.1).1, "last");
    assert_eq!(a.closed().await, (a_session, "shutdown"));
    assert_eq!(b.closed().await, (b_session, "peer_closed"));
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, a.port)).await.is_err());
}

#[tokio::test]
async fn shutting_down_does_not_wait_for_the_owner_or_the_peer() {
    let limits = TransportLimits { inputs: 1, ..TransportLimits::default() };
    let mut end = End::with(1, limits);
    let mut silent = Vec::new();
    for seed in 3..6 {
        silent.push(raw_device(end.port, seed).await);
    }
    end.accepted().await;
    // Nobody reads the queue any more, and the peers do not answer the goodbye.
    end.hub.shutdown(Duration::from_millis(50)).await;
    assert_eq!(end.hub.status().links, 0);
}

#[tokio::test]
async fn others_than_our_own_user_cannot_take_every_place() {
    let limits = TransportLimits { links: 8, links_others: 1, ..TransportLimits::default() };
    let mut end = End::with(1, limits);
    let address = end.hub.listen_network("127.0.0.1:0".parse().unwrap()).unwrap();
    let _first = raw_device(address.port(), 3).await;
    end.accepted().await;
    let mut second = raw_device(address.port(), 4).await;
    let _ = read_out(&mut second).await;
    refused(&end, 1).await;
    let _ours = raw_device(end.port, 5).await;
    assert_eq!(end.accepted().await.3, Origin::SameUser);
}

#[test]
fn the_transport_leaves_half_of_the_descriptors_to_others() {
    for descriptors in [256, 1024, 20_000, u64::MAX] {
        let limits = TransportLimits::with_descriptors(descriptors);
        let used = limits.links + limits.local_handshakes + limits.network_handshakes;
        assert!(u64::try_from(used).unwrap() <= descriptors / 2, "{used} of {descriptors}");
    }
    assert_eq!(TransportLimits::default().links, MAX_LINKS);
}
