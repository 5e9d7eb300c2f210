//! Text as the protocol sees it: which characters are white space, where lines end, how names are
//! compared, what a Git conflict marker is. Pure functions over strings.
//!
//! The reference engine is a Python programme, so "white space", "line" and "case folding" mean what
//! they mean there.

use std::borrow::Cow;

use icu_casemap::{CaseMapper, CaseMapperBorrowed};
use unicode_normalization::{UnicodeNormalization as _, is_nfc};

const FOLDER: CaseMapperBorrowed<'static> = CaseMapper::new();

/// Whether the protocol counts `c` as white space. Unlike `char::is_whitespace` this includes the
/// information separators U+001C to U+001F.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// `text` without white space at both ends.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `text` without white space at its end.
pub fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// Every run of white space as one space, none at the ends.
pub fn collapse(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split(is_space).filter(|word| !word.is_empty()) {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// Whether a line ends at `c` (CRLF ends one line, not two).
fn ends_line(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// The lines of `text` without their ends. An end at the very end opens no further line.
pub fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some((at, end)) = rest.char_indices().find(|(_, c)| ends_line(*c)) else {
            return Some(std::mem::take(&mut rest));
        };
        let (line, after) = rest.split_at(at);
        rest = match after.strip_prefix("\r\n") {
            Some(after) => after,
            None => after.get(end.len_utf8()..).unwrap_or_default(),
        };
        Some(line)
    })
}

/// What a file's bytes mean as text: strict UTF-8, every CRLF and lone CR read as LF.
pub fn decode(bytes: Vec<u8>) -> Option<String> {
    let text = String::from_utf8(bytes).ok()?;
    Some(if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n") } else { text })
}

/// NFC.
pub fn nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc(text) {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(text.nfc().collect())
    }
}

/// Full Unicode case folding.
pub fn fold(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return if text.bytes().any(|b| b.is_ascii_uppercase()) {
            Cow::Owned(text.to_ascii_lowercase())
        } else {
            Cow::Borrowed(text)
        };
    }
    FOLDER.fold_string(text)
}

/// Whether a line of `text` is a conflict marker as Git leaves it: seven `<` or `>`, alone or followed
/// by a space and anything, or exactly seven `=`. Only LF ends a line here.
pub fn has_conflict(text: &str) -> bool {
    let marker = |line: &[u8]| {
        let Some((mark, rest)) = line.split_at_checked(7) else { return false };
        match mark {
            b"<<<<<<<" | b">>>>>>>" => rest.first().is_none_or(|b| *b == b' '),
            b"=======" => rest.is_empty(),
            _ => false,
        }
    };
    let bytes = text.as_bytes();
    let mut start = 0;
    for at in memchr::memchr_iter(b'\n', bytes).chain([bytes.len()]) {
        let line = bytes.get(start..at).unwrap_or_default();
        if matches!(line.first(), Some(b'<' | b'=' | b'>')) && marker(line) {
            return true;
        }
        start = at + 1;
    }
    false
}

/// The zero of every decimal digit set (Unicode category Nd) of Unicode 14, in order; the other nine
/// digits follow it.
const DECIMAL_ZEROS: [u32; 66] = [
    0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66,
    0xde6, 0xe50, 0xed0, 0xf20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90,
    0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0, 0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0xff10,
    0x104a0, 0x10d30, 0x11066, 0x110f0, 0x11136, 0x111d0, 0x112f0, 0x11450, 0x114d0, 0x11650,
    0x116c0, 0x11730, 0x118e0, 0x11950, 0x11c50, 0x11d50, 0x11da0, 0x16a60, 0x16ac0, 0x16b50,
    0x1d7ce, 0x1d7d8, 0x1d7e2, 0x1d7ec, 0x1d7f6, 0x1e140, 0x1e2f0, 0x1e950, 0x1fbf0,
];

/// Most digits of an integer argument; Python's own limit.
const MAX_DIGITS: usize = 4300;

/// An integer as Python's `int()` reads it: white space around it, a sign, decimal digits of any
/// script, single underscores between digits. Values beyond `i64` become its nearest bound.
pub fn integer(text: &str) -> Option<i64> {
    let text = strip(text);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut value: i64 = 0;
    let mut count = 0;
    let mut after_digit = false;
    for c in digits.chars() {
        if c == '_' && after_digit {
            after_digit = false;
            continue;
        }
        let c = u32::from(c);
        let zero = DECIMAL_ZEROS.iter().rev().find(|zero| **zero <= c)?;
        let digit = c.checked_sub(*zero).filter(|digit| *digit < 10)?;
        let digit = i64::from(digit);
        value = value.saturating_mul(10);
        value = if negative { value.saturating_sub(digit) } else { value.saturating_add(digit) };
        count += 1;
        after_digit = true;
    }
    (after_digit && count <= MAX_DIGITS).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_pythons() {
        let spaces: Vec<u32> = (0..0x11_0000)
            .filter_map(char::from_u32)
            .filter(|c| is_space(*c))
            .map(u32::from)
            .collect();
        let mut wanted: Vec<u32> = (0x9..=0xd).chain(0x1c..=0x20).collect();
        wanted.extend([0x85, 0xa0, 0x1680]);
        wanted.extend(0x2000..=0x200a);
        wanted.extend([0x2028, 0x2029, 0x202f, 0x205f, 0x3000]);
        assert_eq!(spaces, wanted);
        assert_eq!(collapse("\u{1f} a\u{a0}\tb \n"), "a b");
    }

    #[test]
    fn lines_end_where_python_ends_them() {
        let split = |text| lines(text).collect::<Vec<_>>();
        assert_eq!(split(""), Vec::<&str>::new());
        assert_eq!(split("a\r\nb\rc\n\nd\u{2028}e\u{1d}"), ["a", "b", "c", "", "d", "e"]);
        assert_eq!(split("\n"), [""]);
        assert_eq!(split("a\u{1f}b"), ["a\u{1f}b"]);
        assert_eq!(decode(b"a\r\nb\rc\r".to_vec()).unwrap(), "a\nb\nc\n");
        assert_eq!(decode(vec![0xff]), None);
    }

    #[test]
    fn folding_is_full_and_not_lower_casing() {
        for (text, folded) in [
            ("STRASSE", "strasse"),
            ("Straße", "strasse"),
            ("ﬁ", "fi"),
            ("ΟΔΟΣ ς", "οδοσ σ"),
            ("ſ", "s"),
            ("\u{212a}", "k"),
            ("İ", "i\u{307}"),
            ("ꭰ", "Ꭰ"),
            ("ı", "ı"),
        ] {
            assert_eq!(fold(text), folded);
        }
    }

    #[test]
    fn conflict_markers_are_whole_lines() {
        for text in ["<<<<<<<", "a\n>>>>>>> b\n", "=======\n", "x\n=======", "<<<<<<< "] {
            assert!(has_conflict(text), "{text:?}");
        }
        for text in
            ["", "<<<<<<<a", "========", "======= ", " =======", "|||||||", "<<<<<< <", "=======\r"]
        {
            assert!(!has_conflict(text), "{text:?}");
        }
    }

    #[test]
    fn integers_are_read_as_python_reads_them() {
        for (text, value) in [
            ("3", Some(3)),
            (" -1_0\u{a0}", Some(-10)),
            ("+٣", Some(3)),
            ("𝟗9", Some(99)),
            ("99999999999999999999", Some(i64::MAX)),
            ("", None),
            ("-", None),
            ("0x3", None),
            ("2.5", None),
            ("1__0", None),
            ("_1", None),
            ("1_", None),
            ("- 1", None),
        ] {
            assert_eq!(integer(text), value, "{text:?}");
        }
    }
}
