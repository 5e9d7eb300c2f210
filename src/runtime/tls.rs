//! TLS as the mesh uses it: both ends show a self-signed certificate, nothing in it is judged but
//! that its key made the handshake's signature, and the peer is whoever that key is (`wire.md`,
//! "TLS"). Sockets are the business of `listener` and `dial`.

use std::fmt;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerMisbehaved, ServerConfig, SignatureScheme,
};

use crate::identity::certificate::{Certificate, peer_public_key};
use crate::identity::device::{DeviceId, DeviceKey};

/// Most plaintext and ciphertext that rustls holds for one connection's writing: four records, so
/// that a record can be filled while another is on its way.
pub const MAX_TLS_BUFFER: usize = 64 * 1024;

/// DER of a SubjectPublicKeyInfo of an uncompressed P-256 point, up to the point.
const P256_SPKI_HEAD: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// A device's TLS configuration cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The key cannot be written as PKCS #8.
    #[error("the device key cannot be encoded for TLS")]
    Key,
    /// rustls refuses key or certificate.
    #[error("TLS refuses the device's key or certificate ({0}); make a new certificate")]
    Config(#[from] Error),
}

impl TlsError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Key => "tls_key",
            Self::Config(_) => "tls_config",
        }
    }
}

/// Both TLS roles of one device. Cheap to clone.
#[derive(Clone)]
pub struct DeviceTls {
    id: DeviceId,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl fmt::Debug for DeviceTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceTls").field(&self.id).finish()
    }
}

impl DeviceTls {
    /// TLS with `key` and `certificate`, which has to hold that key.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn new(key: &DeviceKey, certificate: &Certificate) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Arc::new(PeerVerifier::new(&provider));
        let chain = vec![CertificateDer::from(certificate.der().to_vec())];
        let pkcs8 = key.to_pkcs8_der().ok_or(TlsError::Key)?;
        let private = || PrivatePkcs8KeyDer::from(pkcs8.to_vec()).into();
        let versions = &[&rustls::version::TLS13];

        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(Arc::clone(&verifier) as Arc<dyn ClientCertVerifier>)
            .with_single_cert(chain.clone(), private())?;
        // Sessions last for hours; remembering them would only cost memory.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;

        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(chain, private())?;
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Self { id: key.id(), server: Arc::new(server), client: Arc::new(client) })
    }

    /// The device.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// For accepted connections. A client without certificate gets through the handshake, so that
    /// it can be closed with its reason.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// What judges servers.
    #[cfg(test)]
    pub(super) fn verifier(&self) -> Arc<dyn ServerCertVerifier> {
        Arc::new(PeerVerifier::new(&rustls::crypto::ring::default_provider()))
    }

    /// For dialled connections.
    #[must_use]
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }
}

/// The device that a finished handshake has proven to be at the other end; `None` when it showed no
/// certificate.
#[must_use]
pub fn peer_device(certificates: Option<&[CertificateDer<'_>]>) -> Option<DeviceId> {
    let leaf = certificates?.first()?;
    peer_public_key(leaf).ok().map(|key| key.device())
}

/// Accepts any certificate with a P-256 key, and only handshakes signed by that key.
#[derive(Debug)]
struct PeerVerifier {
    algorithms: WebPkiSupportedAlgorithms,
}

impl PeerVerifier {
    fn new(provider: &CryptoProvider) -> Self {
        Self { algorithms: provider.signature_verification_algorithms }
    }

    fn check_leaf(leaf: &CertificateDer<'_>) -> Result<(), Error> {
        peer_public_key(leaf).map(|_| ()).map_err(|_| CertificateError::BadEncoding.into())
    }

    /// Against the point itself: webpki, which would read the certificate a second time, is
    /// pickier about them than the reference's TLS.
    fn check_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if signed.scheme != SignatureScheme::ECDSA_NISTP256_SHA256 {
            return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
        }
        let key = peer_public_key(leaf).map_err(|_| Error::from(CertificateError::BadEncoding))?;
        let spki = SubjectPublicKeyInfoDer::from([P256_SPKI_HEAD, &key.public_key].concat());
        verify_tls13_signature_with_raw_key(message, &spki, signed, &self.algorithms)
    }
}

/// TLS 1.2 is not offered, so its signatures are never asked about.
fn tls12_refused() -> Error {
    Error::General("TLS 1.2 is not spoken here".to_owned())
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Self::check_leaf(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_refused())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}

impl ClientCertVerifier for PeerVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Self::check_leaf(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_refused())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}
