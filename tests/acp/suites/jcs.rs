//! The canonical form and the strict reader against the public corpora for RFC 8785: the number list
//! of its author, and the edge, parse and depth corpora (`jcs_edge_v1`, `jcs_parse_v1`,
//! `jcs_depth_v1`) of algovoi-jcs-conformance-vectors, written down anew by what they are about.
//! The pairs of files of its author are tested beside the reader.

use commsd::acp::code::Code;
use commsd::acp::json::{MAX_DEPTH, canonical, parse};
use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256};

/// Bits of numbers near a third of each power of ten from 10^22 down, in the order of the list.
const THIRDS: [u64; 50] = [
    0x4466_9669_5dbd_1cc3,
    0x4432_11ed_e497_4a35,
    0x43fc_e97c_a0f2_1056,
    0x43c7_2130_80c1_a6ac,
    0x4392_80f3_9a34_8556,
    0x435d_9b1f_5d20_d557,
    0x4327_af4c_4a80_aaac,
    0x42f2_f2a3_6ecd_5556,
    0x42be_5105_7e15_5558,
    0x4288_40d1_31aa_aaac,
    0x4253_670d_c155_5557,
    0x421f_0b49_3555_5557,
    0x41e8_d5d4_2aaa_aaac,
    0x41b3_de43_5555_5556,
    0x417f_ca05_5555_5556,
    0x4149_6e6a_aaaa_aaab,
    0x4114_5855_5555_5555,
    0x40e0_46aa_aaaa_aaab,
    0x40aa_0aaa_aaaa_aaaa,
    0x4074_d555_5555_5555,
    0x4040_aaaa_aaaa_aaab,
    0x400a_aaaa_aaaa_aaab,
    0x3fd5_5555_5555_5555,
    0x3fa1_1111_1111_1111,
    0x3f6b_4e81_b4e8_1b4f,
    0x3f35_d867_c3ec_e2a5,
    0x3f01_79ec_9cbd_821e,
    0x3ecb_f647_612f_3696,
    0x3e96_5e9f_80f2_9212,
    0x3e61_e54c_6728_74db,
    0x3e2c_a213_d840_baf8,
    0x3df6_e80f_e033_c8c6,
    0x3dc2_533f_e68f_d3d2,
    0x3d8d_51ff_d74c_861c,
    0x3d57_74cc_ac3d_3817,
    0x3d22_c3d6_f030_f9ac,
    0x3cee_0624_b381_8f79,
    0x3cb8_04ea_2934_72c7,
    0x3c83_3721_ba90_5bd3,
    0x3c4e_be9c_5db3_c61e,
    0x3c18_987d_17c3_04e5,
    0x3be3_ad30_dfcf_371d,
    0x3baf_7b81_6618_582f,
    0x3b79_2f9a_b813_79bf,
    0x3b44_2615_600f_9499,
    0x3b10_1e77_800c_76e1,
    0x3ad9_ca58_cce0_be35,
    0x3aa4_a1e0_a3e6_fe90,
    0x3a70_8180_831f_320d,
    0x3a3a_68cd_9e98_5016,
];

/// The other numbers by which the list begins: halves, sums that differ late, bounds and neighbours.
const EDGES: [f64; 64] = [
    10.0,
    5.0,
    0.5,
    0.05,
    0.005,
    0.0005,
    5e-5,
    5e-6,
    5e-7,
    5e-8,
    5e-9,
    5.06e-6,
    5.006e-6,
    5.0006e-6,
    5.00006e-6,
    5.000006e-6,
    5.0000006e-6,
    5.00000006e-6,
    5.000000006e-6,
    5.0000000006e-6,
    5.00000000006e-6,
    5.000000000006e-6,
    5.0000000000006e-6,
    5.00000000000006e-6,
    5.000000000000006e-6,
    5e-6,
    1.0,
    -1.0,
    -0.9999999999999993,
    -0.9999999999999994,
    0.9999999999999993,
    0.9999999999999994,
    0.9999999999999996,
    0.9999999999999998,
    -0.9999999999999999,
    -0.9999999999999999,
    0.9999999999999999,
    0.9999999999999999,
    0.29999999999999993,
    0.3,
    0.30000000000000004,
    2.2250738585072014e-308,
    2.2250738585072e-308,
    2.225073858507201e-308,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    9_007_199_254_740_992.0,
    -9_007_199_254_740_992.0,
    2.9514790517935283e20,
    9.999999999999997e22,
    1e23,
    1.0000000000000001e23,
    9.999999999999997e20,
    9.999999999999999e20,
    1e21,
    9.999999999999997e-7,
    1e-6,
    333_333_333.3333332,
    333_333_333.33333325,
    333_333_333.3333333,
    333_333_333.3333334,
    333_333_333.33333343,
    -3.3333333333333333e-6,
    1_424_953_923_781_206.2,
];

/// The list of any length: cyberphone/json-canonicalization `testdata/numgen.js`, which the crate
/// `serde_json_canonicalizer` carries too.
fn numbers() -> impl Iterator<Item = f64> {
    let smallest = f64::from_bits(1);
    let first = [0.0, -0.0, smallest, -smallest].into_iter();
    let thirds = THIRDS.map(f64::from_bits);
    let fixed = first.chain(thirds.map(|third| -third)).chain(thirds).chain(EDGES);
    let serial = (0..2000).map(|n| f64::from_bits(0x0010_0000_0000_0000 + n));
    let mut block = [0; 32];
    let hashed = std::iter::repeat_with(move || {
        block = Sha256::digest(block).into();
        let (words, _) = block.as_chunks::<8>();
        std::array::from_fn::<f64, 4, _>(|at| f64::from_le_bytes(words[at]))
    });
    let usable = hashed.flatten().filter(|number| *number != 0.0 && number.is_finite());
    fixed.chain(serial).chain(usable)
}

#[test]
fn a_million_numbers_have_the_published_text() {
    let mut known = [
        (1_000, "be18b62b6f69cdab33a7e0dae0d9cfa869fda80ddc712221570f9f40a5878687"),
        (10_000, "b9f7a8e75ef22a835685a52ccba7f7d6bdc99e34b010992cbc5864cd12be6892"),
        (100_000, "22776e6d4b49fa294a0d0f349268e5c28808fe7e0cb2bcbe28f63894e494d4c7"),
        (1_000_000, "49415fee2c56c77864931bd3624faad425c3c577d6d74e89a83bc725506dad16"),
    ]
    .into_iter()
    .peekable();
    let mut hash = Sha256::new();
    for (number, lines) in numbers().zip(1..=1_000_000) {
        hash.update(format!("{:x},", number.to_bits()));
        hash.update(canonical(&number).unwrap());
        hash.update("\n");
        if let Some((_, expected)) = known.next_if(|(at, _)| *at == lines) {
            assert_eq!(HEXLOWER.encode(&hash.clone().finalize()), expected, "{lines} lines");
        }
    }
    assert!(known.next().is_none());
}

const MAX: usize = 1 << 20;

/// `jcs_edge_v1`: bytes that sorted-keys JSON of other kinds gets wrong.
#[test]
fn edges() {
    for (what, input, expected) in [
        ("U+2028 stands for itself", r#"{"v":"a\u2028b"}"#, "{\"v\":\"a\u{2028}b\"}"),
        ("U+2029 in a name", r#"{"\u2029":1}"#, "{\"\u{2029}\":1}"),
        (
            "order by UTF-16 unit",
            r#"{"\uffff":1,"\ud83d\ude00":2}"#,
            "{\"\u{1f600}\":2,\"\u{ffff}\":1}",
        ),
        (
            "names of all lengths in UTF-8",
            r#"{"😀":1,"💩":2,"é":3,"z":4}"#,
            r#"{"z":4,"é":3,"💩":2,"😀":1}"#,
        ),
        ("1.0", r#"{"n":1.0}"#, r#"{"n":1}"#),
        ("1", r#"{"n":1}"#, r#"{"n":1}"#),
        ("short escapes", r#""\u0008\u0009\u000a\u000c\u000d\u0022\u005c""#, r#""\b\t\n\f\r\"\\""#),
        ("other controls", r#""\u0000\u0001\u001F""#, r#""\u0000\u0001\u001f""#),
        ("what HTML escapes", r#""a\/b\u0026c\u003cd\u003ee""#, r#""a/b&c<d>e""#),
        ("no normalisation", r#""cafe\u0301""#, "\"cafe\u{301}\""),
    ] {
        let bytes = canonical(&parse(input.as_bytes(), MAX).unwrap()).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), expected, "{what}");
    }
}

/// `jcs_parse_v1`: member names that stand twice, and such that only seem to.
#[test]
fn members_that_stand_twice() {
    for (what, input) in [
        ("ok-control", r#"{"amount":1000000,"type":"spend_decision"}"#),
        ("ok-same-name-in-sibling-objects", r#"{"a":{"id":"x"},"b":{"id":"y"}}"#),
        ("ok-name-repeated-across-array-elements", r#"{"items":[{"id":"x"},{"id":"y"}]}"#),
    ] {
        assert!(parse(input.as_bytes(), MAX).is_ok(), "{what}");
    }
    for (what, input) in [
        ("rj-duplicate-top-level", r#"{"a":1,"a":2}"#),
        ("rj-duplicate-nested", r#"{"outer":{"b":1,"b":2}}"#),
        ("rj-duplicate-in-array-element", r#"{"items":[{"c":1,"c":2}]}"#),
        ("rj-duplicate-identical-values", r#"{"a":1,"a":1}"#),
        ("rj-duplicate-divergent-evidence", r#"{"kind":"decoy","kind":"private_matter"}"#),
    ] {
        assert_eq!(
            parse(input.as_bytes(), MAX).unwrap_err().code(),
            Code::DuplicateMember,
            "{what}"
        );
    }
}

/// Containers within each other, in turn of each kind, around `leaf`.
fn nested(kinds: &[(&str, &str)], count: usize, leaf: &str) -> Vec<u8> {
    let mut text = String::new();
    let mut ends = Vec::new();
    for (start, end) in kinds.iter().cycle().take(count) {
        text.push_str(start);
        ends.push(*end);
    }
    text.push_str(leaf);
    text.extend(ends.into_iter().rev());
    text.into_bytes()
}

/// `jcs_depth_v1`, at our own bound instead of its 128: the same relations, each side of the bound.
#[test]
fn depth() {
    const OBJECT: (&str, &str) = ("{\"a\":", "}");
    const ARRAY: (&str, &str) = ("[", "]");
    assert_eq!(MAX_DEPTH, 64);
    for (what, kinds, leaf, open) in [
        ("objects", &[OBJECT][..], "0", 0),
        ("arrays", &[ARRAY], "0", 0),
        ("one in the other", &[OBJECT, ARRAY], "0", 0),
        ("an empty object as leaf", &[OBJECT], "{}", 1),
        ("an empty array as leaf", &[ARRAY, OBJECT], "[]", 1),
    ] {
        let text = nested(kinds, 64 - open, leaf);
        assert_eq!(canonical(&parse(&text, MAX).unwrap()).unwrap(), text, "{what}");
        let deeper = parse(&nested(kinds, 65 - open, leaf), MAX);
        assert_eq!(deeper.unwrap_err().code(), Code::TooDeep, "{what}");
    }
    // Refused, and the process lives.
    let deepest = nested(&[ARRAY], 10_000_000, "0");
    assert_eq!(parse(&deepest, usize::MAX).unwrap_err().code(), Code::TooDeep);
}
