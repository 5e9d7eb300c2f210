//! The protocol marker `EchoesVault/.echoes-vault.json` and the gate that it is (specification,
//! section 6).

use serde_json::json;

use super::json::{self as text, Json};
use super::page::REQUIRED;

/// The protocol that this engine writes, and no other.
pub const PROTOCOL: &str = "1.0.0";
/// Shape of the marker.
pub const SCHEMA: u64 = 3;
/// Where the portable runtime is, from the workspace's root.
pub const RUNTIME: &str = ".echoes-vault/echoes_vault.py";

/// The marker's one value.
pub fn canonical() -> Json {
    Json::from(json!({
        "schemaVersion": SCHEMA,
        "protocolVersion": PROTOCOL,
        "generatedIndex": true,
        "dailyLayout": "unique-files-v1",
        "runtime": RUNTIME,
        "requiredFrontmatter": REQUIRED,
    }))
}

/// Why a marker does not let a writer through.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MarkerError {
    /// There is no marker.
    #[error("there is no EchoesVault/.echoes-vault.json")]
    Absent,
    /// Not one JSON object.
    #[error(
        "EchoesVault/.echoes-vault.json cannot be read: {0}; mend it, or take it back from Git"
    )]
    Broken(String),
    /// Another protocol.
    #[error(
        "EchoesVault/.echoes-vault.json names protocol {found}; this engine writes {PROTOCOL} only; use the engine that it belongs to"
    )]
    Unsupported {
        /// The value found, as JSON.
        found: String,
    },
    /// Another value where the protocol fixes one.
    #[error(
        "EchoesVault/.echoes-vault.json has another {0} than protocol {PROTOCOL} prescribes; run `commsd vault upgrade` there"
    )]
    Member(&'static str),
}

/// Reads a marker's text; `None` stands for no file.
///
/// # Errors
/// [`MarkerError::Absent`] or [`MarkerError::Broken`].
pub fn parse(file: Option<&str>) -> Result<Json, MarkerError> {
    let file = file.ok_or(MarkerError::Absent)?;
    match text::parse(file) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(MarkerError::Broken("it is not a JSON object".into())),
        Err(why) => Err(MarkerError::Broken(why)),
    }
}

fn unsupported(found: &Json) -> MarkerError {
    MarkerError::Unsupported { found: text::pretty(found).trim_end().to_owned() }
}

/// Whether a writer may change the vault that this marker describes.
///
/// # Errors
/// [`MarkerError`].
pub fn gate(value: &Json) -> Result<(), MarkerError> {
    let null = Json::Null;
    let found = value.get("protocolVersion").unwrap_or(&null);
    if found.as_str() != Some(PROTOCOL) {
        return Err(unsupported(found));
    }
    let members =
        ["schemaVersion", "generatedIndex", "dailyLayout", "runtime", "requiredFrontmatter"];
    let canonical = canonical();
    for member in members {
        let is = value.get(member).unwrap_or(&null);
        if !canonical.get(member).is_some_and(|should| text::equal(is, should)) {
            return Err(MarkerError::Member(member));
        }
    }
    Ok(())
}

/// Whether `init` may take over a vault with this marker: one of this protocol, of any shape, or one
/// that names no protocol.
///
/// # Errors
/// [`MarkerError::Unsupported`].
pub fn init_gate(value: &Json) -> Result<(), MarkerError> {
    match value.get("protocolVersion") {
        None | Some(Json::Null) => Ok(()),
        Some(version) if version.as_str() == Some(PROTOCOL) => Ok(()),
        Some(other) => Err(unsupported(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn gate(value: &Value) -> Result<(), MarkerError> {
        super::gate(&value.clone().into())
    }

    fn canonical() -> Value {
        serde_json::from_str(&text::pretty(&super::canonical())).unwrap()
    }

    #[test]
    fn the_gate_wants_the_exact_version() {
        gate(&canonical()).unwrap();
        for version in
            [json!("1.0"), json!("1.0.1"), json!(" 1.0.0"), json!(1), json!(null), json!(["1.0.0"])]
        {
            let mut marker = canonical();
            marker["protocolVersion"] = version.clone();
            assert!(matches!(gate(&marker), Err(MarkerError::Unsupported { .. })), "{version}");
        }
    }

    #[test]
    fn numbers_compare_loosely_and_extra_members_pass() {
        let mut marker = canonical();
        marker["schemaVersion"] = json!(3.0);
        marker["generatedIndex"] = json!(1);
        marker["note"] = json!("x");
        gate(&marker).unwrap();
        marker["dailyLayout"] = json!("flat");
        assert_eq!(gate(&marker), Err(MarkerError::Member("dailyLayout")));
    }

    #[test]
    fn init_takes_over_what_names_no_other_protocol() {
        for marker in
            [json!({}), json!({"protocolVersion": null}), json!({"protocolVersion": "1.0.0"})]
        {
            init_gate(&marker.into()).unwrap();
        }
        assert!(init_gate(&json!({"protocolVersion": "2.0.0"}).into()).is_err());
        assert_eq!(parse(None), Err(MarkerError::Absent));
        assert!(matches!(parse(Some("[]")), Err(MarkerError::Broken(_))));
    }
}
