//! DSSE's own vectors (secure-systems-lab/dsse `testvectors`), as far as they are ours: what is
//! signed, by the keys of RFC 8032. We take its pre-authentication encoding and nothing else of it:
//! no envelope with base64 in two alphabets, no key ids, no thresholds, one signature a role. The
//! signatures were made anew with another library and are those of the vectors.

use commsd::acp::did::Secret;
use commsd::acp::sign::pae;
use data_encoding::{BASE64URL_NOPAD, HEXLOWER};

/// RFC 8032 7.1, TEST 1 and TEST 2: seeds.
const A: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
const B: &str = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb";

const KIND: &str = "application/vnd.in-toto+json";
const STATEMENT: &[u8] = br#"{"_type":"https://in-toto.io/Statement/v1"}"#;

fn secret(seed: &str) -> Secret {
    Secret::from_seed(&HEXLOWER.decode(seed.as_bytes()).unwrap().try_into().unwrap()).unwrap()
}

#[test]
fn what_is_signed_is_what_the_vectors_sign() {
    for (what, seed, kind, payload, expected) in [
        (
            "single-signature",
            A,
            KIND,
            STATEMENT,
            "2WAfaHm5jluo0w-0rk8uVkluELJYWjSmU9x7EUzx-AyteDGJ4_nqyJXfmAUVFIAoQafWm7AxBZNw5M9ixNHiCA",
        ),
        (
            "the second key of threshold-two-distinct-keys",
            B,
            KIND,
            STATEMENT,
            "c1-67_aT0yqEpwx8PsVY3MLHsj9D0CZ014_Fv_QlG59P-9CobUZ7xECJ_V3USG0Ob9CiE5LjReEZUzNF2l7eBw",
        ),
        (
            "the bytes of url-safe-base64",
            A,
            KIND,
            &[0xfb, 0xff, 0xbf, 0x3e, 0x3f],
            "P-_KHICeR7tI6S_YyejJTRtrXhcQyQ2LYPaL8h90KjC9qN8HU_svOQ6TuDOT1HIrsGW886DbWNWcCmX5twLrAw",
        ),
        (
            "non-ascii-payload-type",
            A,
            "application/vnd.ex\u{e4}mple+json",
            STATEMENT,
            "xmSk_ug66ysT7ayhkCIjhAq42zgZXSsEWuzUaNL7w2eGAdF_NU6_fRXPtmfN-5DNSAs5_i2lUnHjbbjPsu0tAw",
        ),
        (
            "empty-payload",
            A,
            KIND,
            b"",
            "gSggCAaTLTYyRH6FIDBem6meyIynsYy8RTHVzwx9tnTb7Bg_1jMWnuVgI_gffqmbsC2VX5_jHfkkDqsj7CDbDg",
        ),
        (
            "empty-payload-type",
            A,
            "",
            STATEMENT,
            "iC3q_-3Rm0-lpAJRueDmDh15PnwCfxKmS0NAfKsbv-zgulXQC_WM9trc-j1XEqlwDIg_vf_uNfebeD6sxInrDg",
        ),
    ] {
        let secret = secret(seed);
        let signature = secret.sign_bytes(&pae(kind, payload));
        assert_eq!(BASE64URL_NOPAD.encode(&signature.0), expected, "{what}");
        assert!(secret.did().verifies(&pae(kind, payload), &signature), "{what}");
        // payload-type-swapped: the type is in what is signed.
        let swapped = pae("application/vnd.example.other+json", payload);
        assert!(!secret.did().verifies(&swapped, &signature), "{what}");
    }
}
