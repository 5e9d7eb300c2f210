use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

fn refusal(hex: &str) -> &'static str {
    decode(&data_encoding::HEXLOWER.decode(hex.as_bytes()).unwrap()).unwrap_err().code()
}

fn hex(value: &Value) -> String {
    data_encoding::HEXLOWER.encode(&value.encode())
}

#[test]
fn refusals_name_the_rule() {
    for (input, code) in [
        ("", "truncated"),
        ("0000", "trailing_bytes"),
        ("1817", "overlong_head"),
        ("9f01ff", "indefinite_length"),
        ("ff", "indefinite_length"),
        ("1c", "reserved"),
        ("fc", "reserved"),
        ("a2616101616102", "key_order"),
        ("a2616202616101", "key_order"),
        ("61ff", "invalid_text"),
        ("f81f", "invalid_simple"),
        ("f93c00", "not_shortest"),
        ("f97e01", "not_shortest"),
        ("fa3fc00000", "not_shortest"),
        ("d9d9f7f5", "invalid_tag"),
        ("c248ffffffffffffffff", "invalid_tag"),
        ("9bffffffffffffffff", "truncated"),
        ("bb00ffffffffffffff", "truncated"),
        ("5bffffffffffffffff", "truncated"),
    ] {
        assert_eq!(refusal(input), code, "{input}");
    }
}

#[test]
fn depth_is_bounded_and_the_bound_is_reachable() {
    let nested = |n: usize| [vec![0x81; n], vec![0x01]].concat();
    assert!(decode(&nested(MAX_DEPTH)).is_ok());
    assert_eq!(decode(&nested(MAX_DEPTH + 1)).unwrap_err().kind, CborErrorKind::TooDeep);
    assert_eq!(decode(&vec![0x81; 1 << 20]).unwrap_err().kind, CborErrorKind::TooDeep);
    let tags = [vec![0xc6; MAX_DEPTH + 1], vec![0x01]].concat();
    assert_eq!(decode(&tags).unwrap_err().kind, CborErrorKind::TooDeep);
}

#[test]
fn items_are_bounded() {
    let mut input = vec![0x9a];
    let n = u32::try_from(MAX_ITEMS).unwrap();
    input.extend_from_slice(&n.to_be_bytes());
    input.resize(input.len() + MAX_ITEMS, 0x00);
    assert_eq!(decode(&input).unwrap_err().kind, CborErrorKind::TooManyItems);
}

#[test]
fn numbers_take_the_form_of_the_reference() {
    for (value, expected) in [
        (Value::Float(9_007_199_254_740_992.0), "fa5a000000"),
        (Value::Float(9_007_199_254_740_991.0), "1b001fffffffffffff"),
        (Value::Float(-9_007_199_254_740_991.0), "3b001ffffffffffffe"),
        (Value::Float(1e21), "fb444b1ae4d6e2ef50"),
        (Value::Float(-0.0), "f98000"),
        (Value::Float(0.1), "fb3fb999999999999a"),
        (Value::Float(1.5), "f93e00"),
        (Value::Float(65504.5), "fa477fe080"),
        (Value::Float(5.960_464_477_539_063e-8), "f90001"),
        (Value::Float(f64::NAN), "f97e00"),
        (Value::Float(f64::NEG_INFINITY), "f9fc00"),
        (Value::from(-7i64), "26"),
        (Value::from(i64::MIN), "3b7fffffffffffffff"),
    ] {
        assert_eq!(hex(&value), expected);
    }
}

#[test]
fn maps_are_sorted_by_encoded_key_and_hold_a_key_once() {
    let entries = vec![
        (Value::from("aa"), Value::from(3u64)),
        (Value::from("b"), Value::from(1u64)),
        (Value::from(4u64), Value::from(1u64)),
        (Value::from("b"), Value::from(2u64)),
        (Value::from(-1i64), Value::from(3u64)),
    ];
    let expected = "a4040120036162026261 6103".replace(' ', "");
    assert_eq!(hex(&Value::map(entries.clone())), expected);
    assert_eq!(hex(&Value::Map(entries)), expected);
}

#[test]
fn undefined_is_absent() {
    let value = decode(&[0xa1, 0x61, b'a', 0xf7]).unwrap();
    assert_eq!(value.get("a"), None);
    assert_eq!(value.encode(), [0xa1, 0x61, b'a', 0xf7]);
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Tagged {
    RoomMessage {
        id: String,
        #[serde(rename = "replyTo", skip_serializing_if = "Option::is_none", default)]
        reply_to: Option<String>,
        pid: u32,
        offset: i64,
    },
    Gone,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Plain {
    Unit,
    New(u8),
    Pair(u8, bool),
    Struct { a: Option<f64> },
}

#[test]
fn the_bridge_has_the_usual_semantics() {
    let message = Tagged::RoomMessage { id: "x".into(), reply_to: None, pid: 7, offset: -300 };
    let value = to_value(&message).unwrap();
    let expected = Value::map([
        ("type", Value::from("room_message")),
        ("id", Value::from("x")),
        ("pid", Value::from(7u64)),
        ("offset", Value::from(-300i64)),
    ]);
    assert_eq!(value, expected);
    assert_eq!(from_value::<Tagged>(&value).unwrap(), message);

    let Value::Map(mut entries) = value else { panic!("not a map") };
    entries.push((Value::from("replyTo"), Value::Undefined));
    entries.push((Value::from("unknown"), Value::Tag(42, Box::new(Value::Null))));
    // Buffering an internally tagged enum reads every member, so a tag is refused there …
    assert!(from_value::<Tagged>(&Value::map(entries.clone())).is_err());
    entries.pop();
    // … while an undefined member is as good as none.
    assert_eq!(from_value::<Tagged>(&Value::map(entries)).unwrap(), message);
    assert_eq!(to_value(&Tagged::Gone).unwrap(), Value::map([("type", "gone")]));

    for (plain, expected) in [
        (Plain::Unit, "64556e6974"),
        (Plain::New(1), "a1634e657701"),
        (Plain::Pair(1, true), "a164506169728201f5"),
        (Plain::Struct { a: None }, "a166537472756374a16161f6"),
        (Plain::Struct { a: Some(0.5) }, "a166537472756374a16161f93800"),
    ] {
        let value = to_value(&plain).unwrap();
        assert_eq!(hex(&value), expected);
        assert_eq!(from_value::<Plain>(&decode(&value.encode()).unwrap()).unwrap(), plain);
    }
}

#[test]
fn whole_floats_come_back_as_floats() {
    let value = decode(&to_value(&2.0f64).unwrap().encode()).unwrap();
    assert_eq!(value, Value::Uint(2));
    assert_eq!(from_value::<f64>(&value).unwrap(), 2.0);
}

#[test]
fn a_message_never_quotes_control_characters() {
    let value = Value::map([("type", "\u{1b}[31m\nfoo")]);
    let text = from_value::<Tagged>(&value).unwrap_err().to_string();
    assert!(text.chars().all(|c| !c.is_control()), "{text:?}");
}

/// Any value whose encoding stays within the decoder's limits.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<u64>().prop_map(Value::Uint),
        any::<u64>().prop_map(Value::Nint),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
        ".{0,20}".prop_map(Value::Text),
        any::<bool>().prop_map(Value::Bool),
        Just(Value::Null),
        Just(Value::Undefined),
        prop_oneof![0u8..20, 32u8..].prop_map(Value::Simple),
        any::<f64>().prop_map(Value::Float),
        any::<f32>().prop_map(|x| Value::Float(f64::from(x))),
        any::<u16>().prop_map(|bits| Value::Float(encode::f16_to_f64(bits))),
    ];
    leaf.prop_recursive(6, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
            prop::collection::vec((inner.clone(), inner.clone()), 0..8).prop_map(Value::Map),
            (40u64..60, inner).prop_map(|(tag, v)| Value::Tag(tag, Box::new(v))),
        ]
    })
}

proptest! {
    #[test]
    fn what_is_encoded_decodes_to_the_same_bytes(value in values()) {
        let bytes = value.encode();
        let decoded = decode(&bytes).unwrap();
        prop_assert_eq!(decoded.encode(), bytes);
    }

    #[test]
    fn random_bytes_decode_only_if_canonical(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(value) = decode(&bytes) {
            prop_assert_eq!(value.encode(), bytes);
        }
    }

    #[test]
    fn mutated_bytes_decode_only_if_canonical(
        value in values(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = value.encode();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(value) = decode(&bytes) {
            prop_assert_eq!(value.encode(), bytes);
        }
    }

    #[test]
    fn half_floats_survive(bits in any::<u16>()) {
        let x = encode::f16_to_f64(bits);
        let mut out = Vec::new();
        encode::float(x, &mut out);
        if x.is_nan() {
            prop_assert_eq!(out, [0xf9, 0x7e, 0x00]);
            return Ok(());
        }
        let plain = x.fract() != 0.0 || (x == 0.0 && x.is_sign_negative()) || x.is_infinite();
        if plain {
            prop_assert_eq!(out, [&[0xf9][..], &bits.to_be_bytes()].concat());
        } else {
            prop_assert!(out[0] != 0xfa && out[0] != 0xfb);
        }
    }
}
