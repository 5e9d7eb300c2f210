//! Daily entries: their text, their unique names, the names of agents in them (specification,
//! section 9).

use jiff::ZonedDateTime;
use jiff::tz::TimeZone;

use super::text::{fold, strip};

/// Longest agent name in characters.
const MAX_AGENT: usize = 40;

/// What an entry records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An intermediate note.
    Scratchpad,
    /// The end of a session.
    Session,
}

impl Kind {
    /// As in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scratchpad => "scratchpad",
            Self::Session => "session",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Scratchpad => "Scratchpad",
            Self::Session => "Session",
        }
    }
}

/// An agent's name as entries and states carry it; `None` if nothing of it is left.
pub fn agent(name: &str) -> Option<String> {
    let mut out = String::new();
    for c in fold(strip(name)).chars() {
        if matches!(c, 'a'..='z' | '0'..='9' | '.' | '_') {
            out.push(c);
        } else if c == '-' {
            out.push('-');
        } else if !out.ends_with('\0') {
            // One mark for a whole run; it becomes a dash below.
            out.push('\0');
        }
    }
    let out = out.replace('\0', "-");
    let kept: String = out.trim_matches(['-', '.']).chars().take(MAX_AGENT).collect();
    (!kept.is_empty()).then_some(kept)
}

/// A time as headings and states show it: local, to the second, with its offset from UTC.
pub fn local_time(now: &ZonedDateTime) -> String {
    let seconds = now.offset().seconds();
    let (sign, rest) =
        if seconds < 0 { ('-', seconds.unsigned_abs()) } else { ('+', seconds.unsigned_abs()) };
    let mut out = format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}{sign}{:02}:{:02}",
        now.year(),
        now.month(),
        now.day(),
        now.hour(),
        now.minute(),
        now.second(),
        rest / 3600,
        rest / 60 % 60,
    );
    if rest % 60 != 0 {
        out.push_str(&format!(":{:02}", rest % 60));
    }
    out
}

/// A date as folders are named.
pub fn date(now: &ZonedDateTime) -> String {
    format!("{:04}-{:02}-{:02}", now.year(), now.month(), now.day())
}

/// Local and UTC date; one if they are the same.
pub fn dates(now: &ZonedDateTime) -> Vec<String> {
    let mut out = vec![date(now), date(&now.with_time_zone(TimeZone::UTC))];
    out.dedup();
    out
}

/// Folder (below `daily`) and file name of a new entry.
pub fn entry_name(
    now: &ZonedDateTime,
    kind: Kind,
    agent: Option<&str>,
    random: [u8; 4],
) -> (String, String) {
    let utc = now.with_time_zone(TimeZone::UTC);
    let agent = agent.map(|agent| format!("-{agent}")).unwrap_or_default();
    let file = format!(
        "{:04}{:02}{:02}T{:02}{:02}{:02}{:06}Z-{}{agent}-{:08x}.md",
        utc.year(),
        utc.month(),
        utc.day(),
        utc.hour(),
        utc.minute(),
        utc.second(),
        utc.subsec_nanosecond() / 1000,
        kind.name(),
        u32::from_be_bytes(random),
    );
    (date(&utc), file)
}

/// An entry's text.
pub fn entry_text(now: &ZonedDateTime, kind: Kind, agent: Option<&str>, body: &str) -> String {
    let agent = agent.map(|agent| format!("Agent: `{agent}`\n\n")).unwrap_or_default();
    format!("### {} — {}\n\n{agent}{}\n", kind.title(), local_time(now), strip(body))
}

/// How many entries a text holds, by their headings.
pub fn count_entries(text: &str) -> usize {
    text.split('\n')
        .filter(|line| line.starts_with("### Scratchpad — ") || line.starts_with("### Session — "))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> ZonedDateTime {
        text.parse().unwrap()
    }

    #[test]
    fn agents_are_normalised() {
        for (name, wanted) in [
            (" Codex ", Some("codex")),
            ("My Agent", Some("my-agent")),
            ("a  -  b", Some("a---b")),
            (".-a.b-.", Some("a.b")),
            ("_", Some("_")),
            ("Straße", Some("strasse")),
            ("\u{212a}", Some("k")),
            ("é", None),
            ("", None),
            ("a\n\tb", Some("a-b")),
        ] {
            assert_eq!(agent(name).as_deref(), wanted, "{name:?}");
        }
        assert_eq!(agent(&"x".repeat(41)).unwrap().len(), 40);
        assert_eq!(
            agent(&format!("{}--y", "x".repeat(39))).unwrap(),
            format!("{}-", "x".repeat(39))
        );
    }

    #[test]
    fn names_are_utc_and_headings_local() {
        let now = at("2026-01-02T03:04:05.678901+05:30[+05:30]");
        assert_eq!(
            entry_name(&now, Kind::Session, Some("codex"), [0, 1, 0xab, 2]),
            ("2026-01-01".into(), "20260101T213405678901Z-session-codex-0001ab02.md".into())
        );
        assert_eq!(
            entry_text(&now, Kind::Scratchpad, Some("codex"), "  - x\n"),
            "### Scratchpad — 2026-01-02T03:04:05+05:30\n\nAgent: `codex`\n\n- x\n"
        );
        assert_eq!(dates(&now), ["2026-01-02", "2026-01-01"]);
        assert_eq!(local_time(&at("2026-01-02T03:04:05[UTC]")), "2026-01-02T03:04:05+00:00");
    }
}
