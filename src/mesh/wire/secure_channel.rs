//! The secure channel between two devices that talk through a relay: hellos, keys, sealed frames
//! (`wire.md`, "Secure channel"). Ephemeral keys, nonces and the time come in as arguments.

use aes_gcm::aead::{Aead as _, KeyInit as _, Payload};
use aes_gcm::{Aes256Gcm, Nonce};
use hkdf::Hkdf;
use sha2::Sha256;
use thiserror::Error;
use zeroize::Zeroizing;

use super::frame::{Frame, SecureHello};
use crate::codec::cbor::MAX_SAFE_INTEGER;
use crate::codec::time::UnixMillis;
use crate::identity::device::{DeviceId, DeviceKey};

/// Hellos that come sooner than this after our last one are not answered.
///
/// A hello carries no freshness: a relay that replays one makes two ends that answer every hello
/// exchange them for ever. Within this time a further hello is taken as the answer to ours, which
/// settles such an exchange if a round trip is shorter; and a peer that gave up and starts again
/// does so only after its request's time-out of 15 seconds.
pub const HELLO_INTERVAL_MS: u64 = 5_000;

const HELLO_CONTEXT: &[u8] = b"wire-mesh/secure-hello/v1\0";
const CHANNEL_CONTEXT: &[u8] = b"wire-mesh/secure-channel/v1\0";
const DATA_CONTEXT: &[u8] = b"wire-mesh/secure-data/v1\0";

/// Why a hello or sealed frame is dropped, or nothing can be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChannelError {
    /// The hello is for another device.
    #[error("the hello is for another device")]
    WrongRecipient,
    /// The hello's signature does not verify.
    #[error("the hello's signature does not verify")]
    BadSignature,
    /// The hello is from another device than the channel is with.
    #[error("the hello is from another device")]
    WrongSender,
    /// The hello's ephemeral key is no point on the curve.
    #[error("the hello's ephemeral key cannot be used")]
    UnusableKey,
    /// The hello that the channel was made with came again, or another one too soon.
    #[error("a repeated hello")]
    RepeatedHello,
    /// There is no channel yet.
    #[error("the secure channel is not open")]
    NotOpen,
    /// The counter is not higher than the last one that opened.
    #[error("a repeated or old frame")]
    OldCounter,
    /// The ciphertext does not open under the channel's key.
    #[error("the sealed frame does not open")]
    DoesNotOpen,
    /// The channel's counter is used up.
    #[error("the secure channel's counter is used up")]
    Exhausted,
}

impl ChannelError {
    /// A stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::WrongRecipient => "wrong_recipient",
            Self::BadSignature => "bad_signature",
            Self::WrongSender => "wrong_sender",
            Self::UnusableKey => "unusable_key",
            Self::RepeatedHello => "repeated_hello",
            Self::NotOpen => "not_open",
            Self::OldCounter => "old_counter",
            Self::DoesNotOpen => "does_not_open",
            Self::Exhausted => "exhausted",
        }
    }
}

/// What is drawn afresh for each hello.
#[derive(Clone)]
pub struct Ephemeral {
    /// A fresh key.
    pub key: DeviceKey,
    /// A fresh nonce.
    pub nonce: [u8; 16],
}

impl Ephemeral {
    /// The hello that tells `to` of this, signed by `identity`.
    #[must_use]
    pub fn hello(&self, identity: &DeviceKey, to: DeviceId) -> SecureHello {
        let mut hello = SecureHello {
            ephemeral_key: *self.key.public_key(),
            nonce: self.nonce,
            identity_key: identity.identity_key(),
            to_device: to,
            signature: Vec::new(),
        };
        hello.signature = identity.sign(&hello.signing_input()).to_vec();
        hello
    }
}

impl SecureHello {
    /// Checks that the hello is for `recipient` and properly signed, and returns its sender.
    ///
    /// # Errors
    /// [`ChannelError::WrongRecipient`] or [`ChannelError::BadSignature`].
    pub fn verify(&self, recipient: &DeviceId) -> Result<DeviceId, ChannelError> {
        if self.to_device != *recipient {
            return Err(ChannelError::WrongRecipient);
        }
        if !self.identity_key.verify(&self.signing_input(), &self.signature) {
            return Err(ChannelError::BadSignature);
        }
        Ok(self.identity_key.device())
    }

    fn signing_input(&self) -> Vec<u8> {
        let sender = self.identity_key.device();
        [HELLO_CONTEXT, &self.ephemeral_key, &self.nonce, &sender.0, &self.to_device.0].concat()
    }
}

/// An open channel: a key and a counter for each direction.
pub struct Channel {
    send: Direction,
    receive: Direction,
}

struct Direction {
    cipher: Aes256Gcm,
    from: DeviceId,
    to: DeviceId,
    /// The lowest counter that may be used.
    next: u64,
}

impl Channel {
    /// The channel that results from our hello (`ours`, sent by `me`) and a verified one of `peer`.
    ///
    /// # Errors
    /// [`ChannelError::UnusableKey`].
    pub fn new(
        me: DeviceId,
        ours: &Ephemeral,
        peer: DeviceId,
        theirs: &SecureHello,
    ) -> Result<Self, ChannelError> {
        let secret = ours.key.ecdh(&theirs.ephemeral_key).ok_or(ChannelError::UnusableKey)?;
        let ends = [(me, ours.nonce), (peer, theirs.nonce)];
        let [low, high] = if me < peer { ends } else { [ends[1], ends[0]] };
        let salt = [low.1, high.1].concat();
        let derivation = Hkdf::<Sha256>::new(Some(&salt), secret.as_slice());
        let direction = |from: DeviceId, to: DeviceId| {
            let label: &[u8] = if from == low.0 { b"lo-to-hi" } else { b"hi-to-lo" };
            let info = [CHANNEL_CONTEXT, &low.0.0, &high.0.0, label].concat();
            let mut key = Zeroizing::new([0; 32]);
            // Fails only for lengths that HKDF cannot give; 32 bytes it can.
            derivation.expand(&info, key.as_mut()).map_err(|_| ChannelError::UnusableKey)?;
            let cipher =
                Aes256Gcm::new_from_slice(key.as_slice()).map_err(|_| ChannelError::UnusableKey)?;
            Ok(Direction { cipher, from, to, next: 0 })
        };
        Ok(Self { send: direction(me, peer)?, receive: direction(peer, me)? })
    }

    /// Seals an encoded frame: a `secure-data` frame.
    ///
    /// # Errors
    /// [`ChannelError::Exhausted`] after 2^53-1 frames.
    pub fn seal(&mut self, encoded: &[u8]) -> Result<Frame, ChannelError> {
        let direction = &mut self.send;
        let counter = direction.next;
        if counter > MAX_SAFE_INTEGER {
            return Err(ChannelError::Exhausted);
        }
        let aad = direction.associated_data(counter);
        let payload = Payload { msg: encoded, aad: &aad };
        let ciphertext = direction
            .cipher
            .encrypt(&Direction::nonce(counter), payload)
            .map_err(|_| ChannelError::Exhausted)?;
        direction.next += 1;
        Ok(Frame::SecureData { counter, ciphertext })
    }

    /// Opens a sealed frame: the encoded frame in it. Gaps in the counter are fine.
    ///
    /// # Errors
    /// [`ChannelError::OldCounter`] or [`ChannelError::DoesNotOpen`].
    pub fn open(&mut self, counter: u64, ciphertext: &[u8]) -> Result<Vec<u8>, ChannelError> {
        let direction = &mut self.receive;
        if counter < direction.next || counter > MAX_SAFE_INTEGER {
            return Err(ChannelError::OldCounter);
        }
        let aad = direction.associated_data(counter);
        let payload = Payload { msg: ciphertext, aad: &aad };
        let encoded = direction
            .cipher
            .decrypt(&Direction::nonce(counter), payload)
            .map_err(|_| ChannelError::DoesNotOpen)?;
        direction.next = counter + 1;
        Ok(encoded)
    }
}

impl Direction {
    fn nonce(counter: u64) -> Nonce<aes_gcm::aead::consts::U12> {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&counter.to_be_bytes());
        nonce.into()
    }

    fn associated_data(&self, counter: u64) -> Vec<u8> {
        [DATA_CONTEXT, &self.from.0, &self.to.0, &counter.to_be_bytes()].concat()
    }
}

/// Our end of the talk with one peer over one relay link: who said hello, and the channel.
pub struct SecurePeer {
    peer: DeviceId,
    /// Our last hello and when it was sent.
    ours: Option<(Ephemeral, UnixMillis)>,
    open: Option<Open>,
}

struct Open {
    channel: Channel,
    /// The peer's ephemeral key in the hello that the channel was made with.
    their_key: [u8; 65],
    /// Whether a frame has opened: only then has the peer shown that its hello was no replay.
    confirmed: bool,
}

impl SecurePeer {
    /// No hello said yet.
    #[must_use]
    pub fn new(peer: DeviceId) -> Self {
        Self { peer, ours: None, open: None }
    }

    /// Whether frames can be sealed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether a hello of ours waits for the peer's.
    #[must_use]
    pub fn is_opening(&self) -> bool {
        self.ours.is_some() && self.open.is_none()
    }

    /// Starts (again): the hello to send. A channel that was open is dropped.
    pub fn start(&mut self, me: &DeviceKey, fresh: Ephemeral, now: UnixMillis) -> SecureHello {
        let hello = fresh.hello(me, self.peer);
        self.ours = Some((fresh, now));
        self.open = None;
        hello
    }

    /// Takes the peer's hello. The channel is open afterwards; if a hello is returned, it is our
    /// answer and has to be sent first. `fresh` is drawn from only for an answer.
    ///
    /// # Errors
    /// [`ChannelError`] for a hello to drop without an answer; nothing has changed then.
    pub fn receive_hello(
        &mut self,
        me: &DeviceKey,
        theirs: &SecureHello,
        now: UnixMillis,
        fresh: impl FnOnce() -> Ephemeral,
    ) -> Result<Option<SecureHello>, ChannelError> {
        if theirs.verify(&me.id())? != self.peer {
            return Err(ChannelError::WrongSender);
        }
        let (repeated, confirmed) = match &self.open {
            Some(open) => (open.their_key == theirs.ephemeral_key, open.confirmed),
            None => (false, false),
        };
        let soon = |sent: UnixMillis| now.since(sent) < HELLO_INTERVAL_MS;
        let outstanding = match &self.ours {
            _ if repeated => return Err(ChannelError::RepeatedHello),
            Some((_, sent)) if confirmed && soon(*sent) => {
                return Err(ChannelError::RepeatedHello);
            }
            // Ours is unanswered, or so far answered only by what may have been a replay.
            Some((ours, sent)) if self.open.is_none() || (!confirmed && soon(*sent)) => Some(ours),
            _ => None,
        };
        let their_key = theirs.ephemeral_key;
        if let Some(ours) = outstanding {
            let channel = Channel::new(me.id(), ours, self.peer, theirs)?;
            self.open = Some(Open { channel, their_key, confirmed: false });
            return Ok(None);
        }
        let fresh = fresh();
        let channel = Channel::new(me.id(), &fresh, self.peer, theirs)?;
        let answer = fresh.hello(me, self.peer);
        self.ours = Some((fresh, now));
        self.open = Some(Open { channel, their_key, confirmed: false });
        Ok(Some(answer))
    }

    /// Seals a frame for the peer.
    ///
    /// # Errors
    /// [`ChannelError::NotOpen`] or [`ChannelError::Exhausted`].
    pub fn seal(&mut self, frame: &Frame) -> Result<Frame, ChannelError> {
        let open = self.open.as_mut().ok_or(ChannelError::NotOpen)?;
        open.channel.seal(&frame.encode())
    }

    /// Opens a sealed frame of the peer: the encoded frame in it.
    ///
    /// # Errors
    /// [`ChannelError::NotOpen`], [`ChannelError::OldCounter`] or [`ChannelError::DoesNotOpen`].
    pub fn open(&mut self, counter: u64, ciphertext: &[u8]) -> Result<Vec<u8>, ChannelError> {
        let open = self.open.as_mut().ok_or(ChannelError::NotOpen)?;
        let encoded = open.channel.open(counter, ciphertext)?;
        open.confirmed = true;
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests;
