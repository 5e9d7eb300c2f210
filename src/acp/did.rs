//! Who signs and who is written to: Ed25519 `did:key` identities (design 5.4), their secret halves,
//! the X25519 keys derived from them, and the key file's content. Reads and writes no file.

use std::borrow::Cow;
use std::fmt;

use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use zeroize::Zeroizing;

use super::code::{Code, Error, Result};
use super::value::{Key32, Read, SignatureBytes, Time, VERSION, read_bytes, text_value};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::{Entropy, draw};

/// Multicodec prefix of an Ed25519 public key.
const ED25519: [u8; 2] = [0xed, 0x01];

/// Characters of a did: `did:key:z` and the base58 form of 34 bytes that begin with [`ED25519`].
const DID_CHARS: usize = 56;

/// Bytes of a key file that are read; the real ones are below 300.
const MAX_KEY_FILE: usize = 4096;

/// A `did:key` of an Ed25519 key that is a canonical point and of large order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Did([u8; 32]);

impl Did {
    fn fault() -> Error {
        Error::new(Code::BadDid, "not a did:key of an Ed25519 key (did:key:z6Mk…, 56 characters)")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// `BAD_DID`, also for a point of small order: such a key "signs" every message.
    pub fn parse(text: &str) -> Result<Self> {
        let bytes: [u8; 34] = text
            .strip_prefix("did:key:z")
            .filter(|_| text.len() == DID_CHARS)
            .and_then(|base58| bs58::decode(base58).into_vec().ok())
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(Self::fault)?;
        match bytes.split_first_chunk::<2>() {
            Some((&ED25519, key)) => Self::from_key(key.try_into().map_err(|_| Self::fault())?),
            _ => Err(Self::fault()),
        }
    }

    /// The did of a public key.
    ///
    /// # Errors
    /// `BAD_DID` for what is no point, not its canonical encoding, or of small order.
    pub fn from_key(key: [u8; 32]) -> Result<Self> {
        let point = VerifyingKey::from_bytes(&key).map_err(|_| Self::fault())?;
        if point.is_weak() || point.to_edwards().compress().to_bytes() != key {
            return Err(Self::fault());
        }
        Ok(Self(key))
    }

    /// The Ed25519 public key.
    #[must_use]
    pub const fn key(&self) -> &[u8; 32] {
        &self.0
    }

    /// The X25519 public key derived from it by the birational map: key id `identity`.
    #[must_use]
    pub fn encryption_key(&self) -> Key32 {
        match VerifyingKey::from_bytes(&self.0) {
            Ok(point) => Key32(point.to_montgomery().to_bytes()),
            // A Did holds a point.
            Err(_) => Key32([0; 32]),
        }
    }

    /// Whether `signature` over `message` is this identity's: canonical S, no small-order A or R.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &SignatureBytes) -> bool {
        VerifyingKey::from_bytes(&self.0).is_ok_and(|key| {
            let signature = ed25519_dalek::Signature::from_bytes(&signature.0);
            key.verify_strict(message, &signature).is_ok()
        })
    }
}

impl fmt::Display for Did {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = ED25519.to_vec();
        bytes.extend_from_slice(&self.0);
        write!(f, "did:key:z{}", bs58::encode(bytes).into_string())
    }
}

text_value!(Did, "did:key of an Ed25519 key", "^did:key:z6Mk[1-9A-HJ-NP-Za-km-z]{44}$");

/// The secret half of an identity. Never shown, wiped when dropped.
#[derive(Clone)]
pub struct Secret {
    key: SigningKey,
    did: Did,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", self.did)
    }
}

impl Secret {
    /// The identity of a 32-byte seed.
    ///
    /// # Errors
    /// `BAD_DID`, in theory: no seed makes a weak key.
    pub fn from_seed(seed: &[u8; 32]) -> Result<Self> {
        let key = SigningKey::from_bytes(seed);
        let did = Did::from_key(key.verifying_key().to_bytes())?;
        Ok(Self { key, did })
    }

    /// A new identity.
    ///
    /// # Errors
    /// As [`Self::from_seed`].
    pub fn draw(entropy: &mut dyn Entropy) -> Result<Self> {
        Self::from_seed(&Zeroizing::new(draw(entropy)))
    }

    /// Its public half.
    #[must_use]
    pub const fn did(&self) -> Did {
        self.did
    }

    /// Signs bytes; only [`super::sign`] knows what bytes to sign.
    #[must_use]
    pub fn sign_bytes(&self, message: &[u8]) -> SignatureBytes {
        SignatureBytes(self.key.sign(message).to_bytes())
    }

    /// The X25519 secret key derived from the seed, clamped (RFC 7748): key id `identity`.
    #[must_use]
    pub fn decryption_key(&self) -> Zeroizing<[u8; 32]> {
        let mut scalar = Zeroizing::new(self.key.to_scalar_bytes());
        scalar[0] &= 0xf8;
        scalar[31] &= 0x7f;
        scalar[31] |= 0x40;
        scalar
    }

    /// The content of a new key file, to be written once with mode 0600.
    #[must_use]
    pub fn to_key_file(&self, created_at: UnixMillis) -> Zeroizing<Vec<u8>> {
        let seed = Zeroizing::new(data_encoding::BASE64URL_NOPAD.encode(self.key.as_bytes()));
        Zeroizing::new(
            format!(
                "{{\"type\":\"AcpPrivateKey\",\"version\":\"{VERSION}\",\"did\":\"{}\",\"seed\":\"{}\",\"createdAt\":\"{}\"}}\n",
                self.did,
                seed.as_str(),
                Time::from(created_at)
            )
            .into_bytes(),
        )
    }

    /// The identity that a key file holds.
    ///
    /// # Errors
    /// The codes of the strict reader, and `BAD_DID` when the did is not the seed's.
    pub fn from_key_file(bytes: &[u8]) -> Result<Self> {
        let file: KeyFile = read_bytes(bytes, MAX_KEY_FILE)?;
        let secret = Self::from_seed(&file.seed)?;
        if secret.did != file.did {
            return Err(Error::new(Code::BadDid, "the did is not that of the seed").inside("did"));
        }
        Ok(secret)
    }
}

struct KeyFile {
    did: Did,
    seed: Zeroizing<[u8; 32]>,
}

impl Read for KeyFile {
    fn read(value: Value) -> Result<Self> {
        let mut members = super::value::Members::open(value)?;
        members.header("AcpPrivateKey")?;
        members.only(&["did", "seed", "createdAt"])?;
        let did = Did::read(members.take("did")?).map_err(|e| e.inside("did"))?;
        let seed = Key32::read(members.take("seed")?).map_err(|e| e.inside("seed"))?;
        Time::read(members.take("createdAt")?).map_err(|e| e.inside("createdAt"))?;
        Ok(Self { did, seed: Zeroizing::new(seed.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER;

    fn hex(text: &str) -> [u8; 32] {
        HEXLOWER.decode(text.as_bytes()).unwrap().try_into().unwrap()
    }

    fn seed(n: u8) -> [u8; 32] {
        let mut seed = [0; 32];
        seed[31] = n;
        seed
    }

    /// W3C CCG `ed25519-x25519.json`: seed, did, Ed25519 public, X25519 public.
    #[test]
    fn the_published_keys() {
        for (n, did, public, x25519) in [
            (
                0,
                "did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp",
                "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29",
                "5bf55c73b82ebe22be80f3430667af570fae2556a6415e6b30d4065300aa947d",
            ),
            (
                1,
                "did:key:z6MkjchhfUsD6mmvni8mCdXHw216Xrm9bQe2mBH1P5RDjVJG",
                "4cb5abf6ad79fbf5abbccafcc269d85cd2651ed4b885b5869f241aedf0a5ba29",
                "d92f5eeaa24fd4e66221c770f704a5e2639a476bab82cfec40bd2874abeb481f",
            ),
            (
                2,
                "did:key:z6MknGc3ocHs3zdPiJbnaaqDi58NGb4pk1Sp9WxWufuXSdxf",
                "7422b9887598068e32c4448a949adb290d0f4e35b9e01b0ee5f1a1e600fe2674",
                "86eb31bfa661a77d1a8f714ccb2da9d33bcebb7105bf38a2a9112c4f5b7c1525",
            ),
            (
                3,
                "did:key:z6MkvqoYXQfDDJRv8L4wKzxYeuKyVZBfi9Qo6Ro8MiLH3kDQ",
                "f381626e41e7027ea431bfe3009e94bdd25a746beec468948d6c3c7c5dc9a54b",
                "65177583b09a0ee49b98b7ebdfe380f2a026383743e197b1d8d2ba87a379ef12",
            ),
            (
                4,
                "did:key:z6MkwW6aqMnjgrhJXFUko3NnZPGzVpkNzhYK7yEhnsibmLwL",
                "fd50b8e3b144ea244fbf7737f550bc8dd0c2650bbc1aada833ca17ff8dbf329b",
                "d8d45f008bed0d37bb55dcbf2b18a8cb097a59a84a1e4debb317ce1a7fd33346",
            ),
        ] {
            let secret = Secret::from_seed(&seed(n)).unwrap();
            assert_eq!(secret.did().to_string(), did);
            assert_eq!(Did::parse(did).unwrap(), secret.did());
            assert_eq!(secret.did().key(), &hex(public));
            assert_eq!(secret.did().encryption_key().0, hex(x25519));
            let public = x25519_of(&secret.decryption_key());
            assert_eq!(public, hex(x25519));
        }
    }

    fn x25519_of(secret: &[u8; 32]) -> [u8; 32] {
        use hpke::{Deserializable as _, Kem as _, Serializable as _};
        let secret =
            <hpke::kem::X25519HkdfSha256 as hpke::Kem>::PrivateKey::from_bytes(secret).unwrap();
        hpke::kem::X25519HkdfSha256::sk_to_pk(&secret).to_bytes().into()
    }

    #[test]
    fn weak_and_odd_keys_are_refused() {
        let did = |key: [u8; 32]| {
            let mut bytes = ED25519.to_vec();
            bytes.extend_from_slice(&key);
            format!("did:key:z{}", bs58::encode(bytes).into_string())
        };
        // The points of small order, and encodings of points that are not canonical.
        for key in [
            "0100000000000000000000000000000000000000000000000000000000000000",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "0000000000000000000000000000000000000000000000000000000000000000",
            "0000000000000000000000000000000000000000000000000000000000000080",
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
            "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "0100000000000000000000000000000000000000000000000000000000000080",
            // No point at all.
            "0200000000000000000000000000000000000000000000000000000000000000",
        ] {
            assert_eq!(Did::parse(&did(hex(key))).unwrap_err().code(), Code::BadDid, "{key}");
        }
        let good = "did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp";
        for bad in [
            "",
            "did:key:",
            "did:web:example.com",
            &good.to_uppercase(),
            &format!("{good} "),
            &good[..55],
            "did:key:z6LShs9GGnqk85isEBzzshkuVWrVKsRp24GnDuHk8QWkARMW",
            &good.replace("z6Mk", "Z6Mk"),
            &good.replace('W', "0"),
            "did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp#key",
        ] {
            assert_eq!(Did::parse(bad).unwrap_err().code(), Code::BadDid, "{bad}");
        }
    }

    #[test]
    fn key_files_read_back_and_are_strict() {
        let secret = Secret::from_seed(&seed(1)).unwrap();
        let file = secret.to_key_file(UnixMillis(1_796_083_200_000));
        assert_eq!(
            std::str::from_utf8(&file).unwrap(),
            "{\"type\":\"AcpPrivateKey\",\"version\":\"1.0\",\"did\":\"did:key:z6MkjchhfUsD6mmvni8mCdXHw216Xrm9bQe2mBH1P5RDjVJG\",\"seed\":\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE\",\"createdAt\":\"2026-12-01T00:00:00.000Z\"}\n"
        );
        assert_eq!(Secret::from_key_file(&file).unwrap().did(), secret.did());
        let text = std::str::from_utf8(&file).unwrap();
        for (from, to, code) in [
            ("AAAE\"", "AAAA\"", Code::BadDid),
            ("1.0", "2.0", Code::UnsupportedVersion),
            ("seed", "Seed", Code::UnknownMember),
            (",\"createdAt\":\"2026-12-01T00:00:00.000Z\"", "", Code::MissingMember),
            ("}", "} {}", Code::BadJson),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_eq!(Secret::from_key_file(changed.as_bytes()).unwrap_err().code(), code);
        }
        assert!(!format!("{secret:?}").contains("AAAA"));
    }
}
