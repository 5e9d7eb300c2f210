//! What people call agents and machines: which names are usable, and how names are shown beside
//! ids (`rooms.md` 7.1, 7.2). A name is never an identity.

use std::fmt;

use super::device::DeviceId;
use crate::codec::text::{escape_untrusted, hides_something, shows_something, truncate_chars};

/// Most UTF-16 code units of a name after trimming.
pub const MAX_NAME_UNITS: usize = 64;

/// Hex digits that name an agent at least (decision: `interface.md`).
const MIN_PREFIX: usize = 8;

/// Characters of a refused id shown in an error: a whole id and a little more.
const SHOWN_CHARS: usize = 80;

/// What a name is for; part of the error text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameKind {
    /// An agent's own name.
    Agent,
    /// A label of ours for a device.
    Petname,
    /// A machine's display name.
    Machine,
}

impl fmt::Display for NameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent name",
            Self::Petname => "petname",
            Self::Machine => "machine name",
        })
    }
}

/// The name is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this {0} is not usable: after trimming it must have 1 to 64 characters (UTF-16 units), something to see and no hidden or control characters"
)]
pub struct NameError(pub NameKind);

impl NameError {
    /// Stable code of this error, the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "INVALID_NAME"
    }
}

/// The text is not a full device id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a device id; give all 64 hex digits")]
pub struct IdError(String);

impl IdError {
    /// Stable code of this error, the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "INVALID_DEVICE"
    }
}

/// Reads a full device id that a person gave, in either case.
///
/// # Errors
/// [`IdError`].
pub fn full_id(text: &str) -> Result<DeviceId, IdError> {
    DeviceId::parse(&text.to_ascii_lowercase())
        .ok_or_else(|| IdError(escape_untrusted(truncate_chars(text, SHOWN_CHARS))))
}

/// A name that somebody gives here, as it is to be stored: trimmed as JavaScript trims.
///
/// # Errors
/// [`NameError`].
pub fn check(kind: NameKind, name: &str) -> Result<String, NameError> {
    own(name).map(str::to_owned).ok_or(NameError(kind))
}

/// `name` trimmed, when it may be given here: usable, with something to see and nothing hidden.
/// Peers give what the protocol takes, see [`usable`].
#[must_use]
pub fn own(name: &str) -> Option<&str> {
    usable(name).filter(|name| shows_something(name) && !hides_something(name))
}

/// What an agent of this machine may call itself: as [`own`], and nothing that reads as an id. Peers
/// may be called so, and are not found by such a name.
#[must_use]
pub fn of_agent(name: &str) -> Option<&str> {
    own(name).filter(|name| !is_id_or_prefix(name))
}

/// Whether a text reads as an id or the beginning of one: it then never stands for a name that
/// somebody has given himself.
#[must_use]
pub fn is_id_or_prefix(text: &str) -> bool {
    text.len() >= MIN_PREFIX && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// `name` trimmed, when it is usable.
#[must_use]
pub fn usable(name: &str) -> Option<&str> {
    let name = name.trim_matches(is_ecmascript_space);
    let units = name.encode_utf16().take(MAX_NAME_UNITS + 1).count();
    let fits = (1..=MAX_NAME_UNITS).contains(&units) && !name.chars().any(char::is_control);
    fits.then_some(name)
}

/// Whether a name that was received is usable as it stands: a peer sends names already trimmed.
#[must_use]
pub fn is_clean(name: &str) -> bool {
    usable(name) == Some(name)
}

/// What `String.prototype.trim` removes. Rust's `trim` differs: it takes U+0085 and leaves U+FEFF.
const fn is_ecmascript_space(c: char) -> bool {
    matches!(
        c,
        '\t'..='\r'
            | ' '
            | '\u{a0}'
            | '\u{1680}'
            | '\u{2000}'..='\u{200a}'
            | '\u{2028}'
            | '\u{2029}'
            | '\u{202f}'
            | '\u{205f}'
            | '\u{3000}'
            | '\u{feff}'
    )
}

/// A device in a list: petname bare, self-chosen name as a JSON string, short id. Names that are
/// not usable are left out, as is a self-chosen name equal to the petname.
#[must_use]
pub fn display(petname: Option<&str>, self_name: Option<&str>, device: &DeviceId) -> String {
    let names = shown_names(petname, self_name);
    let short = device.short();
    if names.is_empty() { short } else { format!("{names} {short}") }
}

/// A device by its full id, followed by two spaces and its names where it has any.
#[must_use]
pub fn display_full(petname: Option<&str>, self_name: Option<&str>, device: &DeviceId) -> String {
    let names = shown_names(petname, self_name);
    if names.is_empty() { device.hex() } else { format!("{device}  {names}") }
}

fn shown_names(petname: Option<&str>, self_name: Option<&str>) -> String {
    let petname = petname.and_then(usable);
    let self_name = self_name.and_then(usable).filter(|name| Some(*name) != petname);
    let quoted = self_name.map(|name| serde_json::Value::from(name).to_string());
    let names: Vec<_> =
        [petname, quoted.as_deref()].into_iter().flatten().map(escape_untrusted).collect();
    names.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usable_names() {
        for (name, stored) in [
            ("alice", "alice"),
            ("  two words\t\n", "two words"),
            ("\u{feff}\u{3000}née\u{a0}", "née"),
            ("👩\u{200d}💻 \"q\" \\", "👩\u{200d}💻 \"q\" \\"),
            (&"x".repeat(64), &"x".repeat(64)),
            (&"👍".repeat(32), &"👍".repeat(32)),
            (&format!("  {}  ", "x".repeat(64)), &"x".repeat(64)),
        ] {
            assert_eq!(check(NameKind::Agent, name).as_deref(), Ok(stored));
            assert_eq!(is_clean(name), name == stored);
        }
    }

    #[test]
    fn unusable_names() {
        let long = "x".repeat(65);
        let astral = "👍".repeat(33);
        let huge = "x".repeat(64 * 1024);
        for name in [
            "",
            "  ",
            "\u{feff}",
            "a\nb",
            "a\0",
            "\u{1b}[2J",
            "a\u{7f}",
            "\u{85}a",
            "a\u{9b}b",
            &long,
            &astral,
            &huge,
        ] {
            assert_eq!(usable(name), None, "{name:?}");
            assert!(!is_clean(name));
        }
        let error = check(NameKind::Machine, "").unwrap_err();
        assert_eq!(error.code(), "INVALID_NAME");
        assert!(error.to_string().contains("machine name"));
    }

    #[test]
    fn a_name_given_here_hides_nothing_while_a_peers_is_taken_as_it_is() {
        for name in
            ["\u{202e}", "a\u{202e}b", "\u{200b}c", "\u{200d}", "\u{2800}", "\u{fe0f}", "\u{3164}"]
        {
            assert!(check(NameKind::Agent, name).is_err(), "{name:?}");
            assert!(is_clean(name), "{name:?}");
        }
        for name in ["👩\u{200d}💻", "⚠\u{fe0f}", "née", "שלום", "a b"] {
            assert_eq!(own(name), Some(name));
        }
    }

    #[test]
    fn no_agent_here_is_called_by_what_reads_as_an_id() {
        let id = DeviceId([0xab; 32]).hex();
        for name in [&id, &id.to_uppercase(), &id[..12], "20261130", " deadbeef\t"] {
            assert_eq!((of_agent(name), own(name)), (None, Some(name.trim())), "{name:?}");
            assert!(is_clean(name.trim()), "a peer may be");
        }
        for name in ["decade", "1234567", "deadbeef-1", "abcdefgh", "née"] {
            assert_eq!(of_agent(name), Some(name));
        }
    }

    #[test]
    fn display_order_and_quoting() {
        let device = DeviceId([0xab; 32]);
        let short = "abababababab";
        assert_eq!(display(None, None, &device), short);
        assert_eq!(display(Some("boss"), None, &device), format!("boss {short}"));
        assert_eq!(display(None, Some("al \"x\""), &device), format!("\"al \\\"x\\\"\" {short}"));
        assert_eq!(display(Some("boss"), Some("al"), &device), format!("boss \"al\" {short}"));
        assert_eq!(display(Some("al"), Some("al"), &device), format!("al {short}"));
        assert_eq!(display(Some(""), Some("a\nb"), &device), short);
        let full = device.hex();
        assert_eq!(display_full(None, None, &device), full);
        assert_eq!(display_full(Some("boss"), Some("al"), &device), format!("{full}  boss \"al\""));
    }

    #[test]
    fn a_name_cannot_reorder_or_hide_what_follows() {
        let device = DeviceId([0; 32]);
        let shown = display(Some("a\u{202e}b"), Some("\u{200b}c"), &device);
        assert_eq!(shown, "a\\u{202e}b \"\\u{200b}c\" 000000000000");
        // A self-chosen name cannot pass for the escape of another: its backslash is doubled.
        assert_eq!(display(None, Some("\\u{200b}c"), &device), "\"\\\\u{200b}c\" 000000000000");
    }

    #[test]
    fn full_ids_of_either_case() {
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(full_id(&id.to_uppercase()).unwrap().hex(), id);
        let long = "\u{202e}".repeat(1000);
        for bad in ["", "abc", &"g".repeat(64), &format!("{id}0"), &long] {
            let error = full_id(bad).unwrap_err();
            assert_eq!(error.code(), "INVALID_DEVICE");
            assert!(error.to_string().len() < 1000 && !error.to_string().contains('\u{202e}'));
        }
    }

    proptest! {
        #[test]
        fn what_is_stored_is_clean_and_within_the_rule(name in any::<String>()) {
            if let Some(stored) = usable(&name) {
                prop_assert!(is_clean(stored));
                prop_assert!((1..=64).contains(&stored.encode_utf16().count()));
                prop_assert!(name.contains(stored));
            }
        }
    }
}
