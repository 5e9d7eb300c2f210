//! The server of the page for this machine's user (`docs/web.md`): HTTP on 127.0.0.1 and nowhere
//! else, one request a connection. Who may ask at all is decided in `gate`; what is answered and
//! told is a [`Desk`]'s, which alone knows what it is about.
//!
//! Everybody on the machine can connect here. Whoever has not shown the token holds a place only
//! until others want it, and whoever does not read loses the connection; nobody waits for either.

mod gate;

use std::convert::Infallible;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{Stream, unfold};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Body as _, Bytes, Frame, Incoming};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::gate::{Gate, Passed};
use super::listener::{BindError, Handshakes, Place, bind, tune};
use super::stall::Stalling;

/// Bytes of a request's head: a browser's has about one KiB.
const MAX_HEAD: usize = 16 * 1024;
/// Headers of a request.
const MAX_HEADERS: usize = 64;
/// How long accepting rests when the system is out of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// What is told that is longer is not sent to all: listeners fetch it.
const MAX_NEWS: usize = 16 * 1024;
/// What was told last is kept for listeners that are slow: with [`MAX_NEWS`], 4 MiB for all together.
const KEPT_NEWS: usize = 256;
/// Silence after which a listener is sent a comment, which shows whether it is still there.
const COMMENT_EVERY: Duration = Duration::from_secs(15);
/// Nothing but the page's own files may act in it, and no page may hold it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";
/// What every answer says.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// The bounds of the server. The defaults are for use, others for tests.
#[derive(Clone, Debug)]
pub struct PageLimits {
    /// Connections that have not shown the token; the oldest makes room for a newcomer.
    pub newcomers: usize,
    /// Requests with the token at the same time: more than the connections of a few browsers.
    pub requests: usize,
    /// Of these, listeners: one for each open page.
    pub listeners: usize,
    /// For a request's head.
    pub head: Duration,
    /// For a request's body.
    pub body: Duration,
    /// Bytes of a body: as long as a line of the local API.
    pub body_bytes: usize,
    /// A client must go on reading.
    pub write_stall: Duration,
}

impl Default for PageLimits {
    fn default() -> Self {
        Self {
            newcomers: 64,
            requests: 64,
            listeners: 16,
            head: Duration::from_secs(10),
            body: Duration::from_secs(10),
            body_bytes: 1024 * 1024,
            write_stall: Duration::from_secs(30),
        }
    }
}

/// A file of the page.
#[derive(Clone, Copy, Debug)]
pub struct PageFile {
    /// Its path, from `/` on.
    pub path: &'static str,
    /// Its media type.
    pub kind: &'static str,
    /// What is in it.
    pub text: &'static str,
}

/// What is behind the page.
pub trait Desk: Send + Sync + 'static {
    /// Answers what `POST /api` has brought, in JSON.
    fn ask(&self, body: Bytes) -> impl Future<Output = (StatusCode, Vec<u8>)> + Send;

    /// What a new listener is told first, as JSON: the event `state`. Nothing that is told after it
    /// is missed.
    fn state(&self) -> String;
}

/// Where what happens is told to all listeners. Who is too slow is told that something was missed.
#[derive(Debug)]
pub struct Board(broadcast::Sender<Bytes>);

impl Default for Board {
    fn default() -> Self {
        Self(broadcast::Sender::new(KEPT_NEWS))
    }
}

impl Board {
    /// Tells all listeners: the event's name, and JSON without a line feed.
    pub fn tell(&self, kind: &str, json: &str) {
        let news = if json.len() <= MAX_NEWS { news(kind, json) } else { missed() };
        // Nobody may be listening.
        let _ = self.0.send(news);
    }
}

fn news(kind: &str, json: &str) -> Bytes {
    format!("event: {kind}\ndata: {json}\n\n").into()
}

fn missed() -> Bytes {
    news("missed", "{}")
}

/// A page that can be served.
#[derive(Debug)]
pub struct PageServer {
    listener: TcpListener,
    gate: Gate,
    files: &'static [PageFile],
    limits: PageLimits,
}

struct Shared<D> {
    gate: Gate,
    files: &'static [PageFile],
    limits: PageLimits,
    desk: Arc<D>,
    board: Arc<Board>,
    requests: Arc<Semaphore>,
    listeners: Arc<Semaphore>,
    stop: CancellationToken,
}

/// What a connection holds until it ends: its place among the newcomers, then that of its request.
enum Held {
    Newcomer { _place: Place },
    Request { _place: OwnedSemaphorePermit },
}

impl PageServer {
    /// Binds 127.0.0.1 at a port, which the system chooses where it is 0. Whoever shows `token` may
    /// see the page. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(
        port: u16,
        token: String,
        files: &'static [PageFile],
        limits: PageLimits,
    ) -> Result<Self, BindError> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = bind(address)?;
        let bound = listener.local_addr().map_err(|error| BindError::Failed { address, error })?;
        Ok(Self { listener, gate: Gate::new(bound.port(), token), files, limits })
    }

    /// The page's address, without the token.
    #[must_use]
    pub fn url(&self) -> String {
        self.gate.url()
    }

    /// The address with the token, for the user alone.
    #[must_use]
    pub fn secret_url(&self) -> String {
        self.gate.secret_url()
    }

    /// Serves until `stop` is cancelled; connections end then.
    pub async fn serve<D: Desk>(self, desk: Arc<D>, board: Arc<Board>, stop: CancellationToken) {
        let Self { listener, gate, files, limits } = self;
        // A newcomer never waits for another one.
        let newcomers = Handshakes::new(limits.newcomers, Duration::ZERO);
        let shared = Arc::new(Shared {
            requests: Arc::new(Semaphore::new(limits.requests)),
            listeners: Arc::new(Semaphore::new(limits.listeners)),
            gate,
            files,
            limits,
            desk,
            board,
            stop,
        });
        loop {
            let accepted = tokio::select! {
                () = shared.stop.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let place = newcomers.place().await;
                    tokio::spawn(connection(stream, place, Arc::clone(&shared)));
                }
                // Nothing to do about it but to wait: whoever connects is served then.
                Err(_) => sleep(ACCEPT_BACKOFF).await,
            }
        }
    }
}

/// One connection: one request and its answer.
async fn connection<D: Desk>(stream: TcpStream, place: Place, shared: Arc<Shared<D>>) {
    if tune(&stream, false).is_err() {
        return;
    }
    let evicted = place.evicted.clone();
    let held = Mutex::new(Held::Newcomer { _place: place });
    let stream = TokioIo::new(Stalling::new(stream, shared.limits.write_stall));
    let service = service_fn(async |request| {
        let mut answer = match shared.answer(request, &held).await {
            Ok(answer) => answer,
            Err(refusal) => refusal.into(),
        };
        for (name, value) in HEADERS {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        Ok::<_, Infallible>(answer)
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .keep_alive(false)
        .header_read_timeout(shared.limits.head)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS);
    tokio::select! {
        // How a connection ends is its client's business.
        _ = http.serve_connection(stream, service) => {}
        () = evicted.cancelled() => {}
        () = shared.stop.cancelled() => {}
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Response<Body>;

fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal(StatusCode, &'static str);

impl From<Refusal> for Answer {
    fn from(Refusal(status, why): Refusal) -> Self {
        text(status, "text/plain; charset=utf-8", format!("{why}\n"))
    }
}

impl<D: Desk> Shared<D> {
    async fn answer(
        &self,
        request: Request<Incoming>,
        held: &Mutex<Held>,
    ) -> Result<Answer, Refusal> {
        let (head, body) = request.into_parts();
        let passed = self.gate.judge(&head)?;
        let busy = Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many requests at the same time");
        let place = Arc::clone(&self.requests).try_acquire_owned().map_err(|_| busy)?;
        *held.lock() = Held::Request { _place: place };
        if let Passed::Newly(cookie) = passed {
            let mut answer = text(StatusCode::SEE_OTHER, "text/plain; charset=utf-8", "");
            answer.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/"));
            answer.headers_mut().insert(header::SET_COOKIE, cookie);
            return Ok(answer);
        }
        let file = self.files.iter().find(|file| file.path == head.uri.path());
        let only = |method: Method| {
            let not_so = Refusal(StatusCode::METHOD_NOT_ALLOWED, "not by this method");
            if head.method == method { Ok(()) } else { Err(not_so) }
        };
        match (head.uri.path(), file) {
            ("/api", _) => {
                only(Method::POST)?;
                let (status, json) = self.desk.ask(self.body(body).await?).await;
                Ok(text(status, "application/json", json))
            }
            ("/events", _) => {
                only(Method::GET)?;
                self.events()
            }
            (_, Some(file)) => {
                only(Method::GET)?;
                Ok(text(StatusCode::OK, file.kind, file.text))
            }
            (_, None) => Err(Refusal(StatusCode::NOT_FOUND, "there is nothing here")),
        }
    }

    /// The whole body, within its bounds of bytes and time.
    async fn body(&self, body: Incoming) -> Result<Bytes, Refusal> {
        let too_large = Refusal(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large");
        let most = self.limits.body_bytes;
        if body.size_hint().lower() > most as u64 {
            return Err(too_large);
        }
        let late = Refusal(StatusCode::REQUEST_TIMEOUT, "the body took too long");
        let whole = timeout(self.limits.body, Limited::new(body, most).collect()).await;
        match whole.map_err(|_| late)? {
            Ok(whole) => Ok(whole.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(too_large),
            Err(_) => Err(Refusal(StatusCode::BAD_REQUEST, "the body was cut off")),
        }
    }

    /// What is told from now on, as server-sent events.
    fn events(&self) -> Result<Answer, Refusal> {
        let full = Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many pages are open");
        let place = Arc::clone(&self.listeners).try_acquire_owned().map_err(|_| full)?;
        // Before the state is looked at: what changes after that is told.
        let told = self.board.0.subscribe();
        let first = news("state", &self.desk.state());
        let mut answer = text(StatusCode::OK, "text/event-stream", "");
        *answer.body_mut() = StreamBody::new(listen(first, told, place)).boxed_unsync();
        Ok(answer)
    }
}

/// The body of a listener's answer. What waits for it is shared with all others ([`KEPT_NEWS`]).
fn listen(
    first: Bytes,
    told: broadcast::Receiver<Bytes>,
    place: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> {
    unfold((Some(first), told, place), async |(first, mut told, place)| {
        let next = match first {
            Some(first) => first,
            None => match timeout(COMMENT_EVERY, told.recv()).await {
                Ok(Ok(news)) => news,
                Ok(Err(RecvError::Lagged(_))) => missed(),
                Ok(Err(RecvError::Closed)) => return None,
                Err(_) => Bytes::from_static(b":\n\n"),
            },
        };
        Some((Ok(Frame::data(next)), (None, told, place)))
    })
}

#[cfg(test)]
mod tests;
