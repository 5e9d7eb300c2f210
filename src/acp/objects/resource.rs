//! Names of things that may be used, and patterns over them (design 6.3, 9.1): compared segment by
//! segment, never as text.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::acp::code::{Error, Result};
use crate::acp::value::{Read, bad, text_value};

/// Segments of a resource.
const MAX_SEGMENTS: usize = 32;

/// Characters of a segment.
const MAX_SEGMENT_CHARS: usize = 128;

/// Characters of an action.
const MAX_ACTION_CHARS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Tail {
    /// Nothing more.
    Exact,
    /// `*`: exactly one further segment.
    One,
    /// `**`: zero or more further segments.
    Any,
}

/// A resource, or a pattern of resources: `mcp:docs/project/**`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource {
    scheme: Box<str>,
    segments: Vec<Box<str>>,
    tail: Tail,
}

impl Resource {
    fn fault() -> Error {
        bad(
            "not a resource: scheme, colon, 1 to 32 segments of [A-Za-z0-9._~@=+,-] joined by /, the last of which may be * or **",
        )
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_text(text).ok_or_else(Self::fault)
    }

    fn from_text(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once(':')?;
        let good_scheme = scheme.starts_with(|c: char| c.is_ascii_lowercase())
            && scheme.len() <= MAX_SEGMENT_CHARS
            && scheme
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+.-".contains(&b));
        let mut segments: Vec<Box<str>> =
            rest.split('/').take(MAX_SEGMENTS + 1).map(Box::from).collect();
        if !good_scheme || segments.len() > MAX_SEGMENTS {
            return None;
        }
        let tail = match segments.last().map(AsRef::as_ref) {
            Some("*") => Tail::One,
            Some("**") => Tail::Any,
            _ => Tail::Exact,
        };
        if tail != Tail::Exact {
            segments.pop();
        }
        let good = |segment: &str| {
            (1..=MAX_SEGMENT_CHARS).contains(&segment.len())
                && segment != "."
                && segment != ".."
                && segment.bytes().all(|b| b.is_ascii_alphanumeric() || b"._~@=+,-".contains(&b))
        };
        segments.iter().all(|segment| good(segment)).then(|| Self {
            scheme: scheme.into(),
            segments,
            tail,
        })
    }

    /// Whether it is one thing and no pattern.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.tail == Tail::Exact
    }

    /// Whether everything that this names is named by `other` as well.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        if self.scheme != other.scheme {
            return false;
        }
        let Some(further) = self.segments.strip_prefix(other.segments.as_slice()) else {
            return false;
        };
        match (other.tail, self.tail) {
            (Tail::Any, _) => true,
            (Tail::One, Tail::Exact) => further.len() == 1,
            (Tail::One, Tail::One) | (Tail::Exact, Tail::Exact) => further.is_empty(),
            (Tail::One, Tail::Any) | (Tail::Exact, Tail::One | Tail::Any) => false,
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.scheme)?;
        let tail = match self.tail {
            Tail::Exact => None,
            Tail::One => Some("*"),
            Tail::Any => Some("**"),
        };
        for (at, segment) in self.segments.iter().map(AsRef::as_ref).chain(tail).enumerate() {
            write!(f, "{}{segment}", if at == 0 { "" } else { "/" })?;
        }
        Ok(())
    }
}

text_value!(
    Resource,
    "a resource or a pattern of resources",
    r"^[a-z][a-z0-9+.-]*:([A-Za-z0-9._~@=+,-]{1,128}/)*([A-Za-z0-9._~@=+,-]{1,128}|\*\*?)$"
);

/// What is done with a resource: `[a-z][a-z0-9_.-]*`, up to 64 characters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action(Box<str>);

impl Action {
    fn fault() -> Error {
        bad("not an action of the form [a-z][a-z0-9_.-]*, up to 64 characters")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        let good = text.len() <= MAX_ACTION_CHARS
            && text.starts_with(|c: char| c.is_ascii_lowercase())
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_.-".contains(&b));
        if good { Ok(Self(text.into())) } else { Err(Self::fault()) }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

text_value!(Action, "an action", "^[a-z][a-z0-9_.-]{0,63}$");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resource(text: &str) -> Resource {
        Resource::parse(text).unwrap()
    }

    #[test]
    fn only_the_grammar_is_read() {
        for text in
            ["mcp:docs/project/**", "net:api.example.com/443", "a:b", "a:*", "a:**", "a+b.c-d:x/*"]
        {
            assert_eq!(resource(text).to_string(), text);
        }
        let long = format!("a:{}", vec!["s"; 33].join("/"));
        for text in [
            "",
            "a",
            "a:",
            ":b",
            "A:b",
            "1a:b",
            "a:b/",
            "a:/b",
            "a:b//c",
            "a:.",
            "a:b/../c",
            "a:b/./c",
            "a:*/b",
            "a:**/b",
            "a:b*",
            "a:b/***",
            "a:b%2fc",
            "a:b\\c",
            "a:b c",
            "a:é",
            "a:b/\0",
            "a b:c",
            &long,
            &format!("a:{}", "x".repeat(129)),
        ] {
            assert!(Resource::parse(text).is_err(), "{text}");
        }
        for text in ["read", "a", "a.b_c-d9"] {
            assert_eq!(Action::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "Read", "9a", "*", "a b", &"a".repeat(65)] {
            assert!(Action::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn containment_is_by_segments() {
        for (inner, outer, within) in [
            ("x:a/b", "x:a/b", true),
            ("x:a/b", "x:a/*", true),
            ("x:a/b", "x:a/**", true),
            ("x:a/*", "x:a/*", true),
            ("x:a/*", "x:a/**", true),
            ("x:a/**", "x:a/**", true),
            ("x:a/b/c", "x:a/**", true),
            ("x:a/b/*", "x:a/**", true),
            ("x:a/b/**", "x:a/**", true),
            ("x:a", "x:a/**", true),
            ("x:a", "x:a/*", false),
            ("x:a/b/c", "x:a/*", false),
            ("x:a/**", "x:a/*", false),
            ("x:a/b/*", "x:a/*", false),
            ("x:a/*", "x:a/b", false),
            ("x:a", "x:a/b", false),
            ("x:ab", "x:a/**", false),
            ("mcp:docs/projectSECRET/x", "mcp:docs/project/**", false),
            ("y:a/b", "x:a/b", false),
            ("x:anything/at/all", "x:**", true),
            ("x:A/b", "x:a/**", false),
        ] {
            assert_eq!(resource(inner).is_within(&resource(outer)), within, "{inner} in {outer}");
        }
    }

    /// All exact resources of up to four segments from a small alphabet.
    fn universe() -> Vec<Vec<&'static str>> {
        let mut all = vec![vec![]];
        let mut last: Vec<Vec<&str>> = vec![vec![]];
        for _ in 0..4 {
            last = last
                .iter()
                .flat_map(|path| ["a", "b", "ab"].map(|s| [path.as_slice(), &[s]].concat()))
                .collect();
            all.extend(last.clone());
        }
        all
    }

    /// The slow way: which members of the universe a pattern names.
    fn names(pattern: &str, path: &[&str]) -> bool {
        let parts: Vec<&str> = pattern.split('/').collect();
        match parts.split_last() {
            Some((&"**", front)) => path.len() >= front.len() && &path[..front.len()] == front,
            Some((&"*", front)) => path.len() == front.len() + 1 && &path[..front.len()] == front,
            _ => path == parts,
        }
    }

    proptest! {
        #[test]
        fn containment_is_that_of_the_sets(
            inner in "(a|b|ab)(/(a|b|ab)){0,1}(/\\*\\*?)?",
            outer in "(a|b|ab)(/(a|b|ab)){0,1}(/\\*\\*?)?",
        ) {
            let sets = universe().iter().all(|path| !names(&inner, path) || names(&outer, path));
            let said = resource(&format!("x:{inner}")).is_within(&resource(&format!("x:{outer}")));
            prop_assert_eq!(said, sets);
        }
    }
}
