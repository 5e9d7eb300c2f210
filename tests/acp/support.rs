//! What the modules share: golden files, keys of the vectors, and a signer of bytes that knows
//! nothing of the library's constructors.

use std::path::Path;

use ed25519_dalek::{Signer as _, SigningKey};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// A golden file.
pub fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/acp").join(name);
    std::fs::read(path).unwrap()
}

/// The vector file.
pub fn vectors() -> Value {
    serde_json::from_slice(&golden("acp-vectors.v1.json")).unwrap()
}

/// A person made by hand: seed of 31 zero bytes and `n`, as in the vectors (1 Alice, 2 Bob).
pub struct Person {
    key: SigningKey,
    pub did: String,
}

pub fn person(n: u8) -> Person {
    let mut seed = [0; 32];
    seed[31] = n;
    let key = SigningKey::from_bytes(&seed);
    let mut bytes = vec![0xed, 0x01];
    bytes.extend_from_slice(key.verifying_key().as_bytes());
    let did = format!("did:key:z{}", bs58::encode(bytes).into_string());
    Person { key, did }
}

/// The canonical form, by the library that the protocol names and nothing of ours.
pub fn jcs(value: &Value) -> Vec<u8> {
    serde_json_canonicalizer::to_vec(value).unwrap()
}

pub fn digest(value: &Value) -> String {
    format!("sha256:{}", data_encoding::HEXLOWER.encode(&Sha256::digest(jcs(value))))
}

/// The object without its signatures.
pub fn body(object: &Value) -> Value {
    let mut body = object.clone();
    body.as_object_mut().unwrap().remove("signature");
    body.as_object_mut().unwrap().remove("signatures");
    body
}

pub fn signing_input(object: &Value, kebab: &str, role: &str, did: &str, at: &str) -> Vec<u8> {
    let payload = jcs(&json!({
        "body": body(object),
        "signer": { "alg": "Ed25519", "role": role, "signerDid": did, "signedAt": at },
    }));
    let kind = format!("application/vnd.acp.{kebab}.v1+json");
    let mut input = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    input.extend_from_slice(&payload);
    input
}

impl Person {
    /// A signature object over `object`, by hand.
    pub fn signature(&self, object: &Value, kebab: &str, role: &str, at: &str) -> Value {
        let input = signing_input(object, kebab, role, &self.did, at);
        let value = data_encoding::BASE64URL_NOPAD.encode(&self.key.sign(&input).to_bytes());
        json!({ "alg": "Ed25519", "role": role, "signerDid": self.did, "signedAt": at, "value": value })
    }

    /// `object` with `signature` set, by hand.
    pub fn sign(&self, mut object: Value, kebab: &str, role: &str) -> Value {
        let at = "2026-12-01T00:00:00.000Z";
        object["signature"] = self.signature(&object, kebab, role, at);
        object
    }

    pub fn secret(&self) -> commsd::acp::did::Secret {
        commsd::acp::did::Secret::from_seed(self.key.as_bytes()).unwrap()
    }
}

/// Every JSON pointer to a leaf of `value` (empty containers are leaves).
pub fn leaves(value: &Value) -> Vec<String> {
    fn walk(value: &Value, at: &str, out: &mut Vec<String>) {
        match value {
            Value::Object(members) if !members.is_empty() => {
                for (name, value) in members {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    walk(value, &format!("{at}/{name}"), out);
                }
            }
            Value::Array(items) if !items.is_empty() => {
                for (n, value) in items.iter().enumerate() {
                    walk(value, &format!("{at}/{n}"), out);
                }
            }
            _ => out.push(at.to_owned()),
        }
    }
    let mut out = Vec::new();
    walk(value, "", &mut out);
    out
}

/// Another value of the same kind that is as near as possible to `leaf`.
pub fn nearby(leaf: &Value) -> Value {
    match leaf {
        Value::Null => json!("x"),
        Value::Bool(yes) => json!(!yes),
        Value::Number(n) => json!(n.as_f64().unwrap() + 1.0),
        Value::String(text) => match text.char_indices().last() {
            // A letter that stays within base58, base64url, base32 and hexadecimal.
            Some((at, last)) => {
                let other = if last == 'a' { 'b' } else { 'a' };
                json!(format!("{}{other}", &text[..at]))
            }
            None => json!("a"),
        },
        Value::Array(_) => json!([1]),
        Value::Object(_) => json!({ "a": 1 }),
    }
}
