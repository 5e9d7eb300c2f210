//! HTTP for one run's program alone: a listener that lives as long as the run, and the random token
//! that the program shows. What is asked there is the broker's, the tools' and the proxy's.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::net::Listener;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use crate::acp::json::sha256;
use crate::runtime::http_client::HttpError;

/// Connections of one listener at one time.
const CONNECTIONS: usize = 16;
/// Bytes and number of a request's headers.
const HEAD_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// For the head of a request.
const HEAD_WITHIN: Duration = Duration::from_secs(10);

/// What a request is answered with.
pub(super) type Answer = Response<UnsyncBoxBody<Bytes, HttpError>>;

/// What answers the requests of a listener.
pub(super) trait Handler: Send + Sync + 'static {
    /// Answers one request.
    fn answer(&self, request: Request<Incoming>) -> impl Future<Output = Answer> + Send;
}

/// A run's token: 256 random bits.
pub(super) struct Token {
    text: Zeroizing<String>,
    digest: [u8; 32],
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// A new one.
    pub fn draw() -> std::io::Result<Self> {
        let mut secret = Zeroizing::new([0; 32]);
        getrandom::fill(secret.as_mut_slice()).map_err(std::io::Error::other)?;
        let text = Zeroizing::new(BASE64URL_NOPAD.encode(secret.as_slice()));
        let digest = sha256(text.as_bytes());
        Ok(Self { text, digest })
    }

    /// What the program shows.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a request with these headers shows it. Digests are compared, so that the time taken
    /// tells nothing of it.
    pub fn is_shown(&self, headers: &HeaderMap) -> bool {
        let key = headers.get("x-api-key").map(|value| value.as_bytes());
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        key.or(bearer).is_some_and(|shown| self.is(shown))
    }

    /// Whether this is it.
    pub fn is(&self, shown: &[u8]) -> bool {
        sha256(shown) == self.digest
    }
}

/// Answers what comes to `listener` until the handle is dropped, and every connection with it.
pub(super) fn serve<L>(listener: L, handler: Arc<impl Handler>) -> AbortOnDropHandle<()>
where
    L: Listener<Io: Send + Unpin + 'static> + Send + 'static,
{
    AbortOnDropHandle::new(tokio::spawn(accept(listener, handler)))
}

async fn accept<L>(mut listener: L, handler: Arc<impl Handler>)
where
    L: Listener<Io: Send + Unpin + 'static>,
{
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
        let handler = Arc::clone(&handler);
        connections.spawn(async move {
            converse(stream, &*handler).await;
            drop(place);
        });
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    handler: &impl Handler,
) {
    let service =
        service_fn(|request| async { Ok::<_, Infallible>(handler.answer(request).await) });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_MAX)
        .max_headers(HEADERS_MAX);
    // Its end, good or bad, is the run's program's business.
    let _ended = http.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
}

/// A body that is there as a whole.
pub(super) fn whole(bytes: impl Into<Bytes>) -> UnsyncBoxBody<Bytes, HttpError> {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}
