//! JSON as the protocol's files and payloads hold it: read as leniently as the reference engine
//! reads it, written in its one layout.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::Value;

/// Reads one JSON value. `NaN`, `Infinity` and `-Infinity` are read as null, so that they do no harm
/// where a member is ignored and are refused where a string is wanted. Of two equal members the last
/// one counts.
///
/// # Errors
/// Where reading stopped and why, without any of the content.
pub fn parse(text: &str) -> Result<Value, String> {
    serde_json::from_str(&without_constants(text)).map_err(|error| {
        let what = match error.classify() {
            serde_json::error::Category::Eof => "it ends too early",
            _ => "it is not JSON",
        };
        format!("{what} (line {}, column {})", error.line(), error.column())
    })
}

/// `text` with Python's three constants for numbers that JSON does not have replaced by null.
fn without_constants(text: &str) -> Cow<'_, str> {
    if !text.contains("NaN") && !text.contains("Infinity") {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['"', 'N', 'I', '-']) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let constant =
            ["NaN", "Infinity", "-Infinity"].iter().find(|name| from.starts_with(**name));
        let taken = if let Some(name) = constant {
            out.push_str("null");
            name.len()
        } else {
            let taken = if from.starts_with('"') { string_end(from) } else { 1 };
            out.push_str(from.get(..taken).unwrap_or(from));
            taken
        };
        rest = from.get(taken..).unwrap_or_default();
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Length of the string literal that `text` begins with, quotes included.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, b) in text.bytes().enumerate().skip(1) {
        match b {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The layout of files and of stdout: two spaces a level, one final LF, non-ASCII as it is.
pub fn pretty(value: &impl Serialize) -> String {
    // Only maps with other keys than strings cannot be written, and there are none.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

/// The one line that stderr gets for an error.
pub fn error_line(message: &str) -> String {
    format!("{{\"ok\": false, \"error\": {}}}\n", Value::from(message))
}

/// Equality as Python sees it: 3.0 is 3, and true is 1.
pub fn equal(a: &Value, b: &Value) -> bool {
    let number = |value: &Value| match value {
        Value::Bool(b) => Some(f64::from(u8::from(*b))),
        Value::Number(n) => n.as_f64(),
        _ => None,
    };
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| equal(a, b)))
        }
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => a == b,
            (None, None) => a == b,
            _ => false,
        },
    }
}

/// Truth as Python sees it.
pub fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(b) => *b,
        Value::Number(n) => n.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn constants_are_read_outside_strings_only() {
        let value = parse(r#"{"a": [NaN, -Infinity, Infinity, -1], "N\"aN": "NaN \\"}"#).unwrap();
        assert_eq!(value, json!({"a": [null, null, null, -1], "N\"aN": "NaN \\"}));
        assert!(parse("NaNa").is_err());
        assert!(parse("\"NaN").is_err());
    }

    #[test]
    fn the_last_of_two_members_counts() {
        assert_eq!(parse(r#"{"a": 1, "b": 2, "a": 3}"#).unwrap().to_string(), r#"{"a":3,"b":2}"#);
        for text in ["", "{} x", "[1,]", "\u{feff}{}", "\"\\ud800\""] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_layout_is_the_references() {
        let value = json!({"é\u{7f}\u{2028}": [], "b": {}, "c": ["\u{8}\u{1}/"]});
        assert_eq!(
            pretty(&value),
            "{\n  \"é\u{7f}\u{2028}\": [],\n  \"b\": {},\n  \"c\": [\n    \"\\b\\u0001/\"\n  ]\n}\n"
        );
        assert_eq!(error_line("a\n\"é"), "{\"ok\": false, \"error\": \"a\\n\\\"é\"}\n");
    }

    #[test]
    fn numbers_compare_as_in_python() {
        assert!(equal(&json!({"a": [3, true]}), &json!({"a": [3.0, 1]})));
        assert!(!equal(&json!(1), &json!("1")));
        assert!(!equal(&json!(null), &json!(0)));
        assert!(truthy(&json!("0")) && !truthy(&json!(0.0)));
    }
}
