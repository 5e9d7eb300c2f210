//! JSON as the protocol's files and payloads hold it: read as leniently as the reference engine's
//! parser (Python's `json.loads`) reads it, written in its one layout.
//!
//! What is passed through (session members, a marker's members) comes out as Python would write it:
//! whole numbers of any size, `NaN`, `Infinity`, `-Infinity`, floats in their shortest form.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Write};

use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::ser::Formatter;

/// Deepest nesting of lists and objects: where Python's parser gives up, and little enough that
/// recursion over a value fits the smallest stack in use, a thread's 2 MiB.
pub const MAX_DEPTH: usize = 1000;
/// Most digits of a whole number: Python's own limit (`sys.int_info.default_max_str_digits`).
const MAX_DIGITS: usize = 4300;
/// What stands for a surrogate that is not half of a pair.
const LONE: char = char::REPLACEMENT_CHARACTER;

/// A JSON value, and what Python takes for one.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number as Python writes it: a whole one, a float with point or exponent, or a constant.
    Number(String),
    /// A string, which may be none that UTF-8 can hold.
    Text(Text),
    /// A list.
    List(Vec<Json>),
    /// An object, in the order of its members; no name occurs twice.
    Object(Vec<(Text, Json)>),
}

/// A string of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text {
    /// Its characters, U+FFFD in the place of lone surrogates.
    chars: String,
    /// Whether there were any.
    lone: bool,
}

impl Text {
    fn as_str(&self) -> Option<&str> {
        (!self.lone).then_some(&*self.chars)
    }
}

impl Json {
    /// The string, if it is one that UTF-8 can hold.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => text.as_str(),
            _ => None,
        }
    }

    /// The string, with U+FFFD for every lone surrogate.
    pub fn lossy(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(&text.chars),
            _ => None,
        }
    }

    /// The list.
    pub fn as_list(&self) -> Option<&[Self]> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }

    /// Whether it is an object.
    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    /// An object's member.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members
                .iter()
                .find(|(member, _)| member.as_str() == Some(name))
                .map(|(_, value)| value),
            _ => None,
        }
    }

    /// Whether some string in it cannot be written as UTF-8.
    pub fn has_lone_surrogate(&self) -> bool {
        match self {
            Self::Text(text) => text.lone,
            Self::List(items) => items.iter().any(Self::has_lone_surrogate),
            Self::Object(members) => {
                members.iter().any(|(name, value)| name.lone || value.has_lone_surrogate())
            }
            Self::Null | Self::Bool(_) | Self::Number(_) => false,
        }
    }

    /// Appends it in the one layout; `level` is that of the line it begins on.
    fn render(&self, level: usize, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(digits) => out.push_str(digits),
            Self::Text(text) => out.push_str(&quoted(&text.chars)),
            Self::List(items) if items.is_empty() => out.push_str("[]"),
            Self::Object(members) if members.is_empty() => out.push_str("{}"),
            Self::List(items) => {
                for (at, item) in items.iter().enumerate() {
                    out.push_str(if at == 0 { "[" } else { "," });
                    new_line(level + 1, out);
                    item.render(level + 1, out);
                }
                new_line(level, out);
                out.push(']');
            }
            Self::Object(members) => {
                for (at, (name, value)) in members.iter().enumerate() {
                    out.push_str(if at == 0 { "{" } else { "," });
                    new_line(level + 1, out);
                    out.push_str(&quoted(&name.chars));
                    out.push_str(": ");
                    value.render(level + 1, out);
                }
                new_line(level, out);
                out.push('}');
            }
        }
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn new_line(level: usize, out: &mut String) {
    out.push('\n');
    for _ in 0..level {
        out.push_str("  ");
    }
}

impl From<bool> for Json {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<String> for Json {
    fn from(chars: String) -> Self {
        Self::Text(Text { chars, lone: false })
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => value.into(),
            Value::Number(number) => {
                let text = number.to_string();
                Self::Number(if number.is_f64() { float(&text) } else { text })
            }
            Value::String(text) => text.into(),
            Value::Array(items) => Self::List(items.into_iter().map(Self::from).collect()),
            Value::Object(members) => Self::Object(
                members
                    .into_iter()
                    .map(|(chars, value)| (Text { chars, lone: false }, value.into()))
                    .collect(),
            ),
        }
    }
}

/// Only [`pretty`] writes it as it is: its text is handed over as bytes, which nothing else here has.
impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::new();
        self.render(0, &mut text);
        serializer.serialize_bytes(text.as_bytes())
    }
}

/// Reads one JSON value. `NaN`, `Infinity` and `-Infinity` are numbers; of two equal members the last
/// one counts; surrogates may stand alone.
///
/// # Errors
/// Where reading stopped and why, without any of the content.
pub fn parse(text: &str) -> Result<Json, String> {
    let mut reader = Reader { text, at: 0 };
    let read = reader.value(0).and_then(|value| {
        reader.space();
        if reader.at == text.len() { Ok(value) } else { Err(NOT_JSON) }
    });
    read.map_err(|what| {
        let before = text.as_bytes().get(..reader.at).unwrap_or_default();
        let what = if what == NOT_JSON && reader.at == text.len() { ENDS } else { what };
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|b| **b != b'\n').count() + 1;
        format!("{what} (line {line}, column {column})")
    })
}

const NOT_JSON: &str = "it is not JSON";
const ENDS: &str = "it ends too early";

/// A place in a text that is read as JSON.
struct Reader<'a> {
    text: &'a str,
    /// Bytes read; always between two characters.
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Takes `word` if it comes next.
    fn takes(&mut self, word: &str) -> bool {
        let comes = self.rest().starts_with(word);
        if comes {
            self.at += word.len();
        }
        comes
    }

    fn value(&mut self, depth: usize) -> Result<Json, &'static str> {
        self.space();
        if self.takes("\"") {
            return self.string().map(Json::Text);
        }
        for (word, value) in [("null", Json::Null), ("true", true.into()), ("false", false.into())]
        {
            if self.takes(word) {
                return Ok(value);
            }
        }
        for constant in ["NaN", "Infinity", "-Infinity"] {
            if self.takes(constant) {
                return Ok(Json::Number(constant.to_owned()));
            }
        }
        let is_list = self.peek() == Some(b'[');
        if !is_list && self.peek() != Some(b'{') {
            return self.number();
        }
        if depth == MAX_DEPTH {
            return Err("it is nested too deep");
        }
        self.at += 1;
        if is_list { self.list(depth + 1) } else { self.object(depth + 1) }
    }

    fn list(&mut self, depth: usize) -> Result<Json, &'static str> {
        let mut items = Vec::new();
        self.space();
        if self.takes("]") {
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value(depth)?);
            self.space();
            if self.takes("]") {
                return Ok(Json::List(items));
            }
            if !self.takes(",") {
                return Err(NOT_JSON);
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, &'static str> {
        let mut members: Vec<(Text, Json)> = Vec::new();
        let mut places: HashMap<Text, usize> = HashMap::new();
        self.space();
        if self.takes("}") {
            return Ok(Json::Object(Vec::new()));
        }
        loop {
            self.space();
            if !self.takes("\"") {
                return Err(NOT_JSON);
            }
            let name = self.string()?;
            self.space();
            if !self.takes(":") {
                return Err(NOT_JSON);
            }
            let value = self.value(depth)?;
            match places.entry(name) {
                Entry::Occupied(place) => {
                    if let Some((_, old)) = members.get_mut(*place.get()) {
                        *old = value;
                    }
                }
                Entry::Vacant(place) => {
                    members.push((place.key().clone(), value));
                    place.insert(members.len() - 1);
                }
            }
            self.space();
            if self.takes("}") {
                return Ok(Json::Object(members));
            }
            if !self.takes(",") {
                return Err(NOT_JSON);
            }
        }
    }

    /// Digits from here on; how many.
    fn digits(&mut self) -> usize {
        let from = self.at;
        while self.peek().is_some_and(|b| b.is_ascii_digit()) {
            self.at += 1;
        }
        self.at - from
    }

    fn number(&mut self) -> Result<Json, &'static str> {
        let from = self.at;
        let _ = self.takes("-");
        let starts_with_zero = self.peek() == Some(b'0');
        let whole = if starts_with_zero { usize::from(self.takes("0")) } else { self.digits() };
        if whole == 0 {
            return Err(NOT_JSON);
        }
        let end = self.at;
        if self.takes(".") && self.digits() == 0 {
            self.at = end;
        }
        let before = self.at;
        if self.takes("e") || self.takes("E") {
            let _ = self.takes("+") || self.takes("-");
            if self.digits() == 0 {
                self.at = before;
            }
        }
        let text = self.text.get(from..self.at).unwrap_or_default();
        if self.at > end {
            return Ok(Json::Number(float(text)));
        }
        if whole > MAX_DIGITS {
            return Err("a whole number has too many digits");
        }
        Ok(Json::Number(if text == "-0" { "0" } else { text }.to_owned()))
    }

    /// The rest of a string whose first quote has been taken.
    fn string(&mut self) -> Result<Text, &'static str> {
        let mut text = Text { chars: String::new(), lone: false };
        loop {
            let rest = self.rest();
            let plain = rest.find(|c: char| c == '"' || c == '\\' || c < ' ').unwrap_or(rest.len());
            text.chars.push_str(rest.get(..plain).unwrap_or_default());
            self.at += plain;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => self.at += 1,
                _ => return Err(NOT_JSON),
            }
            let escaped = self.peek().ok_or(NOT_JSON)?;
            let c = match escaped {
                b'"' | b'\\' | b'/' => char::from(escaped),
                b'b' => '\u{8}',
                b'f' => '\u{c}',
                b'n' => '\n',
                b'r' => '\r',
                b't' => '\t',
                b'u' => {
                    self.at += 1;
                    let c = self.code_point()?;
                    text.lone |= c.is_none();
                    text.chars.push(c.unwrap_or(LONE));
                    continue;
                }
                _ => return Err(NOT_JSON),
            };
            self.at += 1;
            text.chars.push(c);
        }
    }

    /// The four digits of a `\u` escape.
    fn unit(&mut self) -> Result<u32, &'static str> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4).unwrap_or_default();
        let mut unit = 0;
        for digit in digits {
            unit = unit * 16 + char::from(*digit).to_digit(16).ok_or(NOT_JSON)?;
        }
        if digits.len() < 4 {
            return Err(NOT_JSON);
        }
        self.at += 4;
        Ok(unit)
    }

    /// What one `\u` escape, or a pair of them, means; `None` for a lone surrogate.
    fn code_point(&mut self) -> Result<Option<char>, &'static str> {
        let first = self.unit()?;
        let after = self.at;
        if (0xd800..0xdc00).contains(&first) && self.takes("\\u") {
            let second = self.unit()?;
            if (0xdc00..0xe000).contains(&second) {
                return Ok(char::from_u32(0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00)));
            }
            self.at = after;
        }
        Ok(char::from_u32(first))
    }
}

/// The float that `text` says, as Python's `repr` writes it: the fewest digits that mean it, with an
/// exponent below 1e-4 and from 1e16 on.
fn float(text: &str) -> String {
    // Every number of JSON is one to Rust.
    let value: f64 = text.parse().unwrap_or(f64::NAN);
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let short = format!("{value:e}");
    let Some((digits, exponent)) = short.split_once('e') else { return short };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{value:?}"),
    }
}

/// The layout of files and of stdout: two spaces a level, one final LF, non-ASCII as it is.
pub fn pretty(value: &impl Serialize) -> String {
    let mut bytes = Vec::new();
    let layout = Layout { level: 0, has_items: false };
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, layout);
    // Only maps with other keys than strings cannot be written, and there are none; what is written is
    // made of strings.
    let _ = value.serialize(&mut serializer);
    let mut text = String::from_utf8(bytes).unwrap_or_default();
    text.push('\n');
    text
}

/// [`pretty`]'s layout, into which a [`Json`] is put as its own text.
struct Layout {
    level: usize,
    has_items: bool,
}

impl Layout {
    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.has_items {
            self.line(out, b"\n")?;
        }
        out.write_all(bracket)
    }

    fn line<W: ?Sized + Write>(&self, out: &mut W, before: &[u8]) -> io::Result<()> {
        out.write_all(before)?;
        (0..self.level).try_for_each(|_| out.write_all(b"  "))
    }
}

impl Formatter for Layout {
    fn write_byte_array<W: ?Sized + Write>(&mut self, out: &mut W, text: &[u8]) -> io::Result<()> {
        for (at, line) in text.split(|b| *b == b'\n').enumerate() {
            if at > 0 {
                self.line(out, b"\n")?;
            }
            out.write_all(line)?;
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.line(out, if first { b"\n" } else { b",\n" })
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.line(out, if first { b"\n" } else { b",\n" })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}

/// The one line that stderr gets for an error.
pub fn error_line(message: &str) -> String {
    format!("{{\"ok\": false, \"error\": {}}}\n", Value::from(message))
}

/// Equality as Python sees it: 3.0 is 3, and true is 1.
pub fn equal(a: &Json, b: &Json) -> bool {
    let number = |value: &Json| match value {
        Json::Bool(b) => Some(f64::from(u8::from(*b))),
        // Rust reads the constants too. The numbers asked for are small, so nothing else rounds to them.
        Json::Number(digits) => digits.parse::<f64>().ok(),
        _ => None,
    };
    match (a, b) {
        (Json::List(a), Json::List(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Json::Object(a), Json::Object(b)) => {
            let same = |(name, a): &(Text, Json)| {
                b.iter().find(|(other, _)| other == name).is_some_and(|(_, b)| equal(a, b))
            };
            a.len() == b.len() && a.iter().all(same)
        }
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => a == b,
            (None, None) => a == b,
            _ => false,
        },
    }
}

/// Truth as Python sees it.
pub fn truthy(value: &Json) -> bool {
    match value {
        Json::Null => false,
        Json::Bool(b) => *b,
        Json::Number(digits) => digits.parse() != Ok(0.0),
        Json::Text(text) => !text.chars.is_empty(),
        Json::List(items) => !items.is_empty(),
        Json::Object(members) => !members.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The value that `text` says, in the one layout without its line ends and spaces.
    fn read(text: &str) -> Option<String> {
        let value = parse(text).ok()?;
        Some(pretty(&value).split_whitespace().collect())
    }

    #[test]
    fn constants_and_numbers_come_out_as_python_writes_them() {
        for (text, out) in [
            ("[NaN, -Infinity, Infinity]", "[NaN,-Infinity,Infinity]"),
            ("1e400", "Infinity"),
            ("-1e400", "-Infinity"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("1E2", "100.0"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.50e+22", "1.5e+22"),
            ("0.0001", "0.0001"),
            ("1e-5", "1e-05"),
            ("5e-324", "5e-324"),
            ("9007199254740993.0", "9007199254740992.0"),
        ] {
            assert_eq!(read(text).as_deref(), Some(out), "{text}");
        }
        for text in ["NaNa", "-NaN", "nan", "+1", "01", "1.", ".5", "1e", "1e+", "-", "0x1", "1_0"]
        {
            assert_eq!(read(text), None, "{text}");
        }
        assert!(parse(&"9".repeat(MAX_DIGITS)).is_ok());
        assert!(parse(&"9".repeat(MAX_DIGITS + 1)).is_err());
    }

    #[test]
    fn the_last_of_two_members_counts() {
        assert_eq!(read(r#"{"a": 1, "b": 2, "a": 3}"#).unwrap(), r#"{"a":3,"b":2}"#);
        for text in
            ["", "{} x", "[1,]", "[,]", "{,}", "{1:1}", "\u{feff}{}", "\"NaN", "\"\t\"", "\"\\x\""]
        {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn surrogates_are_paired_or_marked() {
        assert_eq!(parse("\"\\ud83d\\ude00\"").unwrap().as_str(), Some("\u{1f600}"));
        for (text, lossy) in [
            ("\"\\ud800\"", "\u{fffd}"),
            ("\"\\udc00\\ud800\"", "\u{fffd}\u{fffd}"),
            ("\"\\ud83d\\u0041\"", "\u{fffd}A"),
        ] {
            let value = parse(text).unwrap();
            assert_eq!((value.as_str(), value.lossy()), (None, Some(lossy)), "{text}");
        }
        assert!(parse("[{\"\\ud800\": 1}]").unwrap().has_lone_surrogate());
        assert!(parse("\"\\ud800\\u12\"").is_err());
    }

    /// In a test's thread, which has the small stack that workers have.
    #[test]
    fn nesting_is_bounded_and_fits_the_stack() {
        let nest = |depth: usize| {
            format!("{}{}{}", "[{\"a\":".repeat(depth / 2), 1, "}]".repeat(depth / 2))
        };
        let value = parse(&nest(MAX_DEPTH)).unwrap();
        assert!(truthy(&value) && equal(&value, &value.clone()) && !value.has_lone_surrogate());
        assert_eq!(pretty(&value).lines().count(), 2 * MAX_DEPTH + 1);
        assert!(parse(&nest(MAX_DEPTH + 2)).unwrap_err().contains("too deep"));
        assert!(parse(&"[".repeat(1_000_000)).is_err());
    }

    #[test]
    fn errors_say_where() {
        assert_eq!(parse("{\n  \"a\": x}").unwrap_err(), "it is not JSON (line 2, column 8)");
        assert!(parse("[1").unwrap_err().starts_with("it ends too early"));
    }

    #[test]
    fn the_layout_is_the_references() {
        let value = json!({"é\u{7f}\u{2028}": [], "b": {}, "c": ["\u{8}\u{1}/"]});
        let text = "{\n  \"é\u{7f}\u{2028}\": [],\n  \"b\": {},\n  \"c\": [\n    \"\\b\\u0001/\"\n  ]\n}\n";
        assert_eq!(pretty(&value), text);
        assert_eq!(pretty(&Json::from(value.clone())), text);
        let within = pretty(&[Some(Json::from(value))]);
        assert_eq!(within, format!("[\n  {}\n]\n", text.trim_end().replace('\n', "\n  ")));
        assert_eq!(error_line("a\n\"é"), "{\"ok\": false, \"error\": \"a\\n\\\"é\"}\n");
    }

    #[test]
    fn numbers_compare_as_in_python() {
        let equal = |a: Value, b: Value| equal(&a.into(), &b.into());
        let truthy = |value: Value| truthy(&value.into());
        assert!(equal(json!({"a": [3, true]}), json!({"a": [3.0, 1]})));
        assert!(!equal(json!(1), json!("1")));
        assert!(!equal(json!(null), json!(0)));
        assert!(truthy(json!("0")) && !truthy(json!(0.0)) && !truthy(json!(-0.0)));
        assert!(super::truthy(&parse("NaN").unwrap()));
    }
}
