//! One request and its answer: who asks, for what, with what token (design 11.1, 11.2).

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};

use super::fault::Fault;
use super::feed::{Feed, Page};
use super::keeper::Job;
use super::{Held, Shared, socket, stream};
use crate::acp::code::{Code, Error};
use crate::acp::did::Did;
use crate::acp::json::parse;
use crate::acp::objects::{RelayAction, RelayAuth, RevocationNotice, WorkerCard};
use crate::acp::relay::route::{Route, find};
use crate::acp::relay::{
    CardFilter, Cursor, Listing, MAX_CARD, MAX_NOTICE, auth, check_card_notice,
};
use crate::acp::sign::Signed as _;
use crate::acp::value::{Members, read_bytes};
use crate::runtime::clock::unix_now;
use crate::runtime::http::{forwarded_for, host_is_ours, websocket_accept};

/// Bytes of envelopes in one answer to a poll, behind the first.
const POLL_BYTES: u64 = 4 << 20;
/// Envelopes that a stream or socket fetches at once, and their bytes behind the first: a slow reader
/// must not hold much.
const STREAM_PAGE: (usize, u64) = (16, 256 << 10);
/// Bytes of `{"upTo": …}`.
const MAX_ACK: usize = 1024;

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(Full::default().boxed_unsync());
    *answer.status_mut() = status;
    answer
}

/// Text of one type.
fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = empty(status);
    *answer.body_mut() = Full::new(body.into()).boxed_unsync();
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

fn json_text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    text(status, "application/json", body)
}

fn json_answer(status: StatusCode, body: &Value) -> Answer {
    json_text(status, body.to_string())
}

/// Answers one request.
pub(super) fn answer(
    request: Request<Incoming>,
    peer: IpAddr,
    held: &Arc<Held>,
    shared: &Arc<Shared>,
) -> impl Future<Output = Result<Answer, Infallible>> + Send + use<> {
    let (held, shared) = (Arc::clone(held), Arc::clone(shared));
    async move {
        let forwarded = forwarded_for(request.headers()).filter(|_| shared.behind_proxy);
        let asking = Asking { from: forwarded.unwrap_or(peer), held, shared };
        let mut route = "none";
        let mut answer = match asking.answer(request, &mut route).await {
            Ok(answer) => answer,
            Err(fault) => json_answer(fault.status(), &json!({ "error": fault.body() })),
        };
        let headers = answer.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        let status = answer.status().as_u16();
        tracing::debug!(event = "acp_relay_request", source = %asking.from, route, status);
        Ok(answer)
    }
}

/// Who asks.
struct Asking {
    from: IpAddr,
    held: Arc<Held>,
    shared: Arc<Shared>,
}

impl Asking {
    async fn answer(
        &self,
        request: Request<Incoming>,
        name: &mut &'static str,
    ) -> Result<Answer, Fault> {
        let headers = request.headers();
        if !host_is_ours(headers, &self.shared.hosts) {
            return Err(Fault::forbidden("this Host is none of this relay's"));
        }
        // Browsers always say from which page a request comes.
        let from_page = headers.get_all(header::ORIGIN).iter().any(|origin| {
            !self.shared.pages.iter().any(|page| page.as_bytes() == origin.as_bytes())
        });
        if from_page {
            return Err(Fault::forbidden("requests of web pages are not taken"));
        }
        let uri = request.uri();
        let target = find(request.method().as_str(), uri.path(), uri.query().unwrap_or_default());
        if matches!(&target, Ok(target) if needs_token(&target.route)) {
            self.shared.charge_read(self.from)?;
        } else {
            self.shared.charge_write(self.from)?;
        }
        let target = target?;
        *name = target.route.name();
        let token = |mailbox, action| self.token(&request, target.auth.as_deref(), mailbox, action);
        match target.route {
            Route::Send => self.send(request).await,
            Route::Receive { did, after, limit, wait_ms } => {
                let auth = token(did, RelayAction::Receive)?;
                self.shared.keeper.ask(Job::Use(auth, after)).await?;
                self.poll(did, after, limit, wait_ms).await
            }
            Route::Acknowledge { did } => {
                let auth = token(did, RelayAction::Receive)?;
                self.acknowledge(request, auth).await
            }
            Route::Stream { did } => {
                let auth = token(did, RelayAction::Stream)?;
                let after = last_event_id(request.headers())?;
                self.stream(auth, after).await
            }
            Route::Subscribe { did } => {
                let auth = token(did, RelayAction::Subscribe)?;
                self.subscribe(request, auth).await
            }
            Route::Publish { did } => {
                let (body, _held) = self.body(request, MAX_CARD).await?;
                let card: WorkerCard = read_bytes(&body, MAX_CARD)?;
                if card.did != did {
                    let text = "the card is of another worker than the path";
                    return Err(Error::new(Code::WrongSigner, text).into());
                }
                card.verify()?;
                self.shared.charge_sender(*did.key())?;
                self.shared.keeper.ask(Job::Publish(card)).await?;
                Ok(empty(StatusCode::NO_CONTENT))
            }
            Route::TakeBack { did } => self.revoke(request, Some(did)).await,
            Route::Revoke => self.revoke(request, None).await,
            Route::Card { did } => {
                let card = self.shared.desk.with(|relay| relay.card(did, unix_now()));
                let none = || Fault::http(StatusCode::NOT_FOUND, "no card of this worker");
                Ok(json_text(StatusCode::OK, card.ok_or_else(none)?))
            }
            Route::Cards { filter, after, limit } => Ok(self.cards(&filter, after, limit)),
            Route::Notices { issuer, after, limit } => {
                let list = self.shared.desk.with(|relay| relay.notices(issuer, after, limit))?;
                Ok(listing("notices", list))
            }
            Route::Health => Ok(self.health()),
            Route::Info => Ok(self.info()),
        }
    }

    /// The one token of a request, checked but for its nonce. It may come in three places, and is the
    /// same in all of them.
    fn token(
        &self,
        request: &Request<Incoming>,
        in_query: Option<&str>,
        mailbox: Did,
        action: RelayAction,
    ) -> Result<RelayAuth, Fault> {
        if in_query.is_some() && !self.shared.query_auth {
            let error = Error::new(Code::BadField, "this relay takes no token in a URL");
            return Err(error.inside("auth").into());
        }
        let odd = || Error::new(Code::BadField, "a header that is no text");
        let mut tokens: Vec<&str> = in_query.into_iter().collect();
        for value in request.headers().get_all(header::AUTHORIZATION) {
            let value = value.to_str().map_err(|_| odd())?;
            match value.split_once(' ') {
                Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => {
                    tokens.push(token.trim_start_matches(' '));
                }
                // A proxy's own.
                _ => {}
            }
        }
        for value in request.headers().get_all("x-acp-relay-auth") {
            tokens.push(value.to_str().map_err(|_| odd())?);
        }
        let (Some(token), rest) = (tokens.first(), tokens.get(1..).unwrap_or_default()) else {
            return Err(Error::new(Code::AuthMissing, "this takes a RelayAuth token").into());
        };
        if rest.iter().any(|other| other != token) {
            return Err(Error::new(Code::BadField, "two tokens that are not the same").into());
        }
        Ok(auth::check(token, mailbox, action, &self.shared.origins, unix_now())?)
    }

    /// The whole body, within its bounds of bytes and time.
    async fn body(
        &self,
        request: Request<Incoming>,
        most: usize,
    ) -> Result<(Vec<u8>, Vec<OwnedSemaphorePermit>), Fault> {
        let too_large = || {
            let text = format!("a body of more than {most} bytes");
            Fault::from(Error::new(Code::TooLarge, text))
        };
        let mut body = request.into_body();
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        if size(body.size_hint().lower()) > most {
            return Err(too_large());
        }
        let reading = async {
            let (mut bytes, mut held) = (Vec::new(), Vec::new());
            while let Some(frame) = body.frame().await {
                let cut = |_| Fault::http(StatusCode::BAD_REQUEST, "the body was cut off");
                let Ok(data) = frame.map_err(cut)?.into_data() else { continue };
                if bytes.len() + data.len() > most {
                    return Err(too_large());
                }
                // Only for what has come: who sends slowly does not hold room for the rest.
                held.push(self.shared.hold(data.len())?);
                bytes.extend_from_slice(&data);
            }
            Ok((bytes, held))
        };
        let late = |_| Fault::http(StatusCode::REQUEST_TIMEOUT, "the body took too long");
        timeout(self.shared.limits.body, reading).await.map_err(late)?
    }

    async fn send(&self, request: Request<Incoming>) -> Result<Answer, Fault> {
        let most = self.shared.limits.tables.envelope_bytes;
        let (body, _held) = self.body(request, most).await?;
        let (id, taken) = self.shared.send(&body).await?;
        let status = if taken.fresh { StatusCode::ACCEPTED } else { StatusCode::OK };
        let answer = json!({ "envelopeId": id, "cursor": taken.cursor.to_string() });
        Ok(json_answer(status, &answer))
    }

    /// Waits, when nothing is there, for as long as the client wants to.
    async fn poll(
        &self,
        did: Did,
        after: Option<Cursor>,
        limit: usize,
        wait_ms: u64,
    ) -> Result<Answer, Fault> {
        let mut feed = Feed::open(&self.shared.desk, did, after, (limit, POLL_BYTES))?;
        let page = tokio::select! {
            page = feed.next() => page?,
            () = sleep(std::time::Duration::from_millis(wait_ms)) => feed.page().await?,
            () = self.shared.stop.cancelled() => Page::new(),
        };
        let next =
            page.last().map(|(cursor, _)| *cursor).or(after).map(|cursor| cursor.to_string());
        let mut body = b"{\"envelopes\":[".to_vec();
        for (at, (cursor, envelope)) in page.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let head = format!("{comma}{{\"cursor\":\"{cursor}\",\"envelope\":");
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(envelope);
            body.push(b'}');
        }
        body.extend_from_slice(format!("],\"next\":{}}}", json!(next)).as_bytes());
        Ok(json_text(StatusCode::OK, body))
    }

    /// The token was checked before the body was read, and is judged again and used up after it.
    async fn acknowledge(
        &self,
        request: Request<Incoming>,
        auth: RelayAuth,
    ) -> Result<Answer, Fault> {
        let (body, _held) = self.body(request, MAX_ACK).await?;
        let up_to = up_to(&body);
        // A body that says nothing does not leave the token good for another.
        let cursor = up_to.as_ref().ok().copied();
        self.shared.keeper.ask(Job::Use(auth, cursor)).await?;
        up_to?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    async fn stream(&self, auth: RelayAuth, after: Option<Cursor>) -> Result<Answer, Fault> {
        let did = auth.did;
        self.shared.keeper.ask(Job::Use(auth, None)).await?;
        let feed = Feed::open(&self.shared.desk, did, after, STREAM_PAGE)?;
        let ends = Instant::now() + self.shared.limits.stream_life;
        let events = stream::events(feed, ends, self.shared.stop.clone());
        let mut answer = text(StatusCode::OK, "text/event-stream", Bytes::new());
        *answer.body_mut() = StreamBody::new(events).boxed_unsync();
        Ok(answer)
    }

    async fn subscribe(
        &self,
        mut request: Request<Incoming>,
        auth: RelayAuth,
    ) -> Result<Answer, Fault> {
        let headers = request.headers();
        let Some(accept) = websocket_accept(headers) else {
            return Err(Fault::http(StatusCode::UPGRADE_REQUIRED, "this takes a WebSocket"));
        };
        let protocols = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
        let mut protocols = protocols.filter_map(|value| value.to_str().ok());
        if !protocols.any(|list| list.split(',').any(|word| word.trim() == socket::PROTOCOL)) {
            return Err(Fault::http(StatusCode::BAD_REQUEST, "this speaks acp.relay.v1"));
        }
        let did = auth.did;
        self.shared.keeper.ask(Job::Use(auth, None)).await?;
        let feed = Feed::open(&self.shared.desk, did, None, STREAM_PAGE)?;
        let upgrade = hyper::upgrade::on(&mut request);
        let (shared, held, from) = (Arc::clone(&self.shared), Arc::clone(&self.held), self.from);
        self.shared.tracker.spawn(async move {
            if let Ok(Ok(upgraded)) = timeout(shared.limits.head, upgrade).await {
                socket::serve(TokioIo::new(upgraded), feed, did, from, shared).await;
            }
            drop(held);
        });
        let mut answer = empty(StatusCode::SWITCHING_PROTOCOLS);
        let headers = answer.headers_mut();
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        let protocol = HeaderValue::from_static(socket::PROTOCOL);
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
        Ok(answer)
    }

    async fn revoke(
        &self,
        request: Request<Incoming>,
        card_of: Option<Did>,
    ) -> Result<Answer, Fault> {
        let (body, _held) = self.body(request, MAX_NOTICE).await?;
        let notice: RevocationNotice = read_bytes(&body, MAX_NOTICE)?;
        match card_of {
            Some(did) => check_card_notice(&notice, did)?,
            None => notice.verify()?,
        }
        self.shared.charge_sender(*notice.issuer_did.key())?;
        self.shared.keeper.ask(Job::Revoke(notice)).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    fn cards(&self, filter: &CardFilter, after: Option<Did>, limit: usize) -> Answer {
        let now = unix_now();
        listing("cards", self.shared.desk.with(|relay| relay.cards(filter, after, limit, now)))
    }

    fn health(&self) -> Answer {
        let (status, text) = if self.shared.desk.is_whole() {
            (StatusCode::OK, "ok")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "storage_failed")
        };
        json_answer(status, &json!({ "status": text, "version": self.shared.version }))
    }

    fn info(&self) -> Answer {
        let tables = &self.shared.limits.tables;
        let mut features = vec!["poll", "sse", "websocket", "registry", "revocations"];
        if self.shared.query_auth {
            features.push("query-auth");
        }
        let info = json!({
            "relayOrigin": self.shared.origins.first(),
            "limits": {
                "envelopeBytes": tables.envelope_bytes,
                "mailboxEnvelopes": tables.mailbox_envelopes,
                "mailboxBytes": tables.mailbox_bytes,
                "mailboxMs": tables.mailbox_ms,
                "senderEnvelopes": tables.sender_envelopes,
                "senderBytes": tables.sender_bytes,
                "didPerMinute": tables.did_per_minute,
                "addressPerMinute": tables.address_per_minute,
                "readsPerMinute": tables.reads_per_minute,
                "cardBytes": MAX_CARD,
            },
            "features": features,
        });
        json_answer(StatusCode::OK, &info)
    }
}

fn needs_token(route: &Route) -> bool {
    matches!(
        route,
        Route::Receive { .. }
            | Route::Acknowledge { .. }
            | Route::Stream { .. }
            | Route::Subscribe { .. }
    )
}

fn up_to(body: &[u8]) -> Result<Cursor, Error> {
    let mut members = Members::open(parse(body, MAX_ACK)?)?;
    members.only(&["upTo"])?;
    let cursor = members.take("upTo")?;
    Cursor::parse(cursor.as_str().unwrap_or_default()).map_err(|e| e.inside("upTo"))
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<Cursor>, Error> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    // What an EventSource sends when it has not seen an id.
    if text.is_empty() {
        return Ok(None);
    }
    Cursor::parse(text).map(Some).map_err(|e| e.inside("Last-Event-ID"))
}

/// A list whose objects are in canonical form already.
fn listing(name: &str, list: Listing) -> Answer {
    let mut body = format!("{{\"{name}\":[").into_bytes();
    body.extend_from_slice(&list.items.join(&b','));
    body.extend_from_slice(format!("],\"next\":{}}}", json!(list.next)).as_bytes());
    json_text(StatusCode::OK, body)
}
