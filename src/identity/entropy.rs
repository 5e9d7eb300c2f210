//! Where random bytes come from. Protocol code takes an [`Entropy`] and never asks the operating
//! system itself, so that a test or the simulator can replay every step.

use sha2::{Digest as _, Sha256};

use super::device::DeviceKey;

/// Draws for one key before giving up. A draw fails with a chance of about 2^-32, so a second one
/// is already hardly ever needed; the bound only stops a source that always yields the same bytes.
const KEY_DRAWS: usize = 16;

/// A source of random bytes.
pub trait Entropy {
    /// Fills `bytes`. Cannot fail: a source that may be unusable says so when it is opened.
    fn fill(&mut self, bytes: &mut [u8]);
}

/// The random source could not be used.
#[derive(Debug, thiserror::Error)]
pub enum EntropyError {
    /// The operating system gave no random bytes.
    #[error(
        "the operating system gives no random bytes ({0}); check that getrandom(2) or /dev/urandom is available to this process"
    )]
    Unavailable(String),
    /// The source yielded no usable key in many draws.
    #[error("the random source yields no usable key; it seems to be broken")]
    Broken,
}

impl EntropyError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "entropy_unavailable",
            Self::Broken => "entropy_broken",
        }
    }
}

/// The operating system's source.
#[derive(Debug)]
pub struct OsEntropy(());

impl OsEntropy {
    /// Opens the source and proves once that it gives bytes.
    ///
    /// # Errors
    /// [`EntropyError::Unavailable`].
    pub fn open() -> Result<Self, EntropyError> {
        let mut probe = [0; 32];
        getrandom::fill(&mut probe).map_err(|e| EntropyError::Unavailable(e.to_string()))?;
        Ok(Self(()))
    }
}

impl Entropy for OsEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        if getrandom::fill(bytes).is_err() {
            // It worked when it was opened, and no caller can go on without secrets: end the
            // process rather than let a key or nonce be predictable.
            tracing::error!(event = "entropy_unavailable", "no random bytes; stopping");
            std::process::abort();
        }
    }
}

/// A repeatable source for tests and the simulator: SHA-256 over seed and counter. Never for a
/// real device.
#[derive(Clone, Debug)]
pub struct SeededEntropy {
    seed: u64,
    counter: u64,
}

impl SeededEntropy {
    /// The stream that `seed` stands for.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, counter: 0 }
    }
}

impl Entropy for SeededEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(32) {
            let mut hash = Sha256::new();
            hash.update(self.seed.to_be_bytes());
            hash.update(self.counter.to_be_bytes());
            self.counter = self.counter.wrapping_add(1);
            for (to, from) in chunk.iter_mut().zip(hash.finalize()) {
                *to = from;
            }
        }
    }
}

/// `N` random bytes.
pub fn draw<const N: usize>(entropy: &mut dyn Entropy) -> [u8; N] {
    let mut bytes = [0; N];
    entropy.fill(&mut bytes);
    bytes
}

/// `N` random characters of `0-9a-zA-Z_-`, as ids of the reference have (`rooms.md` 1.1).
pub fn draw_id<const N: usize>(entropy: &mut dyn Entropy) -> String {
    const ALPHABET: &[u8; 64] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-";
    let characters = draw::<N>(entropy);
    characters
        .iter()
        .filter_map(|n| ALPHABET.get(usize::from(n % 64)))
        .copied()
        .map(char::from)
        .collect()
}

/// A new P-256 device key.
///
/// # Errors
/// [`EntropyError::Broken`] when the source keeps yielding bytes that are no key.
pub fn draw_key(entropy: &mut dyn Entropy) -> Result<DeviceKey, EntropyError> {
    for _ in 0..KEY_DRAWS {
        let scalar = zeroize::Zeroizing::new(draw::<32>(entropy));
        if let Some(key) = DeviceKey::from_scalar(&scalar) {
            return Ok(key);
        }
    }
    Err(EntropyError::Broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Zeros;
    impl Entropy for Zeros {
        fn fill(&mut self, bytes: &mut [u8]) {
            bytes.fill(0);
        }
    }

    #[test]
    fn a_seed_replays_and_seeds_differ() {
        let mut a = SeededEntropy::new(1);
        let mut b = SeededEntropy::new(1);
        let first = draw::<40>(&mut a);
        assert_eq!(first, draw::<40>(&mut b));
        assert_ne!(first, draw::<40>(&mut a));
        assert_ne!(first, draw::<40>(&mut SeededEntropy::new(2)));
    }

    #[test]
    fn the_system_gives_keys_and_a_broken_source_is_an_error() {
        let mut os = OsEntropy::open().unwrap();
        let (a, b) = (draw_key(&mut os).unwrap(), draw_key(&mut os).unwrap());
        assert_ne!(a.id(), b.id());
        assert_eq!(draw_key(&mut Zeros).err().unwrap().code(), "entropy_broken");
    }
}
