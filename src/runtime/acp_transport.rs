//! The client of a relay of the Agent Collaboration Protocol (design 11.1, 11.2): every request to
//! it, and the three ways to receive. Envelopes are opaque here, and nothing is retried but
//! receiving: the outbox of a gateway knows what is still to be sent.
//!
//! A relay is a stranger: its answers are bounded and read strictly, its words reach no log, and
//! what it lists is checked before it is handed on.

mod answer;
mod backoff;
mod error;
mod receive;
mod sse;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

pub use self::answer::{CardPage, NoticePage, Posted, RelayInfo};
use self::answer::{Page, failure, read};
pub use self::error::TransportError;
pub use self::receive::{Delivery, Form};
use super::clock::unix_now;
use super::http_client::{Bounds, Connector, HttpClient, Resolve};
use crate::acp::did::{Did, Secret};
use crate::acp::endpoint::{Endpoint, EndpointPolicy};
use crate::acp::json::canonical;
use crate::acp::objects::{Envelope, RelayAction, RevocationNotice, WorkerCard};
use crate::acp::relay::auth;
use crate::acp::value::Word;
use crate::identity::entropy::{Entropy as _, OsEntropy};

/// A request and its answer, but for a poll.
const ANSWER: Duration = Duration::from_secs(20);
/// Bytes of an answer that holds no list.
const MAX_SMALL: usize = 256 * 1024;
/// Bytes of a list of cards or notices; relays take cards of 16 KiB and notices of 32 KiB.
const MAX_PAGE: usize = 2 << 20;
/// Cards or notices that are asked for at once.
const PAGE: usize = 50;
/// What stays as it is in a path segment or a query (RFC 3986, 2.3).
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Which cards are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardFilter {
    /// With this adapter.
    pub adapter: Option<Word>,
    /// With this skill.
    pub skill: Option<Word>,
}

/// A client of one relay, for one identity.
pub struct RelayClient {
    http: HttpClient,
    /// For WebSockets, which are connections of their own.
    connector: Arc<Connector>,
    /// The part of every path before `/v1`.
    base: String,
    /// The audience of every token.
    origin: String,
    key: Arc<Secret>,
    entropy: Mutex<OsEntropy>,
    /// The newest cursor that was acknowledged.
    acked: watch::Sender<Option<String>>,
    /// Whether what receives tells the relay of acknowledgements by itself: an open WebSocket, polls.
    tells: AtomicBool,
}

impl std::fmt::Debug for RelayClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayClient")
            .field("origin", &self.origin)
            .field("did", &self.key.did())
            .finish_non_exhaustive()
    }
}

impl RelayClient {
    /// A client of the relay at `url` (https, http, wss or ws; the forms all go there), which
    /// connects when it is first used.
    ///
    /// # Errors
    /// `ENDPOINT_BLOCKED`, also for a URL with a query; `RELAY_UNREACHABLE` where the system has no
    /// randomness.
    pub fn new(
        url: &str,
        policy: EndpointPolicy,
        key: Arc<Secret>,
    ) -> Result<Self, TransportError> {
        Self::on(url, Connector::new(policy), key)
    }

    /// As [`Self::new`], with names resolved by `resolver`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_resolver(
        url: &str,
        policy: EndpointPolicy,
        key: Arc<Secret>,
        resolver: Box<dyn Resolve>,
    ) -> Result<Self, TransportError> {
        Self::on(url, Connector::with(policy, resolver, None), key)
    }

    fn on(url: &str, connector: Connector, key: Arc<Secret>) -> Result<Self, TransportError> {
        let endpoint = Endpoint::parse(url, connector.policy())?;
        if endpoint.path.contains('?') {
            return Err(TransportError::blocked("the URL of a relay has no query"));
        }
        let entropy = OsEntropy::open()
            .map_err(|_| TransportError::unreachable("the system gives no random bytes"))?;
        let (base, origin) = (endpoint.path.trim_end_matches('/').to_owned(), endpoint.origin());
        let connector = Arc::new(connector);
        Ok(Self {
            http: HttpClient::new(endpoint, Arc::clone(&connector))?,
            connector,
            base,
            origin,
            key,
            entropy: Mutex::new(entropy),
            acked: watch::Sender::new(None),
            tells: AtomicBool::new(false),
        })
    }

    /// The relay's origin, as tokens name it.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Hands an envelope to the relay. The same envelope again is answered the same way.
    ///
    /// # Errors
    /// [`TransportError`]; `MAILBOX_FULL` and `RATE_LIMITED` pass, `ENVELOPE_ID_REUSED` and
    /// `ENVELOPE_EXPIRED` do not.
    pub async fn post(&self, envelope: &Envelope) -> Result<Posted, TransportError> {
        let answer = self.put(Method::POST, "/v1/envelopes", envelope).await?;
        let repeated = answer.status() == StatusCode::OK;
        let posted: Posted = read(answer.body(), MAX_SMALL)?;
        if posted.envelope_id != envelope.envelope_id {
            let text = "the relay answered for another envelope";
            return Err(TransportError::unreachable(text).in_doubt());
        }
        Ok(Posted { repeated, ..posted })
    }

    /// Acknowledges everything up to and including `cursor`: the relay deletes it. The consumer of
    /// [`Self::receive`] calls this once it has stored what it got; once for many is enough. While
    /// a WebSocket is open, or polls go on, it goes with that one, or the next one, and is not awaited.
    ///
    /// # Errors
    /// [`TransportError`]. Receiving goes on behind `cursor` all the same; what the relay has not heard
    /// of comes again at the next start.
    pub async fn ack(&self, cursor: &str) -> Result<(), TransportError> {
        self.acked.send_replace(Some(cursor.to_owned()));
        if self.tells.load(Ordering::SeqCst) {
            return Ok(());
        }
        let path = format!("{}/ack", self.mailbox());
        let request = self.request(Method::POST, &path, Some(RelayAction::Receive))?;
        let body = canonical(&json!({ "upTo": cursor }))?;
        self.exchange(with_body(request, body), MAX_SMALL, ANSWER).await.map(drop)
    }

    /// Receives until `cancel` says so or nobody takes deliveries any more, and connects again and
    /// again: after 0.5 s, 1 s … 60 s, longer where the relay says so. At least once: what was not
    /// acknowledged comes again, so that consumers drop envelope ids that they know (and acknowledge
    /// those, too). One receiver a client.
    #[must_use]
    pub fn receive(
        self: Arc<Self>,
        form: Form,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<Delivery> {
        receive::start(self, form, cancel)
    }

    /// Publishes one's own card.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn put_card(&self, card: &WorkerCard) -> Result<(), TransportError> {
        self.put(Method::PUT, &card_path(card.did), card).await.map(drop)
    }

    /// Takes a card back.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn remove_card(&self, notice: &RevocationNotice) -> Result<(), TransportError> {
        self.put(Method::DELETE, &card_path(notice.issuer_did), notice).await.map(drop)
    }

    /// The card of a worker, `None` when the relay has none. Its signature is checked; its times and
    /// claims are not.
    ///
    /// # Errors
    /// [`TransportError`]; the codes of a signature.
    pub async fn card(&self, did: Did) -> Result<Option<WorkerCard>, TransportError> {
        let request = self.request(Method::GET, &card_path(did), None)?;
        let answer = self.send(request, MAX_SMALL, ANSWER).await?;
        if answer.status() == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !answer.status().is_success() {
            return Err(failure(answer.status(), answer.body()));
        }
        let card = answer::card(read(answer.body(), MAX_SMALL)?)?;
        if card.did != did {
            return Err(TransportError::unreachable("the relay answered with another's card"));
        }
        Ok(Some(card))
    }

    /// One page of the cards that `filter` fits, after the page whose `next` is `after`. A page may
    /// be empty and not the last one.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn cards(
        &self,
        filter: &CardFilter,
        after: Option<&str>,
    ) -> Result<CardPage, TransportError> {
        let (adapter, skill) = (filter.adapter.as_deref(), filter.skill.as_deref());
        let query = [("adapter", adapter), ("skill", skill)];
        let page = self.list("/v1/registry", "cards", query, after).await?;
        Ok(page.verified(answer::card).into())
    }

    /// Publishes a revocation.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn post_revocation(&self, notice: &RevocationNotice) -> Result<(), TransportError> {
        self.put(Method::POST, "/v1/revocations", notice).await.map(drop)
    }

    /// One page of the revocations of `issuer`, after the page whose `next` is `after`. A page may be
    /// empty and not the last one; `next` of the last one that has notices is where later ones come.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn revocations(
        &self,
        issuer: Did,
        after: Option<&str>,
    ) -> Result<NoticePage, TransportError> {
        let issuer_did = issuer.to_string();
        let query = [("issuerDid", Some(issuer_did.as_str()))];
        let page = self.list("/v1/revocations", "notices", query, after).await?;
        Ok(page.verified(|value| answer::notice(value, issuer)).into())
    }

    /// What the relay says of itself; also the way to see whether one is there.
    ///
    /// # Errors
    /// [`TransportError`].
    pub async fn info(&self) -> Result<RelayInfo, TransportError> {
        let request = self.request(Method::GET, "/v1/info", None)?;
        let answer = self.exchange(request, MAX_SMALL, ANSWER).await?;
        read(answer.body(), MAX_SMALL)
    }

    /// The path of one's own mailbox.
    fn mailbox(&self) -> String {
        format!("/v1/mailboxes/{}", escaped(&self.key.did().to_string()))
    }

    /// A request without body; with a fresh token where it needs one.
    fn request(
        &self,
        method: Method,
        path: &str,
        action: Option<RelayAction>,
    ) -> Result<Request<Bytes>, TransportError> {
        let unusable = |_| TransportError::blocked("the URL of the relay cannot be asked for");
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(header::ACCEPT, "application/json")
            .body(Bytes::new())
            .map_err(unusable)?;
        if let Some(action) = action {
            request.headers_mut().insert(header::AUTHORIZATION, self.bearer(action)?);
        }
        Ok(request)
    }

    /// A fresh token as a header; it never goes anywhere else.
    fn bearer(&self, action: RelayAction) -> Result<HeaderValue, TransportError> {
        let mut entropy = self.entropy.lock();
        let token = auth::token(&self.key, action, &self.origin, unix_now(), &mut *entropy)?;
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| TransportError::blocked("a token that is no header"))?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Two random bytes, for jitter.
    fn random(&self) -> u16 {
        let mut bytes = [0; 2];
        self.entropy.lock().fill(&mut bytes);
        u16::from_be_bytes(bytes)
    }

    async fn put<T: Serialize>(
        &self,
        method: Method,
        path: &str,
        object: &T,
    ) -> Result<Response<Bytes>, TransportError> {
        let request = with_body(self.request(method, path, None)?, canonical(object)?);
        self.exchange(request, MAX_SMALL, ANSWER).await
    }

    async fn list<const N: usize>(
        &self,
        path: &str,
        member: &str,
        query: [(&str, Option<&str>); N],
        after: Option<&str>,
    ) -> Result<Page, TransportError> {
        let mut path = format!("{path}?limit={PAGE}");
        for (name, value) in query.into_iter().chain([("after", after)]) {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", escaped(value)));
            }
        }
        let answer =
            self.exchange(self.request(Method::GET, &path, None)?, MAX_PAGE, ANSWER).await?;
        let mut page = Page::read(answer.body(), member, MAX_PAGE, PAGE)?;
        // A relay that has nothing more leaves the place where it is.
        page.next = page.next.filter(|next| after != Some(next));
        Ok(page)
    }

    /// Sends a request; an answer that is no success is an error.
    async fn exchange(
        &self,
        request: Request<Bytes>,
        body: usize,
        within: Duration,
    ) -> Result<Response<Bytes>, TransportError> {
        let answer = self.send(request, body, within).await?;
        if answer.status().is_success() {
            Ok(answer)
        } else {
            Err(failure(answer.status(), answer.body()))
        }
    }

    async fn send(
        &self,
        request: Request<Bytes>,
        body: usize,
        within: Duration,
    ) -> Result<Response<Bytes>, TransportError> {
        Ok(self.http.send(request, Bounds { body, within }).await?)
    }
}

fn with_body(mut request: Request<Bytes>, body: Vec<u8>) -> Request<Bytes> {
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(header::CONTENT_TYPE, json);
    *request.body_mut() = body.into();
    request
}

fn card_path(did: Did) -> String {
    format!("/v1/registry/{}", escaped(&did.to_string()))
}

fn escaped(text: &str) -> String {
    utf8_percent_encode(text, UNRESERVED).to_string()
}

#[cfg(test)]
mod tests;
