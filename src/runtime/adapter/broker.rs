//! The broker of a provider's key (design 10.4): a loopback port that lives as long as one run. The
//! run's program knows the port and a random token of this run; the broker puts the owner's key in
//! the token's place, passes requests on to one provider only, and counts the tokens of the answers.
//! The key is in no environment, file, argument list or log of a run.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Method, Request, Response, StatusCode};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::dialogue::{tokens, unknown};
use super::local_http::{self, Answer, Handler, Token, whole};
use super::provider::Provider;
use super::usage::{Reader, Seen};
use crate::acp::objects::{Metrics, UsageSource};
use crate::acp::value::Name;
use crate::runtime::http_client::{Body, HttpError};

/// Bytes of a request's body: a model's whole context with pictures.
const REQUEST_MAX: usize = 32 << 20;
/// For the head of the provider's answer, which a model may think about for long.
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// Headers of requests that are passed on.
const ASKED: [&str; 6] =
    ["accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta", "user-agent"];
/// Headers of answers that are passed back.
const ANSWERED: [&str; 4] = ["content-type", "request-id", "retry-after", "x-request-id"];

/// What all answers of a run took together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    input: u64,
    output: u64,
    /// Answers that said nothing of tokens.
    silent: u64,
    answers: u64,
    /// The model that answered last.
    pub model: Option<Name>,
}

impl Taken {
    /// The tokens, if the provider was asked at all.
    pub fn metrics(&self) -> Metrics {
        if self.answers == 0 { unknown() } else { tokens(self.input, self.output) }
    }

    /// Where these numbers come from: a guess, if an answer had none.
    pub const fn source(&self) -> UsageSource {
        if self.silent == 0 { UsageSource::Provider } else { UsageSource::Estimated }
    }
}

/// The broker of one run; it ends when it is dropped.
#[derive(Debug)]
pub(super) struct Broker {
    /// The port on 127.0.0.1.
    pub port: u16,
    /// What the run's program shows instead of a key.
    pub token: Arc<Token>,
    /// What was taken so far.
    pub taken: watch::Receiver<Taken>,
    base: String,
    _listener: AbortOnDropHandle<()>,
}

struct Shared {
    provider: Provider,
    token: Arc<Token>,
    hold: watch::Receiver<bool>,
    taken: watch::Sender<Taken>,
}

impl Broker {
    /// Starts a broker for a run. While `hold` is true no request is passed on.
    pub async fn start(provider: Provider, hold: watch::Receiver<bool>) -> std::io::Result<Self> {
        let token = Arc::new(Token::draw()?);
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let (tell, taken) = watch::channel(Taken::default());
        let base = provider.base().to_owned();
        let shared = Shared { provider, token: Arc::clone(&token), hold, taken: tell };
        let listening = local_http::serve(listener, Arc::new(shared));
        Ok(Self { port, token, taken, base, _listener: listening })
    }

    /// The address for the run's program, in the place of the provider's.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}{}", self.port, self.base)
    }
}

fn plain(status: StatusCode) -> Answer {
    let text = status.canonical_reason().unwrap_or_default();
    let mut answer = Response::new(whole(text));
    *answer.status_mut() = status;
    answer
}

impl Handler for Shared {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        self.pass_on(request).await.unwrap_or_else(plain)
    }
}

impl Shared {
    async fn pass_on(&self, request: Request<Incoming>) -> Result<Answer, StatusCode> {
        let (head, body) = request.into_parts();
        if !self.token.is_shown(&head.headers) {
            return Err(StatusCode::UNAUTHORIZED);
        }
        let path = head.uri.path_and_query().map_or("", |path| path.as_str());
        if !self.is_of_provider(path) {
            return Err(StatusCode::NOT_FOUND);
        }
        if !matches!(head.method, Method::GET | Method::POST) {
            return Err(StatusCode::METHOD_NOT_ALLOWED);
        }
        let body = Limited::new(body, REQUEST_MAX).collect().await;
        let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?.to_bytes();
        let mut asked = Request::new(body);
        *asked.method_mut() = head.method;
        *asked.uri_mut() = path.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
        copy(&ASKED, &head.headers, asked.headers_mut());
        if let Some(key) = self.provider.key_value() {
            asked.headers_mut().insert(self.provider.key_header(), key);
        }
        // At the end of a budget calls wait (decision 46).
        let mut hold = self.hold.clone();
        if hold.wait_for(|held| !held).await.is_err() {
            return Err(StatusCode::SERVICE_UNAVAILABLE);
        }
        let answered = self.provider.client().open(asked, ANSWER_WITHIN).await;
        let answered = answered.map_err(|error| match error {
            HttpError::Timeout => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::BAD_GATEWAY,
        })?;
        Ok(self.pass_back(answered))
    }

    /// Whether a path is one of the provider's calls, however it is read.
    fn is_of_provider(&self, path: &str) -> bool {
        let below =
            path.strip_prefix(&self.provider.root()).is_some_and(|rest| rest.starts_with('/'));
        let path = path.split('?').next().unwrap_or_default();
        below && !path.contains(['%', '\\']) && path.split('/').all(|part| part != "..")
    }

    /// The provider's answer, counted while it passes.
    fn pass_back(&self, answered: Response<Body>) -> Answer {
        let (head, body) = answered.into_parts();
        let content_type = head.headers.get(header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let counts = head.status.is_success();
        let passing = Passing {
            body,
            reader: counts.then(|| Reader::new(content_type)),
            counted: Seen::default(),
            taken: self.taken.clone(),
        };
        let body = StreamBody::new(stream::unfold(passing, Passing::next)).boxed_unsync();
        let mut answer = Response::new(body);
        *answer.status_mut() = head.status;
        copy(&ANSWERED, &head.headers, answer.headers_mut());
        answer
    }
}

fn copy(names: &[&'static str], from: &HeaderMap, to: &mut HeaderMap) {
    for name in names.iter().map(|name| HeaderName::from_static(name)) {
        if let Some(value) = from.get(&name) {
            to.insert(name, value.clone());
        }
    }
}

/// An answer on its way. What it took is added as it becomes known, so that one which is broken off
/// counts as well.
struct Passing {
    body: Body,
    /// None for an answer that is not counted, or whose end was counted.
    reader: Option<Reader>,
    counted: Seen,
    taken: watch::Sender<Taken>,
}

impl Passing {
    async fn next(mut self) -> Option<(Result<Frame<Bytes>, HttpError>, Self)> {
        match self.body.chunk().await {
            Ok(Some(bytes)) => {
                if let Some(seen) = self.reader.as_mut().and_then(|reader| reader.take(&bytes)) {
                    self.count(seen);
                }
                Some((Ok(Frame::data(bytes)), self))
            }
            Ok(None) => None,
            Err(error) => Some((Err(error), self)),
        }
    }

    /// Adds what is new in `seen`.
    fn count(&mut self, seen: Seen) {
        let before = std::mem::replace(&mut self.counted, seen);
        let now = &self.counted;
        if *now == before {
            return;
        }
        self.taken.send_modify(|taken| {
            taken.input = taken.input.saturating_add(now.input.saturating_sub(before.input));
            taken.output = taken.output.saturating_add(now.output.saturating_sub(before.output));
            taken.answers += u64::from(now.told && !before.told);
            taken.model = now.model.clone().or(taken.model.take());
        });
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            let seen = reader.finish();
            let told = seen.told;
            self.count(seen);
            if !told {
                self.taken.send_modify(|taken| {
                    taken.answers += 1;
                    taken.silent += 1;
                });
            }
        }
    }
}
