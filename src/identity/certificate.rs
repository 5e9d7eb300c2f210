//! Self-signed certificates in the reference's exact form, and the public key of a peer's
//! certificate. A certificate only carries a key through TLS: no chain, name or date is judged.

use std::time::Duration;

use p256::elliptic_curve::sec1::ToSec1Point as _;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue};
use rcgen::{IsCa, PublicKeyData, SerialNumber, SigningKey};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use sha2::{Digest as _, Sha256};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::device::{ALG_ES256, DeviceKey, IdentityKey};
use crate::codec::time::UnixMillis;

/// How long a certificate is valid: 365 days (`transport.md` 5.4).
pub const VALIDITY_MS: u64 = 365 * 24 * 60 * 60 * 1000;

/// Last `now` that is accepted: year 9000, well inside what X.509 time and the calendar library
/// represent.
const LATEST: UnixMillis = UnixMillis(221_845_392_000_000);

const OID_SUBJECT_KEY_IDENTIFIER: &[u64] = &[2, 5, 29, 14];
const OID_SUBJECT_ALT_NAME: &[u64] = &[2, 5, 29, 17];
const OID_BASIC_CONSTRAINTS: &[u64] = &[2, 5, 29, 19];

/// DER of `SEQUENCE { [2] "localhost", [7] 127.0.0.1 }`.
const ALT_NAMES: &[u8] = b"\x30\x11\x82\x09localhost\x87\x04\x7f\x00\x00\x01";
/// DER of `SEQUENCE {}`: CA false by default.
const NO_CA: &[u8] = b"\x30\x00";
/// DER head of an OCTET STRING of 20 bytes.
const OCTETS_20: &[u8] = b"\x04\x14";

/// A certificate could not be made or read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// `now` lies beyond the year 9000.
    #[error(
        "the system clock says year 9000 or later, so no certificate can be made; set the clock"
    )]
    Clock,
    /// The certificate could not be encoded or signed.
    #[error("the certificate could not be signed: {0}")]
    Sign(String),
    /// Not one X.509 certificate in DER.
    #[error("the peer's certificate is not X.509 in DER")]
    Malformed,
    /// The certificate's key is not an ECDSA P-256 point.
    #[error("the peer's certificate does not hold an ECDSA P-256 key")]
    NotP256,
}

impl CertificateError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Clock => "certificate_clock",
            Self::Sign(_) => "certificate_sign",
            Self::Malformed => "certificate_malformed",
            Self::NotP256 => "certificate_not_p256",
        }
    }
}

/// A certificate as text and bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    pem: String,
    der: Vec<u8>,
}

impl Certificate {
    /// Reads the first certificate of a PEM text; `None` when there is none.
    #[must_use]
    pub fn from_pem(pem: &str) -> Option<Self> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        Some(Self { pem: pem.to_owned(), der: der.to_vec() })
    }

    /// PEM, 64 columns, LF, trailing LF.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// DER.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Whether this certificate carries `key`.
    #[must_use]
    pub fn holds(&self, key: &DeviceKey) -> bool {
        peer_public_key(&self.der).is_ok_and(|public| public.public_key == key.public_key())
    }
}

/// A self-signed certificate for `key`, valid from `now` for 365 days (`transport.md` 5.4).
///
/// `seed` becomes the serial number. The same input always gives the same bytes.
///
/// # Errors
/// [`CertificateError::Clock`], [`CertificateError::Sign`].
pub fn self_signed(
    key: &DeviceKey,
    now: UnixMillis,
    seed: &[u8; 16],
) -> Result<Certificate, CertificateError> {
    let mut serial = [0; 20];
    for (to, from) in serial.iter_mut().zip(Sha256::digest(seed)) {
        *to = from;
    }
    serial[0] &= 0x7f;
    if serial[0] == 0 {
        serial[0] = 1;
    }
    with_serial(key, now, &serial)
}

fn with_serial(
    key: &DeviceKey,
    now: UnixMillis,
    serial: &[u8],
) -> Result<Certificate, CertificateError> {
    if now > LATEST {
        return Err(CertificateError::Clock);
    }
    let signer = Signer(key);
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let mut params = CertificateParams::default();
    params.serial_number = Some(SerialNumber::from_slice(serial));
    params.not_before = epoch + Duration::from_secs(now.seconds());
    params.not_after = epoch + Duration::from_secs(now.plus(VALIDITY_MS).seconds());
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, DnValue::Utf8String("agent-comms".to_owned()));
    // rcgen would write these three in its own order; as custom extensions they keep ours.
    params.is_ca = IsCa::NoCa;
    let key_id = sha1::Sha1::digest(signer.subject_public_key_info());
    let mut no_ca = CustomExtension::from_oid_content(OID_BASIC_CONSTRAINTS, NO_CA.to_vec());
    no_ca.set_criticality(true);
    params.custom_extensions = vec![
        CustomExtension::from_oid_content(
            OID_SUBJECT_KEY_IDENTIFIER,
            [OCTETS_20, &key_id].concat(),
        ),
        CustomExtension::from_oid_content(OID_SUBJECT_ALT_NAME, ALT_NAMES.to_vec()),
        no_ca,
    ];
    let certificate =
        params.self_signed(&signer).map_err(|e| CertificateError::Sign(e.to_string()))?;
    Ok(Certificate { pem: certificate.pem(), der: certificate.der().to_vec() })
}

/// Lets rcgen sign with a device key.
struct Signer<'a>(&'a DeviceKey);

impl PublicKeyData for Signer<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0.public_key()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for Signer<'_> {
    fn sign(&self, msg: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature = p256::ecdsa::Signature::from_slice(&self.0.sign(msg))
            .map_err(|_| rcgen::Error::RemoteKeyError)?;
        Ok(signature.to_der().as_bytes().to_vec())
    }
}

/// The key in a peer's certificate: always the 65-byte uncompressed point, also when the
/// certificate holds it compressed (`wire.md`, "TLS").
///
/// # Errors
/// [`CertificateError::Malformed`]; [`CertificateError::NotP256`] for every other kind of key and
/// for bytes that are no point of the curve.
pub fn peer_public_key(certificate_der: &[u8]) -> Result<IdentityKey, CertificateError> {
    let (rest, certificate) =
        X509Certificate::from_der(certificate_der).map_err(|_| CertificateError::Malformed)?;
    if !rest.is_empty() {
        return Err(CertificateError::Malformed);
    }
    let spki = &certificate.tbs_certificate.subject_pki;
    let curve = spki.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
    if spki.algorithm.algorithm != x509_parser::oid_registry::OID_KEY_TYPE_EC_PUBLIC_KEY
        || curve != Some(x509_parser::oid_registry::OID_EC_P256)
        || spki.subject_public_key.unused_bits != 0
    {
        return Err(CertificateError::NotP256);
    }
    let point = p256::PublicKey::from_sec1_bytes(&spki.subject_public_key.data)
        .map_err(|_| CertificateError::NotP256)?
        .to_sec1_point(false);
    Ok(IdentityKey { alg: ALG_ES256, public_key: point.as_bytes().to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key, certificate and device id of a real 8.0.8 peer, as recorded.
    const PEER_KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgA4VvoWVy7HOPIKSn
DzkVogcBNX8pM9PuOClJif8B61uhRANCAAT2dIk69hHwfLCgl5GXIQ4WUl9yGXQB
Yt62NkNQx9674o7i6hQhZImnf/U31bLdKVChZRQWuSPeA902bVEZenkG
-----END PRIVATE KEY-----
";
    const PEER_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUIwsT6izyOjUbafB4MBoXW6jexX0wCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLYWdlbnQtY29tbXMwHhcNMjYxMTI5MjE1MTM3WhcNMjcxMTI5
MjE1MTM3WjAWMRQwEgYDVQQDDAthZ2VudC1jb21tczBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABPZ0iTr2EfB8sKCXkZchDhZSX3IZdAFi3rY2Q1DH3rvijuLqFCFk
iad/9TfVst0pUKFlFBa5I94D3TZtURl6eQajSzBJMB0GA1UdDgQWBBS+IC0PNfW1
Aby+02ppIaWRXiNbQDAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwDAYDVR0T
AQH/BAIwADAKBggqhkjOPQQDAgNIADBFAiAB+V83f9nvRhhyfJnaZ5R7gdrJQaIh
+HDH2djJcGJfTgIhANmvTOh784k8rc+jO3wy+iMlTRIjxQj+iJvL6sS5COhd
-----END CERTIFICATE-----
";
    const PEER_ID: &str = "c6e50f8b436807b753e4891bd1b4ed2785cfc1d0fcd4bebf4d9a68be527fb64f";
    /// notBefore of the recorded certificate.
    const PEER_NOW: UnixMillis = UnixMillis(1_795_989_097_142);

    fn tbs(der: &[u8]) -> Vec<u8> {
        X509Certificate::from_der(der).unwrap().1.tbs_certificate.as_ref().to_vec()
    }

    #[test]
    fn the_recorded_peer_is_reproduced_byte_for_byte() {
        let key = DeviceKey::from_pkcs8_pem(PEER_KEY).unwrap();
        assert_eq!(key.id().hex(), PEER_ID);
        assert_eq!(key.to_pkcs8_pem().unwrap().as_str(), PEER_KEY);
        let recorded = Certificate::from_pem(PEER_CERTIFICATE).unwrap();
        assert!(recorded.holds(&key));
        let (_, parsed) = X509Certificate::from_der(recorded.der()).unwrap();
        let ours = with_serial(&key, PEER_NOW, parsed.raw_serial()).unwrap();
        assert_eq!(tbs(ours.der()), tbs(recorded.der()));
        // Only the (random) signature may differ.
        assert_eq!(ours.pem().lines().count(), PEER_CERTIFICATE.lines().count());
        let (_, ours) = X509Certificate::from_der(ours.der()).unwrap();
        assert_eq!(ours.signature_algorithm, parsed.signature_algorithm);
    }

    #[test]
    fn the_signature_is_the_keys_own() {
        let key = DeviceKey::from_scalar(&[5; 32]).unwrap();
        let made = self_signed(&key, PEER_NOW, &[0; 16]).unwrap();
        let (_, parsed) = X509Certificate::from_der(made.der()).unwrap();
        let signature =
            p256::ecdsa::Signature::from_der(&parsed.signature_value.data).unwrap().to_bytes();
        assert!(key.identity_key().verify(&tbs(made.der()), &signature));
        assert_eq!(Certificate::from_pem(made.pem()).unwrap(), made);
        assert!(made.pem().ends_with("-----END CERTIFICATE-----\n"));
        assert!(made.pem().lines().all(|line| line.len() <= 64));
    }

    #[test]
    fn serials_are_twenty_bytes_positive_and_never_start_with_zero() {
        let key = DeviceKey::from_scalar(&[5; 32]).unwrap();
        for n in 0..600u32 {
            let mut seed = [0; 16];
            seed[..4].copy_from_slice(&n.to_be_bytes());
            let made = self_signed(&key, PEER_NOW, &seed).unwrap();
            let (_, parsed) = X509Certificate::from_der(made.der()).unwrap();
            let serial = parsed.raw_serial();
            assert_eq!(serial.len(), 20);
            assert!((1..0x80).contains(&serial[0]));
            assert_eq!(serial[1..], Sha256::digest(seed)[1..20]);
        }
    }

    #[test]
    fn rustls_takes_the_pair() {
        let key = DeviceKey::from_scalar(&[6; 32]).unwrap();
        let made = self_signed(&key, PEER_NOW, &[1; 16]).unwrap();
        let der = rustls::pki_types::PrivatePkcs8KeyDer::from(key.to_pkcs8_der().unwrap().to_vec());
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.der().to_vec().into()], der.into())
            .unwrap();
    }

    #[test]
    fn odd_certificates_are_refused() {
        let recorded = Certificate::from_pem(PEER_CERTIFICATE).unwrap();
        let der = recorded.der();
        assert_eq!(peer_public_key(b""), Err(CertificateError::Malformed));
        assert_eq!(peer_public_key(&der[..der.len() - 1]), Err(CertificateError::Malformed));
        assert_eq!(peer_public_key(&[der, b"\0"].concat()), Err(CertificateError::Malformed));
        // Off the curve: flip a bit of Y.
        let key = DeviceKey::from_pkcs8_pem(PEER_KEY).unwrap();
        let at = der.windows(65).position(|w| w == key.public_key()).unwrap();
        let mut off = der.to_vec();
        off[at + 64] ^= 1;
        assert_eq!(peer_public_key(&off), Err(CertificateError::NotP256));
        // Another curve's identifier (last arc of prime256v1 changed).
        let mut curve = der.to_vec();
        let oid = [0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
        let at = der.windows(8).position(|w| w == oid).unwrap();
        curve[at + 7] = 1;
        assert_eq!(peer_public_key(&curve), Err(CertificateError::NotP256));
        let ed25519 = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let other = CertificateParams::default().self_signed(&ed25519).unwrap();
        assert_eq!(peer_public_key(other.der()), Err(CertificateError::NotP256));
    }

    #[test]
    fn a_compressed_point_gives_the_uncompressed_key() {
        struct Compressed(DeviceKey, Vec<u8>);
        impl PublicKeyData for Compressed {
            fn der_bytes(&self) -> &[u8] {
                &self.1
            }
            fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
                &rcgen::PKCS_ECDSA_P256_SHA256
            }
        }
        impl SigningKey for Compressed {
            fn sign(&self, msg: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
                Signer(&self.0).sign(msg)
            }
        }
        let key = DeviceKey::from_scalar(&[8; 32]).unwrap();
        let public = p256::PublicKey::from_sec1_bytes(key.public_key()).unwrap();
        let point = public.to_sec1_point(true).as_bytes().to_vec();
        assert_eq!(point.len(), 33);
        let signer = Compressed(key.clone(), point);
        let made = CertificateParams::default().self_signed(&signer).unwrap();
        assert_eq!(peer_public_key(made.der()).unwrap(), key.identity_key());
    }

    #[test]
    fn dates_past_2049_and_absurd_clocks() {
        let key = DeviceKey::from_scalar(&[8; 32]).unwrap();
        assert!(self_signed(&key, UnixMillis(2_600_000_000_000), &[0; 16]).is_ok());
        assert!(self_signed(&key, LATEST, &[0; 16]).is_ok());
        let late = self_signed(&key, UnixMillis(u64::MAX), &[0; 16]);
        assert_eq!(late.unwrap_err().code(), "certificate_clock");
    }
}
