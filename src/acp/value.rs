//! The values that objects are made of (design 5.5): times, ids, digests, names, bounded numbers and
//! lists, each with one reading, one writing and one JSON Schema. And [`Read`], the strict reading of
//! closed objects, with the macro that makes all three from one list of members.
//!
//! A value that exists is in its grammar; nothing checks it twice.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD, HEXLOWER};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::json::{self, MAX_SAFE_INTEGER};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::{Entropy, draw};

/// Allowed difference of clocks for `notBefore` and `expiresAt`, ms (design 5.5).
pub const SKEW_MS: u64 = 60_000;

/// What JSON values are read into.
pub trait Read: Sized {
    /// Takes `value` if it is in this type's grammar.
    ///
    /// # Errors
    /// The code of design section 16 that names the fault.
    fn read(value: Value) -> Result<Self>;
}

pub(super) fn bad(message: &str) -> Error {
    Error::new(Code::BadField, message)
}

fn text(value: Value, what: &str) -> Result<String> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(bad(what)),
    }
}

/// Defines how a text type serialises, deserialises (for records of the store) and shows its schema.
macro_rules! text_value {
    ($name:ident, $what:expr, $pattern:expr) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::parse(&text).map_err(serde::de::Error::custom)
            }
        }
        impl Read for $name {
            fn read(value: Value) -> Result<Self> {
                match value {
                    Value::String(text) => Self::parse(&text),
                    _ => Err(Self::fault()),
                }
            }
        }
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "description": $what, "type": "string", "pattern": $pattern })
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}
pub(super) use text_value;

/// A time: `YYYY-MM-DDTHH:MM:SS.sssZ`, years 1970 to 9999, compared as an instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(UnixMillis);

/// The last millisecond of the year 9999.
const LAST_TIME: u64 = 253_402_300_799_999;

impl Time {
    fn fault() -> Error {
        Error::new(Code::BadTime, "not a time of the form 2026-12-01T00:00:00.000Z")
    }

    /// Reads the 24 characters.
    ///
    /// # Errors
    /// `BAD_TIME`.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_text(text).ok_or_else(Self::fault)
    }

    fn from_text(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let shape = b"dddd-dd-ddTdd:dd:dd.dddZ";
        let fits = bytes.len() == shape.len()
            && bytes.iter().zip(shape).all(|(byte, form)| match form {
                b'd' => byte.is_ascii_digit(),
                _ => byte == form,
            });
        if !fits {
            return None;
        }
        let part = |range: std::ops::Range<usize>| text.get(range)?.parse::<i16>().ok();
        let small = |range| part(range).and_then(|n| i8::try_from(n).ok());
        let year = part(0..4).filter(|year| *year >= 1970)?;
        let date = jiff::civil::Date::new(year, small(5..7)?, small(8..10)?).ok()?;
        let (hour, minute, second) = (part(11..13)?, part(14..16)?, part(17..19)?);
        if hour > 23 || minute > 59 || second > 59 {
            return None;
        }
        let epoch = jiff::civil::date(1970, 1, 1);
        let days = u64::try_from(date.duration_since(epoch).as_secs()).ok()?;
        let seconds = days + u64::try_from(hour).ok()? * 3600;
        let seconds = seconds + u64::try_from(minute).ok()? * 60 + u64::try_from(second).ok()?;
        Some(Self(UnixMillis(seconds * 1000 + u64::try_from(part(20..23)?).ok()?)))
    }

    /// As Unix milliseconds.
    #[must_use]
    pub const fn millis(self) -> UnixMillis {
        self.0
    }

    /// This time plus `ms`, at most the end of 9999.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self::from(self.0.plus(ms))
    }

    /// Whether a `notBefore` of this time has come at `now`, with the usual skew.
    #[must_use]
    pub fn has_come(self, now: UnixMillis) -> bool {
        now.plus(SKEW_MS) >= self.0
    }

    /// Whether an `expiresAt` of this time has passed at `now`, with the usual skew.
    #[must_use]
    pub fn is_over(self, now: UnixMillis) -> bool {
        now >= self.0.plus(SKEW_MS)
    }
}

impl From<UnixMillis> for Time {
    fn from(ms: UnixMillis) -> Self {
        Self(UnixMillis(ms.0.min(LAST_TIME)))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, ms) = (self.0.0 / 1000, self.0.0 % 1000);
        let seconds = i64::try_from(seconds).unwrap_or(0);
        let at = jiff::civil::datetime(1970, 1, 1, 0, 0, 0, 0)
            .saturating_add(jiff::SignedDuration::from_secs(seconds));
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{ms:03}Z",
            at.year(),
            at.month(),
            at.day(),
            at.hour(),
            at.minute(),
            at.second()
        )
    }
}

text_value!(
    Time,
    "UTC time with milliseconds",
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$"
);

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    fn fault() -> Error {
        bad("not a digest of the form sha256: and 64 lower-case hexadecimal digits")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        text.strip_prefix("sha256:")
            .and_then(|hex| HEXLOWER.decode(hex.as_bytes()).ok())
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(Self::fault)
    }

    /// The digest of the canonical form of `value`.
    ///
    /// # Errors
    /// As [`json::canonical`].
    pub fn of<T: Serialize + ?Sized>(value: &T) -> Result<Self> {
        Ok(Self::of_canonical(&json::canonical(value)?))
    }

    /// The digest of what is in canonical form already.
    #[must_use]
    pub fn of_canonical(bytes: &[u8]) -> Self {
        Self(json::sha256(bytes))
    }

    /// The digest of bytes that are no JSON text.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(json::sha256(bytes))
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first twelve characters of the hexadecimal form, for logs.
    #[must_use]
    pub fn short(&self) -> String {
        HEXLOWER.encode(self.0.get(..6).unwrap_or_default())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", HEXLOWER.encode(&self.0))
    }
}

text_value!(Digest, "SHA-256 of the canonical form", "^sha256:[0-9a-f]{64}$");

/// Defines an id type: its prefix, `_`, and 8 to 64 of `[A-Za-z0-9_-]`.
macro_rules! ids {
    ($($(#[doc = $doc:literal])* $name:ident = $prefix:literal,)*) => { $(
        $(#[doc = $doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            fn fault() -> Error {
                Error::new(Code::BadId, concat!("not an id of the form ", $prefix, "_…"))
            }

            /// Reads the text form.
            ///
            /// # Errors
            /// `BAD_ID`.
            pub fn parse(text: &str) -> Result<Self> {
                text.strip_prefix(concat!($prefix, "_"))
                    .filter(|rest| {
                        (8..=64).contains(&rest.len())
                            && rest.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
                    })
                    .map(|_| Self(text.into()))
                    .ok_or_else(Self::fault)
            }

            /// A new random id: 128 bits as lower-case base32.
            pub fn draw(entropy: &mut dyn Entropy) -> Self {
                let mut text = BASE32_NOPAD.encode(&draw::<16>(entropy));
                text.make_ascii_lowercase();
                Self(format!(concat!($prefix, "_{}"), text).into())
            }

            /// The text form.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        text_value!($name, concat!("id with prefix ", $prefix), concat!("^", $prefix, "_[A-Za-z0-9_-]{8,64}$"));
    )* };
}

ids! {
    /// Of a task; a label chosen by its requester (decision 39).
    TaskId = "task",
    /// Of a contract.
    ContractId = "con",
    /// Of a capability token.
    TokenId = "cap",
    /// Of an approval receipt.
    ApprovalId = "apr",
    /// Of a usage receipt.
    UsageId = "use",
    /// Of an execution attestation.
    AttestationId = "att",
    /// Of a deliverable.
    DeliverableId = "dlv",
    /// Of a verification report.
    ReportId = "vrf",
    /// Of a settlement receipt.
    SettlementId = "set",
    /// Of a revocation notice.
    NoticeId = "rev",
    /// Of an invite.
    InviteId = "inv",
    /// Of an envelope.
    EnvelopeId = "env",
    /// Of a session message.
    MessageId = "msg",
    /// Of a tool call.
    CallId = "call",
    /// Of a session key.
    SessionKeyId = "sk",
    /// Of a worker card.
    CardId = "card",
}

/// Defines a type of `N` bytes written as base64url without padding.
macro_rules! byte_values {
    ($($(#[doc = $doc:literal])* $name:ident = $len:literal / $chars:literal,)*) => { $(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $len]);

        impl $name {
            fn fault() -> Error {
                bad(concat!("not ", $len, " bytes as ", $chars, " characters of base64url"))
            }

            /// Reads the text form.
            ///
            /// # Errors
            /// `BAD_FIELD`.
            pub fn parse(text: &str) -> Result<Self> {
                BASE64URL_NOPAD
                    .decode(text.as_bytes())
                    .ok()
                    .and_then(|bytes| bytes.try_into().ok())
                    .map(Self)
                    .ok_or_else(Self::fault)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&BASE64URL_NOPAD.encode(&self.0))
            }
        }

        text_value!($name, concat!($len, " bytes, base64url"), concat!("^[A-Za-z0-9_-]{", $chars, "}$"));
    )* };
}

byte_values! {
    /// 16 random bytes.
    Nonce = 16 / 22,
    /// A public X25519 key, or the encapsulated key of an envelope.
    Key32 = 32 / 43,
    /// A signature: Ed25519, or P-256 as `r || s`.
    SignatureBytes = 64 / 86,
    /// A public P-256 key: an uncompressed point (SEC 1).
    P256Point = 65 / 87,
}

impl Nonce {
    /// A new nonce.
    pub fn draw(entropy: &mut dyn Entropy) -> Self {
        Self(draw(entropy))
    }
}

/// Bytes of any length as base64url without padding; the text is bounded by the object around it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    fn fault() -> Error {
        bad("not base64url without padding")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        BASE64URL_NOPAD.decode(text.as_bytes()).map(Self).map_err(|_| Self::fault())
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64URL_NOPAD.encode(&self.0))
    }
}

text_value!(Bytes, "bytes, base64url", "^[A-Za-z0-9_-]*$");

/// Text of `MIN` to `MAX` characters without control characters; with `LINES`, line feeds and tabs
/// may be in it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text<const MIN: usize, const MAX: usize, const LINES: bool>(String);

/// A name or title: 1 to 200 characters on one line.
pub type Name = Text<1, 200, false>;
/// A short name: 1 to 64 characters on one line.
pub type Word = Text<1, 64, false>;
/// A description or reason: up to 4,000 characters.
pub type Prose = Text<0, 4000, true>;
/// A message: up to 1,000 characters.
pub type Note = Text<0, 1000, true>;
/// A URL as it was written; judged by [`super::endpoint`] before it is used.
pub type UrlText = Text<1, 2048, false>;

impl<const MIN: usize, const MAX: usize, const LINES: bool> Text<MIN, MAX, LINES> {
    /// Takes `text` if it fits.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        let count = text.chars().count();
        if !(MIN..=MAX).contains(&count) {
            return Err(bad(&format!("{count} characters, {MIN} to {MAX} are taken")));
        }
        if text.chars().any(|c| c.is_control() && !(LINES && matches!(c, '\n' | '\t'))) {
            return Err(bad("a control character"));
        }
        Ok(Self(text.to_owned()))
    }

    /// `text` with control characters replaced by spaces and cut to the longest allowed; for own
    /// messages that quote something. Empty text stays empty whatever `MIN` is.
    #[must_use]
    pub fn lossy(text: &str) -> Self {
        Self(text.chars().take(MAX).map(|c| if c.is_control() { ' ' } else { c }).collect())
    }
}

impl<const MIN: usize, const MAX: usize, const LINES: bool> Deref for Text<MIN, MAX, LINES> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl<const MIN: usize, const MAX: usize, const LINES: bool> fmt::Debug for Text<MIN, MAX, LINES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<const MIN: usize, const MAX: usize, const LINES: bool> Serialize for Text<MIN, MAX, LINES> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<const MIN: usize, const MAX: usize, const LINES: bool> Read for Text<MIN, MAX, LINES> {
    fn read(value: Value) -> Result<Self> {
        Self::parse(&text(value, "not a text")?)
    }
}

impl<const MIN: usize, const MAX: usize, const LINES: bool> JsonSchema for Text<MIN, MAX, LINES> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        format!("Text_{MIN}_{MAX}").into()
    }
    fn schema_id() -> Cow<'static, str> {
        format!("Text_{MIN}_{MAX}_{LINES}").into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "minLength": MIN,
            "maxLength": MAX,
            "pattern": if LINES { r"^[^\u0000-\u0008\u000b-\u001f\u007f-\u009f]*$" } else { r"^[^\u0000-\u001f\u007f-\u009f]*$" },
        })
    }
}

/// An integer from `MIN` to `MAX`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Int<const MIN: u64, const MAX: u64>(u64);

/// Any count: 0 to 2^53 - 1.
pub type Count = Int<0, MAX_SAFE_INTEGER>;

impl<const MIN: u64, const MAX: u64> Int<MIN, MAX> {
    /// Takes `number` if it is in range.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn new(number: u64) -> Result<Self> {
        if (MIN..=MAX).contains(&number) {
            Ok(Self(number))
        } else {
            Err(bad(&format!("not an integer from {MIN} to {MAX}")))
        }
    }

    /// `number`, moved into the range.
    #[must_use]
    pub fn clamped(number: u64) -> Self {
        Self(number.clamp(MIN, MAX))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl<const MIN: u64, const MAX: u64> Serialize for Int<MIN, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<const MIN: u64, const MAX: u64> Read for Int<MIN, MAX> {
    fn read(value: Value) -> Result<Self> {
        Self::new(value.as_u64().ok_or_else(|| bad("not an integer of at least 0"))?)
    }
}

impl<const MIN: u64, const MAX: u64> JsonSchema for Int<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        format!("Int_{MIN}_{MAX}").into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": MIN, "maximum": MAX })
    }
}

impl Read for i64 {
    fn read(value: Value) -> Result<Self> {
        value.as_i64().ok_or_else(|| bad("not an integer"))
    }
}

impl Read for bool {
    fn read(value: Value) -> Result<Self> {
        value.as_bool().ok_or_else(|| bad("neither true nor false"))
    }
}

/// Any JSON inside the bounds of the strict reader.
impl Read for Value {
    fn read(value: Value) -> Result<Self> {
        Ok(value)
    }
}

impl<T: Read> Read for Option<T> {
    fn read(value: Value) -> Result<Self> {
        if value.is_null() { Ok(None) } else { T::read(value).map(Some) }
    }
}

impl<T: Read> Read for Box<T> {
    fn read(value: Value) -> Result<Self> {
        T::read(value).map(Self::new)
    }
}

impl Read for Code {
    fn read(value: Value) -> Result<Self> {
        value.as_str().and_then(Self::parse).ok_or_else(|| bad("not a code of the closed list"))
    }
}

impl JsonSchema for Code {
    fn schema_name() -> Cow<'static, str> {
        "Code".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let words: Vec<&str> = Self::ALL.iter().map(|code| code.as_str()).collect();
        json_schema!({ "description": "An error code", "enum": words })
    }
}

/// A list of `MIN` to `MAX` elements.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Seq<T, const MIN: usize, const MAX: usize>(Vec<T>);

impl<T, const MIN: usize, const MAX: usize> Seq<T, MIN, MAX> {
    /// Takes `items` if their number is in range.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn new(items: Vec<T>) -> Result<Self> {
        if (MIN..=MAX).contains(&items.len()) {
            Ok(Self(items))
        } else {
            Err(bad(&format!("{} elements, {MIN} to {MAX} are taken", items.len())))
        }
    }

    /// The elements.
    #[must_use]
    pub fn into_vec(self) -> Vec<T> {
        self.0
    }
}

impl<T, const MAX: usize> Default for Seq<T, 0, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MIN: usize, const MAX: usize> Deref for Seq<T, MIN, MAX> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Serialize, const MIN: usize, const MAX: usize> Serialize for Seq<T, MIN, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<T: Read, const MIN: usize, const MAX: usize> Read for Seq<T, MIN, MAX> {
    fn read(value: Value) -> Result<Self> {
        let Value::Array(items) = value else { return Err(bad("not a list")) };
        let read = |(at, item): (usize, Value)| {
            T::read(item).map_err(|e: Error| e.inside(&at.to_string()))
        };
        Self::new(items.into_iter().enumerate().map(read).collect::<Result<_>>()?)
    }
}

impl<T: JsonSchema, const MIN: usize, const MAX: usize> JsonSchema for Seq<T, MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        format!("Seq_{}_{MIN}_{MAX}", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let items = generator.subschema_for::<T>();
        json_schema!({ "type": "array", "items": items, "minItems": MIN, "maxItems": MAX })
    }
}

/// Text by short names, at most 32 of them; shown, never interpreted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels(pub BTreeMap<String, Prose>);

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Read for Labels {
    fn read(value: Value) -> Result<Self> {
        let Value::Object(members) = value else { return Err(bad("not an object")) };
        if members.len() > 32 {
            return Err(bad("more than 32 members"));
        }
        let read = |(name, value): (String, Value)| {
            Name::parse(&name)?;
            let value = Prose::read(value).map_err(|e| e.inside(&name))?;
            Ok((name, value))
        };
        Ok(Self(members.into_iter().map(read).collect::<Result<_>>()?))
    }
}

impl JsonSchema for Labels {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Labels".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let (names, values) =
            (generator.subschema_for::<Name>(), generator.subschema_for::<Prose>());
        json_schema!({
            "type": "object", "maxProperties": 32, "propertyNames": names, "additionalProperties": values,
        })
    }
}

/// Defines an enumeration of words.
macro_rules! words {
    (
        $(#[doc = $doc:literal])*
        pub enum $name:ident { $( $(#[doc = $vdoc:literal])* $variant:ident = $text:literal, )* }
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name { $( $(#[doc = $vdoc])* $variant, )* }

        impl $name {
            /// Every word, in the order of the design.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The word.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// The value that `text` names.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$variant),)* _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.as_str())
            }
        }

        impl $crate::acp::value::Read for $name {
            fn read(value: serde_json::Value) -> $crate::acp::code::Result<Self> {
                value.as_str().and_then(Self::parse).ok_or_else(|| {
                    $crate::acp::value::bad(concat!("not one of:" $(, " ", $text)*))
                })
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "enum": [$($text),*] })
            }
        }
    };
}
pub(super) use words;

/// Defines a closed object: its members in the order of the design, each with the name on the wire.
///
/// With `= "Name"` it has the members `type` (this name) and `version` (`"1.0"`), which the struct
/// does not repeat.
macro_rules! object {
    (
        $(#[doc = $doc:literal])*
        pub struct $name:ident $(= $kind:literal)? {
            $( $(#[doc = $mdoc:literal])* $wire:literal $field:ident : $ty:ty, )*
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, PartialEq, Debug)]
        #[allow(missing_docs, reason = "members are those of the wire; those whose name says all have no text")]
        pub struct $name {
            $( $(#[doc = $mdoc])* pub $field: $ty, )*
        }

        $(impl $crate::acp::value::Typed for $name {
            const TYPE: &'static str = $kind;
        })?

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeMap as _;
                let mut map = serializer.serialize_map(None)?;
                $(
                    map.serialize_entry("type", $kind)?;
                    map.serialize_entry("version", $crate::acp::value::VERSION)?;
                )?
                $( map.serialize_entry($wire, &self.$field)?; )*
                map.end()
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let value = serde_json::Value::deserialize(d)?;
                $crate::acp::value::Read::read(value).map_err(serde::de::Error::custom)
            }
        }

        impl $crate::acp::value::Read for $name {
            fn read(value: serde_json::Value) -> $crate::acp::code::Result<Self> {
                use $crate::acp::value::{Members, Read};
                #[allow(unused_mut)]
                let mut members = Members::open(value)?;
                $( members.header($kind)?; )?
                members.only(&[$($wire),*])?;
                Ok(Self {
                    $( $field: {
                        let member = members.take($wire)?;
                        <$ty as Read>::read(member).map_err(|e| e.inside($wire))?
                    }, )*
                })
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let mut properties = serde_json::Map::new();
                let mut required: Vec<serde_json::Value> = Vec::new();
                $(
                    properties.insert("type".into(), serde_json::json!({ "const": $kind }));
                    properties.insert("version".into(), serde_json::json!({ "const": $crate::acp::value::VERSION }));
                    required.extend(["type".into(), "version".into()]);
                )?
                $(
                    let mut member = generator.subschema_for::<$ty>();
                    let text = concat!($($mdoc),*).trim();
                    if !text.is_empty() && member.get("$ref").is_none() {
                        member.insert("description".into(), text.into());
                    }
                    properties.insert($wire.into(), member.to_value());
                    required.push($wire.into());
                )*
                let text = concat!($($doc, "\n"),*).trim();
                schemars::json_schema!({
                    "description": text,
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": false,
                })
            }
        }
    };
}
pub(super) use object;

/// The version of every object; there is no negotiation in 1.0.
pub const VERSION: &str = "1.0";

/// An object that names its type.
pub trait Typed: Serialize + Read {
    /// The member `type`.
    const TYPE: &'static str;
}

/// The members of an object that is being read.
pub struct Members(serde_json::Map<String, Value>);

impl Members {
    /// The members of `value`.
    ///
    /// # Errors
    /// `BAD_FIELD` when it is no object.
    pub fn open(value: Value) -> Result<Self> {
        match value {
            Value::Object(members) => Ok(Self(members)),
            _ => Err(bad("not an object")),
        }
    }

    /// Takes `type` and `version` off; the version is judged first, since another version may have
    /// other members.
    ///
    /// # Errors
    /// `UNSUPPORTED_VERSION`, `BAD_FIELD`, `MISSING_MEMBER`.
    pub fn header(&mut self, kind: &str) -> Result<()> {
        let version = self.take("version")?;
        if version != VERSION {
            return Err(
                Error::new(Code::UnsupportedVersion, "only version 1.0 is known").inside("version")
            );
        }
        if self.take("type")? != kind {
            return Err(bad(&format!("not a {kind}")).inside("type"));
        }
        Ok(())
    }

    /// Refuses members other than `names`.
    ///
    /// # Errors
    /// `UNKNOWN_MEMBER`; the message does not repeat the stranger's name for it.
    pub fn only(&self, names: &[&str]) -> Result<()> {
        if self.0.keys().all(|name| names.contains(&name.as_str())) {
            return Ok(());
        }
        let text = format!("a member other than: {}", names.join(", "));
        Err(Error::new(Code::UnknownMember, text))
    }

    /// Takes the member `name`.
    ///
    /// # Errors
    /// `MISSING_MEMBER`.
    pub fn take(&mut self, name: &str) -> Result<Value> {
        self.0
            .swap_remove(name)
            .ok_or_else(|| Error::new(Code::MissingMember, format!("the member {name} is missing")))
    }
}

/// Reads an object from its bytes: strict JSON, then the closed object.
///
/// # Errors
/// As [`json::parse`] and [`Read::read`].
pub fn read_bytes<T: Read>(bytes: &[u8], max_bytes: usize) -> Result<T> {
    T::read(json::parse(bytes, max_bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::entropy::SeededEntropy;
    use serde_json::json;

    #[test]
    fn times_have_one_form() {
        for (text, ms) in [
            ("1970-01-01T00:00:00.000Z", 0),
            ("2026-12-01T00:00:00.000Z", 1_796_083_200_000),
            ("2024-02-29T23:59:59.999Z", 1_709_251_199_999),
            ("9999-12-31T23:59:59.999Z", LAST_TIME),
        ] {
            let time = Time::parse(text).unwrap();
            assert_eq!(time.millis().0, ms);
            assert_eq!(time.to_string(), text);
        }
        for text in [
            "2026-12-01T00:00:00Z",
            "2026-12-01T00:00:00.000+00:00",
            "2026-12-01 00:00:00.000Z",
            "2026-12-01t00:00:00.000z",
            "1969-12-31T23:59:59.999Z",
            "2026-02-29T00:00:00.000Z",
            "2026-12-01T24:00:00.000Z",
            "2026-12-01T23:59:60.000Z",
            "2026-13-01T00:00:00.000Z",
            "2026-12-01T00:00:00.0000Z",
            "+026-12-01T00:00:00.000Z",
            "２026-12-01T00:00:00.00Z",
            "",
        ] {
            assert_eq!(Time::parse(text).unwrap_err().code(), Code::BadTime, "{text}");
        }
        assert_eq!(Time::from(UnixMillis(u64::MAX)).to_string(), "9999-12-31T23:59:59.999Z");
    }

    #[test]
    fn expiry_is_exclusive_with_skew() {
        let at = Time::from(UnixMillis(1_000_000));
        assert!(!at.is_over(UnixMillis(1_059_999)) && at.is_over(UnixMillis(1_060_000)));
        assert!(!at.has_come(UnixMillis(939_999)) && at.has_come(UnixMillis(940_000)));
    }

    #[test]
    fn ids_digests_and_bytes() {
        assert!(TaskId::parse("task_example001").is_ok());
        for bad in [
            "task_short",
            "task_",
            "tas_example001",
            "task-example001",
            "task_exämple01",
            "con_example001",
        ] {
            assert_eq!(TaskId::parse(bad).unwrap_err().code(), Code::BadId, "{bad}");
        }
        assert_eq!(
            TaskId::parse(&format!("task_{}", "a".repeat(65))).unwrap_err().code(),
            Code::BadId
        );
        let id = MessageId::draw(&mut SeededEntropy::new(1));
        assert_eq!(id.as_str().len(), 4 + 26);
        assert_eq!(MessageId::parse(id.as_str()).unwrap(), id);

        let digest = Digest::of(&json!({"b": 1, "a": [1.0]})).unwrap();
        assert_eq!(Digest::parse(&digest.to_string()).unwrap(), digest);
        assert!(Digest::parse(&digest.to_string().to_uppercase()).is_err());
        assert!(Digest::parse(&digest.to_string().replace("sha256", "sha-256")).is_err());

        assert!(Nonce::parse("AAAAAAAAAAAAAAAAAAAAAA").is_ok());
        // Padding, other alphabet, and bits behind the last byte.
        for bad in
            ["AAAAAAAAAAAAAAAAAAAAAA==", "AAAAAAAAAAAAAAAAAAAA+A", "AAAAAAAAAAAAAAAAAAAAAB", "AAAA"]
        {
            assert_eq!(Nonce::parse(bad).unwrap_err().code(), Code::BadField, "{bad}");
        }
    }

    object! {
        /// A pair.
        pub struct Pair = "Pair" {
            /// A number.
            "theNumber" number: Count,
            "maybe" maybe: Option<Name>,
        }
    }

    #[test]
    fn objects_are_closed() {
        let read = |value| Pair::read(value).map_err(|e| e.code());
        let good = json!({"type": "Pair", "version": "1.0", "theNumber": 7, "maybe": null});
        let pair = read(good.clone()).unwrap();
        assert_eq!(pair.number.get(), 7);
        assert_eq!(serde_json::to_value(&pair).unwrap(), good);
        let with = |name: &str, value: Value| {
            let mut changed = good.clone();
            changed[name] = value;
            changed
        };
        let without = |name: &str| {
            let mut changed = good.clone();
            changed.as_object_mut().unwrap().remove(name);
            changed
        };
        assert_eq!(read(with("extra", json!(null))), Err(Code::UnknownMember));
        for name in ["type", "version", "theNumber", "maybe"] {
            assert_eq!(read(without(name)), Err(Code::MissingMember), "{name}");
        }
        assert_eq!(read(with("version", json!("1.1"))), Err(Code::UnsupportedVersion));
        assert_eq!(read(with("version", json!(1.0))), Err(Code::UnsupportedVersion));
        assert_eq!(read(with("type", json!("pair"))), Err(Code::BadField));
        for number in [json!(-1), json!("7"), json!(0.5), json!(null), json!(1_u64 << 53)] {
            assert_eq!(read(with("theNumber", number)), Err(Code::BadField));
        }
        for name in [json!(""), json!("a\nb"), json!("x".repeat(201)), json!("\u{9b}")] {
            assert_eq!(read(with("maybe", name)), Err(Code::BadField));
        }
        assert!(read(with("maybe", json!("ü".repeat(200)))).is_ok());
        assert_eq!(read(json!([])), Err(Code::BadField));
    }
}
