//! Reading typed members out of a map, as the schema of the protocol does it: an optional member
//! may be absent or undefined but not null, and a map with any key that is not text has no members.

use thiserror::Error;

use crate::codec::cbor::{MAX_SAFE_INTEGER, Value};
use crate::identity::device::{DeviceId, IdentityKey};

/// A member that is missing or has another type or size than its schema says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the member `{member}` is missing or has the wrong type")]
pub struct ShapeError {
    /// The member's name, or what stands in its place.
    pub member: &'static str,
}

impl ShapeError {
    /// An error about `member`.
    #[must_use]
    pub const fn at(member: &'static str) -> Self {
        Self { member }
    }

    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "malformed"
    }
}

/// The members of a map that have not been read yet.
pub struct Fields {
    entries: Vec<(Value, Value)>,
}

impl Fields {
    /// Opens a map; `what` names it in the error.
    ///
    /// # Errors
    /// [`ShapeError`] for anything but a map with text keys only.
    pub fn of(value: Value, what: &'static str) -> Result<Self, ShapeError> {
        match value {
            Value::Map(entries) if entries.iter().all(|(key, _)| key.as_text().is_some()) => {
                Ok(Self { entries })
            }
            _ => Err(ShapeError::at(what)),
        }
    }

    /// Takes an optional member; undefined counts as absent, null does not.
    pub fn take(&mut self, member: &'static str) -> Option<Value> {
        let at = self.entries.iter().position(|(key, _)| key.as_text() == Some(member))?;
        Some(self.entries.remove(at).1).filter(|value| *value != Value::Undefined)
    }

    /// The members not taken, in canonical order.
    #[must_use]
    pub fn rest(self) -> Vec<(Value, Value)> {
        self.entries
    }

    /// Takes an optional member and reads it.
    ///
    /// # Errors
    /// [`ShapeError`] when it is present and `read` refuses it.
    pub fn optional<T>(
        &mut self,
        member: &'static str,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<Option<T>, ShapeError> {
        match self.take(member) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or(ShapeError::at(member)),
        }
    }

    /// Takes a member that must be there and reads it.
    ///
    /// # Errors
    /// [`ShapeError`] when it is absent or `read` refuses it.
    pub fn required<T>(
        &mut self,
        member: &'static str,
        read: impl FnOnce(Value) -> Option<T>,
    ) -> Result<T, ShapeError> {
        self.optional(member, read)?.ok_or(ShapeError::at(member))
    }
}

/// Text.
#[must_use]
pub fn text(value: Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

/// A byte string of any length.
#[must_use]
pub fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}

/// A byte string of exactly `N` bytes.
#[must_use]
pub fn fixed<const N: usize>(value: Value) -> Option<[u8; N]> {
    value.as_bytes()?.try_into().ok()
}

/// An unsigned integer up to 2^53-1.
#[must_use]
pub fn uint(value: Value) -> Option<u64> {
    value.as_u64().filter(|n| *n <= MAX_SAFE_INTEGER)
}

/// An integer from -(2^53-1) to 2^53-1.
#[must_use]
pub fn int(value: Value) -> Option<i64> {
    value.as_i64().filter(|n| n.unsigned_abs() <= MAX_SAFE_INTEGER)
}

/// A device id: a byte string of 32 bytes.
#[must_use]
pub fn device(value: Value) -> Option<DeviceId> {
    fixed(value).map(DeviceId)
}

/// An array whose elements are all read by `read`.
pub fn array<T>(value: Value, read: impl FnMut(Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(elements) => elements.into_iter().map(read).collect(),
        _ => None,
    }
}

/// A map with text keys only. One with any other key counts as empty: the reference sees no
/// members in it.
#[must_use]
pub fn open_map(value: Value) -> Option<Value> {
    match value {
        Value::Map(entries) if entries.iter().all(|(key, _)| key.as_text().is_some()) => {
            Some(Value::Map(entries))
        }
        Value::Map(_) => Some(Value::Map(Vec::new())),
        _ => None,
    }
}

/// An identity key: `{ alg, public-key }`. Other members are dropped.
#[must_use]
pub fn identity_key(value: Value) -> Option<IdentityKey> {
    let mut fields = Fields::of(value, "identity-key").ok()?;
    Some(IdentityKey {
        alg: fields.required("alg", int).ok()?,
        public_key: fields.required("public-key", bytes).ok()?,
    })
}

/// The value of an identity key.
#[must_use]
pub fn identity_key_value(key: &IdentityKey) -> Value {
    Value::map([
        ("alg", Value::from(key.alg)),
        ("public-key", Value::from(key.public_key.as_slice())),
    ])
}

/// The value of a device id.
#[must_use]
pub fn device_value(device: &DeviceId) -> Value {
    Value::from(device.0.as_slice())
}
