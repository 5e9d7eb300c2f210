//! COSE_Sign1 as the mesh uses it: an untagged array of four, its header labels written as text.
//! Protected header, payload and signature are kept as the bytes received; nothing signed is ever
//! re-encoded.

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL, BASE64URL_NOPAD};
use thiserror::Error;

use super::fields::{ShapeError, bytes, device_value};
use crate::codec::cbor::{Value, decode};
use crate::identity::device::{ALG_ES256, DeviceKey, IdentityKey};

/// `[protected, unprotected, payload or null, signature]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CoseSign1 {
    /// The encoded protected header. Not looked at when verifying: the algorithm is taken from
    /// the signer's key.
    pub protected: Vec<u8>,
    /// The unprotected header, a map; we send an empty one.
    pub unprotected: Value,
    /// The signed payload; `None` when detached, which nothing here accepts.
    pub payload: Option<Vec<u8>>,
    /// The signature, raw.
    pub signature: Vec<u8>,
}

/// Text that is not a COSE_Sign1 in its JSON form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CoseTextError {
    /// Not base64url of JSON.
    #[error("the text is not base64url of JSON")]
    NotJson,
    /// JSON of another shape.
    #[error("the JSON is not a signed token: it has to be an array of four")]
    WrongShape,
}

impl CoseTextError {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "not_a_token"
    }
}

impl CoseSign1 {
    /// Signs `payload` with `key`. The protected header is `{"1": alg, "4": device id}` with text
    /// labels, as every peer writes it.
    #[must_use]
    pub fn sign(key: &DeviceKey, payload: Vec<u8>) -> Self {
        let protected =
            Value::map([("1", Value::from(ALG_ES256)), ("4", device_value(&key.id()))]).encode();
        let signature = key.sign(&sig_structure(&protected, &payload)).to_vec();
        Self { protected, unprotected: Value::Map(Vec::new()), payload: Some(payload), signature }
    }

    /// Whether the signature is `key`'s; `false` without a payload.
    #[must_use]
    pub fn verify(&self, key: &IdentityKey) -> bool {
        self.payload.as_deref().is_some_and(|payload| {
            key.verify(&sig_structure(&self.protected, payload), &self.signature)
        })
    }

    /// Reads the array of four.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        const WHAT: ShapeError = ShapeError::at("COSE_Sign1");
        let Value::Array(elements) = value else { return Err(WHAT) };
        let [protected, unprotected, payload, signature] =
            <[Value; 4]>::try_from(elements).map_err(|_| WHAT)?;
        Ok(Self {
            protected: bytes(protected).ok_or(WHAT)?,
            unprotected: match unprotected {
                map @ Value::Map(_) => map,
                _ => return Err(WHAT),
            },
            payload: match payload {
                Value::Null => None,
                payload => Some(bytes(payload).ok_or(WHAT)?),
            },
            signature: bytes(signature).ok_or(WHAT)?,
        })
    }

    /// The array of four.
    #[must_use]
    pub fn to_value(&self) -> Value {
        Value::Array(vec![
            Value::from(self.protected.as_slice()),
            self.unprotected.clone(),
            self.payload.as_deref().map_or(Value::Null, Value::from),
            Value::from(self.signature.as_slice()),
        ])
    }

    /// The canonical bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.to_value().encode()
    }

    /// Reads canonical bytes; `None` for anything else.
    #[must_use]
    pub fn decode(encoded: &[u8]) -> Option<Self> {
        Self::from_value(decode(encoded).ok()?).ok()
    }

    /// The form of identity files: `[base64 protected, unprotected, base64 payload or null, base64
    /// signature]`, padded standard base64; the unprotected map keeps "1" and "4" only.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut unprotected = serde_json::Map::new();
        if let Some(alg) = self.unprotected.get("1").and_then(Value::as_i64) {
            unprotected.insert("1".to_owned(), alg.into());
        }
        if let Some(kid) = self.unprotected.get("4").and_then(Value::as_bytes) {
            unprotected.insert("4".to_owned(), BASE64.encode(kid).into());
        }
        serde_json::json!([
            BASE64.encode(&self.protected),
            unprotected,
            self.payload.as_deref().map(|payload| BASE64.encode(payload)),
            BASE64.encode(&self.signature),
        ])
    }

    /// Reads the form of identity files.
    ///
    /// # Errors
    /// [`CoseTextError::WrongShape`] for anything else.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, CoseTextError> {
        Self::try_from_json(json).ok_or(CoseTextError::WrongShape)
    }

    fn try_from_json(json: &serde_json::Value) -> Option<Self> {
        let [protected, unprotected, payload, signature] = json.as_array()?.as_slice() else {
            return None;
        };
        let unprotected = unprotected.as_object()?;
        let alg = match unprotected.get("1") {
            Some(alg) => Some(Value::from(alg.as_i64()?)),
            None => None,
        };
        let kid = match unprotected.get("4") {
            Some(kid) => Some(Value::from(base64(kid)?)),
            None => None,
        };
        Some(Self {
            protected: base64(protected)?,
            unprotected: Value::record([("1", alg), ("4", kid)]),
            payload: match payload {
                serde_json::Value::Null => None,
                payload => Some(base64(payload)?),
            },
            signature: base64(signature)?,
        })
    }

    /// The text of grants and membership proofs: the JSON form, compact, as base64url without
    /// padding.
    #[must_use]
    pub fn to_text(&self) -> String {
        BASE64URL_NOPAD.encode(self.to_json().to_string().as_bytes())
    }

    /// Reads the text of a grant or proof; surrounding white space and padding are tolerated.
    ///
    /// # Errors
    /// [`CoseTextError`] for anything else.
    pub fn from_text(text: &str) -> Result<Self, CoseTextError> {
        let text = text.trim().as_bytes();
        let json = BASE64URL_NOPAD
            .decode(text)
            .or_else(|_| BASE64URL.decode(text))
            .map_err(|_| CoseTextError::NotJson)?;
        let json = serde_json::from_slice(&json).map_err(|_| CoseTextError::NotJson)?;
        Self::from_json(&json)
    }
}

fn base64(json: &serde_json::Value) -> Option<Vec<u8>> {
    let text = json.as_str()?.as_bytes();
    BASE64.decode(text).or_else(|_| BASE64_NOPAD.decode(text)).ok()
}

/// What is signed (RFC 9052 section 4.4, no external data), over the bytes as received.
#[must_use]
pub fn sig_structure(protected: &[u8], payload: &[u8]) -> Vec<u8> {
    Value::Array(vec![
        Value::from("Signature1"),
        Value::from(protected),
        Value::Bytes(Vec::new()),
        Value::from(payload),
    ])
    .encode()
}
