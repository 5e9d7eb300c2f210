//! Deterministic CBOR (RFC 8949 section 4.2.1): a strict decoder, the canonical encoder, and a
//! serde bridge for typed messages.

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
    Float(f64),
}
