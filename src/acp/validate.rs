//! One object by itself, as `acp validate` judges it: its form, its signatures, and what its members
//! must be to each other. Whether it is good now, and for what, depends on more than the object.

use serde::{Deserialize, Serialize};

use super::audit::{MAX_AUDIT_FILE, from_bundle};
use super::code::{Code, Error, Result};
use super::invite::{MAX_INVITE, read_invite};
use super::json;
use super::objects::{
    ApprovalReceipt, AuditBundle, CapabilityToken, Invite, Party, RevocationNotice, TaskContract,
    TaskManifest, UsageReceipt, WorkerCard,
};
use super::sign::{self, Signed};
use super::value::{Digest, Read, Typed, words};
use super::verify::check_manifest;

/// Bytes of an object that is no bundle: a contract holds a manifest with two schemas.
const MAX_OBJECT: usize = 1 << 20;

words! {
    /// What is validated.
    pub enum Kind {
        /// What is to be done.
        TaskManifest = "task-manifest",
        /// The order of it.
        TaskContract = "task-contract",
        /// A grant.
        CapabilityToken = "capability-token",
        /// An owner's answer.
        ApprovalReceipt = "approval-receipt",
        /// What a run has used.
        UsageReceipt = "usage-receipt",
        /// Something taken back.
        RevocationNotice = "revocation-notice",
        /// A task's log.
        AuditBundle = "audit-bundle",
        /// An introduction, as JSON or as text.
        Invite = "invite",
        /// A worker's claims.
        WorkerCard = "worker-card",
    }
}

impl Kind {
    /// What an object says that it is, by its `type`; `None` where it names no kind.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Named {
            r#type: String,
        }
        let Named { r#type } = serde_json::from_slice(bytes).ok()?;
        Self::parse(&sign::kebab(&r#type))
    }
}

/// What a good object is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Validated {
    /// Its type.
    pub r#type: &'static str,
    /// Digest of the whole.
    pub object_digest: Digest,
    /// Digest without the signatures.
    pub body_digest: Digest,
    /// How many signatures it has; all of them hold.
    pub signatures: usize,
}

/// Judges one object.
///
/// # Errors
/// The codes of the strict reader, of a closed object, of signatures; for a contract
/// `DIGEST_MISMATCH`, `MANIFEST_INVALID` and `SCHEMA_INVALID`, too; for a bundle those of
/// [`from_bundle`]; for an invite `BAD_INVITE`.
pub fn validate(kind: Kind, bytes: &[u8]) -> Result<Validated> {
    match kind {
        Kind::TaskManifest => {
            let manifest: TaskManifest = signed(bytes)?;
            check_manifest(&manifest)?;
            validated(&manifest, 1)
        }
        Kind::TaskContract => {
            let contract = TaskContract::read(json::parse(bytes, MAX_OBJECT)?)?;
            check_contract(&contract)?;
            validated(&contract, contract.signatures.len())
        }
        Kind::CapabilityToken => validated(&signed::<CapabilityToken>(bytes)?, 1),
        Kind::ApprovalReceipt => validated(&signed::<ApprovalReceipt>(bytes)?, 1),
        Kind::UsageReceipt => validated(&signed::<UsageReceipt>(bytes)?, 1),
        Kind::RevocationNotice => validated(&signed::<RevocationNotice>(bytes)?, 1),
        Kind::WorkerCard => validated(&signed::<WorkerCard>(bytes)?, 1),
        Kind::AuditBundle => {
            let bundle = AuditBundle::read(json::parse(bytes, MAX_AUDIT_FILE)?)?;
            let validated = validated(&bundle, 1)?;
            from_bundle(bundle)?;
            Ok(validated)
        }
        Kind::Invite => {
            let text = std::str::from_utf8(bytes)
                .map_err(|_| Error::new(Code::BadInvite, "an invite is text"))?;
            let invite: Invite = if text.trim_start().starts_with('{') {
                Invite::read_verified(json::parse(bytes, MAX_INVITE)?)?
            } else {
                read_invite(text)?
            };
            validated(&invite, 1)
        }
    }
}

fn signed<T: Signed>(bytes: &[u8]) -> Result<T> {
    T::read_verified(json::parse(bytes, MAX_OBJECT)?)
}

fn validated<T: Typed>(object: &T, signatures: usize) -> Result<Validated> {
    Ok(Validated {
        r#type: T::TYPE,
        object_digest: Digest::of(object)?,
        body_digest: sign::body_digest(object)?,
        signatures,
    })
}

/// A contract by itself: the manifest inside, what names it, and the signatures that are there.
fn check_contract(contract: &TaskContract) -> Result<()> {
    let manifest = &contract.manifest;
    manifest.verify().map_err(|error| error.inside("manifest"))?;
    check_manifest(manifest).map_err(|error| error.inside("manifest"))?;
    if manifest.task_id != contract.task_id {
        return Err(Error::new(Code::BadField, "the manifest is another task's").inside("taskId"));
    }
    if Digest::of(manifest)? != contract.manifest_digest {
        let error = Error::new(Code::DigestMismatch, "not the digest of the manifest inside");
        return Err(error.inside("manifestDigest"));
    }
    let signers =
        [(manifest.requester_did, Party::Requester), (contract.worker_did, Party::Worker)];
    for (at, (signature, (signer, party))) in contract.signatures.iter().zip(signers).enumerate() {
        sign::verify(contract, signature, signer, party.role())
            .map_err(|error| error.inside(&format!("signatures/{at}")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const BUNDLE: &[u8] = include_bytes!("../../tests/vectors/acp/acp-bundle-settled.v1.json");

    fn objects(kind: &str) -> Vec<Value> {
        let bundle: Value = serde_json::from_slice(BUNDLE).unwrap();
        let all = bundle["objects"].as_object().unwrap().values();
        all.filter(|object| object["type"] == kind).cloned().collect()
    }

    fn judge(kind: Kind, value: &Value) -> Result<Validated, Code> {
        validate(kind, value.to_string().as_bytes()).map_err(|error| error.code())
    }

    #[test]
    fn golden_objects_are_good_and_changed_ones_are_not() {
        for (kind, name) in [
            (Kind::TaskContract, "TaskContract"),
            (Kind::ApprovalReceipt, "ApprovalReceipt"),
            (Kind::UsageReceipt, "UsageReceipt"),
        ] {
            let found = objects(name);
            assert!(!found.is_empty(), "{name}");
            for object in found {
                let good = judge(kind, &object).unwrap();
                assert_eq!(good.r#type, name);
                assert_eq!(good.object_digest, Digest::of(&object).unwrap());
                assert_eq!(judge(Kind::WorkerCard, &object), Err(Code::BadField));
                let mut longer = object.clone();
                longer["extra"] = Value::Null;
                assert_eq!(judge(kind, &longer), Err(Code::UnknownMember));
            }
        }
        let both = |contract: &Value| contract["signatures"].as_array().unwrap().len() == 2;
        let contract = objects("TaskContract").into_iter().find(both).unwrap();
        let manifest = contract["manifest"].clone();
        assert_eq!(judge(Kind::TaskManifest, &manifest).unwrap().signatures, 1);
        let changed = |path: &str, value: Value| {
            let mut changed = contract.clone();
            *changed.pointer_mut(path).unwrap() = value;
            judge(Kind::TaskContract, &changed)
        };
        let digest = Digest::of(&7).unwrap().to_string();
        assert_eq!(changed("/manifest/title", "x".into()), Err(Code::BadSignature));
        assert_eq!(changed("/taskId", "task_another0001".into()), Err(Code::BadField));
        assert_eq!(changed("/manifestDigest", digest.into()), Err(Code::DigestMismatch));
        let second = contract["signatures"].as_array().unwrap().last().cloned().unwrap();
        assert_eq!(changed("/signatures/0", second), Err(Code::WrongSigner));
    }

    #[test]
    fn bundles_are_checked_as_far_as_they_say_something_of_themselves() {
        assert_eq!(validate(Kind::AuditBundle, BUNDLE).unwrap().r#type, "AuditBundle");
        let mut bundle: Value = serde_json::from_slice(BUNDLE).unwrap();
        bundle["sealed"] = false.into();
        assert_eq!(judge(Kind::AuditBundle, &bundle), Err(Code::BadSignature));
        assert_eq!(validate(Kind::AuditBundle, b"{").map_err(|e| e.code()), Err(Code::BadJson));
    }

    #[test]
    fn invites_are_text_or_json() {
        let vectors: Value =
            serde_json::from_slice(include_bytes!("../../tests/vectors/acp/acp-vectors.v1.json"))
                .unwrap();
        let text = find_invite(&vectors).unwrap();
        let good = validate(Kind::Invite, format!(" {text}\n").as_bytes()).unwrap();
        let invite = read_invite(text).unwrap();
        assert_eq!(judge(Kind::Invite, &serde_json::to_value(&invite).unwrap()), Ok(good));
        for bad in [&b"acp-invite:AA"[..], b"", b"\xff", b"hello"] {
            assert_eq!(validate(Kind::Invite, bad).map_err(|e| e.code()), Err(Code::BadInvite));
        }
    }

    fn find_invite(value: &Value) -> Option<&str> {
        match value {
            Value::String(text) => text.starts_with("acp-invite:").then_some(text),
            Value::Array(items) => items.iter().find_map(find_invite),
            Value::Object(members) => members.values().find_map(find_invite),
            _ => None,
        }
    }
}
