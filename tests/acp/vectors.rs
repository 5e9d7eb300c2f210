//! The golden bytes: everything of the vector files is read by the typed objects, written back to
//! the same bytes, and verified; nothing changed is.

use commsd::acp::code::Code;
use commsd::acp::did::Did;
use commsd::acp::envelope::KeyRef;
use commsd::acp::json::{MAX_DEPTH, canonical, parse};
use commsd::acp::objects::{
    ApprovalReceipt, AuditBundle, AuditEntry, AuditGenesis, CapabilityToken, Deliverable, Envelope,
    ExecutionAttestation, Invite, ProgressUpdate, RelayAuth, RevocationNotice, SettlementReceipt,
    TaskContract, TrustAnchor, UsageReceipt, VerificationReport,
};
use commsd::acp::sign::{self, Signed, body_digest, payload_type};
use commsd::acp::value::{Digest, Read, Typed};
use serde_json::Value;

use crate::support::*;

const MAX: usize = 1 << 20;

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Reads `value` as `T` and finds the same value in it.
fn same<T: Read + serde::Serialize>(value: &Value) -> T {
    let object = T::read(parse(&serde_json::to_vec(value).unwrap(), MAX).unwrap()).unwrap();
    assert_eq!(canonical(&object).unwrap(), jcs(value));
    object
}

fn check_signed<T: Signed>(vector: &Value) {
    let object: T = same(&vector["object"]);
    assert_eq!(payload_type(T::TYPE), text(&vector["payloadType"]));
    let body = sign::body(&object).unwrap();
    assert_eq!(canonical(&body).unwrap(), text(&vector["bodyJcs"]).as_bytes());
    assert_eq!(body_digest(&object).unwrap().to_string(), text(&vector["bodyDigest"]));
    assert_eq!(Digest::of(&object).unwrap().to_string(), text(&vector["objectDigest"]));
    let s = object.signature();
    let input = sign::signing_input(T::TYPE, &body, s.role, s.signer_did, s.signed_at).unwrap();
    assert_eq!(input.len() as u64, vector["signingInputLength"].as_u64().unwrap());
    let hash = data_encoding::HEXLOWER.encode(&commsd::acp::json::sha256(&input));
    assert_eq!(hash, text(&vector["signingInputSha256"]));
    object.verify().unwrap();

    // Signing is deterministic: our signature is theirs.
    let who = [person(1), person(2)].into_iter().find(|p| p.did == s.signer_did.to_string());
    let again = object.clone_signed(&who.unwrap().secret());
    assert_eq!(again.signature().value, s.value);

    // Nothing in it can be changed, and every change has a code of the list.
    for leaf in leaves(&vector["object"]) {
        let mut changed = vector["object"].clone();
        let place = changed.pointer_mut(&leaf).unwrap();
        *place = nearby(place);
        assert!(T::read_verified(changed).is_err(), "{} {leaf}", T::TYPE);
    }
}

trait CloneSigned: Signed {
    fn clone_signed(&self, key: &commsd::acp::did::Secret) -> Self;
}

impl<T: Signed> CloneSigned for T {
    fn clone_signed(&self, key: &commsd::acp::did::Secret) -> Self {
        let copy = T::read(serde_json::to_value(self).unwrap()).unwrap();
        copy.signed(key, self.signature().signed_at.millis()).unwrap()
    }
}

#[test]
fn signed_objects() {
    let vectors = vectors();
    for vector in vectors["signed"].as_array().unwrap() {
        match text(&vector["name"]) {
            "approval-receipt" => check_signed::<ApprovalReceipt>(vector),
            "revocation-notice" => check_signed::<RevocationNotice>(vector),
            "invite" => check_signed::<Invite>(vector),
            "relay-auth" => check_signed::<RelayAuth>(vector),
            "capability-root" | "capability-child" => check_signed::<CapabilityToken>(vector),
            other => panic!("{other}"),
        }
    }
    assert_eq!(vectors["signed"].as_array().unwrap().len(), 6);
}

#[test]
fn keys() {
    let vectors = vectors();
    for (name, n) in [("alice", 1), ("bob", 2)] {
        let key = &vectors["keys"][name];
        let secret = person(n).secret();
        let hex = |bytes: &[u8]| data_encoding::HEXLOWER.encode(bytes);
        assert_eq!(secret.did().to_string(), text(&key["did"]));
        assert_eq!(hex(secret.did().key()), text(&key["ed25519PublicHex"]));
        assert_eq!(hex(&secret.did().encryption_key().0), text(&key["x25519PublicHex"]));
        assert_eq!(hex(&*secret.decryption_key()), text(&key["x25519PrivateHex"]));
    }
}

#[test]
fn relay_auth_as_a_token() {
    let vectors = vectors();
    let token = text(&vectors["relayAuthToken"]);
    assert_eq!(token.len(), 642);
    let bytes = data_encoding::BASE64URL_NOPAD.decode(token.as_bytes()).unwrap();
    assert_eq!(bytes, jcs(&vectors["signed"][3]["object"]));
}

#[test]
fn a_chain_of_entries() {
    let vectors = vectors();
    let genesis: AuditGenesis = same(&vectors["genesis"]["object"]);
    assert_eq!(canonical(&genesis).unwrap(), text(&vectors["genesis"]["jcs"]).as_bytes());
    let mut prev = genesis.digest().unwrap();
    assert_eq!(prev.to_string(), text(&vectors["genesis"]["digest"]));
    for (seq, vector) in vectors["chain"].as_array().unwrap().iter().enumerate() {
        let entry: AuditEntry = same(&vector["entry"]);
        assert_eq!(entry.seq.get(), seq as u64);
        assert_eq!(entry.prev, prev);
        entry.verify(&genesis).unwrap();
        assert!(entry.countersignature().is_some());
        prev = entry.digest().unwrap();
        assert_eq!(prev.to_string(), text(&vector["entryDigest"]));
        for leaf in leaves(&vector["entry"]) {
            let mut changed = vector["entry"].clone();
            let place = changed.pointer_mut(&leaf).unwrap();
            *place = nearby(place);
            assert!(AuditEntry::read(changed).err_or(|e| e.verify(&genesis).is_err()), "{leaf}");
        }
    }
    assert_eq!(prev.to_string(), text(&vectors["head"]));
    let anchor: TrustAnchor = same(&vectors["trustAnchor"]);
    assert_eq!(anchor.head, prev);
}

trait ErrOr<T> {
    fn err_or(self, judge: impl FnOnce(T) -> bool) -> bool;
}
impl<T, E> ErrOr<T> for Result<T, E> {
    fn err_or(self, judge: impl FnOnce(T) -> bool) -> bool {
        self.map_or(true, judge)
    }
}

#[test]
fn an_envelope() {
    let vectors = vectors();
    let vector = &vectors["hpke"];
    let envelope: Envelope = same(&vector["envelope"]);
    assert_eq!(canonical(&envelope.header()).unwrap(), text(&vector["aadJcs"]).as_bytes());
    envelope.verify().unwrap();
    assert_eq!(Digest::of(&envelope).unwrap().to_string(), text(&vector["envelopeDigest"]));
    let bob = person(2).secret();
    let plain = envelope.open(&bob.decryption_key()).unwrap();
    assert_eq!(plain, text(&vector["plaintextUtf8"]).as_bytes());

    // Made again from the same draw: the id from one, the ephemeral key from the other.
    struct Draws(Vec<Vec<u8>>);
    impl commsd::identity::entropy::Entropy for Draws {
        fn fill(&mut self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.0.remove(0));
        }
    }
    let mut draws = Draws(vec![vec![0x21; 16], vec![7; 32]]);
    let alice = person(1).secret();
    let key = (&KeyRef::Identity, bob.did().encryption_key());
    let now = envelope.sent_at.millis();
    let again = Envelope::seal(&alice, bob.did(), key, &plain, now, 3_600_000, &mut draws).unwrap();
    assert_eq!(again.enc, envelope.enc);
    assert_eq!(again.recipient_key_id, envelope.recipient_key_id);
    assert_eq!(again.open(&bob.decryption_key()).unwrap(), plain);
}

#[test]
fn quorum_outputs_have_one_digest() {
    let bytes = golden("acp-vectors.v1.json");
    let vectors = parse(&bytes, MAX).unwrap();
    for output in vectors["quorum"]["outputs"].as_array().unwrap() {
        assert_eq!(Digest::of(output).unwrap().to_string(), text(&vectors["quorum"]["digest"]));
    }
    for output in [r#"{"a":1.0,"b":[1e-7,-0.0]}"#, r#"{"b":[0.0000001,0],"a":1}"#] {
        let value = parse(output.as_bytes(), MAX).unwrap();
        assert_eq!(Digest::of(&value).unwrap().to_string(), text(&vectors["quorum"]["digest"]));
    }
}

#[test]
fn the_bundle_and_its_objects() {
    let value = parse(&golden("acp-bundle-settled.v1.json"), MAX).unwrap();
    let bundle: AuditBundle = same(&value);
    bundle.verify().unwrap();
    assert_eq!(
        Digest::of(&bundle).unwrap().to_string(),
        "sha256:af7b0d53ea70b1ba59409481e7014d85404d723580c308ee7ff0ddd15750593b"
    );
    let mut kinds = 0;
    for (digest, object) in &bundle.objects.0 {
        assert_eq!(Digest::of(object).unwrap(), *digest);
        kinds += 1;
        match object["type"].as_str() {
            Some("TaskContract") => {
                let contract: TaskContract = same(object);
                contract.manifest.verify().unwrap();
                assert_eq!(Digest::of(&contract.manifest).unwrap(), contract.manifest_digest);
                assert_eq!(
                    body_digest(&contract).unwrap().to_string(),
                    "sha256:c82a197d0b1148b46c86a46a3d7d4acba0b37fe7e51bb688f3c3eecb8cec814d"
                );
            }
            Some(ApprovalReceipt::TYPE) => same::<ApprovalReceipt>(object).verify().unwrap(),
            Some(ProgressUpdate::TYPE) => drop(same::<ProgressUpdate>(object)),
            Some(Deliverable::TYPE) => same::<Deliverable>(object).verify().unwrap(),
            Some(UsageReceipt::TYPE) => same::<UsageReceipt>(object).verify().unwrap(),
            Some(ExecutionAttestation::TYPE) => {
                same::<ExecutionAttestation>(object).verify().unwrap();
            }
            Some(VerificationReport::TYPE) => same::<VerificationReport>(object).verify().unwrap(),
            Some(SettlementReceipt::TYPE) => same::<SettlementReceipt>(object).verify().unwrap(),
            None => assert_eq!(object["summary"], "Hello from Alice"),
            Some(other) => panic!("{other}"),
        }
    }
    assert_eq!(kinds, 11);
    for leaf in leaves(&value) {
        let mut changed = value.clone();
        let place = changed.pointer_mut(&leaf).unwrap();
        *place = nearby(place);
        assert!(AuditBundle::read_verified(changed).is_err(), "{leaf}");
    }
}

#[test]
fn the_bound_of_depth_is_ours() {
    assert_eq!(MAX_DEPTH, 64);
    assert_eq!(Did::parse("did:key:z").unwrap_err().code(), Code::BadDid);
}

/// The same files in a second language, where Python is there.
#[test]
fn another_language_agrees() {
    let script =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/acp/check_vectors.py");
    match std::process::Command::new("python3").arg(script).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 3);
        }
        Err(_) => println!("skipped: no python3"),
    }
}
