//! Machine display names: the claim by which a machine identity names itself (`transport.md` 7.2),
//! and which names are usable at all (`rooms.md` 7.1).

use data_encoding::{BASE64URL, BASE64URL_NOPAD};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::codec::time::UnixMillis;
use crate::identity::device::{ALG_ES256, DeviceId, DeviceKey, IdentityKey};

/// Longest claim text that is looked at, in bytes.
pub const MAX_CLAIM_TEXT: usize = 2048;

/// Longest name, in UTF-16 code units.
pub const MAX_NAME_UNITS: usize = 64;

/// First element of what is signed.
const CONTEXT: &str = "agent-comms/name-claim/v1";

/// A name that a machine gave itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameClaim {
    /// The machine.
    pub subject: DeviceId,
    /// Its name, trimmed.
    pub name: String,
    /// Until when the claim counts.
    pub expires: UnixMillis,
}

/// Why a claim does not count. The variants are in the order of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NameClaimError {
    /// More than [`MAX_CLAIM_TEXT`] bytes.
    #[error("the name claim is too long")]
    TooLong,
    /// Not base64url of a claim.
    #[error("the text is not a name claim")]
    NotAClaim,
    /// About another machine.
    #[error("the name claim is about another machine")]
    WrongSubject,
    /// It has expired.
    #[error("the name claim has expired")]
    Expired,
    /// The name breaks the rule for names.
    #[error("the claimed name is not usable")]
    UnusableName,
    /// The key is not the subject's.
    #[error("the name claim's key is not the subject's")]
    WrongKey,
    /// The key is of another algorithm or no key.
    #[error("the name claim's key cannot be used")]
    UnusableKey,
    /// The signature does not verify.
    #[error("the name claim's signature does not verify")]
    BadSignature,
}

impl NameClaimError {
    /// The code that peers use for it.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::NotAClaim => "not_a_claim",
            Self::WrongSubject => "wrong_subject",
            Self::Expired => "expired",
            Self::UnusableName => "unusable_name",
            Self::WrongKey => "wrong_key",
            Self::UnusableKey => "unusable_key",
            Self::BadSignature => "bad_signature",
        }
    }
}

/// The JSON of a claim, members in the order in which peers write them.
#[derive(Serialize, Deserialize)]
struct Json {
    subject: String,
    name: String,
    // Kept as the number that came: the signature is over its text.
    expires: serde_json::Number,
    alg: i64,
    #[serde(rename = "publicKey")]
    public_key: String,
    signature: String,
}

impl NameClaim {
    /// The claim of `key`'s machine as text, signed; `None` when the name is not usable as it is.
    #[must_use]
    pub fn sign(key: &DeviceKey, name: &str, expires: UnixMillis) -> Option<String> {
        if usable_name(name) != Some(name) {
            return None;
        }
        let subject = key.id().hex();
        let expires = expires.0.into();
        let signature = key.sign(&signed_bytes(&subject, name, &expires));
        let json = Json {
            subject,
            name: name.to_owned(),
            expires,
            alg: ALG_ES256,
            public_key: BASE64URL_NOPAD.encode(key.public_key()),
            signature: BASE64URL_NOPAD.encode(&signature),
        };
        Some(BASE64URL_NOPAD.encode(&serde_json::to_vec(&json).ok()?))
    }

    /// Reads and verifies the claim of `subject`, whose own proof has to be good already.
    ///
    /// # Errors
    /// [`NameClaimError`] for the first check that fails.
    pub fn verify(text: &str, subject: &DeviceId, now: UnixMillis) -> Result<Self, NameClaimError> {
        if text.len() > MAX_CLAIM_TEXT {
            return Err(NameClaimError::TooLong);
        }
        let json: Json = base64url(text.trim())
            .and_then(|json| serde_json::from_slice(&json).ok())
            .ok_or(NameClaimError::NotAClaim)?;
        let public_key = base64url(&json.public_key).ok_or(NameClaimError::NotAClaim)?;
        let signature = base64url(&json.signature).ok_or(NameClaimError::NotAClaim)?;
        let expires = whole_millis(&json.expires).ok_or(NameClaimError::NotAClaim)?;
        if json.subject != subject.hex() {
            return Err(NameClaimError::WrongSubject);
        }
        if expires <= now {
            return Err(NameClaimError::Expired);
        }
        if usable_name(&json.name) != Some(json.name.as_str()) {
            return Err(NameClaimError::UnusableName);
        }
        let key = IdentityKey { alg: json.alg, public_key };
        if key.device() != *subject {
            return Err(NameClaimError::WrongKey);
        }
        if key.alg != ALG_ES256 || p256::PublicKey::from_sec1_bytes(&key.public_key).is_err() {
            return Err(NameClaimError::UnusableKey);
        }
        let signed = signed_bytes(&json.subject, &json.name, &json.expires);
        if !key.verify(&signed, &signature) {
            return Err(NameClaimError::BadSignature);
        }
        Ok(Self { subject: *subject, name: json.name, expires })
    }
}

fn base64url(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    BASE64URL_NOPAD.decode(text).or_else(|_| BASE64URL.decode(text)).ok()
}

/// A time that may have a fraction of a millisecond, which is dropped.
fn whole_millis(number: &serde_json::Number) -> Option<UnixMillis> {
    let millis = match number.as_u64() {
        Some(millis) => millis,
        // Saturates; below zero it has long expired.
        None => number.as_f64()? as u64,
    };
    Some(UnixMillis(millis))
}

/// The compact JSON array that is signed.
fn signed_bytes(subject: &str, name: &str, expires: &serde_json::Number) -> Vec<u8> {
    serde_json::json!([CONTEXT, subject, name, expires]).to_string().into_bytes()
}

/// `text` without white space at its ends, if that is a usable name: 1 to [`MAX_NAME_UNITS`]
/// UTF-16 units, no C0 or C1 control character and no DEL.
#[must_use]
pub fn usable_name(text: &str) -> Option<&str> {
    // JavaScript's white space: Unicode's without NEL (a C1 control) and with the byte-order mark.
    let name = text.trim_matches(|c: char| (c.is_whitespace() && c != '\u{85}') || c == '\u{feff}');
    let fits = (1..=MAX_NAME_UNITS).contains(&name.encode_utf16().count());
    (fits && !name.chars().any(char::is_control)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_claims_verify() {
        let key = DeviceKey::from_scalar(&[3; 32]).unwrap();
        let (now, expires) = (UnixMillis(1_000), UnixMillis(2_000));
        let text = NameClaim::sign(&key, "build \"box\" é", expires).unwrap();
        let claim = NameClaim::verify(&text, &key.id(), now).unwrap();
        assert_eq!((claim.name.as_str(), claim.expires), ("build \"box\" é", expires));
        assert_eq!(NameClaim::sign(&key, " box", expires), None);
        let long = "A".repeat(MAX_CLAIM_TEXT + 1);
        assert_eq!(NameClaim::verify(&long, &key.id(), now), Err(NameClaimError::TooLong));
    }

    #[test]
    fn names() {
        assert_eq!(usable_name("\u{feff} box\u{2003}\n"), Some("box"));
        for name in ["", "  ", "a\u{7f}b", "a\u{85}", "a\nb", "\u{9b}x"] {
            assert_eq!(usable_name(name), None, "{name:?}");
        }
        assert!(usable_name(&"😀".repeat(32)).is_some());
        assert!(usable_name(&"😀".repeat(33)).is_none());
    }
}
