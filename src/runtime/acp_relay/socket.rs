//! A mailbox as a WebSocket, subprotocol `acp.relay.v1` (design 11.1). Envelopes go out in order;
//! acknowledgements and envelopes to others come in. What is sent in is answered with `accepted` or
//! `refused`, which the design leaves open.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::SplitSink;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

use super::Shared;
use super::fault::Fault;
use super::feed::Feed;
use super::keeper::Job;
use crate::acp::code::{Code, Error};
use crate::acp::did::Did;
use crate::acp::json::{canonical, parse};
use crate::acp::relay::{Cursor, Taken};
use crate::acp::value::Members;

/// The subprotocol.
pub(super) const PROTOCOL: &str = "acp.relay.v1";
/// How often a client is asked for a sign of life.
const PING_EVERY: Duration = Duration::from_secs(15);
/// How long a client may say nothing: three questions.
const SILENCE: Duration = Duration::from_secs(45);
/// What a message has beside the envelope in it.
const AROUND: usize = 1024;

/// What a client says.
enum Said {
    Ack(Cursor),
    Send(Value),
    Pong,
}

fn read(text: &[u8], max_bytes: usize) -> Result<Said, Error> {
    let mut members = Members::open(parse(text, max_bytes)?)?;
    let kind = members.take("kind")?;
    match kind.as_str() {
        Some("ack") => {
            members.only(&["upTo"])?;
            let up_to = members.take("upTo")?;
            let cursor = Cursor::parse(up_to.as_str().unwrap_or_default());
            cursor.map(Said::Ack).map_err(|e| e.inside("upTo"))
        }
        Some("send") => {
            members.only(&["envelope"])?;
            members.take("envelope").map(Said::Send)
        }
        Some("pong") => members.only(&[]).map(|()| Said::Pong),
        _ => Err(Error::new(Code::BadField, "not one of: ack send pong").inside("kind")),
    }
}

type Sink<S> = SplitSink<WebSocketStream<S>, Message>;

async fn say<S>(sink: &mut Sink<S>, message: &Value) -> Result<(), CloseCode>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    sink.send(Message::text(message.to_string())).await.map_err(|_| CloseCode::Abnormal)
}

/// Serves one socket until either end has had enough of it.
pub(super) async fn serve<S>(stream: S, mut feed: Feed, did: Did, from: IpAddr, shared: Arc<Shared>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let most = shared.limits.tables.envelope_bytes + AROUND;
    let config = WebSocketConfig::default()
        .read_buffer_size(8 * 1024)
        .write_buffer_size(0)
        .max_write_buffer_size(2 * most + AROUND)
        .max_message_size(Some(most))
        .max_frame_size(Some(most));
    let socket = WebSocketStream::from_raw_socket(stream, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let ends = Instant::now() + shared.limits.stream_life;
    let (mut ping, mut silent) = (Instant::now() + PING_EVERY, Instant::now() + SILENCE);
    let code = loop {
        let done = tokio::select! {
            () = shared.stop.cancelled() => Err(CloseCode::Away),
            () = sleep_until(ends) => Err(CloseCode::Again),
            () = sleep_until(silent) => Err(CloseCode::Policy),
            () = sleep_until(ping) => {
                ping = Instant::now() + PING_EVERY;
                say(&mut sink, &json!({ "kind": "ping" })).await
            }
            message = stream.next() => {
                silent = Instant::now() + SILENCE;
                match message {
                    Some(Ok(Message::Text(text))) => {
                        take(text.as_bytes(), did, from, &shared, &mut sink).await
                    }
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Ok(Message::Binary(_) | Message::Frame(_))) => Err(CloseCode::Unsupported),
                    Some(Ok(Message::Close(_))) | None => Err(CloseCode::Normal),
                    Some(Err(WsError::Capacity(_))) => Err(CloseCode::Size),
                    Some(Err(_)) => Err(CloseCode::Protocol),
                }
            }
            page = feed.next() => deliver(page, &mut sink).await,
        };
        if let Err(code) = done {
            break code;
        }
    };
    if code == CloseCode::Abnormal {
        return;
    }
    let _ = timeout(shared.limits.close, async {
        let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await;
        // Read on until the client has seen it: closing with unread bytes would reset the connection.
        while let Some(Ok(_)) = stream.next().await {}
    })
    .await;
}

async fn deliver<S>(
    page: Result<super::feed::Page, Fault>,
    sink: &mut Sink<S>,
) -> Result<(), CloseCode>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let page = page.map_err(|_| CloseCode::Again)?;
    for (cursor, envelope) in page {
        let head = format!("{{\"kind\":\"envelope\",\"cursor\":\"{cursor}\",\"envelope\":");
        let text = [head.as_bytes(), &envelope, b"}"].concat();
        let text = String::from_utf8(text).map_err(|_| CloseCode::Error)?;
        sink.send(Message::text(text)).await.map_err(|_| CloseCode::Abnormal)?;
    }
    Ok(())
}

async fn take<S>(
    text: &[u8],
    did: Did,
    from: IpAddr,
    shared: &Arc<Shared>,
    sink: &mut Sink<S>,
) -> Result<(), CloseCode>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let most = shared.limits.tables.envelope_bytes + AROUND;
    match read(text, most).map_err(|_| CloseCode::Invalid)? {
        Said::Pong => Ok(()),
        Said::Ack(up_to) => {
            let kept = shared.keeper.ask(Job::Acknowledge(did, up_to)).await;
            kept.map(|_| ()).map_err(|_| CloseCode::Again)
        }
        Said::Send(envelope) => {
            // What it calls itself, for the refusal of what is no envelope.
            let claimed = envelope.get("envelopeId").cloned();
            let sent = async {
                shared.charge_write(from)?;
                let _held = shared.hold(text.len())?;
                shared.send(&canonical(&envelope)?).await
            };
            let answer = match sent.await {
                Ok((id, Taken { cursor, .. })) => {
                    json!({ "kind": "accepted", "envelopeId": id, "cursor": cursor.to_string() })
                }
                Err(fault) => {
                    json!({ "kind": "refused", "envelopeId": claimed, "error": fault.body() })
                }
            };
            say(sink, &answer).await
        }
    }
}
