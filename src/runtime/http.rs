//! What the HTTP servers here have in common: certificates for TLS, and what is read from a request's
//! head before anything else.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// A server's certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file with certificate or key.
    #[error("{file} holds no usable {what}: {reason}", file = file.display())]
    Pem {
        /// The file.
        file: PathBuf,
        /// What should be in it.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key are refused.
    #[error("TLS refuses the certificate or its key: {0}")]
    Tls(#[from] rustls::Error),
}

impl CertificateError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Pem { .. } => "certificate_unusable",
            Self::Tls(_) => "certificate_refused",
        }
    }
}

/// TLS 1.3 with the chain and key of two PEM files.
pub(super) fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, CertificateError> {
    let pem = |file: &Path, what| {
        let file = file.to_owned();
        move |error: rustls::pki_types::pem::Error| CertificateError::Pem {
            file,
            what,
            reason: error.to_string(),
        }
    };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect)
        .map_err(pem(certificate, "certificate"))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(pem(key, "private key"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// What a request for a WebSocket is to be answered; `None`: it is none.
pub(super) fn websocket_accept(headers: &HeaderMap) -> Option<HeaderValue> {
    let lists = |name: HeaderName, word: &str| {
        headers.get_all(name).iter().any(|value| {
            let value = value.to_str().unwrap_or_default();
            value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word))
        })
    };
    let is = |name: HeaderName, word: &str| headers.get(name).is_some_and(|value| value == word);
    let key = headers.get(header::SEC_WEBSOCKET_KEY)?;
    // 16 bytes in base64.
    if !lists(header::CONNECTION, "upgrade")
        || !lists(header::UPGRADE, "websocket")
        || !is(header::SEC_WEBSOCKET_VERSION, "13")
        || key.len() != 24
    {
        return None;
    }
    HeaderValue::from_str(&derive_accept_key(key.as_bytes())).ok()
}

/// Whether the one `Host` is an address, `localhost` or one of ours: a page on another name, which
/// its owner has made point here, has that name in it.
pub(super) fn host_is_ours(headers: &HeaderMap, ours: &[String]) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(name, _)| name),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || ours.iter().any(|ours| name.eq_ignore_ascii_case(ours))
}

/// Whom the proxy speaks for: the last address, which it has added itself.
pub(super) fn forwarded_for(headers: &HeaderMap) -> Option<IpAddr> {
    let value = headers.get_all("x-forwarded-for").iter().next_back()?.to_str().ok()?;
    value.rsplit(',').next()?.trim().parse().ok()
}
