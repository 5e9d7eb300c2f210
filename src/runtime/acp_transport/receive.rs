//! Receiving from a relay: long polls, server-sent events or a WebSocket, again and again, each time
//! with a fresh token. Acknowledging is the consumer's; here it is seen, so that a poll does not
//! bring what is being stored, and sent on with the next poll or where a WebSocket is open.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use hyper::Method;
use hyper::header::{self, HeaderValue};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::handshake::client::Request as Handshake;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};
use tokio_util::sync::CancellationToken;

use super::answer::{Page, cursor, failure, unreadable};
use super::backoff::Backoff;
use super::sse::Parser;
use super::{ANSWER, MAX_SMALL, RelayClient, TransportError};
use crate::acp::code::Code;
use crate::acp::json::{self, canonical};
use crate::acp::objects::RelayAction;
use crate::runtime::http_client::Stream;

/// Deliveries that wait for the consumer; a relay that brings more waits.
const WAITING: usize = 16;
/// Envelopes of one poll.
const PAGE: usize = 16;
/// Bytes of one envelope in its frame: the most that a relay may be set to take.
const MAX_FRAMED: usize = (4 << 20) + 4096;
/// Bytes of a poll's answer: a page of the usual bound, or a few of the largest. A page that is
/// larger is asked for in halves.
const MAX_POLL: usize = 16 << 20;
/// How long a relay may hold a poll (design 11.1), ms.
const POLL_WAIT_MS: u64 = 30_000;
/// From a poll to its answer.
const POLL: Duration = Duration::from_millis(POLL_WAIT_MS).saturating_add(ANSWER);
/// An empty answer to a poll comes after this; a relay that does not wait is not asked more often.
const SHORTEST_POLL: Duration = Duration::from_secs(1);
/// The consumer acknowledges within this, or gets the page again.
const STORE: Duration = Duration::from_secs(30);
/// A stream on which nothing came for so long is dead: relays send a sign of life every 15 s.
const SILENCE: Duration = Duration::from_secs(60);
/// A relay must go on reading what we write.
const WRITE_STALL: Duration = Duration::from_secs(30);
/// The WebSocket's protocol (design 11.1).
const SUBPROTOCOL: &str = "acp.relay.v1";

/// How envelopes are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Long polls: one request, one answer.
    Poll,
    /// Server-sent events.
    Sse,
    /// A WebSocket.
    WebSocket,
}

impl Form {
    /// For logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Sse => "sse",
            Self::WebSocket => "websocket",
        }
    }
}

/// An envelope that has come; nobody has looked at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Canonical JSON.
    pub envelope: Vec<u8>,
    /// What [`RelayClient::ack`] takes once it is stored.
    pub cursor: String,
}

pub(super) fn start(
    client: Arc<RelayClient>,
    form: Form,
    cancel: CancellationToken,
) -> mpsc::Receiver<Delivery> {
    let (out, deliveries) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = out.closed() => {}
            () = keep(&client, form, &out) => {}
        }
        client.tells.store(false, Ordering::SeqCst);
    });
    deliveries
}

/// Receives for ever.
async fn keep(client: &RelayClient, form: Form, out: &mpsc::Sender<Delivery>) {
    let mut backoff = Backoff::default();
    loop {
        let mut session = Session { client, form, out, heard: false };
        let ended = match form {
            Form::Poll => session.poll().await,
            Form::Sse => session.stream().await,
            Form::WebSocket => session.subscribe().await,
        };
        client.tells.store(false, Ordering::SeqCst);
        if session.heard {
            backoff.reset();
        }
        let error = ended.err();
        let asked = error.as_ref().and_then(TransportError::retry_after);
        let wait = backoff.next(client.random(), asked);
        tracing::warn!(
            event = "acp_relay_lost",
            relay = client.origin(),
            // A relay ends streams after an hour at most, in good order.
            code = error.as_ref().map_or("", |error| error.code().as_str()),
            retry_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
        );
        sleep(wait).await;
    }
}

/// One connection, or a row of polls, to its end.
struct Session<'a> {
    client: &'a RelayClient,
    form: Form,
    out: &'a mpsc::Sender<Delivery>,
    /// Whether anything came: the relay is there and takes our tokens.
    heard: bool,
}

impl Session<'_> {
    fn hear(&mut self) {
        if !std::mem::replace(&mut self.heard, true) {
            let (relay, form) = (self.client.origin(), self.form.as_str());
            tracing::info!(event = "acp_relay_up", relay, form);
        }
    }

    async fn deliver(&self, delivery: Delivery) -> Result<(), TransportError> {
        // When nobody takes them any more, the whole task is about to end.
        let gone = |_| TransportError::unreachable("nobody takes what is received");
        self.out.send(delivery).await.map_err(gone)
    }

    /// Polls until something goes wrong.
    async fn poll(&mut self) -> Result<(), TransportError> {
        let mut limit = PAGE;
        self.client.tells.store(true, Ordering::SeqCst);
        loop {
            let asked_at = Instant::now();
            let body = match self.ask(limit).await {
                // Large envelopes: fewer at a time.
                Err(error) if error.code() == Code::TooLarge && limit > 1 => {
                    limit /= 2;
                    continue;
                }
                body => body?,
            };
            let page = Page::read(&body, "envelopes", MAX_POLL, limit)?;
            self.hear();
            limit = (limit * 2).min(PAGE);
            let mut last = None;
            for item in page.items {
                let delivery = delivery(item)?;
                last = Some(delivery.cursor.clone());
                self.deliver(delivery).await?;
            }
            match last {
                Some(last) => self.stored(&last).await,
                None => sleep_until(asked_at + SHORTEST_POLL).await,
            }
        }
    }

    async fn ask(&self, limit: usize) -> Result<hyper::body::Bytes, TransportError> {
        let client = self.client;
        let mut path =
            format!("{}/envelopes?limit={limit}&waitMs={POLL_WAIT_MS}", client.mailbox());
        // `after` acknowledges (decision 49), so it is never more than the consumer did. Should the
        // relay not hear of it, the next poll says it again.
        if let Some(acked) = client.acked.borrow().as_deref() {
            path.push_str(&format!("&after={}", super::escaped(acked)));
        }
        let request = client.request(Method::GET, &path, Some(RelayAction::Receive))?;
        Ok(client.exchange(request, MAX_POLL, POLL).await?.into_body())
    }

    /// Waits until the consumer has acknowledged the last one of a page: before that, a poll would
    /// only bring the same again. After [`STORE`] it does.
    async fn stored(&self, last: &str) {
        let mut acked = self.client.acked.subscribe();
        let _ = timeout(STORE, acked.wait_for(|cursor| cursor.as_deref() == Some(last))).await;
    }

    /// Reads server-sent events to the stream's end.
    async fn stream(&mut self) -> Result<(), TransportError> {
        let client = self.client;
        let path = format!("{}/stream", client.mailbox());
        let mut request = client.request(Method::GET, &path, Some(RelayAction::Stream))?;
        let events = HeaderValue::from_static("text/event-stream");
        request.headers_mut().insert(header::ACCEPT, events.clone());
        if let Some(acked) = client.acked.borrow().as_deref() {
            let id = HeaderValue::from_str(acked).map_err(|_| unreadable())?;
            request.headers_mut().insert("last-event-id", id);
        }
        let answer = client.http.open(request, ANSWER).await?;
        let (head, mut body) = answer.into_parts();
        if !head.status.is_success() {
            let told = timeout(ANSWER, body.collect(MAX_SMALL)).await;
            let told = told.ok().and_then(Result::ok).unwrap_or_default();
            return Err(failure(head.status, &told));
        }
        let kind = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        if !kind.is_some_and(|kind| kind.starts_with(events.as_bytes())) {
            return Err(unreadable());
        }
        let mut parser = Parser::default();
        while let Some(piece) = timeout(SILENCE, body.chunk()).await.map_err(|_| silent())?? {
            self.hear();
            for event in parser.feed(&piece).map_err(|_| unreadable())? {
                if event.name != "envelope" {
                    continue;
                }
                let envelope =
                    json::parse(event.data.as_bytes(), MAX_FRAMED).map_err(|_| unreadable())?;
                let item = json!({ "cursor": event.id, "envelope": envelope });
                self.deliver(delivery(item)?).await?;
            }
        }
        Ok(())
    }

    /// Reads a WebSocket to its end.
    async fn subscribe(&mut self) -> Result<(), TransportError> {
        let mut socket = open(self.client).await?;
        let mut acked = self.client.acked.subscribe();
        // What was acknowledged while no socket was open may not have reached the relay.
        if acked.borrow().is_some() {
            acked.mark_changed();
        }
        self.client.tells.store(true, Ordering::SeqCst);
        // Has come, and the consumer has no room for it yet. Until it has, nothing more is read; but
        // acknowledgements go out, or both would wait for each other.
        let mut waiting: Option<Delivery> = None;
        loop {
            tokio::select! {
                Ok(()) = acked.changed() => {
                    let up_to = acked.borrow_and_update().clone();
                    say(&mut socket, &json!({ "kind": "ack", "upTo": up_to })).await?;
                }
                Ok(room) = self.out.reserve(), if waiting.is_some() => {
                    if let Some(delivery) = waiting.take() {
                        room.send(delivery);
                    }
                }
                message = timeout(SILENCE, socket.next()), if waiting.is_none() => {
                    let text = match message.map_err(|_| silent())? {
                        None | Some(Ok(Message::Close(_))) => return Ok(()),
                        Some(Ok(Message::Text(text))) => text,
                        Some(Ok(Message::Binary(_))) => return Err(unreadable()),
                        Some(Ok(_)) => continue,
                        Some(Err(error)) => return Err(lost(error)),
                    };
                    self.hear();
                    let item = json::parse(text.as_bytes(), MAX_FRAMED).map_err(|_| unreadable())?;
                    match item.get("kind").and_then(Value::as_str) {
                        Some("envelope") => waiting = Some(delivery(item)?),
                        Some("ping") => say(&mut socket, &json!({ "kind": "pong" })).await?,
                        // Another relay may say more.
                        _ => {}
                    }
                }
            }
        }
    }
}

/// `{ cursor, envelope }` as it is handed on.
fn delivery(mut item: Value) -> Result<Delivery, TransportError> {
    let cursor = cursor(item.get("cursor").unwrap_or(&Value::Null))?;
    let envelope = item.get_mut("envelope").map(Value::take).filter(Value::is_object);
    Ok(Delivery { envelope: canonical(&envelope.ok_or_else(unreadable)?)?, cursor })
}

type Socket = WebSocketStream<Box<dyn Stream>>;

/// Opens the WebSocket of one's own mailbox.
async fn open(client: &RelayClient) -> Result<Socket, TransportError> {
    let origin = client.origin.replacen("http", "ws", 1);
    let url = format!("{origin}{}{}/subscribe", client.base, client.mailbox());
    let mut request: Handshake = url.into_client_request().map_err(lost)?;
    let protocol = HeaderValue::from_static(SUBPROTOCOL);
    request.headers_mut().insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
    let stream = client.connector.connect(client.http.endpoint()).await?;
    let token = client.bearer(RelayAction::Subscribe)?;
    request.headers_mut().insert(header::AUTHORIZATION, token);
    let config = WebSocketConfig::default()
        .read_buffer_size(16 * 1024)
        .write_buffer_size(0)
        .max_message_size(Some(MAX_FRAMED))
        .max_frame_size(Some(MAX_FRAMED));
    let opened = timeout(ANSWER, client_async_with_config(request, stream, Some(config))).await;
    let (socket, _) = opened.map_err(|_| silent())?.map_err(lost)?;
    Ok(socket)
}

async fn say(socket: &mut Socket, what: &Value) -> Result<(), TransportError> {
    let message = Message::Text(what.to_string().into());
    timeout(WRITE_STALL, socket.send(message)).await.map_err(|_| silent())?.map_err(lost)
}

fn lost(error: WsError) -> TransportError {
    match error {
        WsError::Http(answer) => {
            failure(answer.status(), answer.body().as_deref().unwrap_or_default())
        }
        WsError::Capacity(_) => {
            TransportError::new(Code::TooLarge, "the relay sent a message that is too large")
        }
        _ => TransportError::unreachable("the WebSocket to the relay has failed"),
    }
}

fn silent() -> TransportError {
    TransportError::unreachable("nothing came from the relay for a minute")
}
