//! Wire times: Unix milliseconds, and their ISO-8601 text with milliseconds and `Z`.
//! Reads no clock; "now" always comes in as a value.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970-01-01T00:00:00Z.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// This time plus `ms`, saturating.
    #[must_use]
    pub const fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this time; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Whole seconds, rounded down (the unit of an advert's `snapshot-seconds`).
    #[must_use]
    pub const fn seconds(self) -> u64 {
        self.0 / 1000
    }

    /// ISO-8601 UTC with milliseconds and `Z`, e.g. `2026-11-29T21:51:37.991Z`.
    ///
    /// Times past the end of the year 9999 are shown as the last one that the calendar library
    /// represents, so the text always has 24 characters.
    #[must_use]
    pub fn iso(self) -> String {
        let last = u64::try_from(jiff::Timestamp::MAX.as_second() - 1).unwrap_or(0) * 1000 + 999;
        let ms = self.0.min(last);
        let mut text = String::with_capacity(24);
        if let Some(t) =
            i64::try_from(ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
        {
            // Every message has one: the general formatter takes several times as long.
            let t = jiff::tz::Offset::UTC.to_datetime(t);
            let _a_string_takes_everything = write!(
                text,
                "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
                t.year(),
                t.month(),
                t.day(),
                t.hour(),
                t.minute(),
                t.second(),
                t.millisecond()
            );
        }
        text
    }

    /// Reads ISO-8601 text with an offset or `Z`; `None` for anything else or before 1970.
    #[must_use]
    pub fn parse_iso(text: &str) -> Option<Self> {
        let t: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(t.as_millisecond()).ok().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iso_has_the_reference_form() {
        assert_eq!(UnixMillis(1_795_989_097_991).iso(), "2026-11-29T21:51:37.991Z");
        assert_eq!(UnixMillis(0).iso(), "1970-01-01T00:00:00.000Z");
        assert_eq!(UnixMillis(u64::MAX).iso(), "9999-12-30T21:59:59.999Z");
    }

    #[test]
    fn iso_reads_back() {
        let t = UnixMillis(1_795_989_097_142);
        assert_eq!(UnixMillis::parse_iso(&t.iso()), Some(t));
        assert_eq!(UnixMillis::parse_iso("yesterday"), None);
        assert_eq!(UnixMillis::parse_iso("1969-12-31T23:59:59Z"), None);
    }
}
