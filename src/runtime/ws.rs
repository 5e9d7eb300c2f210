//! The way to a relay hub: a WebSocket, with TLS against the system's certificate authorities, made
//! to look like any other stream of frames to `link` (`wire.md` "Framing": one item a message, no
//! prefix). Frames and their bounds are the link's business.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use hyper::Uri;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, duplex,
};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Error as WsError, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use super::http_client::Stream;
use super::listener::tune;
use super::tls::MAX_TLS_BUFFER;

/// Longest message taken from a hub or sent to it: what ours takes is less, others' may be more.
const MAX_MESSAGE: usize = 4 * 1024 * 1024;
/// Between the link and the socket: a batch of the link's.
const PIPE: usize = 64 * 1024;
/// A hub must go on reading what we write.
const WRITE_STALL: Duration = Duration::from_secs(30);
/// How long a hub may take to answer the end.
const CLOSE: Duration = Duration::from_secs(2);
/// Addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;

/// What is wrong with a hub's URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// No URL, or one with parts that mean nothing here.
    #[error("{0:?} is not a URL like wss://hub.example.org/")]
    Malformed(String),
    /// Not encrypted, and not to this machine.
    #[error(
        "{0:?} is not encrypted: whoever is on the way sees which devices talk, and may claim to be \
         the hub; use wss://, or set hub-plaintext where the network itself is encrypted"
    )]
    Plain(String),
}

/// Where a hub is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubUrl {
    text: String,
    host: String,
    port: u16,
    tls: bool,
}

impl HubUrl {
    /// Reads a URL. `plain`: `ws://` to other machines is allowed.
    ///
    /// # Errors
    /// [`UrlError`].
    pub fn parse(text: &str, plain: bool) -> Result<Self, UrlError> {
        let malformed = || UrlError::Malformed(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| malformed())?;
        let tls = match uri.scheme_str() {
            Some("wss") => true,
            Some("ws") => false,
            _ => return Err(malformed()),
        };
        let authority = uri.authority().ok_or_else(malformed)?;
        // Neither belongs into what a hub tells others as its address.
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(malformed());
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        // A port that is none would be taken for none at all.
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") if tls => 443,
            Some("") => 80,
            Some(rest) => {
                rest.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or_else(malformed)?
            }
            None => return Err(malformed()),
        };
        if host.is_empty() || port == 0 {
            return Err(malformed());
        }
        let loopback = host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if !tls && !plain && !loopback {
            return Err(UrlError::Plain(text.to_owned()));
        }
        Ok(Self { text: text.to_owned(), host, port, tls })
    }

    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// How the configured hub is dialled.
#[derive(Debug)]
pub(super) struct HubDialler {
    url: HubUrl,
    /// Read once: the system's authorities do not change while a daemon runs.
    tls: OnceCell<Arc<ClientConfig>>,
}

impl HubDialler {
    pub(super) fn new(url: HubUrl) -> Self {
        Self { url, tls: OnceCell::new() }
    }

    /// Dials; the error is a stable word. The future beside the stream carries messages to and fro
    /// until one end is over.
    pub(super) async fn dial(
        &self,
    ) -> Result<(DuplexStream, impl Future<Output = ()> + Send + use<>), &'static str> {
        let stream = connect(&self.url.host, self.url.port).await?;
        let stream: Box<dyn Stream> = if self.url.tls {
            let config = self.tls.get_or_try_init(client_config).await?;
            let name = ServerName::try_from(self.url.host.clone()).map_err(|_| "bad_host")?;
            let connector = TlsConnector::from(Arc::clone(config));
            let stream = connector
                .connect_with(name, stream, |tls| tls.set_buffer_limit(Some(MAX_TLS_BUFFER)))
                .await
                .map_err(|error| tls_reason(&error))?;
            Box::new(stream)
        } else {
            Box::new(stream)
        };
        let config = WebSocketConfig::default()
            .read_buffer_size(16 * 1024)
            .write_buffer_size(0)
            .max_message_size(Some(MAX_MESSAGE))
            .max_frame_size(Some(MAX_MESSAGE));
        let (socket, _) = client_async_with_config(&self.url.text, stream, Some(config))
            .await
            .map_err(|error| match error {
                WsError::Http(_) => "hub_refused",
                WsError::Io(_) | WsError::ConnectionClosed => "peer_closed",
                _ => "no_hub",
            })?;
        let (near, far) = duplex(PIPE);
        Ok((near, carry(socket, far)))
    }
}

/// Connects to a host by name or address: to the first address that answers.
pub(super) async fn connect(host: &str, port: u16) -> Result<TcpStream, &'static str> {
    let addresses = lookup_host((host, port)).await.map_err(|_| "unknown_host")?;
    let mut failure = "unknown_host";
    for address in addresses.take(MAX_ADDRESSES) {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                tune(&stream, true).map_err(|_| "io_error")?;
                return Ok(stream);
            }
            Err(error) => failure = super::dial::reason(&error),
        }
    }
    Err(failure)
}

/// TLS against the system's certificate authorities; the error is a stable word.
pub(super) async fn client_config() -> Result<Arc<ClientConfig>, &'static str> {
    // Reads hundreds of files on some systems.
    let found = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs)
        .await
        .map_err(|_| "no_authorities")?;
    let mut roots = RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(found.certs);
    if usable == 0 {
        return Err("no_authorities");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|_| "tls_failed")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Why TLS did not come about, as a stable word.
pub(super) fn tls_reason(error: &io::Error) -> &'static str {
    match error.get_ref().and_then(|e| e.downcast_ref()) {
        Some(rustls::Error::InvalidCertificate(_)) => "untrusted_certificate",
        Some(_) => "tls_failed",
        None => super::dial::reason(error),
    }
}

/// Frames of the pipe are messages of the socket. Ends when either does.
async fn carry<S>(socket: WebSocketStream<S>, pipe: DuplexStream)
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let (mut sink, mut stream) = socket.split();
    let (mut from_link, mut to_link) = tokio::io::split(pipe);
    let inward = async {
        while let Some(Ok(message)) = stream.next().await {
            match message {
                Message::Binary(body) => {
                    let Ok(length) = u32::try_from(body.len()) else { return None };
                    let written = async {
                        to_link.write_all(&length.to_be_bytes()).await?;
                        to_link.write_all(&body).await
                    };
                    if written.await.is_err() {
                        return Some(CloseCode::Normal);
                    }
                }
                Message::Text(_) => return Some(CloseCode::Protocol),
                Message::Close(_) => return None,
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
        None
    };
    let outward = async {
        while let Ok(length) = from_link.read_u32().await {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if length > MAX_MESSAGE {
                tracing::warn!(event = "hub_frame_not_sent", bytes = length);
                let skipped = (&mut from_link).take(length as u64);
                if tokio::io::copy(&mut { skipped }, &mut tokio::io::sink()).await.is_err() {
                    break;
                }
                continue;
            }
            let mut body = vec![0; length];
            if from_link.read_exact(&mut body).await.is_err() {
                break;
            }
            match timeout(WRITE_STALL, sink.send(Message::Binary(Bytes::from(body)))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
        Some(CloseCode::Normal)
    };
    let code = tokio::select! {
        code = inward => code,
        code = outward => code,
    };
    if let Some(code) = code {
        let frame = CloseFrame { code, reason: "".into() };
        let _ = timeout(CLOSE, async {
            let _ = sink.send(Message::Close(Some(frame))).await;
            while let Some(Ok(_)) = stream.next().await {}
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_encrypted_or_lead_nowhere_else() {
        for good in [
            "wss://hub.example.org/",
            "wss://hub.example.org",
            "wss://192.0.2.1:7000/mesh",
            "wss://[2001:db8::1]/",
            "ws://127.0.0.1:9/",
            "ws://[::1]:9/",
            "ws://localhost/",
        ] {
            HubUrl::parse(good, false).unwrap();
        }
        for bad in [
            "",
            "hub.example.org",
            "https://hub.example.org/",
            "wss:///",
            "wss://me:secret@hub.example.org/",
            "wss://hub.example.org/?a=b",
            "wss://hub.example.org:0/",
            "wss://hub.example.org:99999/",
        ] {
            assert_eq!(HubUrl::parse(bad, true), Err(UrlError::Malformed(bad.into())), "{bad}");
        }
        for plain in ["ws://192.0.2.1/", "ws://hub.example.org/", "ws://127.0.0.1.example.org/"] {
            assert_eq!(HubUrl::parse(plain, false), Err(UrlError::Plain(plain.into())));
            HubUrl::parse(plain, true).unwrap();
        }
        let url = HubUrl::parse("wss://[2001:db8::1]/x", false).unwrap();
        assert_eq!((url.host.as_str(), url.port, url.tls), ("2001:db8::1", 443, true));
    }
}
