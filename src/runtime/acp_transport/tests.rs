//! Against a relay that the test plays itself: one connection, one exchange.

use std::collections::{BTreeSet, HashMap};

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request as Asked, Response as Answered};
use tokio_tungstenite::{WebSocketStream, accept_hdr_async};

use super::*;
use crate::acp::code::Code;
use crate::acp::envelope::KeyRef;
use crate::acp::objects::RevocationTarget;
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::value::{CardId, Name, Nonce, NoticeId, Prose, Seq, Time, UrlText};
use crate::identity::entropy::SeededEntropy;

/// Longer than anything here takes; what is waited for longer does not come.
const HANG: Duration = Duration::from_secs(20);
const PRIVATE: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: false };

struct Relay {
    listener: TcpListener,
    origin: String,
}

/// One request; the answer is still to be given.
struct Exchange {
    stream: TcpStream,
    line: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

impl Relay {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        Self { listener, origin }
    }

    async fn connection(&self) -> TcpStream {
        timeout(HANG, self.listener.accept()).await.expect("a connection").unwrap().0
    }

    async fn next(&self) -> Exchange {
        let mut stream = self.connection().await;
        let mut read = Vec::new();
        let end = loop {
            if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            assert!(stream.read_buf(&mut read).await.unwrap() > 0, "half a request");
        };
        let head = String::from_utf8(read[..end].to_vec()).unwrap();
        let (line, rest) = head.split_once("\r\n").unwrap();
        let headers: HashMap<String, String> = rest
            .lines()
            .map(|header| header.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect();
        let length = headers.get("content-length").map_or(0, |n| n.parse().unwrap());
        let mut body = read[end + 4..].to_vec();
        while body.len() < length {
            assert!(stream.read_buf(&mut body).await.unwrap() > 0, "half a body");
        }
        Exchange { stream, line: line.to_owned(), headers, body }
    }

    /// Accepts a WebSocket; its path and token.
    #[allow(clippy::result_large_err, reason = "the library's type of a refusal")]
    async fn socket(&self) -> (WebSocketStream<TcpStream>, String, String) {
        let stream = self.connection().await;
        let (mut path, mut token) = (String::new(), String::new());
        let seen = |asked: &Asked, mut answer: Answered| {
            path = asked.uri().to_string();
            token = asked.headers()["authorization"].to_str().unwrap().to_owned();
            let protocol = asked.headers()["sec-websocket-protocol"].clone();
            answer.headers_mut().insert("sec-websocket-protocol", protocol);
            Ok(answer)
        };
        let socket = accept_hdr_async(stream, seen).await.unwrap();
        (socket, path, token)
    }
}

impl Exchange {
    async fn answer(self, status: u16, body: &Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let length = format!("Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
        self.raw(&format!("HTTP/1.1 {status} So\r\nContent-Type: application/json\r\n{length}"))
            .await;
    }

    async fn raw(mut self, text: &str) -> TcpStream {
        self.stream.write_all(text.as_bytes()).await.unwrap();
        self.stream
    }

    fn token(&self) -> &str {
        &self.headers["authorization"]
    }
}

fn identity(seed: u64) -> Arc<Secret> {
    Arc::new(Secret::draw(&mut SeededEntropy::new(seed)).unwrap())
}

fn client(relay: &Relay, key: &Arc<Secret>) -> Arc<RelayClient> {
    Arc::new(RelayClient::new(&relay.origin, PRIVATE, Arc::clone(key)).unwrap())
}

fn envelope(key: &Secret) -> Envelope {
    let (to, mut entropy) = (key.did(), SeededEntropy::new(9));
    let recipient = (&KeyRef::Identity, to.encryption_key());
    Envelope::seal(key, to, recipient, b"{}", unix_now(), 60_000, &mut entropy).unwrap()
}

fn card(key: &Secret) -> WorkerCard {
    let now = unix_now();
    let card = WorkerCard {
        card_id: CardId::draw(&mut SeededEntropy::new(5)),
        did: key.did(),
        name: Name::parse("bob").unwrap(),
        description: Prose::parse("").unwrap(),
        adapters: Seq::default(),
        skills: Seq::default(),
        isolation: Seq::default(),
        relay_urls: Seq::new(vec![UrlText::parse("https://relay.example").unwrap()]).unwrap(),
        encryption_key: None,
        issued_at: Time::from(now),
        expires_at: Time::from(now).plus(60_000),
        signature: Signature::blank(Role::Worker, key.did()),
    };
    card.signed(key, now).unwrap()
}

fn notice(key: &Secret, id: &str) -> RevocationNotice {
    let now = unix_now();
    let notice = RevocationNotice {
        notice_id: NoticeId::draw(&mut SeededEntropy::new(6)),
        issuer_did: key.did(),
        target_type: RevocationTarget::Card,
        target_id: Name::parse(id).unwrap(),
        reason: Prose::parse("").unwrap(),
        issued_at: Time::from(now),
        effective_at: Time::from(now),
        signature: Signature::blank(Role::Issuer, key.did()),
    };
    notice.signed(key, now).unwrap()
}

/// The nonce of a token that is good for `action` at this relay.
fn checked(token: &str, key: &Secret, action: RelayAction, relay: &Relay) -> Nonce {
    let token = token.strip_prefix("Bearer ").unwrap();
    let origins = [relay.origin.clone()];
    auth::check(token, key.did(), action, &origins, unix_now()).unwrap().nonce
}

fn error(code: &str, wait: u64) -> Value {
    json!({ "error": { "code": code, "message": "\u{1b}[2Jno", "retryAfterMs": wait } })
}

fn page(cursors: &[&str], next: Option<&str>) -> Value {
    let envelopes: Vec<Value> = cursors
        .iter()
        .map(|cursor| json!({ "cursor": cursor, "envelope": { "n": cursor } }))
        .collect();
    json!({ "envelopes": envelopes, "next": next })
}

async fn delivered(deliveries: &mut mpsc::Receiver<Delivery>) -> (String, String) {
    let Delivery { envelope, cursor } =
        timeout(HANG, deliveries.recv()).await.expect("a delivery").expect("no end");
    (cursor, String::from_utf8(envelope).unwrap())
}

#[tokio::test]
async fn envelopes_are_posted_without_a_token() {
    let (relay, key) = (Relay::start().await, identity(1));
    let (client, sent) = (client(&relay, &key), envelope(&key));
    let good = json!({ "envelopeId": sent.envelope_id, "cursor": "c1", "more": 1 });
    for (status, repeated) in [(202, false), (200, true)] {
        let (posted, ()) = tokio::join!(client.post(&sent), async {
            let exchange = relay.next().await;
            assert_eq!(exchange.line, "POST /v1/envelopes HTTP/1.1");
            assert_eq!(exchange.headers["content-type"], "application/json");
            assert!(!exchange.headers.contains_key("authorization"));
            assert_eq!(exchange.body, canonical(&sent).unwrap());
            exchange.answer(status, &good).await;
        });
        let posted = posted.unwrap();
        assert_eq!((posted.cursor.as_str(), posted.repeated), ("c1", repeated));
    }
    let wait = Some(Duration::from_millis(1500));
    let longest = Some(Duration::from_secs(600));
    let other = json!({ "envelopeId": "env_another0001", "cursor": "c1" });
    let unknown = json!({ "error": { "code": "NEW" } });
    for (status, body, code, retryable, after) in [
        (429, error("RATE_LIMITED", 1500), Code::RateLimited, true, wait),
        (503, error("RELAY_UNREACHABLE", 1500), Code::RelayUnreachable, true, wait),
        (507, error("MAILBOX_FULL", u64::MAX >> 11), Code::MailboxFull, true, longest),
        (409, error("ENVELOPE_ID_REUSED", 0), Code::EnvelopeIdReused, false, Some(Duration::ZERO)),
        (429, json!("slow down"), Code::RateLimited, true, None),
        (503, unknown.clone(), Code::RelayUnreachable, true, None),
        (307, Value::Null, Code::EndpointBlocked, true, None),
        (413, Value::Null, Code::TooLarge, false, None),
        (200, json!([]), Code::RelayUnreachable, true, None),
        (202, other.clone(), Code::RelayUnreachable, true, None),
        (202, json!("x".repeat(MAX_SMALL)), Code::TooLarge, true, None),
    ] {
        let answered = async { relay.next().await.answer(status, &body).await };
        let (refused, ()) = tokio::join!(client.post(&sent), answered);
        let refused = refused.unwrap_err();
        assert_eq!((refused.code(), refused.is_retryable()), (code, retryable), "{body}");
        assert_eq!(refused.retry_after(), after, "{body}");
        // What is no answer of a relay does not say that it has not taken the envelope.
        let none = [200, 202, 307].contains(&status) || body == unknown;
        assert_eq!(refused.is_in_doubt(), none, "{status} {body}");
        assert!(!refused.to_string().contains("no\u{1b}") && !refused.message().contains("[2J"));
    }
    drop(relay);
    let gone = client.post(&sent).await.unwrap_err();
    assert_eq!((gone.code(), gone.is_in_doubt()), (Code::RelayUnreachable, false));
}

#[tokio::test]
async fn what_a_relay_lists_is_checked() {
    let (relay, key, eve) = (Relay::start().await, identity(1), identity(2));
    let client = client(&relay, &key);
    let good = card(&key);
    let forged = WorkerCard { did: eve.did(), ..good.clone() };
    let filter = CardFilter {
        adapter: Some(Word::parse("command").unwrap()),
        skill: Some(Word::parse("a&b é").unwrap()),
    };
    let listed = json!({ "cards": [good, forged, 7], "next": "n/1" });
    let (page, ()) = tokio::join!(client.cards(&filter, Some("x y")), async {
        let exchange = relay.next().await;
        let query = "limit=50&adapter=command&skill=a%26b%20%C3%A9&after=x%20y";
        assert_eq!(exchange.line, format!("GET /v1/registry?{query} HTTP/1.1"));
        exchange.answer(200, &listed).await;
    });
    let page = page.unwrap();
    assert_eq!(page, CardPage { cards: vec![good.clone()], refused: 2, next: Some("n/1".into()) });

    let path = format!("/v1/registry/{}", key.did().to_string().replace(':', "%3A"));
    for (status, body, found) in [
        (200, json!(good), Ok(Some(good.clone()))),
        (404, Value::Null, Ok(None)),
        (200, json!(card(&eve)), Err(Code::RelayUnreachable)),
        (200, json!(forged), Err(Code::WrongSigner)),
    ] {
        let (card, ()) = tokio::join!(client.card(key.did()), async {
            let exchange = relay.next().await;
            assert_eq!(exchange.line, format!("GET {path} HTTP/1.1"));
            exchange.answer(status, &body).await;
        });
        assert_eq!(card.map_err(|error| error.code()), found);
    }
    let notices = json!({ "notices": [notice(&key, "a"), notice(&eve, "b")], "next": null });
    let answered = async { relay.next().await.answer(200, &notices).await };
    let (page, ()) = tokio::join!(client.revocations(key.did(), None), answered);
    let page = page.unwrap();
    assert_eq!((page.notices.len(), page.refused, page.next), (1, 1, None));
    assert_eq!(page.notices[0].issuer_did, key.did());
    let endless = json!({ "notices": vec![Value::Null; PAGE + 1] });
    let answered = async { relay.next().await.answer(200, &endless).await };
    let (page, ()) = tokio::join!(client.revocations(key.did(), None), answered);
    assert_eq!(page.unwrap_err().code(), Code::RelayUnreachable);

    let taken_back = notice(&key, "card_00000001");
    for (method, sent) in [("PUT", json!(good)), ("DELETE", json!(taken_back))] {
        let (done, ()) = tokio::join!(
            async {
                match method {
                    "PUT" => client.put_card(&good).await,
                    _ => client.remove_card(&taken_back).await,
                }
            },
            async {
                let exchange = relay.next().await;
                assert_eq!(exchange.line, format!("{method} {path} HTTP/1.1"));
                assert_eq!(serde_json::from_slice::<Value>(&exchange.body).unwrap(), sent);
                exchange.answer(204, &Value::Null).await;
            }
        );
        done.unwrap();
    }
}

#[tokio::test]
async fn polls_wait_for_what_was_acknowledged() {
    let (relay, key) = (Relay::start().await, identity(1));
    let client = client(&relay, &key);
    let mut deliveries = Arc::clone(&client).receive(Form::Poll, CancellationToken::new());
    let mailbox = format!("/v1/mailboxes/{}", key.did().to_string().replace(':', "%3A"));

    // A relay that fails is asked again, with another token.
    let first = relay.next().await;
    let poll = format!("GET {mailbox}/envelopes?limit=16&waitMs=30000");
    assert_eq!(first.line, format!("{poll} HTTP/1.1"));
    let mut nonces = BTreeSet::from([checked(first.token(), &key, RelayAction::Receive, &relay)]);
    first.answer(503, &Value::Null).await;
    let second = relay.next().await;
    assert!(nonces.insert(checked(second.token(), &key, RelayAction::Receive, &relay)));
    second.answer(200, &page(&["1", "2"], Some("2"))).await;
    assert_eq!(delivered(&mut deliveries).await, ("1".into(), "{\"n\":\"1\"}".into()));
    assert_eq!(delivered(&mut deliveries).await.0, "2");

    // Nothing is asked for before the last one is acknowledged; then exactly what was. The poll says
    // so, and where it is lost the next one does: nothing is waited for but the relay.
    client.ack("1").await.unwrap();
    client.ack("2").await.unwrap();
    for _ in 0..2 {
        let lost = relay.next().await;
        assert_eq!(lost.line, format!("{poll}&after=2 HTTP/1.1"));
        assert!(nonces.insert(checked(lost.token(), &key, RelayAction::Receive, &relay)));
    }
    let third = relay.next().await;
    assert_eq!(third.line, format!("{poll}&after=2 HTTP/1.1"));

    // With nobody to take deliveries, nothing more is asked for.
    drop(deliveries);
    let mut stream = third.stream;
    let closed = timeout(HANG, stream.read(&mut [0; 1])).await.expect("the connection ends");
    assert!(matches!(closed, Ok(0) | Err(_)));
}

#[tokio::test]
async fn large_pages_are_asked_for_in_parts() {
    let (relay, key) = (Relay::start().await, identity(1));
    let deliveries = client(&relay, &key).receive(Form::Poll, CancellationToken::new());
    for limit in [16, 8, 4] {
        let exchange = relay.next().await;
        assert!(exchange.line.contains(&format!("limit={limit}&")), "{}", exchange.line);
        let _stream = exchange.raw("HTTP/1.1 200 So\r\nContent-Length: 99999999\r\n\r\n").await;
    }
    drop(deliveries);
}

#[tokio::test]
async fn server_sent_events_resume_behind_what_was_acknowledged() {
    let (relay, key) = (Relay::start().await, identity(1));
    let client = client(&relay, &key);
    let cancel = CancellationToken::new();
    let mut deliveries = Arc::clone(&client).receive(Form::Sse, cancel.clone());
    let first = relay.next().await;
    assert!(first.line.ends_with("/stream HTTP/1.1"), "{}", first.line);
    assert_eq!(first.headers["accept"], "text/event-stream");
    assert!(!first.headers.contains_key("last-event-id"));
    let nonce = checked(first.token(), &key, RelayAction::Stream, &relay);
    let head = "HTTP/1.1 200 So\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
    let events = ": hello\n\nevent: envelope\nid: 1\ndata: {\"b\": 1,\ndata:  \"a\": 2}\n\n\
        event: other\nid: 2\ndata: 3\n\nevent: envelope\nid: 3\ndata: {}\n\nevent: envelope\nid: 4\n";
    let stream = first.raw(&format!("{head}{events}")).await;
    assert_eq!(delivered(&mut deliveries).await, ("1".into(), "{\"a\":2,\"b\":1}".into()));
    assert_eq!(delivered(&mut deliveries).await.0, "3");
    let (done, ()) = tokio::join!(client.ack("0"), async {
        let exchange = relay.next().await;
        assert!(exchange.line.ends_with("/ack HTTP/1.1"), "{}", exchange.line);
        assert_eq!(exchange.body, b"{\"upTo\":\"0\"}");
        checked(exchange.token(), &key, RelayAction::Receive, &relay);
        exchange.answer(204, &Value::Null).await;
    });
    done.unwrap();
    // An acknowledgement that is lost changes nothing about what is here.
    let lost = async { drop(relay.next().await) };
    let (done, ()) = tokio::join!(client.ack("1"), lost);
    assert_eq!(done.unwrap_err().code(), Code::RelayUnreachable);

    drop(stream);
    let second = relay.next().await;
    assert_eq!(second.headers["last-event-id"], "1");
    assert_ne!(checked(second.token(), &key, RelayAction::Stream, &relay), nonce);
    second.answer(401, &error("AUTH_STALE", 0)).await;
    let third = relay.next().await;
    cancel.cancel();
    assert_eq!(timeout(HANG, deliveries.recv()).await.expect("the end"), None);
    drop(third);
}

async fn heard(socket: &mut WebSocketStream<TcpStream>) -> Value {
    match timeout(HANG, socket.next()).await.expect("a message").unwrap().unwrap() {
        Message::Text(text) => serde_json::from_str(&text).unwrap(),
        other => panic!("{other:?}"),
    }
}

async fn tell(socket: &mut WebSocketStream<TcpStream>, value: &Value) {
    socket.send(Message::Text(value.to_string().into())).await.unwrap();
}

#[tokio::test]
async fn websockets_carry_acknowledgements_past_a_slow_consumer() {
    let (relay, key) = (Relay::start().await, identity(1));
    let client = client(&relay, &key);
    let mut deliveries = Arc::clone(&client).receive(Form::WebSocket, CancellationToken::new());
    let (mut socket, path, token) = relay.socket().await;
    let did = key.did().to_string().replace(':', "%3A");
    assert_eq!(path, format!("/v1/mailboxes/{did}/subscribe"));
    let nonce = checked(&token, &key, RelayAction::Subscribe, &relay);
    tell(&mut socket, &json!({ "kind": "news", "of": "tomorrow" })).await;
    tell(&mut socket, &json!({ "kind": "ping" })).await;
    assert_eq!(heard(&mut socket).await, json!({ "kind": "pong" }));
    // More than wait for a consumer who takes none.
    for n in 0..40 {
        let item = json!({ "kind": "envelope", "cursor": n.to_string(), "envelope": { "n": n } });
        tell(&mut socket, &item).await;
    }
    assert_eq!(delivered(&mut deliveries).await, ("0".into(), "{\"n\":0}".into()));
    client.ack("0").await.unwrap();
    assert_eq!(heard(&mut socket).await, json!({ "kind": "ack", "upTo": "0" }));
    for n in 1..40 {
        assert_eq!(delivered(&mut deliveries).await.0, n.to_string());
    }

    // The acknowledgement that did not get through goes out on the next connection.
    drop(socket);
    let (mut socket, _, token) = relay.socket().await;
    assert_ne!(checked(&token, &key, RelayAction::Subscribe, &relay), nonce);
    assert_eq!(heard(&mut socket).await, json!({ "kind": "ack", "upTo": "0" }));
    // What is no message of the protocol ends the connection.
    socket.send(Message::Binary(vec![1].into())).await.unwrap();
    let (_socket, ..) = relay.socket().await;
    drop(deliveries);
}

#[tokio::test]
async fn urls_are_judged() {
    let key = identity(1);
    let public = EndpointPolicy::default();
    for (url, policy) in [
        ("https://relay.example/?a=b", PRIVATE),
        ("https://u:p@relay.example/", PRIVATE),
        ("http://192.0.2.1/", PRIVATE),
        ("ftp://relay.example/", PRIVATE),
        ("https://127.0.0.1/", public),
        ("https://169.254.169.254/", PRIVATE),
    ] {
        let refused = RelayClient::new(url, policy, Arc::clone(&key)).unwrap_err();
        assert_eq!(refused.code(), Code::EndpointBlocked, "{url}");
        assert!(!refused.is_retryable());
    }
    // A relay behind a prefix, and one that leads elsewhere.
    let relay = Relay::start().await;
    let url = format!("{}/acp/", relay.origin.replacen("http", "ws", 1));
    let client = RelayClient::new(&url, PRIVATE, key).unwrap();
    assert_eq!(client.origin(), relay.origin);
    let (info, ()) = tokio::join!(client.info(), async {
        let exchange = relay.next().await;
        assert_eq!(exchange.line, "GET /acp/v1/info HTTP/1.1");
        exchange.answer(200, &json!({ "relayOrigin": "https://r", "limits": { "a": 1 } })).await;
    });
    let info = info.unwrap();
    assert_eq!((info.relay_origin.as_str(), info.limits["a"].as_u64()), ("https://r", Some(1)));
    let away = "HTTP/1.1 307 Away\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n";
    let answered = async { drop(relay.next().await.raw(away).await) };
    let (refused, ()) = tokio::join!(client.info(), answered);
    assert_eq!(refused.unwrap_err().code(), Code::EndpointBlocked);
}
