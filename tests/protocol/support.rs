//! Reading vector files, and their JSON convention for CBOR values.

use std::path::{Path, PathBuf};

use commsd::codec::cbor::Value;
use serde_json::{Map, Value as Json, json};

fn read(path: &Path) -> Json {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn lab_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/lab")
}

/// A file of `tests/vectors/lab`.
pub fn lab(name: &str) -> Json {
    read(&lab_directory().join(name))
}

/// All recorded conversations, by file name.
pub fn recordings() -> Vec<(String, Json)> {
    let mut names: Vec<String> = std::fs::read_dir(lab_directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()) && name.ends_with(".json"))
        .collect();
    names.sort();
    assert!(names.len() >= 32, "recordings are missing: {names:?}");
    names.into_iter().map(|name| (name.clone(), lab(&name))).collect()
}

/// The vectors of an upstream file; `None`, said aloud, where they are not there.
pub fn wire_mesh(name: &str) -> Option<Vec<Json>> {
    let directory = std::env::var_os("COMMSD_WIRE_MESH_VECTORS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/vectors/wire-mesh"),
        PathBuf::from,
    );
    let path = directory.join(name);
    if !path.exists() {
        println!("SKIPPED: upstream vectors {} are not there", path.display());
        return None;
    }
    Some(list(&read(&path), "vectors"))
}

/// A member that is an array.
pub fn list(json: &Json, member: &str) -> Vec<Json> {
    json[member].as_array().unwrap_or_else(|| panic!("{member} is no array")).clone()
}

/// A member that is text.
pub fn text<'j>(json: &'j Json, member: &str) -> &'j str {
    json[member].as_str().unwrap_or_else(|| panic!("{member} is no text"))
}

/// A member that is hex.
pub fn hex(json: &Json, member: &str) -> Vec<u8> {
    unhex(text(json, member))
}

/// Bytes of hex digits.
pub fn unhex(text: &str) -> Vec<u8> {
    data_encoding::HEXLOWER.decode(text.as_bytes()).unwrap()
}

/// A value in the vectors' JSON convention.
pub fn to_json(value: &Value) -> Json {
    match value {
        Value::Uint(n) => json!(n),
        Value::Nint(_) => json!(value.as_i64().unwrap()),
        Value::Bytes(bytes) => json!({ "hex": data_encoding::HEXLOWER.encode(bytes) }),
        Value::Text(text) => json!(text),
        Value::Array(elements) => elements.iter().map(to_json).collect(),
        Value::Map(entries) => Json::Object(
            entries
                .iter()
                .map(|(k, v)| (k.as_text().unwrap().to_owned(), to_json(v)))
                .collect::<Map<_, _>>(),
        ),
        Value::Bool(b) => json!(b),
        Value::Null => Json::Null,
        Value::Undefined => json!({ "undefined": true }),
        Value::Float(x) => json!(x),
        Value::Tag(..) | Value::Simple(_) => panic!("not in any vector: {value:?}"),
    }
}
