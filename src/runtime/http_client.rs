//! An HTTP/1.1 client for endpoints that somebody else has named (design 12): a name is resolved
//! once, every address of it is judged, and the connection goes to a judged address. It follows no
//! redirect, knows no proxy and keeps one connection. What is asked and answered is the caller's.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::listener::tune;
use super::tls::MAX_TLS_BUFFER;
use super::ws;
use crate::acp::code::Error as Blocked;
use crate::acp::endpoint::{Endpoint, EndpointPolicy, Host};

/// From the name to a connection that can be used: room for two lost SYNs and a slow resolver.
const CONNECT: Duration = Duration::from_secs(15);
/// For one address, so that the next ones get their turn.
const CONNECT_ONE: Duration = Duration::from_secs(5);
/// Addresses of one name that are tried; all are judged.
const MAX_ADDRESSES: usize = 8;
/// Bytes of an answer's head, and of what is read ahead of its body.
const MAX_HEAD: usize = 16 * 1024;
/// Headers of an answer.
const MAX_HEADERS: usize = 64;
/// A kept connection that rested longer is not used again: many servers close theirs after 20 s or
/// more, and a request that meets the closing is lost.
const KEEP: Duration = Duration::from_secs(15);
/// For a connection to be ready again. One that still sends a request that was answered early is
/// not worth waiting for.
const SETTLE: Duration = Duration::from_millis(100);

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The endpoint, or an address of it, may not be connected to.
    #[error(transparent)]
    Blocked(#[from] Blocked),
    /// It answered with a redirect, and none is followed.
    #[error("the endpoint answered {0}, which leads elsewhere: give the address it leads to")]
    Redirected(u16),
    /// The name has no address.
    #[error("the name of the endpoint cannot be resolved")]
    Unresolved,
    /// No address of it takes connections; the word says why.
    #[error("the endpoint cannot be connected to ({0})")]
    Unreachable(&'static str),
    /// Its certificate is not trusted, or it does not speak TLS; the word says which.
    #[error("no encrypted connection to the endpoint ({0})")]
    Tls(&'static str),
    /// It did not answer in time.
    #[error("the endpoint did not answer in time")]
    Timeout,
    /// It closed the connection early.
    #[error("the endpoint closed the connection")]
    Closed,
    /// It does not speak HTTP/1.1, or more head than is taken.
    #[error("the endpoint's answer is not HTTP that is taken here")]
    NotHttp,
    /// The body is larger than the caller takes.
    #[error("the endpoint's answer is larger than {0} bytes")]
    TooLarge(usize),
    /// What was asked for cannot be written as a request.
    #[error("this is no request that can be sent")]
    Request,
}

impl HttpError {
    /// Stable code.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Blocked(error) => error.code().as_str(),
            Self::Redirected(_) => "http_redirected",
            Self::Unresolved => "http_unresolved",
            Self::Unreachable(_) => "http_unreachable",
            Self::Tls(_) => "http_tls",
            Self::Timeout => "http_timeout",
            Self::Closed => "http_closed",
            Self::NotHttp => "http_bad_answer",
            Self::TooLarge(_) => "http_too_large",
            Self::Request => "http_bad_request",
        }
    }

    /// Whether the same request may well succeed later.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(self, Self::Unresolved | Self::Unreachable(_) | Self::Timeout | Self::Closed)
    }
}

/// What a name resolves to.
pub type Resolved<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// Where addresses of names come from.
pub trait Resolve: Send + Sync {
    /// Every address of `name`.
    fn resolve<'a>(&'a self, name: &'a str) -> Resolved<'a>;
}

/// The system's resolver.
#[derive(Clone, Copy, Debug)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> Resolved<'a> {
        Box::pin(
            async move { Ok(lookup_host((name, 0)).await?.map(|address| address.ip()).collect()) },
        )
    }
}

/// A connected byte stream.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Makes connections that the policy allows.
pub struct Connector {
    policy: EndpointPolicy,
    resolver: Box<dyn Resolve>,
    /// Read once: the system's authorities do not change while a process runs.
    tls: OnceCell<Arc<ClientConfig>>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Connector {
    /// With the system's resolver and certificate authorities.
    #[must_use]
    pub fn new(policy: EndpointPolicy) -> Self {
        Self::with(policy, Box::new(SystemResolver), None)
    }

    /// With another resolver, and with authorities of the caller's (`None`: the system's).
    #[must_use]
    pub fn with(
        policy: EndpointPolicy,
        resolver: Box<dyn Resolve>,
        tls: Option<Arc<ClientConfig>>,
    ) -> Self {
        Self { policy, resolver, tls: OnceCell::new_with(tls) }
    }

    /// What may be connected to.
    #[must_use]
    pub const fn policy(&self) -> EndpointPolicy {
        self.policy
    }

    /// Connects, with TLS where the endpoint's scheme says so.
    pub(super) async fn connect(&self, endpoint: &Endpoint) -> Result<Box<dyn Stream>, HttpError> {
        timeout(CONNECT, self.connect_slowly(endpoint)).await.map_err(|_| HttpError::Timeout)?
    }

    async fn connect_slowly(&self, endpoint: &Endpoint) -> Result<Box<dyn Stream>, HttpError> {
        let addresses = match &endpoint.host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => {
                self.resolver.resolve(name).await.map_err(|_| HttpError::Unresolved)?
            }
        };
        if addresses.is_empty() {
            return Err(HttpError::Unresolved);
        }
        let addresses = endpoint.check_resolved(&addresses, self.policy)?;
        let stream = connect_to(&addresses, endpoint.port).await?;
        if !endpoint.secure {
            return Ok(Box::new(stream));
        }
        let config = self.tls.get_or_try_init(ws::client_config).await.map_err(HttpError::Tls)?;
        let name = match &endpoint.host {
            Host::Address(address) => ServerName::IpAddress((*address).into()),
            Host::Name(name) => ServerName::try_from(name.trim_end_matches('.').to_owned())
                .map_err(|_| HttpError::Tls("bad_host"))?,
        };
        let stream = TlsConnector::from(Arc::clone(config))
            .connect_with(name, stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)))
            .await
            .map_err(|error| HttpError::Tls(ws::tls_reason(&error)))?;
        Ok(Box::new(stream))
    }
}

/// Connects to the first of the judged addresses that answers.
async fn connect_to(addresses: &[IpAddr], port: u16) -> Result<TcpStream, HttpError> {
    let mut failure = "timeout";
    for address in addresses.iter().take(MAX_ADDRESSES) {
        let address = SocketAddr::new(*address, port);
        match timeout(CONNECT_ONE, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                tune(&stream, true).map_err(|_| HttpError::Unreachable("io_error"))?;
                return Ok(stream);
            }
            Ok(Err(error)) => failure = super::dial::reason(&error),
            Err(_) => failure = "timeout",
        }
    }
    Err(HttpError::Unreachable(failure))
}

type Sender = http1::SendRequest<Full<Bytes>>;

/// A connection and the task that drives it, which ends with it.
#[derive(Debug)]
struct Connection {
    sender: Sender,
    driver: AbortOnDropHandle<()>,
}

/// The bounds of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of the answer's body.
    pub body: usize,
    /// From the request to the end of the answer; connecting has its own bound of 15 s.
    pub within: Duration,
}

/// A client of one endpoint. Requests at the same time have a connection each; one of them is kept.
#[derive(Debug)]
pub struct HttpClient {
    connector: Arc<Connector>,
    endpoint: Endpoint,
    /// `Host` of every request.
    host: HeaderValue,
    kept: Mutex<Option<(Connection, Instant)>>,
}

impl HttpClient {
    /// A client of `endpoint`, which connects when it is first used.
    ///
    /// # Errors
    /// [`HttpError::Request`] for a host that cannot be named in a header.
    pub fn new(endpoint: Endpoint, connector: Arc<Connector>) -> Result<Self, HttpError> {
        let origin = endpoint.origin();
        let host = origin.split_once("://").map_or(origin.as_str(), |(_, host)| host);
        let host = HeaderValue::from_str(host).map_err(|_| HttpError::Request)?;
        Ok(Self { connector, endpoint, host, kept: Mutex::new(None) })
    }

    /// Where it connects to.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends a request and reads the whole answer. The URI of the request is path and query;
    /// `Host` and `Content-Length` are added.
    ///
    /// # Errors
    /// [`HttpError`]; an answer with any status but a redirect is none.
    pub async fn send(
        &self,
        request: Request<Bytes>,
        bounds: Bounds,
    ) -> Result<Response<Bytes>, HttpError> {
        let (response, connection, until) = self.exchange(request, bounds.within).await?;
        let (head, body) = response.into_parts();
        let mut body = Body { incoming: body, connection };
        let whole = tokio::time::timeout_at(until, body.collect(bounds.body));
        let whole = whole.await.map_err(|_| HttpError::Timeout)??;
        self.keep(body.connection).await;
        Ok(Response::from_parts(head, whole))
    }

    /// Sends a request; the body of the answer is the caller's to read, for as long as it likes.
    /// `within` bounds the time to the answer's head.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn open(
        &self,
        request: Request<Bytes>,
        within: Duration,
    ) -> Result<Response<Body>, HttpError> {
        let (response, connection, _) = self.exchange(request, within).await?;
        Ok(response.map(|incoming| Body { incoming, connection }))
    }

    /// Sends a request on the kept connection or a new one, to the head of the answer. Also says
    /// when the time for this exchange is over.
    async fn exchange(
        &self,
        request: Request<Bytes>,
        within: Duration,
    ) -> Result<(Response<Incoming>, Connection, Instant), HttpError> {
        let mut request = request.map(Full::new);
        if request.uri().authority().is_some() || !request.uri().path().starts_with('/') {
            return Err(HttpError::Request);
        }
        request.headers_mut().insert(header::HOST, self.host.clone());
        if let Some(mut connection) = self.take_kept() {
            let until = Instant::now() + within;
            let sent = connection.sender.try_send_request(request);
            let sent = tokio::time::timeout_at(until, sent).await;
            match sent.map_err(|_| HttpError::Timeout)? {
                Ok(response) => return Ok((checked(response)?, connection, until)),
                // It was closed while it rested, and nothing of the request has left.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(failure(error.error())),
                },
            }
        }
        let mut connection = self.connect().await?;
        let until = Instant::now() + within;
        let sent = connection.sender.send_request(request);
        let sent = tokio::time::timeout_at(until, sent).await;
        let response = sent.map_err(|_| HttpError::Timeout)?.map_err(|error| failure(&error))?;
        Ok((checked(response)?, connection, until))
    }

    async fn connect(&self) -> Result<Connection, HttpError> {
        let stream = self.connector.connect(&self.endpoint).await?;
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(MAX_HEAD)
            .max_header_size(MAX_HEAD)
            .max_headers(MAX_HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| failure(&error))?;
        let driver = tokio::spawn(async move {
            // Its end is seen by whoever waits for an answer.
            let _ = driver.await;
        });
        Ok(Connection { sender, driver: AbortOnDropHandle::new(driver) })
    }

    fn take_kept(&self) -> Option<Connection> {
        let (connection, since) = self.kept.lock().take()?;
        (since.elapsed() < KEEP && !connection.driver.is_finished()).then_some(connection)
    }

    /// Keeps a connection whose answer was read to its end, if it goes on.
    async fn keep(&self, mut connection: Connection) {
        // The driver needs a turn to see that the body is over.
        if let Ok(Ok(())) = timeout(SETTLE, connection.sender.ready()).await {
            *self.kept.lock() = Some((connection, Instant::now()));
        }
    }
}

fn checked(response: Response<Incoming>) -> Result<Response<Incoming>, HttpError> {
    let status = response.status();
    if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
        return Err(HttpError::Redirected(status.as_u16()));
    }
    Ok(response)
}

fn failure(error: &hyper::Error) -> HttpError {
    if error.is_parse() {
        HttpError::NotHttp
    } else if error.is_user() {
        HttpError::Request
    } else {
        HttpError::Closed
    }
}

/// The body of an answer; its connection ends with it.
#[derive(Debug)]
pub struct Body {
    incoming: Incoming,
    connection: Connection,
}

impl Body {
    /// The next part, `None` at the end; at most what is read ahead, 16 KiB or so. May be dropped
    /// and called again. How long to wait is the caller's.
    ///
    /// # Errors
    /// [`HttpError::Closed`], [`HttpError::NotHttp`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        while let Some(frame) = self.incoming.frame().await {
            // Trailers say nothing here.
            if let Ok(data) = frame.map_err(|error| failure(&error))?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// The whole body.
    ///
    /// # Errors
    /// As [`Self::chunk`], and [`HttpError::TooLarge`] above `max` bytes.
    pub async fn collect(&mut self, max: usize) -> Result<Bytes, HttpError> {
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if whole.len() + chunk.len() > max {
                return Err(HttpError::TooLarge(max));
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.into())
    }
}

#[cfg(test)]
mod tests;
