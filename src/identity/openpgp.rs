//! OpenPGP signatures of connection codes (RFC 9580), by the crate `pgp`. The policy is ours: a key that
//! is revoked, expired or not made for signing signs nothing, and neither does a weak hash or an
//! algorithm of old. Built only with the feature `openpgp`; without it everything here says so.

#[cfg(feature = "openpgp")]
mod rpgp;

#[cfg(feature = "openpgp")]
pub use rpgp::{sign, verify};

#[cfg(not(feature = "openpgp"))]
use crate::codec::time::UnixMillis;

/// Bytes of an armoured key: one with many names and certifications; larger ones are photographs.
pub const MAX_KEY: usize = 256 * 1024;
/// Bytes of a file with a passphrase.
pub const MAX_PASSPHRASE: usize = 4 * 1024;

/// A signature could not be checked or made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenPgpError {
    /// Not built in.
    #[error("this commsd was built without OpenPGP")]
    Missing,
    /// The text of a signature or key is none.
    #[error("the {0} cannot be read as armoured OpenPGP")]
    Form(&'static str),
    /// The signature is not by the key, or not over this.
    #[error("the signature is not good: {0}")]
    Signature(&'static str),
    /// The key must not be used.
    #[error("the key cannot be used: {0}")]
    Key(&'static str),
    /// The passphrase does not open the key.
    #[error("the key cannot be opened: wrong passphrase, or none given")]
    Passphrase,
    /// The key is another one.
    #[error("the key has the fingerprint {0}, which is not the one that was asked for")]
    Fingerprint(String),
}

impl OpenPgpError {
    /// Stable code of this error; `signature_invalid` and `fingerprint_mismatch` are the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing => "openpgp_missing",
            Self::Form(_) => "openpgp_form",
            Self::Signature(_) => "signature_invalid",
            Self::Key(_) => "openpgp_key",
            Self::Passphrase => "openpgp_passphrase",
            Self::Fingerprint(_) => "fingerprint_mismatch",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> &'static str {
        match self {
            Self::Missing => {
                "use a commsd built with the feature `openpgp`; or leave the signature out, and the code \
                 counts as unsigned"
            }
            Self::Form(_) => "give it whole, from -----BEGIN to the end (gpg --armor)",
            Self::Signature(_) => "ask for a new code, and for the key that it is signed with",
            Self::Key(_) => "use a key that is good now and may sign",
            Self::Passphrase => "put the passphrase into the first line of a file, and name that",
            Self::Fingerprint(_) => "compare the fingerprint with its owner, by another way",
        }
    }
}

/// That a key has the fingerprint which somebody gave; spaces, colons and case do not matter.
///
/// # Errors
/// [`OpenPgpError::Fingerprint`].
pub fn pin(found: &str, wanted: &str) -> Result<(), OpenPgpError> {
    let plain = |text: &str| -> String {
        text.chars().filter(|c| !c.is_whitespace() && *c != ':').collect::<String>().to_uppercase()
    };
    if plain(found) == plain(wanted) {
        Ok(())
    } else {
        Err(OpenPgpError::Fingerprint(found.into()))
    }
}

/// That `signature` was made over `text` by `key`; answers the key's fingerprint.
///
/// # Errors
/// [`OpenPgpError::Missing`].
#[cfg(not(feature = "openpgp"))]
pub fn verify(
    _signature: &str,
    _key: &str,
    _text: &str,
    _now: UnixMillis,
) -> Result<String, OpenPgpError> {
    Err(OpenPgpError::Missing)
}

/// Signs `text` with an armoured private key.
///
/// # Errors
/// [`OpenPgpError::Missing`].
#[cfg(not(feature = "openpgp"))]
pub fn sign(
    _key: &str,
    _passphrase: Option<&str>,
    _text: &str,
    _now: UnixMillis,
) -> Result<String, OpenPgpError> {
    Err(OpenPgpError::Missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_compared_whole_and_however_it_is_written() {
        let found = "0123456789ABCDEF0123456789ABCDEF01234567";
        for same in [
            found,
            "0123456789abcdef0123456789abcdef01234567",
            "0123 4567 89AB CDEF 0123  4567 89AB CDEF 0123 4567",
            "01:23:45:67:89:ab:cd:ef:01:23:45:67:89:ab:cd:ef:01:23:45:67",
        ] {
            assert_eq!(pin(found, same), Ok(()), "{same}");
        }
        for other in ["", "01234567", &found[1..], &format!("{found}0")] {
            assert_eq!(pin(found, other).unwrap_err().code(), "fingerprint_mismatch", "{other}");
        }
    }

    #[cfg(not(feature = "openpgp"))]
    #[test]
    fn without_the_library_nothing_is_good() {
        let now = UnixMillis(0);
        assert_eq!(verify("", "", "", now).unwrap_err().code(), "openpgp_missing");
        assert_eq!(sign("", None, "", now).unwrap_err().code(), "openpgp_missing");
    }
}
