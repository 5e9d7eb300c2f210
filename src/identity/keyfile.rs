//! What slot, user and machine files have in common: a private key, its certificate and when that
//! ends, beside members that only the owner of the file understands.

use serde_json::Value;

use super::certificate::{self, Certificate, CertificateError};
use super::device::DeviceKey;
use super::entropy::{Entropy, EntropyError, draw, draw_key};
use super::files::Document;
use crate::codec::time::UnixMillis;

const PRIVATE_KEY: &str = "privateKey";
const CERTIFICATE: &str = "certificate";
const EXPIRES_AT: &str = "expiresAt";

/// A certificate with less than this left is renewed: a twelfth of 365 days (`transport.md` 5.4).
pub const RENEWAL_MARGIN_MS: u64 = certificate::VALIDITY_MS / 12;

/// A key, or the certificate for it, could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// See [`CertificateError`].
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// See [`EntropyError`].
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The key could not be written as PKCS#8.
    #[error("the new private key could not be encoded")]
    Encode,
}

impl MakeError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Certificate(e) => e.code(),
            Self::Entropy(e) => e.code(),
            Self::Encode => "key_encode",
        }
    }
}

/// What opening a key file did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A new identity was stored.
    Created,
    /// The stored identity, unchanged.
    Loaded,
    /// The stored identity with a new certificate.
    Renewed,
}

/// A member of a key file that is a map from names to JSON values.
pub trait Table: Copy {
    /// The member's name.
    fn member(self) -> &'static str;
}

/// One change of a key file's tables.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<T> {
    /// Which table.
    pub table: T,
    /// Which entry.
    pub key: String,
    /// Its new value; `None` removes it.
    pub value: Option<Value>,
}

/// The file's document together with the key in it, always with a certificate for that key.
#[derive(Clone)]
pub(super) struct KeyFile {
    key: DeviceKey,
    certificate: Certificate,
    document: Document,
}

impl KeyFile {
    /// A new key with a certificate from `now`.
    pub(super) fn create(now: UnixMillis, entropy: &mut dyn Entropy) -> Result<Self, MakeError> {
        let key = draw_key(entropy)?;
        let pem = key.to_pkcs8_pem().ok_or(MakeError::Encode)?;
        let mut document = Document::default();
        document.set(PRIVATE_KEY, Value::String((*pem).clone()));
        let certificate = renew(&mut document, &key, now, entropy)?;
        Ok(Self { key, certificate, document })
    }

    /// The key file in `document`, with a renewed certificate where that is due. `None` when there
    /// is no usable key.
    ///
    /// A certificate that is missing, unreadable or another key's counts as due: the key alone is
    /// the identity.
    pub(super) fn open(
        mut document: Document,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Option<(Self, Opening)>, MakeError> {
        let Some(key) = key_of(&document) else { return Ok(None) };
        let current = certificate_of(&document, &key).filter(|_| !due(&document, now));
        let (certificate, opening) = match current {
            Some(certificate) => (certificate, Opening::Loaded),
            None => (renew(&mut document, &key, now, entropy)?, Opening::Renewed),
        };
        Ok(Some((Self { key, certificate, document }, opening)))
    }

    /// Renews the certificate where that is due; tells whether it was.
    pub(super) fn renew_if_due(
        &mut self,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<bool, MakeError> {
        if !due(&self.document, now) {
            return Ok(false);
        }
        self.certificate = renew(&mut self.document, &self.key, now, entropy)?;
        Ok(true)
    }

    /// This key file with what `document`, read again from disk, says beside the key. `None` when
    /// it holds another key, or none.
    pub(super) fn reloaded(&self, mut document: Document) -> Option<Self> {
        let key = key_of(&document).filter(|key| key.id() == self.key.id())?;
        let certificate = match certificate_of(&document, &key) {
            Some(certificate) => certificate,
            None => {
                for member in [CERTIFICATE, EXPIRES_AT] {
                    if let Some(value) = self.document.get(member) {
                        document.set(member, value.clone());
                    }
                }
                self.certificate.clone()
            }
        };
        Some(Self { key, certificate, document })
    }

    pub(super) fn apply<T: Table>(&mut self, changes: &[Change<T>]) {
        for Change { table, key, value } in changes {
            self.document.set_entry(table.member(), key, value.clone());
        }
    }

    pub(super) fn key(&self) -> &DeviceKey {
        &self.key
    }

    pub(super) fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    pub(super) fn expires_at(&self) -> Option<UnixMillis> {
        self.document.text(EXPIRES_AT).and_then(UnixMillis::parse_iso)
    }

    pub(super) fn document(&self) -> &Document {
        &self.document
    }

    pub(super) fn document_mut(&mut self) -> &mut Document {
        &mut self.document
    }
}

fn key_of(document: &Document) -> Option<DeviceKey> {
    document.text(PRIVATE_KEY).and_then(DeviceKey::from_pkcs8_pem)
}

fn certificate_of(document: &Document, key: &DeviceKey) -> Option<Certificate> {
    document.text(CERTIFICATE).and_then(Certificate::from_pem).filter(|found| found.holds(key))
}

fn due(document: &Document, now: UnixMillis) -> bool {
    let expires = document.text(EXPIRES_AT).and_then(UnixMillis::parse_iso);
    expires.is_none_or(|expires| expires < now.plus(RENEWAL_MARGIN_MS))
}

fn renew(
    document: &mut Document,
    key: &DeviceKey,
    now: UnixMillis,
    entropy: &mut dyn Entropy,
) -> Result<Certificate, MakeError> {
    let certificate = certificate::self_signed(key, now, &draw(entropy))?;
    document.set(CERTIFICATE, Value::String(certificate.pem().to_owned()));
    document.set(EXPIRES_AT, Value::String(now.plus(certificate::VALIDITY_MS).iso()));
    Ok(certificate)
}
