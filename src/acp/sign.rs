//! What is signed and how it is checked (design 5.3): DSSE's pre-authentication encoding around the
//! canonical form of body and signer, Ed25519, strict verification.

use serde::Serialize;
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::json::canonical;
use super::value::{Digest, Read, SignatureBytes, Time, Typed, object, words};
use crate::codec::time::UnixMillis;

words! {
    /// The one signature algorithm.
    pub enum Alg {
        /// Ed25519, without pre-hash.
        Ed25519 = "Ed25519",
    }
}

words! {
    /// In what role somebody signs; each kind of object names the one it takes.
    pub enum Role {
        /// Who orders the work.
        Requester = "requester",
        /// Who does it.
        Worker = "worker",
        /// Who grants something of its own.
        Issuer = "issuer",
        /// The human behind a gateway.
        Owner = "owner",
        /// Who exported a bundle.
        Exporter = "exporter",
        /// Who sent an envelope.
        Sender = "sender",
        /// Who receives at a relay.
        Recipient = "recipient",
    }
}

object! {
    /// A signature.
    pub struct Signature {
        "alg" alg: Alg,
        "role" role: Role,
        "signerDid" signer_did: Did,
        "signedAt" signed_at: Time,
        /// Over the signing input, strictly verified.
        "value" value: SignatureBytes,
    }
}

impl Signature {
    /// A place for a signature that has not been made; verifies nothing.
    #[must_use]
    pub fn blank(role: Role, signer_did: Did) -> Self {
        let signed_at = Time::from(UnixMillis(0));
        Self { alg: Alg::Ed25519, role, signer_did, signed_at, value: SignatureBytes([0; 64]) }
    }
}

/// DSSE 1.0.2 pre-authentication encoding.
#[must_use]
pub fn pae(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let lengths = (payload_type.len(), payload.len());
    let mut out = format!("DSSEv1 {} {payload_type} {} ", lengths.0, lengths.1).into_bytes();
    out.extend_from_slice(payload);
    out
}

/// The payload type of an object type: `TaskContract` → `application/vnd.acp.task-contract.v1+json`.
#[must_use]
pub fn payload_type(object_type: &str) -> String {
    format!("application/vnd.acp.{}.v1+json", kebab(object_type))
}

/// `TaskContract` → `task-contract`.
#[must_use]
pub fn kebab(object_type: &str) -> String {
    let mut out = String::with_capacity(object_type.len() + 4);
    for (at, c) in object_type.chars().enumerate() {
        if c.is_ascii_uppercase() && at > 0 {
            out.push('-');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// The object without its signatures.
///
/// # Errors
/// `BAD_FIELD` when it is no object.
pub fn body<T: Serialize>(object: &T) -> Result<Value> {
    let mut value = serde_json::to_value(object)
        .map_err(|_| Error::new(Code::BadField, "this object has no JSON form"))?;
    let members =
        value.as_object_mut().ok_or_else(|| Error::new(Code::BadField, "not an object"))?;
    members.swap_remove("signature");
    members.swap_remove("signatures");
    Ok(value)
}

/// Digest of [`body`].
///
/// # Errors
/// As [`body`].
pub fn body_digest<T: Serialize>(object: &T) -> Result<Digest> {
    Digest::of(&body(object)?)
}

#[derive(Serialize)]
struct Signer {
    alg: Alg,
    role: Role,
    #[serde(rename = "signerDid")]
    signer_did: Did,
    #[serde(rename = "signedAt")]
    signed_at: Time,
}

#[derive(Serialize)]
struct Payload<'a> {
    body: &'a Value,
    signer: Signer,
}

/// The bytes that are signed over `body` of an object of type `object_type`.
///
/// # Errors
/// As [`canonical`].
pub fn signing_input(
    object_type: &str,
    body: &Value,
    role: Role,
    signer_did: Did,
    signed_at: Time,
) -> Result<Vec<u8>> {
    let signer = Signer { alg: Alg::Ed25519, role, signer_did, signed_at };
    Ok(pae(&payload_type(object_type), &canonical(&Payload { body, signer })?))
}

/// Signs `object` in `role`.
///
/// # Errors
/// As [`body`].
pub fn sign<T: Typed>(object: &T, key: &Secret, role: Role, now: UnixMillis) -> Result<Signature> {
    let (signer_did, signed_at) = (key.did(), Time::from(now));
    let input = signing_input(T::TYPE, &body(object)?, role, signer_did, signed_at)?;
    Ok(Signature { alg: Alg::Ed25519, role, signer_did, signed_at, value: key.sign_bytes(&input) })
}

/// Checks `signature` over `object`: by `signer`, in `role`.
///
/// # Errors
/// `WRONG_SIGNER`, `WRONG_ROLE`, `BAD_SIGNATURE`, in this order.
pub fn verify<T: Typed>(object: &T, signature: &Signature, signer: Did, role: Role) -> Result<()> {
    if signature.signer_did != signer {
        return Err(Error::new(Code::WrongSigner, "signed by somebody else than the object names"));
    }
    if signature.role != role {
        return Err(Error::new(Code::WrongRole, format!("not signed in the role {role}")));
    }
    let input = signing_input(T::TYPE, &body(object)?, role, signer, signature.signed_at)?;
    if signer.verifies(&input, &signature.value) {
        Ok(())
    } else {
        Err(Error::new(
            Code::BadSignature,
            format!("the signature of the {} does not hold", T::TYPE),
        ))
    }
}

/// An object with one signature, by the did that its own body names.
pub trait Signed: Typed {
    /// The role of its signer.
    const ROLE: Role;
    /// The member of the body that names the signer.
    fn signer(&self) -> Did;
    /// Its signature.
    fn signature(&self) -> &Signature;
    /// Where its signature goes.
    fn signature_mut(&mut self) -> &mut Signature;

    /// The object signed by `key` at `now`, whatever signature it had.
    ///
    /// # Errors
    /// `WRONG_SIGNER` when `key` is not the signer's.
    fn signed(mut self, key: &Secret, now: UnixMillis) -> Result<Self> {
        if key.did() != self.signer() {
            return Err(Error::new(Code::WrongSigner, "this key is not the signer's"));
        }
        *self.signature_mut() = sign(&self, key, Self::ROLE, now)?;
        Ok(self)
    }

    /// Checks its signature.
    ///
    /// # Errors
    /// As [`verify`].
    fn verify(&self) -> Result<()> {
        verify(self, self.signature(), self.signer(), Self::ROLE)
    }

    /// Reads an object and checks its signature.
    ///
    /// # Errors
    /// As [`Read::read`] and [`verify`].
    fn read_verified(value: Value) -> Result<Self> {
        let object = <Self as Read>::read(value)?;
        Signed::verify(&object)?;
        Ok(object)
    }
}

/// Says who signs an object, in what role.
macro_rules! signed_by {
    ($($name:ident . $signer:ident as $role:ident;)*) => { $(
        impl $crate::acp::sign::Signed for $name {
            const ROLE: $crate::acp::sign::Role = $crate::acp::sign::Role::$role;
            fn signer(&self) -> $crate::acp::did::Did {
                self.$signer
            }
            fn signature(&self) -> &$crate::acp::sign::Signature {
                &self.signature
            }
            fn signature_mut(&mut self) -> &mut $crate::acp::sign::Signature {
                &mut self.signature
            }
        }
    )* };
}
pub(super) use signed_by;

#[cfg(test)]
mod tests {
    use super::*;

    /// secure-systems-lab/dsse: the known answer of the specification.
    #[test]
    fn the_known_encoding() {
        assert_eq!(
            pae("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
        assert_eq!(pae("", b""), b"DSSEv1 0  0 ");
        assert_eq!(pae("\u{e9}", "\u{e9}".as_bytes()), "DSSEv1 2 \u{e9} 2 \u{e9}".as_bytes());
    }

    #[test]
    fn types_in_kebab_case() {
        assert_eq!(payload_type("TaskContract"), "application/vnd.acp.task-contract.v1+json");
        assert_eq!(payload_type("Invite"), "application/vnd.acp.invite.v1+json");
    }
}
