//! Which bytes are one canonical item.

use commsd::codec::cbor::{MAX_DEPTH, Value, decode};

use crate::support::{hex, lab, list, text};

/// Our decoder accepts what the reference accepts and would write itself; what the reference
/// merely tolerates is refused, so that decoding and encoding are exact inverses.
#[test]
fn items() {
    let cases = list(&lab("cbor-negative.json"), "items");
    assert_eq!(cases.len(), 123);
    for case in cases {
        let bytes = hex(&case, "hex");
        let reason = text(&case, "reason");
        let canonical = text(&case, "verdict") == "accept" && case["canonical"] == true;
        // The reference allows a nesting of 1024.
        let too_deep = reason.contains("nesting") && bytes.len() > MAX_DEPTH;
        match decode(&bytes) {
            Ok(value) => {
                assert!(canonical && !too_deep, "accepted: {reason}");
                assert_eq!(value.encode(), bytes, "{reason}");
            }
            Err(error) => assert!(!canonical || too_deep, "{reason}: {error}"),
        }
    }
}

/// What the reference's encoder makes of JavaScript values that a Rust value can stand for.
#[test]
fn encoder() {
    let cases = list(&lab("cbor-negative.json"), "encoder");
    let mut seen = 0;
    for case in cases {
        let value = match text(&case, "js") {
            "2**53 (number)" => Value::Float(2f64.powi(53)),
            "2**53-1" => Value::Float(2f64.powi(53) - 1.0),
            "-(2**53-1)" => Value::Float(1.0 - 2f64.powi(53)),
            "1e21" => Value::Float(1e21),
            "2n**53n" => Value::Uint(1 << 53),
            "-0" => Value::Float(-0.0),
            "0.1" => Value::Float(0.1),
            "1.5" => Value::Float(1.5),
            "65504.5" => Value::Float(65504.5),
            "NaN" => Value::Float(f64::NAN),
            "Infinity" => Value::Float(f64::INFINITY),
            "undefined" => Value::Undefined,
            "{b:1,a:2,aa:3}" => Value::map([("b", 1u64), ("a", 2), ("aa", 3)]),
            "{\"10\":1,\"9\":2}" => Value::map([("10", 1u64), ("9", 2)]),
            "new Uint8Array(0)" => Value::Bytes(Vec::new()),
            "e + combining acute" => Value::from("e\u{301}"),
            _ => continue,
        };
        seen += 1;
        assert_eq!(value.encode(), hex(&case, "hex"), "{}", case["js"]);
    }
    assert_eq!(seen, 16);
}
