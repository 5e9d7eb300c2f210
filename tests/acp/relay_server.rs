//! The relay's server over loopback: every route, tokens in every place, streams that are cut and
//! resumed, clients that are slow, rude or many, and a process that is killed.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use commsd::acp::relay::Limits;
use commsd::codec::time::UnixMillis;
use commsd::daemon::acp_relay::{RelayOptions, run};
use commsd::daemon::config::LogFormat;
use commsd::runtime::clock::unix_now;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::relay_support::{
    Answer, HANG, Server, all, bind, card, cursor_and_id, envelope, notice, options, read_to_end,
    start, start_with, token,
};
use crate::support::{Person, jcs, person};

fn env(from: u8, to: &Person, id: &str) -> Value {
    envelope(&person(from), &to.did, id, unix_now(), 100)
}

fn id(n: &str) -> String {
    format!("env_{n:0>8}")
}

#[tokio::test]
async fn an_envelope_goes_in_once_is_fetched_acknowledged_and_gone() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    let envelope = env(1, &bob, "1");
    let taken = server.post(&envelope).await;
    assert_eq!((taken.status, &taken.json()["envelopeId"]), (202, &json!(id("1"))));
    for name in ["cache-control: no-store", "referrer-policy: no-referrer"] {
        let (name, value) = name.split_once(": ").unwrap();
        assert_eq!(taken.headers[name], value);
    }
    assert!(!taken.headers.keys().any(|name| name.starts_with("access-control")));
    let again = server.post(&envelope).await;
    assert_eq!((again.status, again.json()), (200, taken.json()));
    let other = changed_by_its_sender(&envelope);
    let reused = server.post(&other).await;
    assert_eq!((reused.status, reused.code()), (409, "ENVELOPE_ID_REUSED".into()));
    let polled = server.poll(&bob, "limit=5", 1).await;
    let cursor = taken.json()["cursor"].as_str().unwrap().to_owned();
    let expected = json!({"envelopes": [{"cursor": cursor, "envelope": envelope}], "next": cursor});
    assert_eq!((polled.status, polled.json()), (200, expected));
    // Reading deletes nothing; acknowledging does, up to and including.
    assert_eq!(server.waiting(&bob, 2).await.len(), 1);
    let target = format!("/v1/mailboxes/{}/ack", bob.did.replace(':', "%3A"));
    let bearer = server.bearer(&bob, "receive", 3);
    let body = jcs(&json!({ "upTo": cursor }));
    let acked = server.ask("POST", &target, &[("Authorization", &bearer)], &body).await;
    assert_eq!((acked.status, acked.body.len()), (204, 0));
    assert_eq!(server.waiting(&bob, 4).await, []);
    // `after=` on a poll acknowledges, too.
    server.post(&env(1, &bob, "2")).await;
    let (second, _) = server.waiting(&bob, 5).await.remove(0);
    let polled = server.poll(&bob, &format!("after={second}"), 6).await;
    assert_eq!(polled.json(), json!({"envelopes": [], "next": second}));
    assert_eq!(server.waiting(&bob, 7).await, []);
    server.end().await;
}

/// The same id with other bytes, properly signed.
fn changed_by_its_sender(envelope: &Value) -> Value {
    let mut changed = envelope.clone();
    changed["ciphertext"] = "AAAA".into();
    person(1).sign(changed, "envelope", "sender")
}

#[tokio::test]
async fn a_token_is_good_once_for_its_mailbox_action_and_relay() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let (bob, eve) = (person(2), person(3));
    let now = unix_now();
    let target = format!("/v1/mailboxes/{}/envelopes", bob.did);
    let ask = async |token: &str| {
        let bearer = format!("Bearer {token}");
        let answer = server.ask("GET", &target, &[("Authorization", &bearer)], b"").await;
        (answer.status, answer.code())
    };
    let good = token(&bob, "receive", &server.origin, now, 1);
    assert_eq!(ask(&good).await, (200, String::new()));
    assert_eq!(ask(&good).await, (401, "AUTH_REPLAYED".into()));
    for (of, action, audience, at, status, code) in [
        (&eve, "receive", server.origin.as_str(), now, 403, "AUTH_WRONG_MAILBOX"),
        (&bob, "stream", &server.origin, now, 401, "AUTH_WRONG_ACTION"),
        (&bob, "receive", "https://relay.example.org", now, 401, "AUTH_WRONG_AUDIENCE"),
        (&bob, "receive", &server.origin, UnixMillis(now.0 - 400_000), 401, "AUTH_STALE"),
        (&bob, "receive", &server.origin, UnixMillis(now.0 + 400_000), 401, "AUTH_STALE"),
        (&bob, "receive", "nonsense\u{7f}", now, 400, "BAD_FIELD"),
    ] {
        assert_eq!(ask(&token(of, action, audience, at, 2)).await, (status, code.into()));
    }
    let forged = {
        let mut object: Value = serde_json::from_slice(
            &data_encoding::BASE64URL_NOPAD.decode(good.as_bytes()).unwrap(),
        )
        .unwrap();
        object["nonce"] = "AAAAAAAAAAAAAAAAAAAAAA".into();
        data_encoding::BASE64URL_NOPAD.encode(&jcs(&object))
    };
    assert_eq!(ask(&forged).await, (401, "AUTH_BAD_SIGNATURE".into()));
    assert_eq!(ask(&"A".repeat(3_000)).await, (413, "TOO_LARGE".into()));
    let none = server.ask("GET", &target, &[], b"").await;
    assert_eq!((none.status, none.code()), (401, "AUTH_MISSING".into()));
    let error = &none.json()["error"];
    assert!(error["message"].is_string() && error["retryAfterMs"].is_null(), "{error}");
    // localhost is the same relay by another of its names.
    let local = server.origin.replace("127.0.0.1", "localhost");
    assert_eq!(ask(&token(&bob, "receive", &local, now, 9)).await.0, 200);
    server.end().await;
}

#[tokio::test]
async fn a_token_may_come_in_three_places_and_is_the_same_in_all() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    let fresh = |nonce| token(&bob, "receive", &server.origin, unix_now(), nonce);
    let path = format!("/v1/mailboxes/{}/envelopes", bob.did);
    let ask = async |bearer: Option<&str>, header: Option<&str>, query: Option<&str>| {
        let bearer = bearer.map(|token| format!("Bearer {token}"));
        let mut headers = Vec::new();
        headers.extend(bearer.as_deref().map(|bearer| ("Authorization", bearer)));
        headers.extend(header.map(|token| ("x-acp-relay-auth", token)));
        let target = query.map_or(path.clone(), |token| format!("{path}?auth={token}"));
        let answer = server.ask("GET", &target, &headers, b"").await;
        (answer.status, answer.code())
    };
    let (a, b, c, d) = (fresh(1), fresh(2), fresh(3), fresh(4));
    assert_eq!(ask(None, Some(&a), None).await.0, 200);
    assert_eq!(ask(None, None, Some(&b)).await.0, 200);
    assert_eq!(ask(Some(&c), Some(&c), Some(&c)).await.0, 200);
    let unequal = (400, "BAD_FIELD".to_owned());
    assert_eq!(ask(Some(&d), Some(&a), None).await, unequal);
    assert_eq!(ask(Some(&d), None, Some(&a)).await, unequal);
    assert_eq!(ask(None, Some(&d), Some(&a)).await, unequal);
    // None of it was used up.
    assert_eq!(ask(Some(&d), None, None).await.0, 200);
    let twice = fresh(5);
    let basic = [("Authorization", "Basic eDp5"), ("x-acp-relay-auth", twice.as_str())];
    assert_eq!(server.ask("GET", &path, &basic, b"").await.status, 200);
    server.end().await;
    // Switched off.
    let mut options = options(home.path());
    options.no_query_auth = true;
    let server = start_with(options);
    let fresh = token(&bob, "receive", &server.origin, unix_now(), 6);
    let answer = server.ask("GET", &format!("{path}?auth={fresh}"), &[], b"").await;
    assert_eq!((answer.status, answer.code()), (400, "BAD_FIELD".into()));
    let info = server.ask("GET", "/v1/info", &[], b"").await.json();
    assert!(!info["features"].as_array().unwrap().contains(&json!("query-auth")));
    assert_eq!(info["relayOrigin"], server.origin);
    server.end().await;
}

#[tokio::test]
async fn freshness_is_judged_again_when_the_body_is_there() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    // Good for half a second more.
    let issued = UnixMillis(unix_now().0 - 299_500);
    let bearer = format!("Bearer {}", token(&bob, "receive", &server.origin, issued, 1));
    let target = format!("/v1/mailboxes/{}/ack", bob.did);
    let body = jcs(&json!({ "upTo": "0000000000000000" }));
    let mut head = server.head("POST", &target, &[("Authorization", &bearer)]);
    head += &format!("Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let mut slow = server.connect().await;
    slow.write_all(head.as_bytes()).await.unwrap();
    // The token's own end is what is waited for.
    while unix_now().0 <= issued.0 + 300_000 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    slow.write_all(&body).await.unwrap();
    let answer = read_to_end(slow).await;
    assert_eq!((answer.status, answer.code()), (401, "AUTH_STALE".into()));
    server.end().await;
}

#[tokio::test]
async fn a_restart_forgets_neither_nonces_nor_envelopes_nor_cards() {
    let home = tempfile::tempdir().unwrap();
    let mut options = options(home.path());
    options.origins = vec!["https://relay.example.org".into()];
    let server = start_with(options.clone());
    let bob = person(2);
    let taken = server.post(&env(1, &bob, "1")).await.json();
    let published = card(&bob, "1", unix_now(), &["rust"]);
    let target = format!("/v1/registry/{}", bob.did);
    assert_eq!(server.ask("PUT", &target, &[], &jcs(&published)).await.status, 204);
    let captured = server.bearer(&bob, "receive", 1);
    let headers = [("Authorization", captured.as_str())];
    let mailbox = format!("/v1/mailboxes/{}/envelopes", bob.did);
    assert_eq!(server.ask("GET", &mailbox, &headers, b"").await.status, 200);
    // Only one relay has the store.
    let second = bind(options.clone()).err().unwrap();
    assert_eq!(second.code(), "store_locked");
    assert!(second.todo().contains("--state"));
    server.end().await;
    let server = start_with(options);
    let replayed = server.ask("GET", &mailbox, &headers, b"").await;
    assert_eq!((replayed.status, replayed.code()), (401, "AUTH_REPLAYED".into()));
    let cursor = taken["cursor"].as_str().unwrap().to_owned();
    assert_eq!(server.waiting(&bob, 2).await, [(cursor, id("1"))]);
    assert_eq!(server.ask("GET", &target, &[], b"").await.body, jcs(&published));
    server.end().await;
}

#[tokio::test]
async fn a_long_poll_is_answered_when_something_comes_or_its_time_is_over() {
    let home = tempfile::tempdir().unwrap();
    let server = Arc::new(start(home.path(), |_| {}));
    let bob = person(2);
    let waiting = {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.poll(&person(2), "waitMs=20000", 1).await })
    };
    // Whoever is faster, the poll is answered.
    server.post(&env(1, &bob, "1")).await;
    let answer = timeout(HANG / 2, waiting).await.expect("an answer").unwrap();
    assert_eq!(answer.json()["envelopes"].as_array().unwrap().len(), 1);
    let after = answer.json()["next"].as_str().unwrap().to_owned();
    let empty = server.poll(&bob, &format!("after={after}&waitMs=50"), 2).await;
    assert_eq!(empty.json(), json!({"envelopes": [], "next": after}));
}

#[tokio::test]
async fn a_stream_of_events_resumes_behind_the_last_seen_id() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    server.post(&env(1, &bob, "1")).await;
    let mut events = server.events(&bob, 1, None).await;
    assert!(events.until(":\n\n").await, "a first comment");
    let first = events.next().await.unwrap();
    server.post(&env(1, &bob, "2")).await;
    let second = events.next().await.unwrap();
    assert_eq!((first.1, second.1.clone()), (id("1"), id("2")));
    assert!(second.0 > first.0);
    drop(events);
    server.post(&env(1, &bob, "3")).await;
    // Behind the first: the second again, and what has come since.
    let mut events = server.events(&bob, 2, Some(&first.0)).await;
    assert_eq!(events.next().await.unwrap(), second);
    assert_eq!(events.next().await.unwrap().1, id("3"));
    // From the beginning: reading has deleted nothing.
    let mut all = server.events(&bob, 3, None).await;
    assert_eq!(all.next().await.unwrap().1, id("1"));
    let mut odd = server.events(&bob, 4, Some("x")).await;
    assert!(odd.until("400 Bad Request").await);
    // A token for a stream is no token for a poll, and is used up.
    let bearer = server.bearer(&bob, "stream", 4);
    let target = format!("/v1/mailboxes/{}/envelopes", bob.did);
    let answer = server.ask("GET", &target, &[("Authorization", &bearer)], b"").await;
    assert_eq!(answer.code(), "AUTH_WRONG_ACTION");
    // The relay's end is the stream's end.
    server.end().await;
    assert_eq!(events.next().await, None);
}

#[tokio::test]
async fn a_stream_has_an_end() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.stream_life = Duration::from_millis(200));
    let mut events = server.events(&person(2), 1, None).await;
    assert_eq!(events.next().await, None);
    let mut socket = subscribe(&server, &person(2), 2).await;
    assert_eq!(closed(&mut socket).await, Some(1013));
    server.end().await;
}

type Socket = WebSocketStream<TcpStream>;

async fn subscribe(server: &Server, of: &Person, nonce: u32) -> Socket {
    let url = format!("ws://{}/v1/mailboxes/{}/subscribe", server.address, of.did);
    let mut request = url.into_client_request().unwrap();
    let headers = request.headers_mut();
    headers.insert("authorization", server.bearer(of, "subscribe", nonce).parse().unwrap());
    headers.insert("sec-websocket-protocol", "acp.relay.v1".parse().unwrap());
    let (socket, response) = client_async(request, server.connect().await).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "acp.relay.v1");
    socket
}

async fn said(socket: &mut Socket) -> Value {
    match timeout(HANG, socket.next()).await.expect("a message").expect("no end").unwrap() {
        Message::Text(text) => serde_json::from_str(&text).unwrap(),
        other => panic!("{other:?}"),
    }
}

async fn say(socket: &mut Socket, message: Value) {
    socket.send(Message::text(message.to_string())).await.unwrap();
}

async fn closed(socket: &mut Socket) -> Option<u16> {
    loop {
        match timeout(HANG, socket.next()).await.expect("an end") {
            Some(Ok(Message::Close(frame))) => return frame.map(|frame| frame.code.into()),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return None,
        }
    }
}

#[tokio::test]
async fn a_socket_that_was_lost_before_its_acknowledgement_gets_everything_again() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    server.post(&env(1, &bob, "1")).await;
    let mut socket = subscribe(&server, &bob, 1).await;
    let first = said(&mut socket).await;
    assert_eq!(
        (&first["kind"], &first["envelope"]["envelopeId"]),
        (&json!("envelope"), &json!(id("1")))
    );
    drop(socket);
    let mut socket = subscribe(&server, &bob, 2).await;
    assert_eq!(said(&mut socket).await, first);
    server.post(&env(1, &bob, "2")).await;
    let second = said(&mut socket).await;
    say(&mut socket, json!({ "kind": "ack", "upTo": first["cursor"] })).await;
    // What is sent in is answered in order behind it: then the acknowledgement is stored.
    say(&mut socket, json!({ "kind": "send", "envelope": env(2, &person(1), "9") })).await;
    let sent = said(&mut socket).await;
    assert_eq!((&sent["kind"], &sent["envelopeId"]), (&json!("accepted"), &json!(id("9"))));
    drop(socket);
    let mut socket = subscribe(&server, &bob, 3).await;
    assert_eq!(said(&mut socket).await, second);
    let cursor = sent["cursor"].as_str().unwrap().to_owned();
    assert_eq!(server.waiting(&person(1), 4).await, [(cursor, id("9"))]);
    // A refusal says why, and the socket goes on.
    let mut forged = env(2, &person(1), "8");
    forged["ciphertext"] = "AAAA".into();
    say(&mut socket, json!({ "kind": "send", "envelope": forged })).await;
    let refused = said(&mut socket).await;
    assert_eq!(
        (&refused["kind"], &refused["error"]["code"]),
        (&json!("refused"), &json!("BAD_SIGNATURE"))
    );
    say(&mut socket, json!({ "kind": "pong" })).await;
    say(&mut socket, json!({ "kind": "send", "envelope": 7 })).await;
    assert_eq!(said(&mut socket).await["error"]["code"], "BAD_FIELD");
    // The relay's end is told.
    server.end().await;
    assert_eq!(closed(&mut socket).await, Some(1001));
}

#[tokio::test]
async fn odd_messages_end_a_socket() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.tables.envelope_bytes = 8_000);
    let bob = person(2);
    for (nonce, message, code) in [
        (1, Message::text("{"), 1007),
        (2, Message::text(r#"{"kind":"ack"}"#), 1007),
        (3, Message::text(r#"{"kind":"ack","upTo":7}"#), 1007),
        (4, Message::text(r#"{"kind":"ack","upTo":"0000000000000000","x":1}"#), 1007),
        (5, Message::text(r#"{"kind":"subscribe"}"#), 1007),
        (6, Message::binary(vec![0; 8]), 1003),
        (7, Message::text("x".repeat(10_000)), 1009),
    ] {
        let mut socket = subscribe(&server, &bob, nonce).await;
        socket.send(message).await.unwrap();
        assert_eq!(closed(&mut socket).await, Some(code), "{nonce}");
    }
    // Without the subprotocol, or without a WebSocket, the token is not used up.
    let bearer = server.bearer(&bob, "subscribe", 8);
    let target = format!("/v1/mailboxes/{}/subscribe", bob.did);
    let headers = [("Authorization", bearer.as_str())];
    assert_eq!(server.ask("GET", &target, &headers, b"").await.status, 426);
    let upgrade = [
        ("Authorization", bearer.as_str()),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ];
    let head = server.head("GET", &target, &upgrade);
    let answer = server.raw(format!("{head}Connection: Upgrade, close\r\n\r\n").as_bytes()).await;
    assert_eq!(answer.status, 400);
    subscribe(&server, &bob, 8).await;
    server.end().await;
}

#[tokio::test]
async fn cards_are_published_found_and_taken_back() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let (bob, eve) = (person(2), person(3));
    let now = unix_now();
    let (of_bob, of_eve) = (card(&bob, "1", now, &["rust"]), card(&eve, "1", now, &["prose"]));
    let path = |of: &Person| format!("/v1/registry/{}", of.did);
    let put = async |of: &Person, card: &Value| {
        let answer = server.ask("PUT", &path(of), &[], &jcs(card)).await;
        (answer.status, answer.code())
    };
    assert_eq!(put(&bob, &of_bob).await, (204, String::new()));
    assert_eq!(put(&eve, &of_eve).await, (204, String::new()));
    assert_eq!(put(&eve, &of_bob).await, (403, "WRONG_SIGNER".into()));
    let older = card(&bob, "0", UnixMillis(now.0 - 1), &[]);
    assert_eq!(put(&bob, &older).await, (400, "BAD_TIME".into()));
    let mut long = card(&bob, "2", UnixMillis(now.0 + 1), &[]);
    long["description"] = "\u{1f600}".repeat(4_000).into();
    let long = bob.sign(long, "worker-card", "worker");
    assert_eq!(put(&bob, &long).await, (413, "TOO_LARGE".into()));
    let found = server.ask("GET", "/v1/registry?skill=rust", &[], b"").await.json();
    assert_eq!(found["cards"], json!([of_bob]));
    let first = server.ask("GET", "/v1/registry?limit=1", &[], b"").await.json();
    let after = first["next"].as_str().unwrap().replace(':', "%3A");
    let second = server.ask("GET", &format!("/v1/registry?after={after}"), &[], b"").await.json();
    assert_eq!(first["cards"].as_array().unwrap().len(), 1);
    assert_eq!(second["cards"].as_array().unwrap().len(), 1);
    assert_ne!(first["cards"], second["cards"]);
    assert_eq!(second["next"], Value::Null);
    // Taking back: one's own card, by a notice about a card.
    let back = notice(&bob, "card", "card_00000001", now);
    let delete = async |of: &Person, notice: &Value| {
        let answer = server.ask("DELETE", &path(of), &[], &jcs(notice)).await;
        (answer.status, answer.code())
    };
    assert_eq!(delete(&eve, &back).await, (403, "WRONG_SIGNER".into()));
    let invite = notice(&bob, "invite", "inv_00000001", now);
    assert_eq!(delete(&bob, &invite).await, (400, "BAD_FIELD".into()));
    assert_eq!(delete(&bob, &back).await, (204, String::new()));
    let gone = server.ask("GET", &path(&bob), &[], b"").await;
    assert_eq!(gone.status, 404);
    // The notice is one of all, which anybody may ask for.
    let posted = server.ask("POST", "/v1/revocations", &[], &jcs(&invite)).await;
    assert_eq!(posted.status, 204);
    let all = server.ask("GET", "/v1/revocations", &[], b"").await.json();
    assert_eq!(all["notices"], json!([back, invite]));
    let target = format!("/v1/revocations?issuerDid={}&limit=1", bob.did);
    let one = server.ask("GET", &target, &[], b"").await.json();
    let target = format!("{target}&after={}", one["next"].as_str().unwrap());
    let two = server.ask("GET", &target, &[], b"").await.json();
    assert_eq!((&one["notices"], &two["notices"]), (&json!([back]), &json!([invite])));
    server.end().await;
}

#[tokio::test]
async fn malformed_requests_are_refused_with_an_error_body() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.tables.envelope_bytes = 4_000);
    let bob = person(2);
    let refused = |answer: &Answer| (answer.status, answer.code());
    for (body, status, code) in [
        (b"".to_vec(), 400, "BAD_JSON"),
        (b"{}".to_vec(), 400, "MISSING_MEMBER"),
        (b"[1,2".to_vec(), 400, "BAD_JSON"),
        (vec![0xff; 10], 400, "BAD_JSON"),
        (b"{\"a\":1,\"a\":1}".to_vec(), 400, "DUPLICATE_MEMBER"),
        (vec![b'['; 3_000], 400, "BAD_JSON"),
        (vec![b' '; 4_001], 413, "TOO_LARGE"),
    ] {
        let answer = server.ask("POST", "/v1/envelopes", &[], &body).await;
        assert_eq!(refused(&answer), (status, code.into()), "{}", body.len());
    }
    // Without a length: bounded as it comes.
    let mut request = server.head("POST", "/v1/envelopes", &[("Transfer-Encoding", "chunked")]);
    request += "Connection: close\r\n\r\n";
    for _ in 0..5 {
        request += &format!("3e8\r\n{}\r\n", " ".repeat(1000));
    }
    let answer = server.raw((request + "0\r\n\r\n").as_bytes()).await;
    assert_eq!(refused(&answer), (413, "TOO_LARGE".into()));
    for (method, target, status) in [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/envelopes", 405),
        ("OPTIONS", "/v1/envelopes", 405),
        ("GET", "/v1/registry/did:web:example.com", 400),
        ("GET", "/v1/registry?limit=0", 400),
        ("GET", "/v1/health?x=1", 400),
    ] {
        let answer = server.ask(method, target, &[], b"").await;
        assert_eq!(answer.status, status, "{method} {target}");
        assert!(answer.json()["error"]["message"].is_string(), "{method} {target}");
    }
    // Other pages, other hosts.
    let page = [("Origin", "https://evil.example")];
    assert_eq!(server.ask("GET", "/v1/health", &page, b"").await.status, 403);
    assert_eq!(server.ask("GET", "/v1/health", &[("Origin", "null")], b"").await.status, 403);
    for host in ["relay.evil.example", "127.0.0.1.evil.example", ""] {
        let request =
            format!("GET /v1/health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert_eq!(server.raw(request.as_bytes()).await.status, 403, "{host}");
    }
    let health = server.ask("GET", "/v1/health", &[], b"").await;
    assert_eq!(health.json(), json!({"status": "ok", "version": "test"}));
    // Nothing of all that is in anybody's mailbox.
    assert_eq!(server.waiting(&bob, 1).await, []);
    server.end().await;
}

#[tokio::test]
async fn a_relay_behind_a_proxy_goes_by_the_name_that_it_is_given() {
    let home = tempfile::tempdir().unwrap();
    let mut options = options(home.path());
    options.origins = vec!["https://Relay.Example.org/".into()];
    options.behind_proxy = true;
    options.limits.tables.reads_per_minute = 1;
    let server = start_with(options.clone());
    assert_eq!(server.origin, "https://relay.example.org");
    let bob = person(2);
    let target = format!("/v1/mailboxes/{}/envelopes", bob.did);
    let ask = async |audience: &str, nonce: u32, from: &str| {
        let bearer = format!("Bearer {}", token(&bob, "receive", audience, unix_now(), nonce));
        let request = format!(
            "GET {target} HTTP/1.1\r\nHost: relay.example.org\r\nOrigin: https://relay.example.org\r\n\
             Authorization: {bearer}\r\nX-Forwarded-For: 203.0.113.1, {from}\r\nConnection: close\r\n\r\n"
        );
        let answer = server.raw(request.as_bytes()).await;
        (answer.status, answer.code())
    };
    assert_eq!(ask("https://relay.example.org", 1, "192.0.2.1").await.0, 200);
    // Addresses are counted one by one, as the proxy names them.
    let limited = ask("https://relay.example.org", 2, "192.0.2.1").await;
    assert_eq!(limited, (429, "RATE_LIMITED".into()));
    let own = format!("http://{}", server.address);
    let other = ask(&own, 3, "192.0.2.2").await;
    assert_eq!(other, (401, "AUTH_WRONG_AUDIENCE".into()));
    server.end().await;
    for (origin, code) in [
        ("relay.example.org", "relay_origin_malformed"),
        ("https://relay.example.org/path", "relay_origin_malformed"),
        ("https://me@relay.example.org", "relay_origin_malformed"),
    ] {
        options.origins = vec![origin.into()];
        assert_eq!(bind(options.clone()).err().unwrap().code(), code, "{origin}");
    }
    options.origins.clear();
    let everywhere: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let error = commsd::runtime::acp_relay::AcpRelayServer::bind(everywhere, options);
    assert_eq!(error.err().unwrap().code(), "relay_origin_missing");
}

#[tokio::test]
async fn senders_and_addresses_have_a_rate() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.tables.did_per_minute = 3);
    let bob = person(2);
    for n in 0..3 {
        assert_eq!(server.post(&env(1, &bob, &n.to_string())).await.status, 202);
    }
    let limited = server.post(&env(1, &bob, "9")).await;
    assert_eq!((limited.status, limited.code()), (429, "RATE_LIMITED".into()));
    assert!(limited.json()["error"]["retryAfterMs"].is_u64());
    assert_eq!(server.post(&env(3, &bob, "9")).await.status, 202);
    // Who has not signed it does not use up another's rate.
    let server_two_home = tempfile::tempdir().unwrap();
    let two = start(server_two_home.path(), |limits| limits.tables.did_per_minute = 1);
    let mut forged = env(1, &bob, "1");
    forged["ciphertext"] = "AAAA".into();
    assert_eq!(two.post(&forged).await.code(), "BAD_SIGNATURE");
    assert_eq!(two.post(&env(1, &bob, "1")).await.status, 202);
    two.end().await;
    server.end().await;
    let server = start(home.path(), |limits| limits.tables.address_per_minute = 2);
    for (n, status) in [(0, 200), (1, 200), (2, 429)] {
        assert_eq!(server.ask("GET", "/v1/health", &[], b"").await.status, status, "{n}");
    }
    server.end().await;
}

#[tokio::test]
async fn a_full_mailbox_says_so() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.tables.sender_envelopes = 2);
    let bob = person(2);
    for n in 0..2 {
        assert_eq!(server.post(&env(1, &bob, &n.to_string())).await.status, 202);
    }
    let full = server.post(&env(1, &bob, "2")).await;
    assert_eq!((full.status, full.code()), (429, "MAILBOX_FULL".into()));
    assert_eq!(full.json()["error"]["retryAfterMs"], 60_000);
    assert_eq!(server.post(&env(3, &bob, "2")).await.status, 202);
    server.end().await;
}

#[tokio::test]
async fn slow_and_many_connections_are_bounded() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| {
        limits.body = Duration::from_millis(150);
        limits.head = Duration::from_millis(300);
        limits.per_source = 3;
    });
    // A body that does not end.
    let mut slow = server.connect().await;
    let head = server.head("POST", "/v1/envelopes", &[("Content-Length", "100")]);
    slow.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    assert_eq!(read_to_end(slow).await.status, 408);
    // A head that does not end.
    let mut slow = server.connect().await;
    slow.write_all(b"GET /v1/health HT").await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(HANG, slow.read_to_end(&mut rest)).await.expect("an end");
    // More connections than one address may have: closed without a word.
    let mut open = Vec::new();
    for nonce in 0..3 {
        let mut events = server.events(&person(2), nonce, None).await;
        assert!(events.until(":\n\n").await);
        open.push(events);
    }
    let mut over = server.connect().await;
    let mut rest = Vec::new();
    let _ = timeout(HANG, over.read_to_end(&mut rest)).await.expect("an end");
    assert_eq!(rest, b"");
    drop(open);
    server.end().await;
}

#[tokio::test]
async fn a_reader_that_does_not_read_is_let_go() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |limits| limits.write_stall = Duration::from_millis(300));
    let bob = person(2);
    // More than sockets hold.
    for n in 0..24_u8 {
        let from = person(30 + n);
        let large = envelope(&from, &bob.did, "1", unix_now(), 600_000);
        assert_eq!(server.post(&large).await.status, 202);
    }
    let mut events = server.events(&bob, 1, None).await;
    assert!(events.until(":\n\n").await);
    // Twice the time that a reader may stall has to go by.
    tokio::time::sleep(Duration::from_millis(600)).await;
    let mut seen = 0;
    while events.next().await.is_some() {
        seen += 1;
    }
    assert!(seen < 24, "the stream was cut: {seen}");
    server.end().await;
}

#[tokio::test]
async fn a_relay_that_cannot_store_says_so_and_goes_on_when_it_can() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    let first = server.post(&env(1, &bob, "1")).await.json();
    let (file, away) = (home.path().join("relay.redb"), home.path().join("away"));
    std::fs::rename(&file, &away).unwrap();
    let envelope = env(1, &bob, "2");
    for _ in 0..2 {
        let failed = server.post(&envelope).await;
        assert_eq!((failed.status, failed.code()), (503, "RELAY_UNREACHABLE".into()));
        assert!(failed.json()["error"]["retryAfterMs"].is_u64());
        let path = home.path().to_str().unwrap();
        assert!(!String::from_utf8_lossy(&failed.body).contains(path));
    }
    assert_eq!(server.poll(&bob, "", 1).await.status, 503);
    assert_eq!(server.ask("GET", "/v1/health", &[], b"").await.status, 503);
    std::fs::rename(&away, &file).unwrap();
    // It may have been written before it was missed: then it is known, and answered the same way.
    let back = server.post(&envelope).await;
    assert!([200, 202].contains(&back.status), "{back:?}");
    let waiting = server.waiting(&bob, 2).await;
    let ids: Vec<&str> = waiting.iter().map(|(_, id)| id.as_str()).collect();
    assert_eq!(ids, [id("1"), id("2")]);
    assert_eq!(json!(waiting[0].0), first["cursor"]);
    assert_eq!(server.ask("GET", "/v1/health", &[], b"").await.status, 200);
    server.end().await;
}

#[tokio::test]
async fn with_a_certificate_it_speaks_tls_and_is_called_https() {
    let home = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (chain, key) = (home.path().join("chain.pem"), home.path().join("key.pem"));
    std::fs::write(&chain, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let mut options = options(&home.path().join("state"));
    options.tls = Some((chain, home.path().join("none.pem")));
    assert_eq!(bind(options.clone()).err().unwrap().code(), "certificate_unusable");
    options.tls = options.tls.map(|(chain, _)| (chain, key));
    let server = start_with(options);
    assert_eq!(server.origin, format!("https://{}", server.address));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, server.connect().await).await.unwrap();
    let bearer = server.bearer(&person(2), "receive", 1);
    let target = format!("/v1/mailboxes/{}/envelopes", person(2).did);
    let head = server.head("GET", &target, &[("Authorization", &bearer), ("Connection", "close")]);
    stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(HANG, stream.read_to_end(&mut answer)).await.expect("an end");
    assert!(answer.starts_with(b"HTTP/1.1 200"));
    server.end().await;
}

#[tokio::test]
async fn a_mailbox_has_so_many_readers_and_their_places_come_back() {
    let home = tempfile::tempdir().unwrap();
    let server = start(home.path(), |_| {});
    let bob = person(2);
    let mut open = Vec::new();
    for nonce in 0..16 {
        let mut events = server.events(&bob, nonce, None).await;
        assert!(events.until(":\n\n").await);
        open.push(events);
    }
    let over = server.poll(&bob, "", 20).await;
    assert_eq!((over.status, over.code()), (429, "RATE_LIMITED".into()));
    assert_eq!(server.poll(&person(3), "", 20).await.status, 200);
    open.clear();
    for nonce in 21.. {
        // The relay sees sooner or later that they have gone.
        if server.poll(&bob, "", nonce).await.status == 200 {
            break;
        }
        assert!(nonce < 500, "no place came back");
    }
    server.end().await;
}

#[tokio::test]
async fn a_store_that_is_none_is_refused_and_left() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("relay.redb"), b"something else").unwrap();
    let error = bind(options(home.path())).err().unwrap();
    assert_eq!(error.code(), "store_corrupt");
    assert!(error.todo().contains("relay.redb"));
    assert_eq!(std::fs::read(home.path().join("relay.redb")).unwrap(), b"something else");
    let mut over = options(home.path());
    over.limits.tables.mailbox_bytes = u64::MAX;
    assert_eq!(bind(over).err().unwrap().code(), "relay_limit_out_of_range");
}

// --- killed --------------------------------------------------------------------------------------

/// Tells the child where its store is.
const STATE: &str = "COMMSD_TEST_RELAY_STATE";

/// Not a test by itself: the relay as a process, for the test below.
#[test]
#[ignore = "the child of another test"]
fn serve_as_a_child() {
    let Some(state) = std::env::var_os(STATE) else { return };
    let options = RelayOptions {
        host: "127.0.0.1".parse().unwrap(),
        port: 0,
        state: state.into(),
        query_auth: true,
        max_mailbox_bytes: None,
        origins: vec!["http://relay.test".into()],
        behind_proxy: false,
        limits: Limits::default(),
        per_source: None,
        tls: None,
        log: LogFormat::Json,
        log_filter: "off".into(),
    };
    run(options, |address, _| println!("\nlistening {address}")).unwrap();
}

struct Process(Child);

impl Process {
    fn start(state: &std::path::Path) -> (Self, SocketAddr) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["relay_server::serve_as_a_child", "--exact", "--ignored", "--nocapture"])
            .env(STATE, state)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .find_map(|line| line.unwrap().strip_prefix("listening ").map(str::to_owned))
            .expect("the child listens");
        // The rest of what it says goes nowhere.
        std::thread::spawn(move || lines.for_each(drop));
        (Self(child), address.parse().unwrap())
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn post(address: SocketAddr, envelope: &Value) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let body = jcs(envelope);
    let head = format!(
        "POST /v1/envelopes HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), &body].concat()).await.ok()?;
    let mut bytes = Vec::new();
    timeout(HANG, stream.read_to_end(&mut bytes)).await.expect("an end").ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, headers: std::collections::HashMap::new(), body: body.into() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_before_a_kill_is_there_after_it() {
    const SENDERS: u8 = 12;
    const EACH: u32 = 40;
    const KILL_AFTER: usize = 150;
    let home = tempfile::tempdir().unwrap();
    let bob = person(2);
    let (mut process, address) = Process::start(home.path());
    let (told, mut answered) = tokio::sync::mpsc::unbounded_channel();
    let senders = (0..SENDERS).map(|n| {
        let (from, bob, told) = (40 + n, person(2), told.clone());
        async move {
            for id in 0..EACH {
                let envelope = env(from, &bob, &id.to_string());
                let Some(answer) = post(address, &envelope).await else { return };
                assert_eq!(answer.status, 202);
                let cursor = answer.json()["cursor"].as_str().unwrap().to_owned();
                told.send((cursor, envelope)).unwrap();
            }
        }
    });
    let sending = tokio::spawn(all(senders.collect::<Vec<_>>()));
    drop(told);
    let mut kept = Vec::new();
    while let Some(one) = answered.recv().await {
        kept.push(one);
        if kept.len() == KILL_AFTER {
            process.kill();
        }
    }
    sending.await.unwrap();
    assert!((KILL_AFTER..usize::from(SENDERS) * EACH as usize).contains(&kept.len()));
    let (_process, address) = Process::start(home.path());
    let mut found = Vec::new();
    let mut after = String::new();
    for nonce in 0.. {
        let bearer = token(&bob, "receive", "http://relay.test", unix_now(), nonce);
        let query = if after.is_empty() { String::new() } else { format!("?after={after}") };
        let request = format!(
            "GET /v1/mailboxes/{}/envelopes{query} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {bearer}\r\nConnection: close\r\n\r\n",
            bob.did
        );
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let page = read_to_end(stream).await.json();
        let items = page["envelopes"].as_array().unwrap();
        let Some(last) = items.last() else { break };
        after = cursor_and_id(last).0;
        found.extend(
            items.iter().map(|item| {
                (item["cursor"].as_str().unwrap().to_owned(), item["envelope"].clone())
            }),
        );
    }
    // In order, each once, and everything that was answered among it.
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0));
    for one in &kept {
        assert_eq!(found.iter().filter(|other| *other == one).count(), 1);
    }
    // Sent again it is known, although it was fetched.
    let again = post(address, &kept[0].1).await.unwrap();
    assert_eq!((again.status, &again.json()["cursor"]), (200, &json!(kept[0].0)));
}
