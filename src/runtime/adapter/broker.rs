//! The broker of a provider's key (design 10.4): a loopback port that lives as long as one run. The
//! run's program knows the port and a random token of this run; the broker puts the owner's key in
//! the token's place, passes requests on to one provider only, and counts the tokens of the answers.
//! The key is in no environment, file, argument list or log of a run.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderName};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::dialogue::{tokens, unknown};
use super::provider::Provider;
use super::usage::{Reader, Seen};
use crate::acp::json::sha256;
use crate::acp::objects::{Metrics, UsageSource};
use crate::acp::value::Name;
use crate::runtime::http_client::{Body, HttpError};

/// Connections of one run at one time.
const CONNECTIONS: usize = 16;
/// Bytes of a request's body: a model's whole context with pictures.
const REQUEST_MAX: usize = 32 << 20;
/// Bytes and number of a request's headers.
const HEAD_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// For the head of a request.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
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
    pub token: Zeroizing<String>,
    /// What was taken so far.
    pub taken: watch::Receiver<Taken>,
    base: String,
    _listener: AbortOnDropHandle<()>,
}

struct Shared {
    provider: Provider,
    token: [u8; 32],
    hold: watch::Receiver<bool>,
    taken: watch::Sender<Taken>,
}

type Answer = Response<UnsyncBoxBody<Bytes, HttpError>>;

impl Broker {
    /// Starts a broker for a run. While `hold` is true no request is passed on.
    pub async fn start(provider: Provider, hold: watch::Receiver<bool>) -> std::io::Result<Self> {
        let mut secret = Zeroizing::new([0; 32]);
        getrandom::fill(secret.as_mut_slice()).map_err(std::io::Error::other)?;
        let token = Zeroizing::new(BASE64URL_NOPAD.encode(secret.as_slice()));
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let (tell, taken) = watch::channel(Taken::default());
        let base = provider.base().to_owned();
        let token_digest = sha256(token.as_bytes());
        let shared = Arc::new(Shared { provider, token: token_digest, hold, taken: tell });
        let accepting = tokio::spawn(accept(listener, shared));
        Ok(Self { port, token, taken, base, _listener: AbortOnDropHandle::new(accepting) })
    }

    /// The address for the run's program, in the place of the provider's.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}{}", self.port, self.base)
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, or a client that went away at once.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            serve(stream, &shared).await;
            drop(place);
        });
    }
}

async fn serve(stream: TcpStream, shared: &Shared) {
    let service = service_fn(|request| async {
        Ok::<_, Infallible>(match shared.pass_on(request).await {
            Ok(answer) => answer,
            Err(status) => plain(status),
        })
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_MAX.max(8192))
        .max_headers(HEADERS_MAX);
    // Its end, good or bad, is the run's program's business.
    let _ended = http.serve_connection(TokioIo::new(stream), service).await;
}

fn plain(status: StatusCode) -> Answer {
    let text = status.canonical_reason().unwrap_or_default();
    let mut answer = Response::new(Full::from(text).map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer
}

impl Shared {
    async fn pass_on(&self, request: Request<Incoming>) -> Result<Answer, StatusCode> {
        let (head, body) = request.into_parts();
        if !self.knows_token(&head.headers) {
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

    /// Whether the request shows the run's token. Digests are compared, so that the time taken tells
    /// nothing of it.
    fn knows_token(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get("x-api-key").map(|value| value.as_bytes());
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        shown.or(bearer).is_some_and(|shown| sha256(shown) == self.token)
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
