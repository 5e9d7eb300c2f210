//! Scopes: what a request or a token is about, and when one scope lies within another.

use super::fields::{Fields, ShapeError, text};
use super::room_path::RoomPath;
use crate::codec::cbor::Value;

/// Scope kind of a request to the device itself.
pub const KIND_NODE: &str = "node";
/// Scope kind of room verbs and room tokens; the path is a room path.
pub const KIND_ROOM: &str = "room";
/// Scope kind of `dm:send` grants; the path is the granting principal's id in hex.
pub const KIND_USER: &str = "user";
/// Scope kind of membership proofs; the path is the issuer's id in hex.
pub const KIND_GROUP: &str = "group";
/// Scope kind of shared vaults; the path is the share's name (decision 32).
pub const KIND_VAULT: &str = "x-commsd-vault";
/// Scope kind of the Agent Collaboration Protocol between daemons; it has no path.
pub const KIND_ACP: &str = "x-commsd-acp";
/// Scope kind of agent-comms mesh messages.
pub const KIND_MESH: &str = "agent-comms-mesh";

/// `{ kind, ?path }`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// What kind of thing the scope is about.
    pub kind: String,
    /// Which one; absent means all of that kind.
    pub path: Option<String>,
}

impl Scope {
    /// A scope without a path.
    #[must_use]
    pub fn of_kind(kind: &str) -> Self {
        Self { kind: kind.to_owned(), path: None }
    }

    /// A scope with a path.
    #[must_use]
    pub fn new(kind: &str, path: impl Into<String>) -> Self {
        Self { kind: kind.to_owned(), path: Some(path.into()) }
    }

    /// The scope of a room.
    #[must_use]
    pub fn room(path: &RoomPath) -> Self {
        Self::new(KIND_ROOM, path.to_string())
    }

    /// Reads `{ kind, ?path }`; other members are dropped.
    ///
    /// # Errors
    /// [`ShapeError`] for another shape.
    pub fn from_value(value: Value) -> Result<Self, ShapeError> {
        let mut fields = Fields::of(value, "scope")?;
        Ok(Self { kind: fields.required("kind", text)?, path: fields.optional("path", text)? })
    }

    /// The wire form.
    #[must_use]
    pub fn to_value(&self) -> Value {
        Value::record([
            ("kind", Some(Value::from(self.kind.as_str()))),
            ("path", self.path.as_deref().map(Value::from)),
        ])
    }

    /// Whether `inner` is this scope or lies within it (`wire.md`, "Token verification", Scope):
    /// same kind; no path covers everything; otherwise equal, or below on a `/` boundary.
    /// A `.` or `..` segment on either side never matches. Case-sensitive, nothing is normalised.
    #[must_use]
    pub fn covers(&self, inner: &Self) -> bool {
        if self.kind != inner.kind {
            return false;
        }
        let Some(outer) = &self.path else { return true };
        let Some(inner) = &inner.path else { return false };
        if [outer, inner].iter().any(|path| path.split('/').any(|s| s == "." || s == "..")) {
            return false;
        }
        match inner.strip_prefix(outer.as_str()) {
            Some(below) => below.is_empty() || outer.ends_with('/') || below.starts_with('/'),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_follows_the_observed_pairs() {
        for (outer, inner, covers) in [
            (Some("/proj"), Some("/proj"), true),
            (Some("/proj"), Some("/proj/a"), true),
            (Some("/proj"), Some("/projbook"), false),
            (Some("/proj"), Some("/proj/./a"), false),
            (Some("/proj/.."), Some("/proj/.."), false),
            (Some("/proj/"), Some("/proj"), false),
            (Some("/proj/"), Some("/proj/a"), true),
            (Some(""), Some("/x"), true),
            (Some(""), Some("x"), false),
            (Some(""), Some(""), true),
            (Some("Work"), Some("work"), false),
            (None, Some("/x"), true),
            (None, Some("/x/../y"), true),
            (None, None, true),
            (Some("/proj"), None, false),
        ] {
            let scope = |path: Option<&str>| Scope { kind: "k".into(), path: path.map(Into::into) };
            assert_eq!(scope(outer).covers(&scope(inner)), covers, "{outer:?} {inner:?}");
        }
        assert!(!Scope::of_kind("a").covers(&Scope::of_kind("b")));
    }
}
