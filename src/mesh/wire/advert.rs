//! Peer adverts: what a device says about itself in gossip, signed by its own key.

use thiserror::Error;

use super::fields::{
    Fields, ShapeError, array, bytes, device, device_value, identity_key, identity_key_value, int,
    text,
};
use crate::codec::cbor::Value;
use crate::identity::device::{DeviceId, DeviceKey, IdentityKey};

/// What precedes the advert in its signing input.
const CONTEXT: &[u8] = b"wire-mesh/peer-advert/v1\0";

/// A peer advert. Extensions are all members beside the five fixed ones, kept as received.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerAdvert {
    /// Whom it is about.
    pub device: DeviceId,
    /// Where the device listens, `host:port`.
    pub addresses: Vec<String>,
    /// When it was made, Unix seconds.
    pub snapshot_seconds: i64,
    /// The key that the device id is the hash of.
    pub identity_key: IdentityKey,
    /// Signature over [`PeerAdvert::signing_input`].
    pub signature: Vec<u8>,
    /// `<domain>/<field>` members.
    pub extensions: Vec<(Value, Value)>,
}

/// Why an advert does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AdvertError {
    /// The device id is not the hash of the key.
    #[error("the advert's device id is not the hash of its key")]
    WrongDevice,
    /// The signature does not verify under the key.
    #[error("the advert's signature does not verify")]
    BadSignature,
}

impl AdvertError {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::WrongDevice => "wrong_device",
            Self::BadSignature => "bad_signature",
        }
    }
}

impl PeerAdvert {
    /// An advert of `key`'s device, signed.
    #[must_use]
    pub fn sign(
        key: &DeviceKey,
        addresses: Vec<String>,
        snapshot_seconds: i64,
        extensions: Vec<(Value, Value)>,
    ) -> Self {
        let mut advert = Self {
            device: key.id(),
            addresses,
            snapshot_seconds,
            identity_key: key.identity_key(),
            signature: Vec::new(),
            extensions,
        };
        advert.signature = key.sign(&advert.signing_input()).to_vec();
        advert
    }

    /// Checks that the device id is the key's hash, then the signature. Time plays no part.
    ///
    /// # Errors
    /// [`AdvertError`] for the first check that fails.
    pub fn verify(&self) -> Result<(), AdvertError> {
        if self.identity_key.device() != self.device {
            return Err(AdvertError::WrongDevice);
        }
        if !self.identity_key.verify(&self.signing_input(), &self.signature) {
            return Err(AdvertError::BadSignature);
        }
        Ok(())
    }

    /// The signed bytes: context, zero byte, the advert map without its signature.
    #[must_use]
    pub fn signing_input(&self) -> Vec<u8> {
        let mut input = CONTEXT.to_vec();
        self.body(None).encode_into(&mut input);
        input
    }

    /// An extension by its key; undefined counts as absent.
    #[must_use]
    pub fn extension(&self, key: &str) -> Option<&Value> {
        self.extensions
            .iter()
            .find(|(k, v)| k.as_text() == Some(key) && *v != Value::Undefined)
            .map(|(_, v)| v)
    }

    /// Reads an advert map.
    ///
    /// # Errors
    /// [`ShapeError`] when one of the five fixed members is missing or of another type.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "peer-advert")?;
        Ok(Self {
            device: fields.required("device", device)?,
            addresses: fields.required("addresses", |value| array(value, text))?,
            snapshot_seconds: fields.required("snapshot-seconds", int)?,
            identity_key: fields.required("identity-key", identity_key)?,
            signature: fields.required("signature", bytes)?,
            extensions: fields.rest(),
        })
    }

    /// The advert map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        self.body(Some(Value::from(self.signature.as_slice())))
    }

    fn body(&self, signature: Option<Value>) -> Value {
        let addresses = self.addresses.iter().map(|a| Value::from(a.as_str())).collect::<Vec<_>>();
        let fixed = [
            ("device", Some(device_value(&self.device))),
            ("addresses", Some(Value::from(addresses))),
            ("snapshot-seconds", Some(Value::from(self.snapshot_seconds))),
            ("identity-key", Some(identity_key_value(&self.identity_key))),
            ("signature", signature),
        ];
        let fixed = fixed.into_iter().filter_map(|(key, value)| Some((Value::from(key), value?)));
        // The fixed members come last, so no extension of the same name replaces one.
        Value::map(self.extensions.iter().cloned().chain(fixed))
    }
}
