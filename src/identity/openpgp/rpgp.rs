//! The policy, over the crate `pgp`, which only knows whether arithmetic comes out right.

use pgp::composed::{
    ArmorOptions, Deserializable as _, DetachedSignature, SignedPublicKey, SignedPublicSubKey,
    SignedSecretKey,
};
use pgp::crypto::hash::HashAlgorithm;
use pgp::packet::{Signature, SignatureType};
use pgp::ser::Serialize as _;
use pgp::types::{
    Duration, EcdsaPublicParams, KeyDetails, KeyVersion, Password, PublicParams, SigningKey, Tag,
    Timestamp,
};
use rand_core::OsRng;

use super::{MAX_KEY, OpenPgpError};
use crate::codec::time::UnixMillis;

/// How far the clock of who signs may be ahead of ours.
const SKEW_SECS: u64 = 300;
/// Shortest RSA modulus that still counts.
const MIN_RSA_BITS: u16 = 2048;

/// That `signature` was made over `text` by `key`, which may sign now; answers the fingerprint of the
/// primary key, in capitals.
///
/// # Errors
/// [`OpenPgpError`].
pub fn verify(
    signature: &str,
    key: &str,
    text: &str,
    now: UnixMillis,
) -> Result<String, OpenPgpError> {
    if key.len() > MAX_KEY {
        return Err(OpenPgpError::Form("public key"));
    }
    let (key, _) =
        SignedPublicKey::from_string(key).map_err(|_| OpenPgpError::Form("public key"))?;
    let (signature, _) =
        DetachedSignature::from_string(signature).map_err(|_| OpenPgpError::Form("signature"))?;
    check(&key, &signature.signature, text, now.seconds())?;
    Ok(key.primary_key.fingerprint().to_string().to_uppercase())
}

/// Signs `text` with an armoured private key, by its newest part that may sign; answers the armoured
/// signature. What [`verify`] would refuse is not made. The library reads the clock and the system's
/// randomness.
///
/// # Errors
/// [`OpenPgpError`].
pub fn sign(
    key: &str,
    passphrase: Option<&str>,
    text: &str,
    now: UnixMillis,
) -> Result<String, OpenPgpError> {
    let (key, _) =
        SignedSecretKey::from_string(key).map_err(|_| OpenPgpError::Form("private key"))?;
    let passphrase = passphrase.map_or_else(Password::empty, Password::from);
    let public = key.to_public_key();
    let signs = |signatures: &[Signature]| signatures.iter().any(|s| s.key_flags().sign());
    let parts = key.secret_subkeys.iter().rev().filter(|part| signs(&part.signatures));
    let mut refused = None;
    for part in parts {
        match signed(&part.key, &public, &passphrase, text, now) {
            Ok(signature) => return Ok(signature),
            Err(error) => refused = Some(error),
        }
    }
    let primary = signed(&key.primary_key, &public, &passphrase, text, now);
    primary.map_err(|error| refused.unwrap_or(error))
}

fn signed(
    part: &impl SigningKey,
    public: &SignedPublicKey,
    passphrase: &Password,
    text: &str,
    now: UnixMillis,
) -> Result<String, OpenPgpError> {
    let hash = HashAlgorithm::Sha512;
    let made = DetachedSignature::sign_binary_data(OsRng, part, passphrase, hash, text.as_bytes())
        .map_err(|_| OpenPgpError::Passphrase)?;
    check(public, &made.signature, text, now.seconds())?;
    made.to_armored_string(ArmorOptions::default()).map_err(|_| OpenPgpError::Form("signature"))
}

fn check(
    key: &SignedPublicKey,
    signature: &Signature,
    text: &str,
    now: u64,
) -> Result<(), OpenPgpError> {
    let bad = |why| Err(OpenPgpError::Signature(why));
    if !matches!(signature.typ(), Some(SignatureType::Binary | SignatureType::Text)) {
        return bad("it is not one over data");
    }
    if !is_strong(signature) {
        return bad("its hash is too weak");
    }
    if !is_current(signature, now) {
        return bad("it has expired, or was made in the future");
    }
    let primary = &key.primary_key;
    let own = own_word(key, now)?;
    if own.key_flags().sign() && signature.verify(primary, text.as_bytes()).is_ok() {
        return Ok(());
    }
    for part in &key.public_subkeys {
        if signature.verify(&part.key, text.as_bytes()).is_ok() {
            return may_sign(key, part, now);
        }
    }
    bad("it was not made over this code by a part of this key that may sign")
}

/// What a key says of itself: its newest self-signature that holds.
fn own_word(key: &SignedPublicKey, now: u64) -> Result<&Signature, OpenPgpError> {
    let bad = |why| Err(OpenPgpError::Key(why));
    let primary = &key.primary_key;
    // One by a key that was designated for it cannot be checked here, and counts all the same.
    if !key.details.revocation_signatures.is_empty() {
        return bad("it is revoked");
    }
    if !is_strong_key(primary) {
        return bad("its algorithm is not used for signatures any more");
    }
    let direct = key.details.direct_signatures.iter().filter(|s| s.verify_key(primary).is_ok());
    let names = key.details.users.iter().flat_map(|user| {
        let good: Vec<&Signature> = user
            .signatures
            .iter()
            .filter(|s| s.verify_certification(primary, Tag::UserId, &user.id).is_ok())
            .collect();
        let revoked = good.iter().any(|s| s.typ() == Some(SignatureType::CertRevocation));
        if revoked { Vec::new() } else { good }
    });
    let Some(own) = newest(direct.chain(names), now) else {
        return bad("it says nothing of itself that holds");
    };
    if is_over(primary.created_at(), own.key_expiration_time(), now) {
        return bad("it has expired");
    }
    Ok(own)
}

/// That a part of a key is bound to it, for signing, and not revoked or expired.
fn may_sign(
    key: &SignedPublicKey,
    part: &SignedPublicSubKey,
    now: u64,
) -> Result<(), OpenPgpError> {
    let bad = |why| Err(OpenPgpError::Key(why));
    let is_revocation = |s: &&Signature| s.typ() == Some(SignatureType::SubkeyRevocation);
    if part.signatures.iter().any(|s| is_revocation(&s)) {
        return bad("the part of it that has signed is revoked");
    }
    if !is_strong_key(&part.key) {
        return bad("the algorithm of its part is not used for signatures any more");
    }
    let primary = &key.primary_key;
    let bound = part.signatures.iter().filter(|s| {
        let back = s.embedded_signature().filter(|back| is_strong(back));
        s.verify_subkey_binding(primary, &part.key).is_ok()
            && s.key_flags().sign()
            && back.is_some_and(|back| back.verify_primary_key_binding(&part.key, primary).is_ok())
    });
    let Some(binding) = newest(bound, now) else {
        return bad("the part of it that has signed may not sign");
    };
    if is_over(part.key.created_at(), binding.key_expiration_time(), now) {
        return bad("the part of it that has signed has expired");
    }
    Ok(())
}

/// The newest of signatures that hold now.
fn newest<'a>(signatures: impl Iterator<Item = &'a Signature>, now: u64) -> Option<&'a Signature> {
    signatures.filter(|s| is_strong(s) && is_current(s, now)).max_by_key(|s| s.created())
}

fn is_strong(signature: &Signature) -> bool {
    use HashAlgorithm::{Sha3_256, Sha3_512, Sha256, Sha384, Sha512};
    matches!(signature.hash_alg(), Some(Sha256 | Sha384 | Sha512 | Sha3_256 | Sha3_512))
}

/// Whether a signature was made by now, and has not expired.
fn is_current(signature: &Signature, now: u64) -> bool {
    signature.created().is_some_and(|made| {
        u64::from(made.as_secs()) <= now + SKEW_SECS
            && !is_over(made, signature.signature_expiration_time(), now)
    })
}

/// Whether something has ended that began at `from`; no life, or one of zero, is for ever.
fn is_over(from: Timestamp, life: Option<Duration>, now: u64) -> bool {
    let life = life.map_or(0, Duration::as_secs);
    life > 0 && u64::from(from.as_secs()) + u64::from(life) <= now
}

fn is_strong_key(key: &impl KeyDetails) -> bool {
    if !matches!(key.version(), KeyVersion::V4 | KeyVersion::V6) {
        return false;
    }
    match key.public_params() {
        // The modulus comes first, and begins with its length in bits.
        PublicParams::RSA(rsa) => rsa.to_bytes().is_ok_and(|bytes| match bytes.as_slice() {
            [high, low, ..] => u16::from_be_bytes([*high, *low]) >= MIN_RSA_BITS,
            _ => false,
        }),
        PublicParams::ECDSA(curve) => matches!(
            curve,
            EcdsaPublicParams::P256 { .. }
                | EcdsaPublicParams::P384 { .. }
                | EcdsaPublicParams::P521 { .. }
        ),
        PublicParams::EdDSALegacy(_) | PublicParams::Ed25519(_) | PublicParams::Ed448(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Made with GnuPG: `tests/vectors/openpgp/README.md`.
    fn vector(name: &str) -> String {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/openpgp/");
        std::fs::read_to_string(format!("{dir}{name}")).unwrap()
    }

    const GOOD: &str = "887CE993AF56F108EA14919F78DC3531F9D00547";

    /// A minute after the signatures were made.
    fn soon() -> UnixMillis {
        UnixMillis::parse_iso("2026-11-30T12:01:00Z").unwrap()
    }

    fn judged_at(signature: &str, key: &str, now: UnixMillis) -> Result<String, OpenPgpError> {
        let (signature, key) = (vector(&format!("{signature}.sig")), vector(&format!("{key}.key")));
        verify(&signature, &key, &vector("text"), now)
    }

    fn judged(signature: &str, key: &str) -> Result<String, OpenPgpError> {
        judged_at(signature, key, soon())
    }

    #[test]
    fn good_signatures_of_gnupg_are_good_and_name_the_primary_key() {
        for (name, fingerprint) in [
            ("good", GOOD),
            ("rsa", "6FD4555EB2F9C50E317AF0E77BDD8060A4562AD7"),
            ("p256", "4AF37C62A4C63934DDE6ACEEFEAA1893CD424001"),
        ] {
            assert_eq!(judged(name, name).as_deref(), Ok(fingerprint), "{name}");
        }
        assert_eq!(judged("good-text", "good").as_deref(), Ok(GOOD));
    }

    #[test]
    fn another_text_or_key_is_not_what_was_signed() {
        let (signature, key, text) = (vector("good.sig"), vector("good.key"), vector("text"));
        let changed = text.replace("12:15", "23:15");
        assert_ne!(changed, text);
        let error = verify(&signature, &key, &changed, soon()).unwrap_err();
        assert_eq!(error.code(), "signature_invalid");
        assert_eq!(judged("good", "rsa").unwrap_err().code(), "signature_invalid");
        for (signature, key) in [("", &*key), (&*signature, ""), ("-----BEGIN", &key), (&key, &key)]
        {
            let error = verify(signature, key, &text, soon()).unwrap_err();
            assert_eq!(error.code(), "openpgp_form", "{signature:.20}");
        }
        let long = "x".repeat(MAX_KEY + 1);
        assert_eq!(verify(&signature, &long, &text, soon()).unwrap_err().code(), "openpgp_form");
    }

    #[test]
    fn keys_and_parts_that_may_not_sign_do_not() {
        for (name, why) in [
            ("revoked", "it is revoked"),
            ("revoked-part", "the part of it that has signed is revoked"),
            ("weak", "its algorithm is not used for signatures any more"),
            ("dsa", "its algorithm is not used for signatures any more"),
        ] {
            assert_eq!(judged(name, name), Err(OpenPgpError::Key(why)), "{name}");
        }
    }

    #[test]
    fn what_is_over_or_not_yet_does_not_count() {
        let at = |text: &str| UnixMillis::parse_iso(text).unwrap();
        let before_and_after = |signature, key, before: &str, after: &str| {
            judged_at(signature, key, at(before)).unwrap();
            judged_at(signature, key, at(after)).unwrap_err()
        };
        let key = before_and_after("rsa", "rsa", "2026-12-09T00:00:00Z", "2026-12-11T00:00:00Z");
        assert_eq!(key, OpenPgpError::Key("it has expired"));
        let days = ("2026-12-04T00:00:00Z", "2026-12-06T00:00:00Z");
        let part = before_and_after("passing-part", "passing-part", days.0, days.1);
        assert_eq!(part, OpenPgpError::Key("the part of it that has signed has expired"));
        let days = ("2026-12-01T11:59:59Z", "2026-12-01T12:00:00Z");
        let signature = before_and_after("short", "good", days.0, days.1);
        assert_eq!(signature.code(), "signature_invalid");
        let early = judged("future", "good").unwrap_err();
        assert_eq!(early.code(), "signature_invalid");
        judged_at("future", "good", at("2026-12-01T12:00:00Z")).unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// What a stranger has damaged ends in an answer, and never makes another text good.
        #[test]
        fn damaged_keys_and_signatures_are_refused(
            name in prop::sample::select(vec!["good", "rsa", "p256", "revoked-part", "dsa"]),
            in_key in any::<bool>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 33..127_u8), 1..6),
        ) {
            let (mut key, mut signature) =
                (vector(&format!("{name}.key")), vector(&format!("{name}.sig")));
            let damaged = if in_key { &mut key } else { &mut signature };
            let mut bytes = std::mem::take(damaged).into_bytes();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            *damaged = String::from_utf8(bytes).unwrap();
            prop_assert!(verify(&signature, &key, "another text", soon()).is_err());
        }
    }

    #[test]
    fn a_weak_hash_is_refused() {
        let error = judged("sha1", "good").unwrap_err();
        assert_eq!(error, OpenPgpError::Signature("its hash is too weak"));
    }

    #[test]
    fn what_is_signed_here_is_good_and_a_locked_key_wants_its_passphrase() {
        // The library dates signatures by the clock.
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let now = UnixMillis(u64::try_from(since.as_millis()).unwrap());
        let made = sign(&vector("good.secret"), None, "a:b:c", now).unwrap();
        assert!(made.starts_with("-----BEGIN PGP SIGNATURE-----"));
        assert_eq!(verify(&made, &vector("good.key"), "a:b:c", now).as_deref(), Ok(GOOD));
        let locked = vector("locked.secret");
        for wrong in [None, Some("wrong")] {
            assert_eq!(sign(&locked, wrong, "a:b:c", now), Err(OpenPgpError::Passphrase));
        }
        let made = sign(&locked, Some("correct horse"), "a:b:c", now).unwrap();
        verify(&made, &vector("locked.key"), "a:b:c", now).unwrap();
        assert_eq!(
            sign(&vector("good.key"), None, "a:b:c", now).unwrap_err().code(),
            "openpgp_form"
        );
    }
}
