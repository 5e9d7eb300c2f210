//! Room paths: `<owner hex>/<name>` for a named room, `<lower hex>+<higher hex>` for a direct
//! message (`wire.md`, "Room paths and room tokens"; `rooms.md` 1.1).

use std::fmt;

use thiserror::Error;

use crate::identity::device::DeviceId;

/// The id of a room.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RoomPath {
    /// A room named by its owner.
    Named {
        /// The device that owns the room.
        owner: DeviceId,
        /// One or more of `A-Z a-z 0-9 _ -`.
        name: String,
    },
    /// The conversation of two devices.
    Dm {
        /// The bytewise lower id.
        low: DeviceId,
        /// The bytewise higher id.
        high: DeviceId,
    },
}

/// Bytes of a room's name in a path. Paths are in every record, token and event of a room, so a
/// long one would be in the way everywhere; what people type is a few words.
pub const MAX_NAME_BYTES: usize = 256;

/// Text that is no room path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RoomPathError {
    /// Neither form.
    #[error("a room path is `<owner id>/<name>` or `<lower id>+<higher id>`")]
    NeitherForm,
    /// A direct message between a device and itself.
    #[error("a direct message needs two different devices")]
    SameDevice,
    /// The two ids of a direct message are in descending order, which no peer produces.
    #[error("the ids of a direct message go in ascending order")]
    Descending,
}

impl RoomPathError {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        "invalid_room_path"
    }
}

impl RoomPath {
    /// The owner of a named room; a conversation has none.
    #[must_use]
    pub fn owner(&self) -> Option<DeviceId> {
        match self {
            Self::Named { owner, .. } => Some(*owner),
            Self::Dm { .. } => None,
        }
    }

    /// The two ends of a conversation, lower id first.
    #[must_use]
    pub fn participants(&self) -> Option<(DeviceId, DeviceId)> {
        match self {
            Self::Dm { low, high } => Some((*low, *high)),
            Self::Named { .. } => None,
        }
    }

    /// The part after the owner; empty for a conversation.
    #[must_use]
    pub fn local_name(&self) -> &str {
        match self {
            Self::Named { name, .. } => name,
            Self::Dm { .. } => "",
        }
    }

    /// Whether `device` is the one whose word lets a sender into this room: the owner, or either
    /// end of a conversation.
    #[must_use]
    pub fn is_issued_by(&self, device: &DeviceId) -> bool {
        match self {
            Self::Named { owner, .. } => owner == device,
            Self::Dm { low, high } => low == device || high == device,
        }
    }

    /// A named room; `None` when `name` is empty, too long or holds other characters.
    #[must_use]
    pub fn named(owner: DeviceId, name: &str) -> Option<Self> {
        ((1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(is_name_character))
            .then(|| Self::Named { owner, name: name.to_owned() })
    }

    /// The conversation of two devices in whatever order; `None` when they are the same.
    #[must_use]
    pub fn dm(a: DeviceId, b: DeviceId) -> Option<Self> {
        match a.cmp(&b) {
            std::cmp::Ordering::Less => Some(Self::Dm { low: a, high: b }),
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => Some(Self::Dm { low: b, high: a }),
        }
    }

    /// Reads a path; the slash form is tried first.
    ///
    /// # Errors
    /// [`RoomPathError`] for anything else. The reference also takes a direct message with its
    /// ids in descending order; nobody sends that, so it is refused here.
    pub fn parse(text: &str) -> Result<Self, RoomPathError> {
        if let Some((owner, name)) = text.split_once('/') {
            let owner = DeviceId::parse(owner).ok_or(RoomPathError::NeitherForm)?;
            return Self::named(owner, name).ok_or(RoomPathError::NeitherForm);
        }
        let (low, high) = text.split_once('+').ok_or(RoomPathError::NeitherForm)?;
        let low = DeviceId::parse(low).ok_or(RoomPathError::NeitherForm)?;
        let high = DeviceId::parse(high).ok_or(RoomPathError::NeitherForm)?;
        match low.cmp(&high) {
            std::cmp::Ordering::Less => Ok(Self::Dm { low, high }),
            std::cmp::Ordering::Equal => Err(RoomPathError::SameDevice),
            std::cmp::Ordering::Greater => Err(RoomPathError::Descending),
        }
    }

    /// Whether `device` is one of the two of a direct message.
    #[must_use]
    pub fn has_participant(&self, device: &DeviceId) -> bool {
        matches!(self, Self::Dm { low, high } if low == device || high == device)
    }

    /// The other device of a direct message that `device` takes part in.
    #[must_use]
    pub fn other_participant(&self, device: &DeviceId) -> Option<DeviceId> {
        match self {
            Self::Dm { low, high } if low == device => Some(*high),
            Self::Dm { low, high } if high == device => Some(*low),
            _ => None,
        }
    }
}

impl fmt::Display for RoomPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named { owner, name } => write!(f, "{owner}/{name}"),
            Self::Dm { low, high } => write!(f, "{low}+{high}"),
        }
    }
}

fn is_name_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '-'
}

/// The room name made out of free text: each run of other characters than `A-Z a-z 0-9 _ -`
/// becomes one hyphen, hyphens at the ends go. `None` when nothing is left.
#[must_use]
pub fn slug(text: &str) -> Option<String> {
    let mut name = String::with_capacity(text.len());
    let mut in_run = false;
    for c in text.chars() {
        if is_name_character(c) {
            name.push(c);
            in_run = false;
        } else if !in_run {
            name.push('-');
            in_run = true;
        }
    }
    let name = name.trim_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_read_back() {
        let (a, b) = (DeviceId([1; 32]), DeviceId([2; 32]));
        for path in [RoomPath::named(a, "gen_eral-1").unwrap(), RoomPath::dm(b, a).unwrap()] {
            assert_eq!(RoomPath::parse(&path.to_string()), Ok(path));
        }
        assert_eq!(RoomPath::dm(a, b).unwrap().other_participant(&a), Some(b));
        assert_eq!(RoomPath::dm(a, a), None);
    }

    #[test]
    fn other_texts_are_refused() {
        let (a, b) = (DeviceId([1; 32]).hex(), DeviceId([2; 32]).hex());
        for (text, error) in [
            ("general".to_owned(), RoomPathError::NeitherForm),
            (format!("{a}/"), RoomPathError::NeitherForm),
            (format!("{a}/x y"), RoomPathError::NeitherForm),
            (format!("{a}/x/y"), RoomPathError::NeitherForm),
            (format!("{a}0/x"), RoomPathError::NeitherForm),
            (format!("{}/x", "A".repeat(64)), RoomPathError::NeitherForm),
            (format!("{a}+{a}"), RoomPathError::SameDevice),
            (format!("{b}+{a}"), RoomPathError::Descending),
            (format!("{a}+{b}+{b}"), RoomPathError::NeitherForm),
        ] {
            assert_eq!(RoomPath::parse(&text), Err(error), "{text}");
        }
    }

    #[test]
    fn slugs() {
        assert_eq!(slug("My  Project!").as_deref(), Some("My-Project"));
        assert_eq!(slug("--a_b--").as_deref(), Some("a_b"));
        assert_eq!(slug("a - b").as_deref(), Some("a---b"));
        assert_eq!(slug("é/…"), None);
    }
}
