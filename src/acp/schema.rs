//! JSON Schema, both ways: schemas of strangers, compiled within bounds and without reaching out,
//! and the schemas of our own objects, generated from their types.

use jsonschema::{Draft, PatternOptions, Validator};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::binding::DeviceBinding;
use super::code::{Code, Error, Result};
use super::json::canonical;
use super::objects;
use super::price::Priced;
use super::sign::kebab;
use super::value::Typed;

/// Bytes of a schema in canonical form (design 17).
pub const MAX_SCHEMA: usize = 64 * 1024;

/// Compiled size of one regular expression: ordinary ones stay far below, `(a{1000}){1000}` is over.
const MAX_REGEX: usize = 256 * 1024;

/// Subschemas and keywords in one schema; bounds the time to compile.
const MAX_NODES: usize = 10_000;

/// References in one schema: each may make the rest be looked at again.
const MAX_REFERENCES: usize = 200;

/// Steps up to which it is also said where a value does not fit: finding that out keeps every place
/// that was tried.
const MAX_TOLD_STEPS: u64 = 100_000;

/// A compiled schema of a stranger.
#[derive(Debug)]
pub struct UserSchema {
    validator: Validator,
    priced: Priced,
}

fn invalid(message: &str) -> Error {
    Error::new(Code::SchemaInvalid, message)
}

/// Counts nodes and references, and refuses references that leave the document.
fn walk(value: &Value, root: bool, nodes: &mut usize, references: &mut usize) -> Result<()> {
    *nodes += 1;
    match value {
        Value::Array(items) => {
            items.iter().try_for_each(|item| walk(item, false, nodes, references))
        }
        Value::Object(members) => members.iter().try_for_each(|(name, value)| {
            if let ("$ref" | "$dynamicRef", Value::String(target)) = (name.as_str(), value) {
                *references += 1;
                if !target.starts_with('#') {
                    return Err(invalid("a reference to another document"));
                }
            }
            // A document within the document would have references of its own.
            if (name.as_str(), value.is_string(), root) == ("$id", true, false) {
                return Err(invalid("$id below the beginning"));
            }
            walk(value, false, nodes, references)
        }),
        _ => Ok(()),
    }
}

impl UserSchema {
    /// Compiles a schema of Draft 2020-12: at most 64 KiB, references within itself only, regular
    /// expressions without backtracking.
    ///
    /// # Errors
    /// `SCHEMA_INVALID`, `TOO_LARGE`.
    pub fn compile(schema: &Value) -> Result<Self> {
        if canonical(schema)?.len() > MAX_SCHEMA {
            return Err(Error::new(Code::TooLarge, "a schema of more than 64 KiB"));
        }
        let dialect = schema.get("$schema").and_then(Value::as_str);
        let known = "https://json-schema.org/draft/2020-12/schema";
        if dialect.is_some_and(|dialect| dialect.trim_end_matches('#') != known) {
            return Err(invalid("not of Draft 2020-12"));
        }
        let (mut nodes, mut references) = (0, 0);
        walk(schema, true, &mut nodes, &mut references)?;
        if nodes > MAX_NODES || references > MAX_REFERENCES {
            return Err(invalid("more than 10,000 nodes or 200 references"));
        }
        let patterns = PatternOptions::regex().size_limit(MAX_REGEX).dfa_size_limit(MAX_REGEX);
        jsonschema::options()
            .with_draft(Draft::Draft202012)
            .with_pattern_options(patterns)
            .build(schema)
            .map(|validator| Self { validator, priced: Priced::new(schema) })
            .map_err(|error| {
                let at = place(error.instance_path().as_str());
                // Without what stands there, which may be anything.
                let why = shown(&error.masked().to_string());
                invalid(&format!("not a usable JSON Schema: {at}: {why}"))
            })
    }

    /// Whether `value` fits; where it does not.
    ///
    /// # Errors
    /// `SCHEMA_MISMATCH` at the first place that does not fit, without the value; `SCHEMA_INVALID`
    /// when finding out would take too many steps.
    pub fn check(&self, value: &Value) -> Result<()> {
        let too_dear = |_| invalid("it takes too many steps for this value");
        let steps = self.priced.of(value).map_err(too_dear)?;
        if self.validator.is_valid(value) {
            return Ok(());
        }
        if steps > MAX_TOLD_STEPS {
            return Err(Error::new(Code::SchemaMismatch, "it does not fit"));
        }
        match self.validator.validate(value) {
            Ok(()) => Ok(()),
            Err(error) => {
                let (at, rule) = (error.instance_path(), error.schema_path());
                let text = format!("{} does not fit {}", place(at.as_str()), place(rule.as_str()));
                Err(Error::new(Code::SchemaMismatch, text))
            }
        }
    }
}

/// Escaped and cut, since a stranger's words may stand in it.
fn shown(text: &str) -> String {
    crate::codec::text::escape_untrusted(crate::codec::text::truncate_chars(text, 200))
}

/// A JSON pointer, in which member names may be a stranger's.
fn place(pointer: &str) -> String {
    let shown = shown(pointer);
    if shown.is_empty() { "the whole".to_owned() } else { shown }
}

/// The schema of one of our objects.
#[must_use]
pub fn of<T: JsonSchema>(title: &str) -> Value {
    let mut schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), title.into());
    schema.to_value()
}

/// File names and schemas of all objects, as `docs/schemas/acp` holds them.
#[must_use]
pub fn all() -> Vec<(String, Value)> {
    fn named<T: JsonSchema + Typed>() -> (String, Value) {
        (kebab(T::TYPE), of::<T>(T::TYPE))
    }
    vec![
        named::<objects::TaskManifest>(),
        named::<objects::TaskContract>(),
        named::<objects::CapabilityToken>(),
        named::<objects::ApprovalReceipt>(),
        named::<objects::ApprovalPolicy>(),
        named::<objects::UsageReceipt>(),
        named::<objects::ExecutionAttestation>(),
        named::<objects::Deliverable>(),
        named::<objects::VerificationReport>(),
        named::<objects::SettlementReceipt>(),
        named::<objects::RevocationNotice>(),
        named::<objects::ProgressUpdate>(),
        named::<objects::CancelNotice>(),
        named::<objects::RejectNotice>(),
        named::<objects::FailNotice>(),
        named::<objects::EvidenceNotice>(),
        named::<objects::Envelope>(),
        named::<objects::SessionMessage>(),
        named::<objects::ToolCall>(),
        named::<objects::ToolResult>(),
        named::<objects::AuditGenesis>(),
        named::<objects::AuditEntry>(),
        named::<objects::AuditBundle>(),
        named::<objects::AuditCheckpoint>(),
        ("trust-anchor".to_owned(), of::<objects::TrustAnchor>("TrustAnchor")),
        named::<objects::GatewayGenesis>(),
        named::<objects::GatewayEntry>(),
        named::<objects::Invite>(),
        named::<objects::WorkerCard>(),
        named::<objects::RelayAuth>(),
        named::<DeviceBinding>(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(schema: Value) -> Code {
        UserSchema::compile(&schema).unwrap_err().code()
    }

    #[test]
    fn judges_values() {
        let schema = UserSchema::compile(&json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object", "required": ["n"], "$defs": { "n": { "type": "integer", "maximum": 3 } },
            "properties": { "n": { "$ref": "#/$defs/n" }, "s": { "pattern": "^[a-c]+$" } },
        }))
        .unwrap();
        schema.check(&json!({ "n": 3, "s": "abc" })).unwrap();
        schema.check(&json!({ "n": 1.0 })).unwrap();
        for wrong in [json!({}), json!({ "n": 4 }), json!({ "n": 1, "s": "abd" }), json!([])] {
            assert_eq!(schema.check(&wrong).unwrap_err().code(), Code::SchemaMismatch);
        }
        let error = schema.check(&json!({ "n": 1, "s": "a\u{202e}secret" })).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        UserSchema::compile(&json!(true)).unwrap().check(&json!([1])).unwrap();
    }

    #[test]
    fn nothing_is_fetched() {
        for target in [
            "http://127.0.0.1:1/x",
            "https://example.com/s.json",
            "file:///etc/passwd",
            "other.json",
            "",
        ] {
            assert_eq!(refused(json!({ "$ref": target })), Code::SchemaInvalid, "{target}");
        }
        assert_eq!(refused(json!({ "$ref": "#/$defs/none" })), Code::SchemaInvalid);
        assert_eq!(
            refused(json!({ "$schema": "http://json-schema.org/draft-07/schema#" })),
            Code::SchemaInvalid
        );
        assert_eq!(refused(json!({ "$schema": "https://example.com/own" })), Code::SchemaInvalid);
        // What our own look at it lets pass, the library does not resolve either.
        assert!(jsonschema::options().build(&json!({ "$ref": "http://127.0.0.1:1/x" })).is_err());
    }

    #[test]
    fn hostile_schemas_are_bounded() {
        assert_eq!(refused(json!({ "description": "x".repeat(MAX_SCHEMA) })), Code::TooLarge);
        assert_eq!(refused(json!({ "pattern": "(a{1000}){1000}" })), Code::SchemaInvalid);
        assert_eq!(refused(json!({ "pattern": "(?=a)b" })), Code::SchemaInvalid);
        assert_eq!(refused(json!({ "pattern": "(a)\\1" })), Code::SchemaInvalid);
        assert_eq!(refused(json!({ "type": "nonsense" })), Code::SchemaInvalid);
        let error = UserSchema::compile(&json!({ "properties": { "n": { "type": "secret" } } }));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("/properties/n/type") && !text.contains("secret"), "{text}");
        let many: Vec<Value> = (0..201).map(|_| json!({ "$ref": "#" })).collect();
        assert_eq!(refused(json!({ "allOf": many })), Code::SchemaInvalid);
        // Exponential for an engine that backtracks.
        let schema = UserSchema::compile(&json!({ "pattern": "^(a+)+$" })).unwrap();
        let text = "a".repeat(20_000) + "b";
        assert!(schema.check(&json!(text)).is_err());
    }

    #[test]
    fn our_own_schemas_are_checked_in() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schemas/acp");
        let write = std::env::var_os("COMMSD_WRITE_SCHEMAS").is_some();
        let mut names = std::collections::BTreeSet::new();
        for (name, schema) in all() {
            let path = folder.join(format!("{name}.json"));
            let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
            if write {
                std::fs::write(&path, &text).unwrap();
            }
            let there = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(there == text, "{name}: run this test with COMMSD_WRITE_SCHEMAS=1");
            names.insert(format!("{name}.json"));
            UserSchema::compile(&schema).unwrap();
        }
        for file in std::fs::read_dir(folder).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            assert!(names.contains(&name), "{name} belongs to no object");
        }
    }
}
