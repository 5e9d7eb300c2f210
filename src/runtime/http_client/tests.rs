use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::acp::code::Code;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PRIVATE: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: false };
const PUBLIC: EndpointPolicy = EndpointPolicy { allow_private: false, allow_insecure: true };
const BOUNDS: Bounds = Bounds { body: 1024, within: Duration::from_secs(20) };
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

/// A server that answers each request with the next text; an empty one closes the connection.
struct Stub {
    port: u16,
    accepted: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<String>>>,
}

async fn stub(answers: &[&str]) -> Stub {
    stub_with(answers, None).await
}

async fn stub_with(answers: &[&str], tls: Option<TlsAcceptor>) -> Stub {
    let listener = TcpListener::bind((LOCAL, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (accepted, requests) = (Arc::default(), Arc::default());
    let stub = Stub { port, accepted: Arc::clone(&accepted), requests: Arc::clone(&requests) };
    let answers: VecDeque<String> = answers.iter().map(|text| (*text).to_owned()).collect();
    let answers = Arc::new(Mutex::new(answers));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            accepted.fetch_add(1, Ordering::SeqCst);
            let stream: Box<dyn Stream> = match &tls {
                None => Box::new(stream),
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => Box::new(stream),
                    Err(_) => continue,
                },
            };
            tokio::spawn(converse(stream, Arc::clone(&answers), Arc::clone(&requests)));
        }
    });
    stub
}

async fn converse(
    mut stream: Box<dyn Stream>,
    answers: Arc<Mutex<VecDeque<String>>>,
    requests: Arc<Mutex<Vec<String>>>,
) {
    let (mut read, mut buffer) = (String::new(), [0; 4096]);
    loop {
        while !read.contains("\r\n\r\n") {
            match stream.read(&mut buffer).await {
                Ok(n) if n > 0 => read.push_str(&String::from_utf8_lossy(&buffer[..n])),
                _ => return,
            }
        }
        requests.lock().push(std::mem::take(&mut read));
        let Some(answer) = answers.lock().pop_front() else {
            return std::future::pending().await;
        };
        if answer.is_empty() || stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Answers from a list, the last one again and again; counts the questions.
struct Names {
    answers: Mutex<VecDeque<Vec<IpAddr>>>,
    asked: Arc<AtomicUsize>,
}

impl Names {
    fn new(answers: &[&[&str]]) -> (Box<Self>, Arc<AtomicUsize>) {
        let parse = |list: &&[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect();
        let asked = Arc::new(AtomicUsize::new(0));
        let answers = Mutex::new(answers.iter().map(parse).collect());
        (Box::new(Self { answers, asked: Arc::clone(&asked) }), asked)
    }
}

impl Resolve for Names {
    fn resolve<'a>(&'a self, _: &'a str) -> Resolved<'a> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut answers = self.answers.lock();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        Box::pin(async move { Ok(answer.unwrap_or_default()) })
    }
}

fn client(url: &str, connector: Connector) -> HttpClient {
    let endpoint = Endpoint::parse(url, connector.policy()).unwrap();
    HttpClient::new(endpoint, Arc::new(connector)).unwrap()
}

fn local(stub: &Stub) -> HttpClient {
    client(&format!("http://127.0.0.1:{}", stub.port), Connector::new(PRIVATE))
}

fn get(path: &str) -> Request<Bytes> {
    Request::get(path).body(Bytes::new()).unwrap()
}

fn blocked<T: std::fmt::Debug>(result: Result<T, HttpError>) {
    match result.unwrap_err() {
        HttpError::Blocked(error) => assert_eq!(error.code(), Code::EndpointBlocked),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn one_connection_is_kept_and_replaced_when_it_has_gone() {
    let closing = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi";
    let stub = stub(&[OK, OK, closing, OK]).await;
    let client = local(&stub);
    for (at, connections) in [1, 1, 1, 2].into_iter().enumerate() {
        let answer = client.send(get(&format!("/a?n={at}")), BOUNDS).await.unwrap();
        assert_eq!((answer.status(), &answer.body()[..]), (StatusCode::OK, &b"hi"[..]));
        assert_eq!(stub.accepted.load(Ordering::SeqCst), connections, "request {at}");
    }
    let requests = stub.requests.lock();
    let expected = format!("GET /a?n=0 HTTP/1.1\r\nhost: 127.0.0.1:{}\r\n\r\n", stub.port);
    assert_eq!(requests[0].to_ascii_lowercase(), expected.to_ascii_lowercase());
}

/// Test list G: a redirect to a blocked address, and to one that is not.
#[tokio::test]
async fn redirects_are_not_followed() {
    let trap = std::net::TcpListener::bind((LOCAL, 0)).unwrap();
    trap.set_nonblocking(true).unwrap();
    let trap_port = trap.local_addr().unwrap().port();
    for target in [format!("http://127.0.0.1:{trap_port}/"), "http://169.254.169.254/".into()] {
        for status in [301_u16, 302, 303, 307, 308] {
            let answer = format!(
                "HTTP/1.1 {status} Away\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
            );
            let stub = stub(&[&answer]).await;
            let refused = local(&stub).send(get("/"), BOUNDS).await;
            assert_eq!(refused.unwrap_err(), HttpError::Redirected(status));
        }
    }
    assert_eq!(trap.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// Test list G: the answer that is judged is the one that is used, and there is no second question.
#[tokio::test]
async fn a_name_that_changes_is_asked_once() {
    let stub = stub(&[OK]).await;
    let (names, asked) = Names::new(&[&["127.0.0.1"], &["169.254.169.254"]]);
    let url = format!("http://relay.example:{}", stub.port);
    let good = client(&url, Connector::with(PRIVATE, names, None));
    assert_eq!(good.send(get("/"), BOUNDS).await.unwrap().body()[..], b"hi"[..]);
    assert_eq!(asked.load(Ordering::SeqCst), 1);

    // The other way round: what was good at another time does not count.
    let (names, asked) = Names::new(&[&["169.254.169.254"], &["127.0.0.1"]]);
    let bad = client(&url, Connector::with(PRIVATE, names, None));
    blocked(bad.send(get("/"), BOUNDS).await);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_eq!(stub.accepted.load(Ordering::SeqCst), 1);
}

/// Test list G: every kind of address that a name may lead to, alone and beside a good one.
#[tokio::test]
async fn one_blocked_address_blocks_the_name() {
    let stub = stub(&[]).await;
    let always = [
        "0.0.0.0",
        "169.254.169.254",
        "169.254.0.1",
        "100.100.100.200",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "fe80::1",
        "ff02::1",
        "fd00:ec2::254",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
    ];
    let private = [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "::1",
        "fc00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ];
    let judged = |addresses: &[&str], policy| {
        let (names, _) = Names::new(&[addresses]);
        let url = format!("http://relay.example:{}", stub.port);
        let client = client(&url, Connector::with(policy, names, None));
        async move { blocked(client.send(get("/"), BOUNDS).await) }
    };
    for address in always {
        judged(&[address], PRIVATE).await;
        judged(&["127.0.0.1", address], PRIVATE).await;
    }
    for address in private {
        judged(&[address], PUBLIC).await;
        judged(&["192.0.2.1", address], PUBLIC).await;
    }
    // Plain HTTP to a name that is not this machine.
    judged(&["192.0.2.1"], PRIVATE).await;
    judged(&["127.0.0.1", "192.0.2.1"], PRIVATE).await;
    assert_eq!(stub.accepted.load(Ordering::SeqCst), 0);

    let (names, _) = Names::new(&[&[]]);
    let nowhere = client("https://relay.example", Connector::with(PRIVATE, names, None));
    assert_eq!(nowhere.send(get("/"), BOUNDS).await.unwrap_err(), HttpError::Unresolved);
}

#[tokio::test]
async fn the_next_address_is_tried() {
    let stub = stub(&[OK]).await;
    // Nobody listens at the first one.
    let (names, _) = Names::new(&[&["127.0.0.77", "127.0.0.1"]]);
    let url = format!("http://relay.example:{}", stub.port);
    let good = client(&url, Connector::with(PRIVATE, names, None));
    good.send(get("/"), BOUNDS).await.unwrap();
}

#[tokio::test]
async fn answers_are_bounded() {
    let long = format!("HTTP/1.1 200 OK\r\nContent-Length: 1025\r\n\r\n{}", "x".repeat(1025));
    let chunk = format!("400\r\n{}\r\n", "x".repeat(1024));
    let chunks =
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n");
    let head = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(MAX_HEAD));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(MAX_HEADERS + 1));
    for (answer, error) in [
        (long.as_str(), HttpError::TooLarge(1024)),
        (chunks.as_str(), HttpError::TooLarge(1024)),
        (head.as_str(), HttpError::NotHttp),
        (many.as_str(), HttpError::NotHttp),
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n", HttpError::NotHttp),
        ("", HttpError::Closed),
    ] {
        let stub = stub(&[answer, ""]).await;
        assert_eq!(local(&stub).send(get("/"), BOUNDS).await.unwrap_err(), error);
    }
    // A body that is announced and does not come, and no answer at all.
    for answers in [&["HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"][..], &[]] {
        let stub = stub(answers).await;
        let bounds = Bounds { within: Duration::from_millis(50), ..BOUNDS };
        let late = local(&stub).send(get("/"), bounds).await;
        assert_eq!(late.unwrap_err(), HttpError::Timeout);
    }
    let nobody = TcpListener::bind((LOCAL, 0)).await.unwrap().local_addr().unwrap();
    let refused = client(&format!("http://{nobody}"), Connector::new(PRIVATE));
    let refused = refused.send(get("/"), BOUNDS).await.unwrap_err();
    assert_eq!(refused, HttpError::Unreachable("refused"));
    assert!(refused.is_passing());
}

#[tokio::test]
async fn a_stream_is_read_as_it_comes() {
    let stub = stub(&["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"]).await;
    let answer = local(&stub).open(get("/"), BOUNDS.within).await.unwrap();
    let mut body = answer.into_body();
    assert_eq!(body.chunk().await.unwrap().unwrap()[..], b"abc"[..]);
    let next = timeout(Duration::from_millis(50), body.chunk()).await;
    assert!(next.is_err(), "the stream goes on");
}

#[tokio::test]
async fn requests_are_paths() {
    let stub = stub(&[OK]).await;
    for uri in ["http://169.254.169.254/", "example.org:80"] {
        let refused = local(&stub).send(get(uri), BOUNDS).await;
        assert_eq!(refused.unwrap_err(), HttpError::Request, "{uri}");
    }
    assert_eq!(stub.accepted.load(Ordering::SeqCst), 0);
}

/// The certificate has to be for the name of the endpoint, whatever address that has.
#[tokio::test]
async fn certificates_are_checked_against_the_name() {
    let made = rcgen::generate_simple_self_signed(vec!["relay.example".into()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let trusting = |trusted: bool| {
        let mut roots = RootCertStore::empty();
        if trusted {
            roots.add(made.cert.der().clone()).unwrap();
        }
        ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    };
    let stub = stub_with(&[OK, OK], Some(TlsAcceptor::from(Arc::new(server)))).await;
    for (name, trusted, good) in [
        ("relay.example", true, true),
        ("relay.example.", true, true),
        ("other.example", true, false),
        ("relay.example", false, false),
    ] {
        let (names, _) = Names::new(&[&["127.0.0.1"]]);
        let connector = Connector::with(PRIVATE, names, Some(Arc::new(trusting(trusted))));
        let answer = client(&format!("https://{name}:{}", stub.port), connector);
        match answer.send(get("/"), BOUNDS).await {
            Err(error) if !good => assert_eq!(error, HttpError::Tls("untrusted_certificate")),
            Ok(_) if good => {}
            other => panic!("{name}: {other:?}"),
        }
    }
}
