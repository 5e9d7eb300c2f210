//! Device ids and the keys behind them: ECDSA P-256 (our own devices) and, for verification only,
//! Ed25519. A device id is SHA-256 over the raw public-key bytes (`wire.md`, "TLS").

use std::fmt;

use data_encoding::HEXLOWER;
use p256::ecdsa::signature::{Signer as _, Verifier as _};
use p256::elliptic_curve::Generate as _;
use p256::elliptic_curve::sec1::ToSec1Point as _;
use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// COSE algorithm number of ECDSA with P-256 and SHA-256.
pub const ALG_ES256: i64 = -7;
/// COSE algorithm number of EdDSA (Ed25519).
pub const ALG_EDDSA: i64 = -8;

/// Bytes of an uncompressed point of P-256.
const POINT_BYTES: usize = 65;

/// SHA-256 of a device's raw public key: the one name of a device, peer and agent on the mesh.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub [u8; 32]);

impl DeviceId {
    /// The id that `public_key` (raw bytes: 65-byte SEC1 point or 32-byte Ed25519 key) stands for.
    #[must_use]
    pub fn of_public_key(public_key: &[u8]) -> Self {
        Self(Sha256::digest(public_key).into())
    }

    /// 64 lower-case hex digits.
    #[must_use]
    pub fn hex(&self) -> String {
        HEXLOWER.encode(&self.0)
    }

    /// The first 12 hex digits, for display beside a name.
    #[must_use]
    pub fn short(&self) -> String {
        HEXLOWER.encode(&self.0[..6])
    }

    /// Reads exactly 64 lower-case hex digits; upper case is refused as the reference does.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = HEXLOWER.decode(text.as_bytes()).ok()?;
        Self::from_slice(&bytes)
    }

    /// Reads exactly 32 bytes.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({})", self.short())
    }
}

impl Serialize for DeviceId {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        // In text and on the wire hex digits; where only machines read, the bytes.
        if s.is_human_readable() { s.serialize_str(&self.hex()) } else { self.0.serialize(s) }
    }
}

impl<'de> Deserialize<'de> for DeviceId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        if !d.is_human_readable() {
            return <[u8; 32]>::deserialize(d).map(Self);
        }
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        Self::parse(&text)
            .ok_or_else(|| serde::de::Error::custom("a device id is 64 lower-case hex digits"))
    }
}

/// A public key as it travels in adverts, tokens and hellos: `{ alg, public-key }`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IdentityKey {
    /// COSE algorithm number; other numbers than ES256 and EdDSA are carried but never verify.
    pub alg: i64,
    /// Raw public-key bytes exactly as received.
    pub public_key: Vec<u8>,
}

impl IdentityKey {
    /// The device id these bytes stand for.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        DeviceId::of_public_key(&self.public_key)
    }

    /// Whether `signature` over `message` verifies under this key.
    ///
    /// An unknown algorithm, an unusable key and a signature of the wrong length are all `false`:
    /// odd keys from the network are a refusal, never an error path of their own.
    /// ES256 signatures are raw `r || s`, high `s` included; Ed25519 is checked strictly and weak
    /// (small-order) keys are refused.
    #[must_use]
    pub fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        match self.alg {
            // Keys in their usual form go to ring, which takes a fifth of the time; the other
            // forms of SEC1 are nobody's but valid.
            ALG_ES256 if self.public_key.len() == POINT_BYTES => {
                let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &self.public_key);
                key.verify(message, signature).is_ok()
            }
            ALG_ES256 => {
                let Ok(key) = p256::ecdsa::VerifyingKey::from_sec1_bytes(&self.public_key) else {
                    return false;
                };
                let Ok(signature) = p256::ecdsa::Signature::from_slice(signature) else {
                    return false;
                };
                key.verify(message, &signature).is_ok()
            }
            ALG_EDDSA => {
                let Ok(key) = <&[u8; 32]>::try_from(self.public_key.as_slice()) else {
                    return false;
                };
                let Ok(key) = ed25519_dalek::VerifyingKey::from_bytes(key) else {
                    return false;
                };
                let Ok(signature) = ed25519_dalek::Signature::from_slice(signature) else {
                    return false;
                };
                !key.is_weak() && key.verify_strict(message, &signature).is_ok()
            }
            _ => false,
        }
    }
}

/// A device's private P-256 key with its id. Has no `Debug`: keys are never printed.
#[derive(Clone)]
pub struct DeviceKey {
    secret: p256::SecretKey,
    id: DeviceId,
    public: [u8; POINT_BYTES],
}

impl DeviceKey {
    /// A key from 32 bytes of the caller's randomness.
    ///
    /// `None` when the bytes are no valid scalar (chance about 2^-32): draw again.
    #[must_use]
    pub fn from_scalar(bytes: &[u8; 32]) -> Option<Self> {
        p256::SecretKey::from_slice(bytes).ok().and_then(Self::from_secret)
    }

    /// A new key from the operating system's randomness.
    #[must_use]
    pub fn generate() -> Option<Self> {
        p256::SecretKey::try_generate().ok().and_then(Self::from_secret)
    }

    /// Reads a PKCS#8 PEM private key; `None` when it is not one for P-256.
    #[must_use]
    pub fn from_pkcs8_pem(pem: &str) -> Option<Self> {
        use p256::pkcs8::DecodePrivateKey as _;
        p256::SecretKey::from_pkcs8_pem(pem).ok().and_then(Self::from_secret)
    }

    fn from_secret(secret: p256::SecretKey) -> Option<Self> {
        let point = secret.public_key().to_sec1_point(false);
        let public: [u8; POINT_BYTES] = point.as_bytes().try_into().ok()?;
        Some(Self { id: DeviceId::of_public_key(&public), secret, public })
    }

    /// PKCS#8 PEM, 64 columns, LF.
    #[must_use]
    pub fn to_pkcs8_pem(&self) -> Option<zeroize::Zeroizing<String>> {
        use p256::pkcs8::EncodePrivateKey as _;
        self.secret.to_pkcs8_pem(p256::pkcs8::LineEnding::LF).ok()
    }

    /// PKCS#8 DER.
    #[must_use]
    pub fn to_pkcs8_der(&self) -> Option<zeroize::Zeroizing<Vec<u8>>> {
        use p256::pkcs8::EncodePrivateKey as _;
        self.secret.to_pkcs8_der().ok().map(|der| zeroize::Zeroizing::new(der.as_bytes().to_vec()))
    }

    /// This key's device id.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The 65-byte SEC1 uncompressed point.
    #[must_use]
    pub fn public_key(&self) -> &[u8; 65] {
        &self.public
    }

    /// The public half as it travels.
    #[must_use]
    pub fn identity_key(&self) -> IdentityKey {
        IdentityKey { alg: ALG_ES256, public_key: self.public.to_vec() }
    }

    /// ES256 signature, raw `r || s`, 64 bytes (deterministic nonce, RFC 6979).
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        let key = p256::ecdsa::SigningKey::from(&self.secret);
        let signature: p256::ecdsa::Signature = key.sign(message);
        signature.to_bytes().into()
    }

    /// ECDH with a peer's 65-byte point: the 32-byte X coordinate; `None` for an unusable point.
    #[must_use]
    pub fn ecdh(&self, peer_public: &[u8]) -> Option<zeroize::Zeroizing<[u8; 32]>> {
        let peer = p256::PublicKey::from_sec1_bytes(peer_public).ok()?;
        let shared = p256::ecdh::diffie_hellman(self.secret.to_nonzero_scalar(), peer.as_affine());
        let bytes: [u8; 32] = (*shared.raw_secret_bytes()).into();
        Some(zeroize::Zeroizing::new(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_text_is_lower_case_only() {
        let key = DeviceKey::from_scalar(&[7; 32]).unwrap();
        let hex = key.id().hex();
        assert_eq!(DeviceId::parse(&hex), Some(key.id()));
        assert_eq!(DeviceId::parse(&hex.to_uppercase()), None);
        assert_eq!(DeviceId::parse(&hex[..63]), None);
    }

    #[test]
    fn signatures_verify_and_odd_input_is_false() {
        let key = DeviceKey::from_scalar(&[9; 32]).unwrap();
        let signature = key.sign(b"message");
        let public = key.identity_key();
        assert!(public.verify(b"message", &signature));
        assert!(!public.verify(b"other", &signature));
        assert!(!public.verify(b"message", &signature[..63]));
        assert!(!IdentityKey { alg: -257, ..public.clone() }.verify(b"message", &signature));
        assert!(!IdentityKey { alg: ALG_ES256, public_key: vec![4; 65] }.verify(b"m", &signature));
        assert!(!IdentityKey { alg: ALG_EDDSA, public_key: vec![0; 32] }.verify(b"m", &[0; 64]));
    }

    /// The two ways to the same answer, over signatures of both halves of `s` and broken ones.
    #[test]
    fn both_forms_of_a_key_judge_alike() {
        let key = DeviceKey::from_scalar(&[9; 32]).unwrap();
        let full = key.identity_key();
        let point = p256::PublicKey::from_sec1_bytes(&full.public_key).unwrap();
        let short = IdentityKey {
            public_key: p256::ecdsa::VerifyingKey::from(point)
                .to_sec1_point(true)
                .as_bytes()
                .into(),
            ..full.clone()
        };
        assert_eq!(short.public_key.len(), 33);
        for n in 0..40_u8 {
            let good = key.sign(&[n]);
            let (r, s) = p256::ecdsa::Signature::from_slice(&good).unwrap().split_scalars();
            let other = p256::ecdsa::Signature::from_scalars(*r, -*s).unwrap().to_bytes();
            let mut broken = good;
            broken[usize::from(n)] ^= 1;
            let mut zero = good;
            zero[32..].fill(0);
            let mut over = good;
            over[..32].fill(0xff);
            for (signature, valid) in [
                (&good[..], true),
                (&other, true),
                (&broken, false),
                (&zero, false),
                (&over, false),
            ] {
                assert_eq!(full.verify(&[n], signature), valid, "{n}");
                assert_eq!(short.verify(&[n], signature), valid, "{n}");
            }
        }
        let off_curve = IdentityKey { public_key: [vec![4], vec![1; 64]].concat(), ..full };
        assert!(!off_curve.verify(b"m", &key.sign(b"m")));
    }

    #[test]
    fn keys_survive_pem() {
        let key = DeviceKey::generate().unwrap();
        let pem = key.to_pkcs8_pem().unwrap();
        assert!(DeviceKey::from_pkcs8_pem(&pem).unwrap().id() == key.id());
    }
}
