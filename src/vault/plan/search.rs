//! Literal, case-insensitive search in one page's text (specification, section 12.7).

use memchr::memmem::Finder;
use serde::Serialize;

use super::text::{fold, lines, strip};
use crate::codec::text::truncate_chars;

/// Most results of one search.
pub const MAX_LIMIT: usize = 500;
/// Results without a limit given.
pub const DEFAULT_LIMIT: i64 = 100;
/// Most characters of a result's text.
const MAX_TEXT: usize = 300;

/// A line that matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Match {
    /// The page, from the workspace's root.
    pub file: String,
    /// The line's number, from one.
    pub line: usize,
    /// The line, trimmed and cut.
    pub text: String,
}

/// A query made ready.
pub struct Query {
    folded: String,
    finder: Finder<'static>,
}

impl Query {
    /// `text` must not be blank.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let folded = fold(strip(text)).into_owned();
        let finder = Finder::new(folded.as_bytes()).into_owned();
        Self { folded, finder }
    }

    /// Whether a page can match at all; `false` is certain. This decides most pages without splitting
    /// them into lines.
    fn may_match(&self, text: &str) -> bool {
        if text.is_ascii() && !self.folded.is_ascii() {
            return false;
        }
        self.finder.find(fold(text).as_bytes()).is_some()
    }

    /// The lines of `bytes` that match, at most `limit`; `None` if they are not UTF-8. `file` makes
    /// the path shown, only if needed.
    pub fn page(
        &self,
        bytes: &[u8],
        limit: usize,
        file: impl Fn() -> String,
    ) -> Option<Vec<Match>> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut found = Vec::new();
        if !self.may_match(text) {
            return Some(found);
        }
        for (at, line) in lines(text).enumerate() {
            if found.len() >= limit {
                break;
            }
            if self.finder.find(fold(line).as_bytes()).is_some() {
                let text = truncate_chars(strip(line), MAX_TEXT).to_owned();
                found.push(Match { file: file(), line: at + 1, text });
            }
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(query: &str, text: &str) -> Vec<(usize, String)> {
        let found = Query::new(query).page(text.as_bytes(), 100, || "p".into()).unwrap();
        found.into_iter().map(|hit| (hit.line, hit.text)).collect()
    }

    #[test]
    fn folding_applies_to_both_sides() {
        assert_eq!(hits(" STRASSE ", "x\r\n die Straße \n"), [(2, "die Straße".to_owned())]);
        assert_eq!(hits("ς", "ΟΔΟΣ"), [(1, "ΟΔΟΣ".to_owned())]);
        assert_eq!(hits("é", "e\u{301}"), []);
        assert_eq!(hits("é", "plain"), []);
        assert_eq!(hits(".*", "a.*B\nab"), [(1, "a.*B".to_owned())]);
        assert_eq!(hits("a b", "A\nB a\u{c}b\nxA By"), [(4, "xA By".to_owned())]);
    }

    #[test]
    fn texts_are_cut_after_trimming() {
        let long = format!("  {}x", "é".repeat(300));
        assert_eq!(hits("x", &long), [(1, "é".repeat(300))]);
        assert_eq!(Query::new("x").page(b"x\xff", 9, String::new), None);
        assert_eq!(Query::new("x").page(b"x\nx\nx", 2, String::new).unwrap().len(), 2);
    }
}
