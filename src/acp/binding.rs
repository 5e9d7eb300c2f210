//! A device of the mesh and the did that answers behind it (design 19): signed by both keys, so that
//! neither can claim the other. Whoever knows a device, by a petname for instance, finds the did to
//! order from. It is no authority: what the did may do is judged as everywhere.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::sign::{Role, Signature, body, signing_input};
use super::value::{
    P256Point, Read, SignatureBytes, Time, Typed as _, object, read_bytes, text_value,
};
use crate::codec::time::UnixMillis;
use crate::identity::device::{ALG_ES256, DeviceId, DeviceKey, IdentityKey};

/// How long a binding may be good, ms.
pub const MAX_BINDING_LIFE_MS: u64 = 30 * 24 * 3_600_000;

/// Bytes of a binding as JSON; one has below 1,000.
pub const MAX_BINDING: usize = 4096;

/// A device of the mesh, as the mesh names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub DeviceId);

impl Device {
    fn fault() -> Error {
        Error::new(Code::BadField, "not a device id of 64 lower-case hexadecimal digits")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn parse(text: &str) -> Result<Self> {
        DeviceId::parse(text).map(Self).ok_or_else(Self::fault)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

text_value!(Device, "device id of the mesh", "^[0-9a-f]{64}$");

object! {
    /// A device of the mesh bound to a did. The body that both sign is everything but `signature` and
    /// `deviceSignature`.
    pub struct DeviceBinding = "DeviceBinding" {
        "did" did: Did,
        /// SHA-256 of `deviceKey`.
        "deviceId" device_id: Device,
        "deviceKey" device_key: P256Point,
        "issuedAt" issued_at: Time,
        "expiresAt" expires_at: Time,
        /// By `did`, role `owner`.
        "signature" signature: Signature,
        /// ECDSA (P-256, SHA-256) by `deviceKey` over the signing input of `signature`.
        "deviceSignature" device_signature: SignatureBytes,
    }
}

impl DeviceBinding {
    /// Binds a device to the did of `owner`, from `now` for `life_ms`, 30 days at most.
    ///
    /// # Errors
    /// A fault of this program.
    pub fn issue(
        owner: &Secret,
        device: &DeviceKey,
        life_ms: u64,
        now: UnixMillis,
    ) -> Result<Self> {
        let mut binding = Self {
            did: owner.did(),
            device_id: Device(device.id()),
            device_key: P256Point(*device.public_key()),
            issued_at: Time::from(now),
            expires_at: Time::from(now.plus(life_ms.min(MAX_BINDING_LIFE_MS))),
            signature: Signature {
                signed_at: Time::from(now),
                ..Signature::blank(Role::Owner, owner.did())
            },
            device_signature: SignatureBytes([0; 64]),
        };
        let input = binding.signing_input()?;
        binding.signature.value = owner.sign_bytes(&input);
        binding.device_signature = SignatureBytes(device.sign(&input));
        Ok(binding)
    }

    /// Reads the binding of `device` that is good at `now`.
    ///
    /// # Errors
    /// The codes of the strict reader, and as [`Self::check`].
    pub fn read_checked(bytes: &[u8], device: DeviceId, now: UnixMillis) -> Result<Self> {
        let binding: Self = read_bytes(bytes, MAX_BINDING)?;
        binding.check(device, now)?;
        Ok(binding)
    }

    /// Whether this binds `device`, and is good at `now`.
    ///
    /// # Errors
    /// `WRONG_SIGNER` (another device, another did), `WRONG_ROLE`, `BAD_FIELD` for one that lives too
    /// long, `TOKEN_NOT_YET_VALID`, `TOKEN_EXPIRED`, `BAD_SIGNATURE`.
    pub fn check(&self, device: DeviceId, now: UnixMillis) -> Result<()> {
        let key = IdentityKey { alg: ALG_ES256, public_key: self.device_key.0.to_vec() };
        if self.device_id.0 != device || key.device() != device {
            return Err(Error::new(Code::WrongSigner, "the binding of another device"));
        }
        if self.signature.signer_did != self.did {
            let text = "signed by somebody else than the object names";
            return Err(Error::new(Code::WrongSigner, text));
        }
        if self.signature.role != Role::Owner {
            return Err(Error::new(Code::WrongRole, "not signed in the role owner"));
        }
        let longest = self.issued_at.plus(MAX_BINDING_LIFE_MS);
        if self.expires_at > longest || self.expires_at <= self.issued_at {
            let text = "not after issuedAt, or more than 30 days after it";
            return Err(Error::new(Code::BadField, text).inside("expiresAt"));
        }
        if !self.issued_at.has_come(now) {
            return Err(Error::new(Code::TokenNotYetValid, "a binding from the future"));
        }
        if self.expires_at.is_over(now) {
            return Err(Error::new(Code::TokenExpired, "the binding is over"));
        }
        let input = self.signing_input()?;
        let by_owner = self.did.verifies(&input, &self.signature.value);
        if by_owner && key.verify(&input, &self.device_signature.0) {
            return Ok(());
        }
        let who = if by_owner { "device" } else { "owner" };
        Err(Error::new(Code::BadSignature, format!("the signature of the {who} does not hold")))
    }

    fn signing_input(&self) -> Result<Vec<u8>> {
        let mut body = body(self)?;
        if let Some(members) = body.as_object_mut() {
            members.swap_remove("deviceSignature");
        }
        let signed_at = self.signature.signed_at;
        signing_input(Self::TYPE, &body, Role::Owner, self.did, signed_at)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::acp::json::canonical;
    use crate::acp::sign::pae;

    const NOW: UnixMillis = UnixMillis(1_796_083_200_000);
    const DAY: u64 = 24 * 3_600_000;

    fn owner(n: u8) -> Secret {
        Secret::from_seed(&[n; 32]).unwrap()
    }

    fn device(n: u8) -> DeviceKey {
        DeviceKey::from_scalar(&[n; 32]).unwrap()
    }

    /// A binding made by hand: the members as they are given, signed by whoever is given.
    fn forged(members: Value, role: &str, owner: &Secret, device: &DeviceKey) -> Value {
        let mut object = json!({
            "type": "DeviceBinding", "version": "1.0",
            "did": owner.did(), "deviceId": device.id().hex(),
            "deviceKey": data_encoding::BASE64URL_NOPAD.encode(device.public_key()),
            "issuedAt": "2026-12-01T00:00:00.000Z", "expiresAt": "2026-12-02T00:00:00.000Z",
        });
        object.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let mut signature = json!({
            "alg": "Ed25519", "role": role, "signerDid": owner.did(),
            "signedAt": "2026-12-01T00:00:00.000Z",
        });
        let payload = json!({ "body": object, "signer": signature });
        let kind = "application/vnd.acp.device-binding.v1+json";
        let input = pae(kind, &canonical(&payload).unwrap());
        signature["value"] = json!(owner.sign_bytes(&input));
        object["signature"] = signature;
        object["deviceSignature"] = json!(SignatureBytes(device.sign(&input)));
        object
    }

    fn judged(object: &Value) -> Option<Code> {
        let bytes = canonical(object).unwrap();
        DeviceBinding::read_checked(&bytes, device(2).id(), NOW).err().map(|error| error.code())
    }

    #[test]
    fn both_keys_sign_what_the_design_says() {
        let made = DeviceBinding::issue(&owner(1), &device(2), DAY, NOW).unwrap();
        made.check(device(2).id(), NOW).unwrap();
        let by_hand = forged(json!({}), "owner", &owner(1), &device(2));
        assert_eq!(judged(&by_hand), None);
        // Both signatures are deterministic.
        assert_eq!(serde_json::to_value(&made).unwrap(), by_hand);
        let bytes = canonical(&made).unwrap();
        assert!(bytes.len() < 1000);
        assert_eq!(DeviceBinding::read_checked(&bytes, device(2).id(), NOW).unwrap(), made);
    }

    #[test]
    fn nobody_binds_what_is_not_his() {
        let of_others = [
            // Another device's binding, and one that only says that it is this device's.
            (forged(json!({}), "owner", &owner(1), &device(3)), Code::WrongSigner),
            (
                forged(json!({ "deviceId": device(2).id().hex() }), "owner", &owner(1), &device(3)),
                Code::WrongSigner,
            ),
            // Somebody else's did.
            (
                forged(json!({ "did": owner(4).did() }), "owner", &owner(1), &device(2)),
                Code::WrongSigner,
            ),
            (forged(json!({}), "worker", &owner(1), &device(2)), Code::WrongRole),
        ];
        for (object, code) in of_others {
            assert_eq!(judged(&object), Some(code), "{object}");
        }
        // One signature of each pair.
        let good = forged(json!({}), "owner", &owner(1), &device(2));
        let other = forged(json!({}), "owner", &owner(1), &device(3));
        let mut half = good.clone();
        half["deviceSignature"] = other["deviceSignature"].clone();
        assert_eq!(judged(&half), Some(Code::BadSignature));
        let mut half = good.clone();
        half["signature"]["value"] = other["signature"]["value"].clone();
        assert_eq!(judged(&half), Some(Code::BadSignature));
        let mut later = good.clone();
        later["expiresAt"] = json!("2026-12-03T00:00:00.000Z");
        assert_eq!(judged(&later), Some(Code::BadSignature));
        let mut later = good;
        later["signature"]["signedAt"] = json!("2026-12-01T00:00:00.001Z");
        assert_eq!(judged(&later), Some(Code::BadSignature));
    }

    #[test]
    fn times_are_bounded() {
        let with = |issued: &str, expires: &str| {
            let times = json!({ "issuedAt": issued, "expiresAt": expires });
            judged(&forged(times, "owner", &owner(1), &device(2)))
        };
        let today = "2026-12-01T00:00:00.000Z";
        assert_eq!(with(today, "2026-12-31T00:00:00.000Z"), None);
        assert_eq!(with(today, "2026-12-31T00:00:00.001Z"), Some(Code::BadField));
        assert_eq!(with(today, today), Some(Code::BadField));
        let (before, after) = ("2026-11-30T00:00:00.000Z", "2026-12-02T00:00:00.000Z");
        assert_eq!(with(before, "2026-11-30T23:59:00.001Z"), None);
        assert_eq!(with(before, "2026-11-30T23:59:00.000Z"), Some(Code::TokenExpired));
        assert_eq!(with("2026-12-01T00:01:00.000Z", after), None);
        assert_eq!(with("2026-12-01T00:01:00.001Z", after), Some(Code::TokenNotYetValid));
        let longest = DeviceBinding::issue(&owner(1), &device(2), u64::MAX, NOW).unwrap();
        longest.check(device(2).id(), NOW).unwrap();
    }

    #[test]
    fn reading_is_strict() {
        let good = forged(json!({}), "owner", &owner(1), &device(2));
        let changed = |name: &str, value: Value| {
            let mut object = good.clone();
            object[name] = value;
            judged(&object)
        };
        assert_eq!(changed("more", json!(1)), Some(Code::UnknownMember));
        assert_eq!(changed("version", json!("2.0")), Some(Code::UnsupportedVersion));
        assert_eq!(changed("deviceKey", json!("AA")), Some(Code::BadField));
        let upper = device(2).id().hex().to_uppercase();
        assert_eq!(changed("deviceId", json!(upper)), Some(Code::BadField));
        let mut short = good.clone();
        short.as_object_mut().unwrap().remove("deviceSignature");
        assert_eq!(judged(&short), Some(Code::MissingMember));
    }
}
