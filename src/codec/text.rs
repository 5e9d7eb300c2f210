//! Text that strangers wrote, made safe to show, and cut without breaking it. Knows no protocol;
//! what a name may be is decided in `identity::names`.

/// Whether `c` is shown as an escape: it moves the cursor, breaks the line, reorders or hides text.
///
/// Controls (C0, DEL, C1), the line and paragraph separators, bidirectional controls, and all of
/// Unicode's `Default_Ignorable_Code_Point` (zero-width characters, fillers, variation selectors,
/// tags), plus the interlinear annotation marks.
const fn is_hazard(c: char) -> bool {
    matches!(
        c,
        '\0'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Whether a name of our own must not have `c`: what [`escape_untrusted`] would write out, but for
/// the joiner and the variation selectors, which belong to emoji.
#[must_use]
pub const fn is_hidden(c: char) -> bool {
    is_hazard(c) && !matches!(c, '\u{200d}' | '\u{fe00}'..='\u{fe0f}')
}

/// Whether `text` has a character that [`is_hidden`].
#[must_use]
pub fn hides_something(text: &str) -> bool {
    text.chars().any(is_hidden)
}

/// Whether `text` has a character that is seen.
#[must_use]
pub fn shows_something(text: &str) -> bool {
    text.chars().any(|c| !is_hazard(c) && !c.is_whitespace() && c != '\u{2800}')
}

/// `text` with every dangerous or invisible character written as `\u{…}` (lower-case hex), fit for
/// one line of a terminal, log or prompt.
///
/// Everything else stays as it is, backslashes too: the result is for eyes, not for reading back.
/// One text or emoji presentation selector (U+FE0E, U+FE0F) right after a visible character stays,
/// because ordinary emoji carry it; a second in a row does not.
#[must_use]
pub fn escape_untrusted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_visible = false;
    for c in text.chars() {
        let presentation = matches!(c, '\u{fe0e}' | '\u{fe0f}') && after_visible;
        if is_hazard(c) && !presentation {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
        after_visible = !is_hazard(c) && !c.is_whitespace();
    }
    out
}

/// The same JSON as `json`, which has no line ends outside strings, with the characters that
/// [`escape_untrusted`] writes out as JSON's own escapes.
#[must_use]
pub fn escape_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut units = [0; 2];
    for c in json.chars() {
        if is_hazard(c) {
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// The first `max` characters (Unicode scalar values) of `text`; all of it when it is shorter.
#[must_use]
pub fn truncate_chars(text: &str, max: usize) -> &str {
    match text.char_indices().nth(max) {
        Some((at, _)) => text.get(..at).unwrap_or(text),
        None => text,
    }
}

/// Whether a text speaks to somebody: an `@` and a name of theirs, in any case, with neither a letter
/// nor a digit before or behind.
#[must_use]
pub fn mentions(text: &str, names: &[&str]) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices('@').any(|(at, _)| {
        let before = text.get(..at).and_then(|before| before.chars().next_back());
        let behind = text.get(at + 1..).unwrap_or_default();
        !before.is_some_and(joins)
            && names.iter().filter(|name| !name.is_empty()).any(|name| {
                let mut rest = behind.chars().flat_map(char::to_lowercase);
                name.chars().flat_map(char::to_lowercase).all(|c| rest.next() == Some(c))
                    && !rest.next().is_some_and(joins)
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_mention_is_a_whole_name_behind_an_at() {
        let ann = ["Ann Lee", "abababababab"];
        for text in ["@ann lee", "hi @ANN LEE, look", "(@Ann Lee)", "@abababababab?", "@x @ann lee"]
        {
            assert!(mentions(text, &ann), "{text}");
        }
        for text in
            ["ann lee", "@ann", "@ann leeds", "x@ann lee", "@ann lee_2", "@", "", "@ ann lee"]
        {
            assert!(!mentions(text, &ann), "{text}");
        }
        assert!(mentions("@Ärzte!", &["ärzte"]) && !mentions("@anything", &[""]));
    }

    #[test]
    fn ordinary_text_stays() {
        for text in [
            "",
            "plain ASCII, \"quotes\" and \\ too",
            "Grüße, 你好, שלום, नमस्ते",
            "👍🏽 ⚠\u{fe0f} 1\u{fe0f}\u{20e3}",
        ] {
            assert_eq!(escape_untrusted(text), text);
        }
    }

    #[test]
    fn dangerous_text_is_spelt_out() {
        for (text, shown) in [
            ("a\nb\r\t\0", "a\\u{a}b\\u{d}\\u{9}\\u{0}"),
            ("\x1b[2J", "\\u{1b}[2J"),
            ("\u{7f}\u{80}\u{9b}31m\u{9f}", "\\u{7f}\\u{80}\\u{9b}31m\\u{9f}"),
            ("\u{202a}\u{202e}\u{2066}\u{2069}", "\\u{202a}\\u{202e}\\u{2066}\\u{2069}"),
            ("\u{200e}\u{200f}\u{61c}", "\\u{200e}\\u{200f}\\u{61c}"),
            ("a\u{200b}\u{200d}\u{2060}\u{feff}b", "a\\u{200b}\\u{200d}\\u{2060}\\u{feff}b"),
            ("\u{ad}\u{3164}\u{ffa0}\u{115f}", "\\u{ad}\\u{3164}\\u{ffa0}\\u{115f}"),
            ("\u{e0041}\u{e0100}\u{1d173}", "\\u{e0041}\\u{e0100}\\u{1d173}"),
            ("\u{2028}\u{2029}\u{fff9}", "\\u{2028}\\u{2029}\\u{fff9}"),
            ("\u{fe0f}x\u{fe0f}\u{fe0f} \u{fe0f}", "\\u{fe0f}x\u{fe0f}\\u{fe0f} \\u{fe0f}"),
            ("x\u{fe00}", "x\\u{fe00}"),
        ] {
            assert_eq!(escape_untrusted(text), shown);
        }
    }

    #[test]
    fn cuts_between_characters() {
        assert_eq!(truncate_chars("añ👍b", 0), "");
        assert_eq!(truncate_chars("añ👍b", 3), "añ👍");
        assert_eq!(truncate_chars("añ👍b", 4), "añ👍b");
        assert_eq!(truncate_chars("añ👍b", 9), "añ👍b");
    }

    proptest! {
        #[test]
        fn nothing_dangerous_is_left(text in any::<String>()) {
            let shown = escape_untrusted(&text);
            prop_assert!(!shown.chars().any(char::is_control));
            let hidden = ['\u{202e}', '\u{2066}', '\u{200d}', '\u{feff}', '\u{2028}'];
            prop_assert!(!shown.contains(hidden));
        }

        #[test]
        fn escaped_json_is_the_same_value_and_hides_nothing(text in any::<String>()) {
            let text = format!("{text}\u{202e}\u{85}\u{9b}\u{2028}\u{200b}\u{e0041}");
            let shown = escape_json(&serde_json::json!([text]).to_string());
            prop_assert!(!shown.chars().any(is_hazard), "{:?}", shown);
            let back: Vec<String> = serde_json::from_str(&shown).unwrap();
            prop_assert_eq!(back, [text]);
        }

        #[test]
        fn a_cut_is_a_prefix_of_the_asked_length(text in any::<String>(), max in 0usize..40) {
            let cut = truncate_chars(&text, max);
            prop_assert!(text.starts_with(cut));
            prop_assert_eq!(cut.chars().count(), max.min(text.chars().count()));
        }
    }
}
