//! JSON-Schema-Test-Suite for Draft 2020-12 (`tests/vectors/json-schema`) against the validator as it
//! is configured for schemas of strangers, with the strict reader before it and the price of each
//! value within its bound.
//!
//! `format` only annotates, as the draft has it by default; the suite's optional cases that demand
//! more of it are left out. No pattern of the suite needs backtracking.

use std::collections::BTreeMap;

use commsd::acp::code::Code;
use commsd::acp::json::parse;
use commsd::acp::schema::UserSchema;
use serde_json::Value;

/// Nothing is fetched, and no name of a document leads back into it: references begin with `#`.
const REMOTE: [&str; 46] = [
    "anchor | Location-independent identifier with absolute URI",
    "anchor | Location-independent identifier with base URI change in subschema",
    "defs | validate definition against metaschema",
    "dynamicRef | A $dynamicRef resolves to the first $dynamicAnchor still in scope that is encountered when the schema is evaluated",
    "dynamicRef | A $dynamicRef without anchor in fragment behaves identical to $ref",
    "dynamicRef | A $dynamicRef with intermediate scopes that don't include a matching $dynamicAnchor does not affect dynamic scope resolution",
    "dynamicRef | An $anchor with the same name as a $dynamicAnchor is not used for dynamic scope resolution",
    "dynamicRef | A $dynamicRef without a matching $dynamicAnchor in the same schema resource behaves like a normal $ref to $anchor",
    "dynamicRef | A $dynamicRef with a non-matching $dynamicAnchor in the same schema resource behaves like a normal $ref to $anchor",
    "dynamicRef | A $dynamicRef that initially resolves to a schema with a matching $dynamicAnchor resolves to the first $dynamicAnchor in the dynamic scope",
    "dynamicRef | A $dynamicRef that initially resolves to a schema without a matching $dynamicAnchor behaves like a normal $ref to $anchor",
    "dynamicRef | multiple dynamic paths to the $dynamicRef keyword",
    "dynamicRef | strict-tree schema, guards against misspelled properties",
    "dynamicRef | tests for implementation dynamic anchor and reference link",
    "dynamicRef | $ref and $dynamicAnchor are independent of order - $defs first",
    "dynamicRef | $ref and $dynamicAnchor are independent of order - $ref first",
    "dynamicRef | $ref to $dynamicRef finds detached $dynamicAnchor",
    "dynamicRef | $dynamicRef skips over intermediate resources - direct reference",
    "ref | remote ref, containing refs itself",
    "ref | Recursive references between schemas",
    "ref | order of evaluation: $id and $ref",
    "ref | simple URN base URI with $ref via the URN",
    "ref | URN base URI with URN and JSON pointer ref",
    "ref | URN base URI with URN and anchor ref",
    "ref | URN ref with nested pointer ref",
    "ref | ref to if",
    "ref | ref to then",
    "ref | ref to else",
    "refRemote | remote ref",
    "refRemote | fragment within remote ref",
    "refRemote | anchor within remote ref",
    "refRemote | ref within remote ref",
    "refRemote | base URI change - change folder",
    "refRemote | base URI change - change folder in subschema",
    "refRemote | root ref in remote ref",
    "refRemote | remote ref with ref to defs",
    "refRemote | Location-independent identifier in remote ref",
    "refRemote | retrieved nested refs resolve relative to their URI not $id",
    "refRemote | remote HTTP ref with different $id",
    "refRemote | remote HTTP ref with different URN $id",
    "refRemote | remote HTTP ref with nested absolute ref",
    "refRemote | $ref to $ref finds detached $anchor",
    "unevaluatedItems | unevaluatedItems with $dynamicRef",
    "unevaluatedProperties | unevaluatedProperties with $dynamicRef",
    "optional/cross-draft | refs to historic drafts are processed as historic drafts",
    "optional/dynamicRef | $dynamicRef skips over intermediate resources - pointer reference across resource boundary",
];

/// Documents within a document have references of their own, which we do not price; also where the
/// `$id` only looks like one.
const EMBEDDED: [&str; 10] = [
    "anchor | same $anchor with different base uri",
    "dynamicRef | after leaving a dynamic scope, it is not used by a $dynamicRef",
    "ref | refs with relative uris and defs",
    "ref | relative refs with absolute uris and defs",
    "ref | $id must be resolved against nearest parent, not just immediate parent",
    "ref | order of evaluation: $id and $anchor and $ref",
    "ref | ref with absolute-path-reference",
    "refRemote | base URI change",
    "optional/id | $id inside an enum is not a real identifier",
    "optional/unknownKeyword | $id inside an unknown keyword is not a real identifier",
];

/// One dialect, the published one: a metaschema of one's own is a document that would be fetched.
const DIALECT: [&str; 4] = [
    "vocabulary | schema that uses custom metaschema with with no validation vocabulary",
    "vocabulary | ignore unrecognized optional vocabulary",
    "optional/format-assertion | schema that uses custom metaschema with format-assertion: false",
    "optional/format-assertion | schema that uses custom metaschema with format-assertion: true",
];

/// The strict reader takes no integer beyond 2^53 - 1, neither in a schema nor in a value.
const INTEGERS: [&str; 12] = [
    "const | float and integers are equal up to 64-bit representation limits",
    "multipleOf | float division = inf | always invalid, but naive implementations may raise an overflow error",
    "optional/bignum | integer | a bignum is an integer",
    "optional/bignum | integer | a negative bignum is an integer",
    "optional/bignum | number | a bignum is a number",
    "optional/bignum | number | a negative bignum is a number",
    "optional/bignum | string | a bignum is not a string",
    "optional/bignum | maximum integer comparison",
    "optional/bignum | float comparison with high precision",
    "optional/bignum | minimum integer comparison",
    "optional/bignum | float comparison with high precision on negative numbers",
    "optional/float-overflow | all integers are multiples of 0.5, if overflow is handled | valid if optional overflow handling is implemented",
];

/// What is refused instead of judged, by what the refusal says.
fn expected() -> BTreeMap<String, &'static str> {
    let of = |says, names: &'static [&'static str]| {
        names.iter().map(move |name| ((*name).to_owned(), says))
    };
    of("a reference to another document", &REMOTE)
        .chain(of("$id below the beginning", &EMBEDDED))
        .chain(of("not of Draft 2020-12", &DIALECT))
        .chain(of("UNSAFE_INTEGER", &INTEGERS))
        .collect()
}

fn read(value: &Value) -> commsd::acp::code::Result<Value> {
    parse(value.to_string().as_bytes(), 1 << 20)
}

#[test]
fn draft_2020_12_is_judged_as_published_or_refused_as_listed() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/json-schema");
    let suite = std::fs::read_to_string(folder.join("draft2020-12.jsonl")).unwrap();
    let mut refused = BTreeMap::new();
    let mut judged = 0;
    for group in suite.lines() {
        let group: Value = serde_json::from_str(group).unwrap();
        let text = |of: &Value, member: &str| of[member].as_str().unwrap().to_owned();
        let name = format!("{} | {}", text(&group, "file"), text(&group, "description"));
        let schema = match read(&group["schema"]).and_then(|schema| UserSchema::compile(&schema)) {
            Ok(schema) => schema,
            Err(error) => {
                refused.insert(name, error.to_string());
                continue;
            }
        };
        for test in group["tests"].as_array().unwrap() {
            let name = format!("{name} | {}", text(test, "description"));
            let valid = match read(&test["data"]).and_then(|data| schema.check(&data)) {
                Ok(()) => true,
                Err(error) if error.code() == Code::SchemaMismatch => false,
                Err(error) => {
                    refused.insert(name, error.to_string());
                    continue;
                }
            };
            assert_eq!(valid, test["valid"], "{name}");
            judged += 1;
        }
    }
    let expected = expected();
    for (name, error) in &refused {
        assert!(expected.get(name).is_some_and(|says| error.contains(says)), "{name}: {error}");
    }
    let gone: Vec<_> = expected.keys().filter(|name| !refused.contains_key(*name)).collect();
    assert!(gone.is_empty(), "listed, and judged after all: {gone:?}");
    assert_eq!(judged, 1273);
}
