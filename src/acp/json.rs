//! JSON as the protocol reads and writes it: a strict reader (design 5.2) and the canonical form
//! (RFC 8785). Knows no object.
//!
//! The reader is not recursive, so no input can exhaust the stack. It goes through the whole text and
//! then reports the fault that comes first in the order of 5.2, not the one that comes first in
//! the text: two readers agree on the code.

use serde::Serialize;
use serde_json::{Map, Number, Value};
use sha2::{Digest as _, Sha256};

use super::code::{Code, Error, Result};

/// Containers that may be open at once; the outermost is 1, an empty one counts.
pub const MAX_DEPTH: usize = 64;

/// The largest magnitude of an integer, 2^53 - 1: above it, different numbers share one double.
pub const MAX_SAFE_INTEGER: u64 = 9_007_199_254_740_991;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Deep,
    Duplicate,
    Number,
    Unsafe,
}

/// A container whose end has not come.
enum Open {
    Array(Vec<Value>),
    Object(Map<String, Value>, String),
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    fault: Option<(Fault, usize)>,
}

/// Reads one JSON text of at most `max_bytes` bytes.
///
/// Numbers with an integral value come back as integers, so that `1.0`, `1e0` and `1` are one value,
/// and `-0` is `0`.
///
/// # Errors
/// In this order: `TOO_LARGE`, `BAD_JSON` (also invalid UTF-8, a lone surrogate, trailing bytes),
/// `TOO_DEEP`, `DUPLICATE_MEMBER`, `BAD_NUMBER`, `UNSAFE_INTEGER`.
pub fn parse(bytes: &[u8], max_bytes: usize) -> Result<Value> {
    if bytes.len() > max_bytes {
        let text = format!("{} bytes, at most {max_bytes} are taken", bytes.len());
        return Err(Error::new(Code::TooLarge, text));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Error::new(Code::BadJson, format!("no UTF-8 at byte {}", e.valid_up_to())))?;
    let mut reader = Reader { text, at: 0, fault: None };
    let value = reader.document()?;
    match reader.fault {
        None => Ok(value),
        Some((fault, at)) => Err(match fault {
            Fault::Deep => Error::new(
                Code::TooDeep,
                format!("more than {MAX_DEPTH} open containers at byte {at}"),
            ),
            Fault::Duplicate => Error::new(
                Code::DuplicateMember,
                format!("a member occurs twice in one object, at byte {at}"),
            ),
            Fault::Number => Error::new(Code::BadNumber, format!("no finite double at byte {at}")),
            Fault::Unsafe => {
                Error::new(Code::UnsafeInteger, format!("an integer beyond 2^53 - 1 at byte {at}"))
            }
        }),
    }
}

impl Reader<'_> {
    fn bad(&self, what: &str) -> Error {
        Error::new(Code::BadJson, format!("{what} at byte {}", self.at))
    }

    fn blame(&mut self, fault: Fault, at: usize) {
        if self.fault.is_none_or(|(worst, _)| fault < worst) {
            self.fault = Some((fault, at));
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn document(&mut self) -> Result<Value> {
        // What is open: of every container whether it is an object, and the containers themselves
        // as long as there are not too many of them.
        let mut kinds: Vec<bool> = Vec::new();
        let mut open: Vec<Open> = Vec::new();
        'value: loop {
            self.space();
            let mut value = match self.peek() {
                Some(start @ (b'{' | b'[')) => {
                    let object = start == b'{';
                    kinds.push(object);
                    if kinds.len() > MAX_DEPTH {
                        self.blame(Fault::Deep, self.at);
                        open = Vec::new();
                    }
                    self.at += 1;
                    self.space();
                    let build = !self.is_too_deep();
                    if self.take(if object { b'}' } else { b']' }) {
                        kinds.pop();
                        if object { Value::Object(Map::new()) } else { Value::Array(Vec::new()) }
                    } else {
                        let key = if object { self.key()? } else { String::new() };
                        if build {
                            open.push(if object {
                                Open::Object(Map::new(), key)
                            } else {
                                Open::Array(Vec::new())
                            });
                        }
                        continue 'value;
                    }
                }
                Some(b'"') => Value::String(self.string()?),
                Some(b'-' | b'0'..=b'9') => self.number()?,
                Some(b't') => self.word("true", Value::Bool(true))?,
                Some(b'f') => self.word("false", Value::Bool(false))?,
                Some(b'n') => self.word("null", Value::Null)?,
                _ => return Err(self.bad("no value")),
            };
            // The value is whole: put it into its container, and close what ends after it.
            loop {
                let Some(object) = kinds.last().copied() else {
                    self.space();
                    if self.at != self.text.len() {
                        return Err(self.bad("something after the end"));
                    }
                    return Ok(value);
                };
                self.space();
                let more = self.take(b',');
                if !more && !self.take(if object { b'}' } else { b']' }) {
                    return Err(self.bad("neither a comma nor the end of the container"));
                }
                let next = if more && object {
                    self.space();
                    Some(self.key()?)
                } else {
                    None
                };
                let (at, mut duplicate) = (self.at, false);
                match open.last_mut() {
                    Some(Open::Array(items)) => items.push(value),
                    Some(Open::Object(members, key)) => {
                        let key = std::mem::replace(key, next.unwrap_or_default());
                        duplicate = members.insert(key, value).is_some();
                    }
                    None => {}
                }
                if duplicate {
                    self.blame(Fault::Duplicate, at);
                }
                if more {
                    continue 'value;
                }
                kinds.pop();
                value = match open.pop() {
                    Some(Open::Array(items)) => Value::Array(items),
                    Some(Open::Object(members, _)) => Value::Object(members),
                    None => Value::Null,
                };
            }
        }
    }

    fn is_too_deep(&self) -> bool {
        self.fault.is_some_and(|(fault, _)| fault == Fault::Deep)
    }

    fn key(&mut self) -> Result<String> {
        if self.peek() != Some(b'"') {
            return Err(self.bad("no member name"));
        }
        let key = self.string()?;
        self.space();
        if !self.take(b':') {
            return Err(self.bad("no colon after a member name"));
        }
        Ok(key)
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value> {
        if !self.text.get(self.at..).is_some_and(|rest| rest.starts_with(word)) {
            return Err(self.bad("no value"));
        }
        self.at += word.len();
        Ok(value)
    }

    fn string(&mut self) -> Result<String> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let start = self.at;
            while !matches!(self.peek(), None | Some(b'"' | b'\\' | 0..0x20)) {
                self.at += 1;
            }
            // Both ends are beside ASCII bytes or the end, hence between characters.
            out.push_str(self.text.get(start..self.at).unwrap_or_default());
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => {
                    self.at += 1;
                    out.push(self.escape()?);
                }
                Some(_) => return Err(self.bad("a raw control character in a string")),
                None => return Err(self.bad("an unfinished string")),
            }
        }
    }

    fn escape(&mut self) -> Result<char> {
        let byte = self.peek();
        self.at += 1;
        Ok(match byte {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let first = self.unit()?;
                let code = if (0xd800..0xdc00).contains(&first) {
                    if !(self.take(b'\\') && self.take(b'u')) {
                        return Err(self.bad("a lone surrogate"));
                    }
                    let second = self.unit()?;
                    if !(0xdc00..0xe000).contains(&second) {
                        return Err(self.bad("a lone surrogate"));
                    }
                    0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00)
                } else {
                    first
                };
                char::from_u32(code).ok_or_else(|| self.bad("a lone surrogate"))?
            }
            _ => return Err(self.bad("an unknown escape")),
        })
    }

    fn unit(&mut self) -> Result<u32> {
        let digits = self
            .text
            .as_bytes()
            .get(self.at..self.at + 4)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .ok_or_else(|| self.bad("an escape without four hexadecimal digits"))?;
        let unit = u32::from_str_radix(digits, 16).map_err(|_| self.bad("no number"))?;
        self.at += 4;
        Ok(unit)
    }

    fn digits(&mut self) -> Result<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.bad("a number without digits")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Value> {
        let start = self.at;
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            if !self.take(b'+') {
                self.take(b'-');
            }
            self.digits()?;
        }
        let text = self.text.get(start..self.at).unwrap_or_default();
        let number: f64 = text.parse().map_err(|_| self.bad("no number"))?;
        #[allow(clippy::cast_precision_loss, reason = "2^53 - 1 is a double")]
        let limit = MAX_SAFE_INTEGER as f64;
        if !number.is_finite() {
            self.blame(Fault::Number, start);
            return Ok(Value::Null);
        }
        if number.abs() > limit {
            // Every double of this size is integral.
            self.blame(Fault::Unsafe, start);
            return Ok(Value::Null);
        }
        if number.fract() == 0.0 {
            #[allow(clippy::cast_possible_truncation, reason = "integral and below 2^53")]
            let whole = number as i64;
            return Ok(Value::from(whole));
        }
        Ok(Number::from_f64(number).map_or(Value::Null, Value::Number))
    }
}

/// The canonical form (RFC 8785) of anything that serialises to JSON.
///
/// # Errors
/// `BAD_NUMBER` for what JSON cannot say; values that [`parse`] returned never fail.
pub fn canonical<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>> {
    serde_json_canonicalizer::to_vec(&value)
        .map_err(|_| Error::new(Code::BadNumber, "this value has no JSON form"))
}

/// SHA-256.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn code(text: &str) -> Code {
        parse(text.as_bytes(), 1 << 20).unwrap_err().code()
    }

    fn canon(text: &str) -> String {
        String::from_utf8(canonical(&parse(text.as_bytes(), 1 << 20).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn refusals_come_in_the_order_of_the_design() {
        assert_eq!(parse(b"[1,2]", 4).unwrap_err().code(), Code::TooLarge);
        for bad in [
            "",
            " ",
            "{",
            "[",
            "[1,]",
            "{\"a\":1,}",
            "{a:1}",
            "[1 2]",
            "01",
            "1.",
            ".5",
            "+1",
            "-",
            "1e",
            "nul",
            "truex",
            "\"\\x\"",
            "\"\u{1}\"",
            "\"a",
            "\"\\ud800\"",
            "\"\\udc00\"",
            "\"\\ud800\\u0041\"",
            "\"\\u12g4\"",
            "\"\\u+123\"",
            "1 2",
            "{} x",
            "\u{feff}1",
            "NaN",
            "Infinity",
            "'a'",
            "[1}",
            "{\"a\":1]",
            "{\"a\" 1}",
            "/**/1",
        ] {
            assert_eq!(code(bad), Code::BadJson, "{bad}");
        }
        assert_eq!(parse(b"\"\xff\"", 9).unwrap_err().code(), Code::BadJson);
        assert_eq!(code(r#"{"a":1,"a":1}"#), Code::DuplicateMember);
        assert_eq!(code(r#"{"a":1,"\u0061":2}"#), Code::DuplicateMember);
        assert_eq!(code(r#"[{"b":{"a":1,"c":2,"a":[]}}]"#), Code::DuplicateMember);
        assert_eq!(code("1e400"), Code::BadNumber);
        for unsafe_integer in
            ["9007199254740992", "-9007199254740993", "1e30", "1e16", "9007199254740991.9"]
        {
            assert_eq!(code(unsafe_integer), Code::UnsafeInteger, "{unsafe_integer}");
        }
        // Later faults of the text that come earlier in the order.
        assert_eq!(code(r#"{"a":1e400,"a":1} x"#), Code::BadJson);
        assert_eq!(code(r#"[9007199254740993,1e400]"#), Code::BadNumber);
        assert_eq!(code(r#"[9007199254740993,{"a":1,"a":1}]"#), Code::DuplicateMember);
        let deep = "[".repeat(65) + &"]".repeat(65);
        assert_eq!(code(&format!(r#"[{{"a":1,"a":2}},{deep}]"#)), Code::TooDeep);
        assert_eq!(code(&format!("[{deep},")), Code::BadJson);
    }

    #[test]
    fn depth_is_64() {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let nested = |n: usize, core: &str| open.repeat(n) + core + &close.repeat(n);
            assert!(parse(nested(64, "1").as_bytes(), 1 << 20).is_ok());
            assert!(parse(nested(63, "[]").as_bytes(), 1 << 20).is_ok());
            assert!(parse(nested(63, "{}").as_bytes(), 1 << 20).is_ok());
            assert_eq!(code(&nested(65, "1")), Code::TooDeep);
            assert_eq!(code(&nested(64, "[]")), Code::TooDeep);
            assert_eq!(code(&nested(64, "{}")), Code::TooDeep);
        }
        let deep = "[".repeat(10_000_000);
        assert_eq!(parse(deep.as_bytes(), usize::MAX).unwrap_err().code(), Code::BadJson);
        let deep = deep + &"]".repeat(10_000_000);
        assert_eq!(parse(deep.as_bytes(), usize::MAX).unwrap_err().code(), Code::TooDeep);
    }

    #[test]
    fn the_files_of_rfc_8785() {
        // cyberphone/json-canonicalization testdata; digests of the canonical bytes.
        let values = r#"{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],"string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}"#;
        let french = "{\"peach\":\"This sorting order\",\"p\u{e9}ch\u{e9}\":\"is wrong according to French\",\"p\u{ea}che\":\"but canonicalization MUST\",\"sin\":\"ignore locale\"}";
        let weird = r#"{"\u20ac":"Euro Sign","\r":"Carriage Return","\u000a":"Newline","1":"One","\u0080":"Control\u007f","\ud83d\ude02":"Smiley","\u00f6":"Latin Small Letter O With Diaeresis","\ufb33":"Hebrew Letter Dalet With Dagesh","</script>":"Browser Challenge"}"#;
        for (input, digest) in [
            (
                r#"[56,{"d":true,"10":null,"1":[]}]"#,
                "099601b171cafed97c333f8878d68e7f8c8f795412adb34b2fdcf0e7c7beac42",
            ),
            (french, "d99d0ebdcb0033cb858cfa830ae46bc0fb3309413b271f1da828c89901a27ed5"),
            (
                r#"{"1":{"f":{"f":"hi","F":5},"\n":56.0},"10":{},"":"empty","a":{},"111":[{"e":"yes","E":"no"}],"A":{}}"#,
                "605f65004ec2db7692522a0852c22f1c989e036d547e88963d1a3143cf3195d5",
            ),
            (
                r#"{"Unnormalized Unicode":"A\u030a"}"#,
                "0d99aad92a125196ff887876643fd3206786a84ddce2cee52ba4ad256d2381d3",
            ),
            (weird, "6af595a9aa80110b964b4de3f82a05fa6ae7423005019bacfa2620dddc4e94d1"),
        ] {
            let bytes = canonical(&parse(input.as_bytes(), 1 << 20).unwrap()).unwrap();
            let hex = data_encoding::HEXLOWER.encode(&sha256(&bytes));
            assert_eq!(hex, digest, "{}", String::from_utf8_lossy(&bytes));
        }
        // 1E30 is canonical JSON and no integer of ours.
        assert_eq!(code(values), Code::UnsafeInteger);
        let lax: Value = serde_json::from_str(values).unwrap();
        assert_eq!(
            data_encoding::HEXLOWER.encode(&sha256(&canonical(&lax).unwrap())),
            "2d5e01a318d0f0879ab568c4be289c8b1f64ef8921a53c6277d5e069978baacb"
        );
    }

    #[test]
    fn numbers_of_rfc_8785() {
        for (bits, text) in [
            (0x4340_0000_0000_0001_u64, "9007199254740994"),
            (0x4340_0000_0000_0002, "9007199254740996"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x8000_0000_0000_0000, "0"),
            (0, "0"),
        ] {
            assert_eq!(canonical(&f64::from_bits(bits)).unwrap(), text.as_bytes());
        }
        for bits in [0x7fff_ffff_ffff_ffff_u64, 0x7ff0_0000_0000_0000, 0xfff0_0000_0000_0000] {
            assert_eq!(canonical(&f64::from_bits(bits)).unwrap_err().code(), Code::BadNumber);
        }
        assert_eq!(canon("[-0,1.0,1e2,-0.0,1e-7,4.50]"), "[0,1,100,0,1e-7,4.5]");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (-9_007_199_254_740_991_i64..=9_007_199_254_740_991).prop_map(Value::from),
            (-1e9f64..1e9).prop_map(|n| if n.fract() == 0.0 {
                Value::Null
            } else {
                Value::from(n)
            }),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_what_serde_writes(value in any_json()) {
            for text in [serde_json::to_vec(&value).unwrap(), serde_json::to_vec_pretty(&value).unwrap(), canonical(&value).unwrap()] {
                prop_assert_eq!(parse(&text, usize::MAX).unwrap(), value.clone());
            }
        }

        /// Whatever is taken here, serde_json takes too, as the same value; and the other way round but for
        /// what only we refuse.
        #[test]
        fn agrees_with_serde_json(text in r#"[\[\]{}",:0-9eE.+\-a-z\\ ]{0,24}"#) {
            let ours = parse(text.as_bytes(), usize::MAX);
            let theirs = serde_json::from_str::<Value>(&text);
            match (ours, theirs) {
                (Ok(ours), Ok(theirs)) => prop_assert_eq!(canonical(&ours).unwrap(), canonical(&theirs).unwrap()),
                (Err(error), Ok(_)) => prop_assert!(error.code() != Code::BadJson, "{}", error),
                (Err(error), Err(_)) => prop_assert!(matches!(error.code(), Code::BadJson | Code::BadNumber), "{}", error),
                (Ok(_), Err(error)) => prop_assert!(false, "{}", error),
            }
        }
    }
}
