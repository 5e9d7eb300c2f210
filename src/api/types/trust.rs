//! Whom the user trusts beyond this machine, and codes by which that is agreed.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Bounded;

/// How long a connection code lives, in seconds: at most a day.
pub type CodeSecs = Bounded<1, 86_400>;

words! {
    /// What is trusted.
    TrustKind {
        /// One device.
        Device = "device",
        /// Every device that proves to be this user's.
        Principal = "principal",
        /// Every device that proves to be on this machine.
        Machine = "machine",
    }
}

params! {
    /// `trust.add`.
    TrustAddParams {
        /// Full id.
        id: String,
        ;
        /// Of what; of a device without it.
        kind: TrustKind,
    }

    /// `trust.remove`.
    TrustRemoveParams {
        /// Full id.
        id: String,
        ;
        /// Of what; of a device without it.
        kind: TrustKind,
    }

    /// `trust.list`.
    TrustListParams { ; }

    /// `trust.code.create`.
    TrustCodeCreateParams {
        ;
        /// How long it can be redeemed, in milliseconds; a quarter of an hour without it, a day at most.
        ttl_ms: u64,
        /// File with an armoured OpenPGP private key that signs it; an absolute path.
        sign_key_file: String,
        /// File with the passphrase of that key in its first line; an absolute path.
        sign_passphrase_file: String,
    }

    /// `trust.code.redeem`.
    TrustCodeRedeemParams {
        /// The code, or the whole line of JSON with what belongs to it.
        code: String,
        ;
        /// When it ends, as the line says.
        expires_at: String,
        /// Which device it names, as the line says.
        device: String,
        /// Its armoured OpenPGP signature.
        signature: String,
        /// The armoured OpenPGP public key that the signature is checked with.
        public_key: String,
        /// The key's fingerprint, which it has to have.
        fingerprint: String,
    }
}

results! {
    /// `trust.add`, `trust.remove`.
    TrustChanged {
        /// Full id.
        id: String,
        /// Of what.
        kind: TrustKind,
        /// Whether it is trusted now.
        trusted: bool,
        /// Whether that is new.
        changed: bool,
    }

    /// `trust.list`.
    Trusted {
        /// Full ids.
        devices: Vec<String>,
        /// Full ids of users.
        principals: Vec<String>,
        /// Full ids of machines.
        machines: Vec<String>,
        /// The relay hub through which they are reached.
        hub: Option<String>,
    }

    /// `trust.code.create`.
    TrustCode {
        /// The code.
        code: String,
        /// When it ends.
        expires_at: String,
        /// Full id of the device that it names.
        device_id: String,
        /// Its armoured OpenPGP signature.
        signature: Option<String>,
    }

    /// `trust.code.redeem`.
    TrustCodeRedeemed {
        /// Full id of the device that is trusted now.
        device: String,
        /// Whether that is new.
        changed: bool,
        /// Fingerprint of the key that has signed the code.
        fingerprint: Option<String>,
    }
}
