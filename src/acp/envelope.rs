//! Envelopes: a message encrypted to one recipient by HPKE (RFC 9180, single shot) and signed by
//! its sender (design 5.4, 6.12), and which of its keys a recipient lets count.

use hpke::aead::AesGcm256;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::rand_core::{TryCryptoRng, TryRng};
use hpke::{Deserializable as _, Kem, OpModeR, OpModeS, Serializable as _};
use zeroize::Zeroizing;

use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::json::canonical;
use super::objects::{Envelope, EnvelopeHeader, Suite};
use super::sign::{Role, Signature, Signed as _};
use super::value::{
    Bytes, EnvelopeId, Key32, SessionKeyId, Time, Typed as _, VERSION, Word, read_bytes,
};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// HPKE's `info`.
const INFO: &[u8] = b"acp/1.0 envelope";

/// Bytes of an envelope as JSON.
pub const MAX_ENVELOPE: usize = 1 << 20;

/// How long an envelope may be under way, ms (decision 49).
pub const MAX_ENVELOPE_LIFE_MS: u64 = 7 * 24 * 3_600_000;

type PublicKey = <X25519HkdfSha256 as Kem>::PublicKey;
type PrivateKey = <X25519HkdfSha256 as Kem>::PrivateKey;
type EncappedKey = <X25519HkdfSha256 as Kem>::EncappedKey;

/// The injected source as HPKE wants it.
struct Source<'a>(&'a mut dyn Entropy);

impl TryRng for Source<'_> {
    type Error = std::convert::Infallible;

    fn try_next_u32(&mut self) -> std::result::Result<u32, Self::Error> {
        let mut bytes = [0; 4];
        self.0.fill(&mut bytes);
        Ok(u32::from_le_bytes(bytes))
    }

    fn try_next_u64(&mut self) -> std::result::Result<u64, Self::Error> {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> std::result::Result<(), Self::Error> {
        self.0.fill(bytes);
        Ok(())
    }
}

impl TryCryptoRng for Source<'_> {}

/// Which of a recipient's keys an envelope is encrypted to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyRef {
    /// The key derived from the did.
    Identity,
    /// The key of the recipient's newest invite or card.
    Declared,
    /// A key announced in the task.
    Session(SessionKeyId),
}

impl KeyRef {
    /// Reads `recipientKeyId`.
    ///
    /// # Errors
    /// `BAD_FIELD`, `BAD_ID`.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "identity" => Ok(Self::Identity),
            "declared" => Ok(Self::Declared),
            _ => match text.strip_prefix("session:") {
                Some(id) => SessionKeyId::parse(id).map(Self::Session),
                None => Err(Error::new(Code::BadField, "no key id").inside("recipientKeyId")),
            },
        }
    }

    fn text(&self) -> Result<Word> {
        Word::parse(&match self {
            Self::Identity => "identity".to_owned(),
            Self::Declared => "declared".to_owned(),
            Self::Session(id) => format!("session:{id}"),
        })
    }
}

/// A new X25519 key pair, for a session or an invite: secret, public.
#[must_use]
pub fn draw_key_pair(entropy: &mut dyn Entropy) -> (Zeroizing<[u8; 32]>, Key32) {
    let (secret, public) = X25519HkdfSha256::gen_keypair_with_rng(&mut Source(entropy));
    (Zeroizing::new(secret.to_bytes().into()), Key32(public.to_bytes().into()))
}

impl Envelope {
    /// The header, which is bound into the ciphertext.
    #[must_use]
    pub fn header(&self) -> EnvelopeHeader {
        EnvelopeHeader {
            r#type: Self::TYPE,
            version: VERSION,
            envelope_id: self.envelope_id.clone(),
            from: self.from,
            to: self.to,
            sent_at: self.sent_at,
            expires_at: self.expires_at,
            suite: self.suite,
            recipient_key_id: self.recipient_key_id.clone(),
        }
    }

    /// Encrypts `plaintext` to `to` and signs the whole.
    ///
    /// # Errors
    /// `BAD_FIELD` for a key that cannot be encrypted to.
    pub fn seal(
        from: &Secret,
        to: Did,
        key: (&KeyRef, Key32),
        plaintext: &[u8],
        now: UnixMillis,
        life_ms: u64,
        entropy: &mut dyn Entropy,
    ) -> Result<Self> {
        let mut envelope = Self {
            envelope_id: EnvelopeId::draw(entropy),
            from: from.did(),
            to,
            sent_at: Time::from(now),
            expires_at: Time::from(now).plus(life_ms.min(MAX_ENVELOPE_LIFE_MS)),
            suite: Suite::HpkeX25519Aes256,
            recipient_key_id: key.0.text()?,
            enc: Key32([0; 32]),
            ciphertext: Bytes(Vec::new()),
            signature: Signature::blank(Role::Sender, from.did()),
        };
        envelope.encrypt(key.1, plaintext, entropy)?;
        envelope.signed(from, now)
    }

    fn encrypt(&mut self, to: Key32, plaintext: &[u8], entropy: &mut dyn Entropy) -> Result<()> {
        let unusable = |_| Error::new(Code::BadField, "this key cannot be encrypted to");
        let aad = canonical(&self.header())?;
        let public = PublicKey::from_bytes(&to.0).map_err(unusable)?;
        let (enc, ciphertext) =
            hpke::single_shot_seal_with_rng::<AesGcm256, HkdfSha256, X25519HkdfSha256>(
                &OpModeS::Base,
                &public,
                INFO,
                plaintext,
                &aad,
                &mut Source(entropy),
            )
            .map_err(unusable)?;
        self.enc = Key32(enc.to_bytes().into());
        self.ciphertext = Bytes(ciphertext);
        Ok(())
    }

    /// Reads an envelope, checks its times and its signature. What a relay does, too.
    ///
    /// # Errors
    /// The codes of a closed object, `ENVELOPE_EXPIRED`, `BAD_TIME` (too long a life, or from the
    /// future), and those of a signature.
    pub fn read_checked(bytes: &[u8], max_bytes: usize, now: UnixMillis) -> Result<Self> {
        let envelope: Self = read_bytes(bytes, max_bytes)?;
        if envelope.expires_at > envelope.sent_at.plus(MAX_ENVELOPE_LIFE_MS)
            || envelope.expires_at <= envelope.sent_at
            || !envelope.sent_at.has_come(now)
        {
            return Err(Error::new(Code::BadTime, "sent in the future, or with too long a life"));
        }
        if envelope.expires_at.is_over(now) {
            return Err(Error::new(Code::EnvelopeExpired, "the envelope is too old"));
        }
        envelope.verify()?;
        Ok(envelope)
    }

    /// Which key it is encrypted to.
    ///
    /// # Errors
    /// As [`KeyRef::parse`].
    pub fn key_ref(&self) -> Result<KeyRef> {
        KeyRef::parse(&self.recipient_key_id)
    }

    /// Decrypts it with the secret half of the key that [`Self::key_ref`] names. The signature is
    /// checked by [`Self::read_checked`].
    ///
    /// # Errors
    /// `DECRYPT_FAILED`, also for an all-zero shared secret.
    pub fn open(&self, secret: &[u8; 32]) -> Result<Vec<u8>> {
        let failed = |_| Error::new(Code::DecryptFailed, "not encrypted to this key, or changed");
        let aad = canonical(&self.header())?;
        let secret = PrivateKey::from_bytes(secret).map_err(failed)?;
        let enc = EncappedKey::from_bytes(&self.enc.0).map_err(failed)?;
        hpke::single_shot_open::<AesGcm256, HkdfSha256, X25519HkdfSha256>(
            &OpModeR::Base,
            &secret,
            &enc,
            INFO,
            &self.ciphertext.0,
            &aad,
        )
        .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::entropy::SeededEntropy;
    use data_encoding::HEXLOWER;

    fn hex(text: &str) -> Vec<u8> {
        HEXLOWER.decode(text.as_bytes()).unwrap()
    }

    struct Fixed(Vec<u8>);
    impl Entropy for Fixed {
        fn fill(&mut self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.0);
        }
    }

    /// RFC 9180 A.1.1, through the same library; the AEAD there is AES-128-GCM.
    #[test]
    fn the_vector_of_rfc_9180() {
        use hpke::aead::AesGcm128;
        let (secret, public) = X25519HkdfSha256::derive_keypair(&hex(
            "6db9df30aa07dd42ee5e8181afdb977e538f5e1fec8a06223f33f7013e525037",
        ));
        // The RFC prints it before clamping (46…c8), the library after.
        assert_eq!(
            secret.to_bytes().to_vec(),
            hex("4012c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8a48")
        );
        assert_eq!(
            public.to_bytes().to_vec(),
            hex("3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d")
        );
        let mut ikm =
            Fixed(hex("7268600d403fce431561aef583ee1613527cff655c1343f29812e66706df3234"));
        let (enc, ciphertext) =
            hpke::single_shot_seal_with_rng::<AesGcm128, HkdfSha256, X25519HkdfSha256>(
                &OpModeS::Base,
                &public,
                b"Ode on a Grecian Urn",
                b"Beauty is truth, truth beauty",
                b"Count-0",
                &mut Source(&mut ikm),
            )
            .unwrap();
        assert_eq!(
            enc.to_bytes().to_vec(),
            hex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431")
        );
        assert_eq!(
            ciphertext,
            hex(
                "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
            )
        );
    }

    const NOW: UnixMillis = UnixMillis(1_796_083_200_000);

    fn people() -> (Secret, Secret, SeededEntropy) {
        let mut entropy = SeededEntropy::new(7);
        let (a, b) = (Secret::draw(&mut entropy).unwrap(), Secret::draw(&mut entropy).unwrap());
        (a, b, entropy)
    }

    #[test]
    fn seals_and_opens_and_binds_the_header() {
        let (alice, bob, mut entropy) = people();
        let key = (&KeyRef::Identity, bob.did().encryption_key());
        let sealed =
            Envelope::seal(&alice, bob.did(), key, b"hello", NOW, 60_000, &mut entropy).unwrap();
        let bytes = canonical(&sealed).unwrap();
        let read = Envelope::read_checked(&bytes, MAX_ENVELOPE, NOW).unwrap();
        assert_eq!(read.open(&bob.decryption_key()).unwrap(), b"hello");
        assert_eq!(read.open(&alice.decryption_key()).unwrap_err().code(), Code::DecryptFailed);

        // Signed anew by somebody else: the signature holds, the ciphertext does not open.
        let mallory = Secret::draw(&mut entropy).unwrap();
        let stolen =
            Envelope { from: mallory.did(), ..sealed.clone() }.signed(&mallory, NOW).unwrap();
        stolen.verify().unwrap();
        assert_eq!(stolen.open(&bob.decryption_key()).unwrap_err().code(), Code::DecryptFailed);
        // Every member of the header is bound.
        for changed in [
            Envelope { envelope_id: EnvelopeId::draw(&mut entropy), ..sealed.clone() },
            Envelope { to: alice.did(), ..sealed.clone() },
            Envelope { sent_at: sealed.sent_at.plus(1), ..sealed.clone() },
            Envelope { expires_at: sealed.expires_at.plus(1), ..sealed.clone() },
            Envelope { recipient_key_id: Word::parse("declared").unwrap(), ..sealed.clone() },
        ] {
            assert_eq!(
                changed.open(&bob.decryption_key()).unwrap_err().code(),
                Code::DecryptFailed
            );
            assert_eq!(changed.verify().unwrap_err().code(), Code::BadSignature);
        }
    }

    #[test]
    fn zero_and_small_order_keys_do_not_open_or_seal() {
        let (alice, bob, mut entropy) = people();
        let key = (&KeyRef::Identity, bob.did().encryption_key());
        let sealed =
            Envelope::seal(&alice, bob.did(), key, b"x", NOW, 60_000, &mut entropy).unwrap();
        for small in [[0; 32], {
            let mut one = [0; 32];
            one[0] = 1;
            one
        }] {
            let changed = Envelope { enc: Key32(small), ..sealed.clone() };
            assert_eq!(
                changed.open(&bob.decryption_key()).unwrap_err().code(),
                Code::DecryptFailed
            );
            let to = (&KeyRef::Identity, Key32(small));
            let refused = Envelope::seal(&alice, bob.did(), to, b"x", NOW, 1, &mut entropy);
            assert_eq!(refused.unwrap_err().code(), Code::BadField);
        }
    }

    #[test]
    fn times_are_judged_at_the_boundary() {
        let (alice, bob, mut entropy) = people();
        let key = (&KeyRef::Identity, bob.did().encryption_key());
        let mut judge = |life, now| {
            let sealed =
                Envelope::seal(&alice, bob.did(), key, b"x", NOW, life, &mut entropy).unwrap();
            let bytes = canonical(&sealed).unwrap();
            Envelope::read_checked(&bytes, MAX_ENVELOPE, UnixMillis(now)).err().map(|e| e.code())
        };
        let at = NOW.0;
        assert_eq!(judge(1000, at + 60_999), None);
        assert_eq!(judge(1000, at + 61_000), Some(Code::EnvelopeExpired));
        assert_eq!(judge(1000, at - 60_000), None);
        assert_eq!(judge(1000, at - 60_001), Some(Code::BadTime));
        assert_eq!(judge(0, at), Some(Code::BadTime));
        // Longer lives are shortened when they are made.
        assert_eq!(judge(u64::MAX, at + MAX_ENVELOPE_LIFE_MS), None);
    }
}
