//! Deterministic CBOR (RFC 8949 section 4.2.1): a strict decoder, the canonical encoder, and a
//! serde bridge for typed messages.
//!
//! The first thing that an unauthenticated peer reaches: [`decode()`] never panics, never recurses
//! deeper than [`MAX_DEPTH`], and uses memory in proportion to the bytes that really came. It
//! accepts exactly the bytes that [`Value::encode`] writes, so `decode(x)?.encode() == x`.

mod de;
mod decode;
mod encode;
mod ser;

use thiserror::Error;

pub use de::from_value;
pub use decode::{MAX_DEPTH, MAX_ITEMS, decode};
pub use ser::to_value;

/// The largest integer that a frame field may hold: the peers' integers are IEEE doubles.
pub const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

/// One CBOR data item.
///
/// Map entries are kept in canonical order (bytewise order of the encoded keys) once a value has
/// been decoded or built with [`Value::map`].
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Major type 0.
    Uint(u64),
    /// Major type 1: the value is `-1 - n`.
    Nint(u64),
    /// Major type 2.
    Bytes(Vec<u8>),
    /// Major type 3.
    Text(String),
    /// Major type 4.
    Array(Vec<Value>),
    /// Major type 5.
    Map(Vec<(Value, Value)>),
    /// Major type 6.
    Tag(u64, Box<Value>),
    /// `false`, `true`.
    Bool(bool),
    /// `null`.
    Null,
    /// `undefined`: read as absent wherever a member is optional, never sent.
    Undefined,
    /// Any other simple value.
    Simple(u8),
    /// Half, single or double float; always written in the shortest exact form.
    ///
    /// A float without a fraction inside the safe integer range is written as an integer, as the
    /// peers' encoder does with its numbers; the decoder refuses such a float.
    Float(f64),
}

/// Why bytes are not one canonical CBOR item. `offset` counts bytes from the start of the input.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("not canonical CBOR at byte {offset}: {kind}")]
pub struct CborError {
    /// What is wrong.
    pub kind: CborErrorKind,
    /// Where the item starts that is wrong.
    pub offset: usize,
}

impl CborError {
    /// A stable code for the kind.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.kind.code()
    }
}

/// The kinds of [`CborError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CborErrorKind {
    /// The input ends inside an item, or announces more than it holds.
    #[error("the input ends too early")]
    Truncated,
    /// Bytes follow the item.
    #[error("bytes follow the item")]
    TrailingBytes,
    /// A head is longer than its number needs.
    #[error("a head is longer than its number needs")]
    OverlongHead,
    /// An indefinite length, or a break.
    #[error("indefinite lengths are not allowed")]
    IndefiniteLength,
    /// Additional information 28 to 30.
    #[error("reserved additional information")]
    Reserved,
    /// A map key that is not greater than the one before it.
    #[error("map keys are repeated or out of order")]
    KeyOrder,
    /// Text that is not UTF-8.
    #[error("text is not UTF-8")]
    InvalidText,
    /// A two-byte simple value below 32.
    #[error("an invalid simple value")]
    InvalidSimple,
    /// A float that has a shorter form, or is a whole number, or is another NaN than `f97e00`.
    #[error("a number is not in its shortest form")]
    NotShortest,
    /// A tag whose content does not fit it, or that peers rewrite on reading.
    #[error("a tag that is not allowed here")]
    InvalidTag,
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("nested too deeply")]
    TooDeep,
    /// More than [`MAX_ITEMS`] items.
    #[error("too many items")]
    TooManyItems,
}

impl CborErrorKind {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::TrailingBytes => "trailing_bytes",
            Self::OverlongHead => "overlong_head",
            Self::IndefiniteLength => "indefinite_length",
            Self::Reserved => "reserved",
            Self::KeyOrder => "key_order",
            Self::InvalidText => "invalid_text",
            Self::InvalidSimple => "invalid_simple",
            Self::NotShortest => "not_shortest",
            Self::InvalidTag => "invalid_tag",
            Self::TooDeep => "too_deep",
            Self::TooManyItems => "too_many_items",
        }
    }
}

/// Why a value and a Rust type do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertError(String);

/// Longest message kept: it may quote a peer's text.
const MAX_CONVERT_MESSAGE: usize = 200;

impl ConvertError {
    fn new(message: &dyn std::fmt::Display) -> Self {
        // The message may quote what a peer sent: escaped here, once, so that no log line or
        // terminal meets it raw.
        let escaped = message.to_string().chars().flat_map(char::escape_debug).collect::<String>();
        Self(escaped.chars().take(MAX_CONVERT_MESSAGE).collect())
    }

    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "malformed"
    }
}

impl std::fmt::Display for ConvertError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConvertError {}

impl serde::ser::Error for ConvertError {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self::new(&message)
    }
}

impl serde::de::Error for ConvertError {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self::new(&message)
    }
}

impl Value {
    /// A map in canonical order. Of entries with the same key the last one stays.
    pub fn map<K, V>(entries: impl IntoIterator<Item = (K, V)>) -> Self
    where
        K: Into<Self>,
        V: Into<Self>,
    {
        Self::Map(canonical(entries.into_iter().map(|(k, v)| (k.into(), v.into())).collect()))
    }

    /// A map of the members that are present: `None` leaves its key out.
    pub fn record<'k>(members: impl IntoIterator<Item = (&'k str, Option<Self>)>) -> Self {
        Self::map(members.into_iter().filter_map(|(key, value)| Some((key, value?))))
    }

    /// The member under a text key. A member that is `undefined` counts as absent.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.as_map()?
            .iter()
            .find(|(k, _)| k.as_text() == Some(key))
            .map(|(_, v)| v)
            .filter(|v| **v != Self::Undefined)
    }

    /// The number, when this is an unsigned integer.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Uint(n) => Some(*n),
            _ => None,
        }
    }

    /// The number, when this is an integer that fits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Uint(n) => i64::try_from(*n).ok(),
            Self::Nint(n) => i64::try_from(*n).ok().map(|n| -1 - n),
            _ => None,
        }
    }

    /// The text, when this is text.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes, when this is a byte string.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The elements, when this is an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(elements) => Some(elements),
            _ => None,
        }
    }

    /// The entries, when this is a map.
    #[must_use]
    pub fn as_map(&self) -> Option<&[(Self, Self)]> {
        match self {
            Self::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The truth value, when this is one.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }
}

/// Canonical order without repeated keys (the last one stays).
fn canonical(mut entries: Vec<(Value, Value)>) -> Vec<(Value, Value)> {
    // Stable, so equal keys stay in the order given.
    entries.sort_by(|(a, _), (b, _)| encode::key_order(a, b));
    entries.dedup_by(|later, earlier| {
        let same = encode::key_order(&later.0, &earlier.0).is_eq();
        if same {
            std::mem::swap(later, earlier);
        }
        same
    });
    entries
}

impl From<u64> for Value {
    fn from(n: u64) -> Self {
        Self::Uint(n)
    }
}

impl From<i64> for Value {
    fn from(n: i64) -> Self {
        match u64::try_from(n) {
            Ok(n) => Self::Uint(n),
            Err(_) => Self::Nint(!n.cast_unsigned()),
        }
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Vec<Value>> for Value {
    fn from(elements: Vec<Value>) -> Self {
        Self::Array(elements)
    }
}

#[cfg(test)]
mod tests;
