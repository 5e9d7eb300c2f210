//! The closed list of error codes (design section 16) and the one error type that carries them.
//! Knows nothing of where an error is shown; a code is stable, a message is for people.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($( $(#[doc = $doc:literal])* $name:ident = $text:literal, )*) => {
        /// A stable error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[allow(missing_docs, reason = "the text of a code is its documentation")]
        pub enum Code { $( $(#[doc = $doc])* #[serde(rename = $text)] $name, )* }

        impl Code {
            /// Every code, in the order of the list.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The code as it is written.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The code that `text` names.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$name),)* _ => None }
            }
        }
    };
}

codes! {
    // Parsing
    BadJson = "BAD_JSON",
    TooLarge = "TOO_LARGE",
    TooDeep = "TOO_DEEP",
    DuplicateMember = "DUPLICATE_MEMBER",
    BadNumber = "BAD_NUMBER",
    UnsafeInteger = "UNSAFE_INTEGER",
    UnknownMember = "UNKNOWN_MEMBER",
    MissingMember = "MISSING_MEMBER",
    BadField = "BAD_FIELD",
    UnsupportedVersion = "UNSUPPORTED_VERSION",
    BadDid = "BAD_DID",
    BadTime = "BAD_TIME",
    BadId = "BAD_ID",
    // Cryptography
    BadSignature = "BAD_SIGNATURE",
    WrongSigner = "WRONG_SIGNER",
    WrongRole = "WRONG_ROLE",
    DigestMismatch = "DIGEST_MISMATCH",
    DecryptFailed = "DECRYPT_FAILED",
    StaleKey = "STALE_KEY",
    UnsupportedSuite = "UNSUPPORTED_SUITE",
    // Capabilities
    CallIdReused = "CALL_ID_REUSED",
    /// Added by decision 41: the call was started before a restart and its end is not known.
    CallOutcomeUnknown = "CALL_OUTCOME_UNKNOWN",
    TokenRevoked = "TOKEN_REVOKED",
    TokenExpired = "TOKEN_EXPIRED",
    TokenNotYetValid = "TOKEN_NOT_YET_VALID",
    UntrustedIssuer = "UNTRUSTED_ISSUER",
    ChainBroken = "CHAIN_BROKEN",
    DepthExceeded = "DEPTH_EXCEEDED",
    WrongAudience = "WRONG_AUDIENCE",
    AttenuationViolation = "ATTENUATION_VIOLATION",
    CapabilityNotGranted = "CAPABILITY_NOT_GRANTED",
    UsesExhausted = "USES_EXHAUSTED",
    // Contracts
    ContractNotCountersigned = "CONTRACT_NOT_COUNTERSIGNED",
    OfferExpired = "OFFER_EXPIRED",
    DeadlinePassed = "DEADLINE_PASSED",
    ManifestInvalid = "MANIFEST_INVALID",
    InputInvalid = "INPUT_INVALID",
    SchemaInvalid = "SCHEMA_INVALID",
    InviteRevoked = "INVITE_REVOKED",
    InviteExpired = "INVITE_EXPIRED",
    InviteExhausted = "INVITE_EXHAUSTED",
    BadInvite = "BAD_INVITE",
    WorkerBusy = "WORKER_BUSY",
    // Session
    IllegalTransition = "ILLEGAL_TRANSITION",
    SeqConflict = "SEQ_CONFLICT",
    SeqGap = "SEQ_GAP",
    AuditFork = "AUDIT_FORK",
    DivergedUnilateral = "DIVERGED_UNILATERAL",
    PeerTimeout = "PEER_TIMEOUT",
    UnknownTask = "UNKNOWN_TASK",
    // Approvals
    ApprovalRequired = "APPROVAL_REQUIRED",
    ApprovalDenied = "APPROVAL_DENIED",
    ApprovalExpired = "APPROVAL_EXPIRED",
    ApprovalUsed = "APPROVAL_USED",
    ApprovalMismatch = "APPROVAL_MISMATCH",
    PolicyChanged = "POLICY_CHANGED",
    // Runs
    IsolationUnavailable = "ISOLATION_UNAVAILABLE",
    IsolationDowngrade = "ISOLATION_DOWNGRADE",
    SandboxFailed = "SANDBOX_FAILED",
    AdapterFailed = "ADAPTER_FAILED",
    OutputTooLarge = "OUTPUT_TOO_LARGE",
    OutputNotJson = "OUTPUT_NOT_JSON",
    BudgetExceeded = "BUDGET_EXCEEDED",
    Cancelled = "CANCELLED",
    // Verification
    SchemaMismatch = "SCHEMA_MISMATCH",
    CheckFailed = "CHECK_FAILED",
    AttestationMissing = "ATTESTATION_MISSING",
    OutputDigestMismatch = "OUTPUT_DIGEST_MISMATCH",
    AuditInvalid = "AUDIT_INVALID",
    AuditTruncated = "AUDIT_TRUNCATED",
    AnchorMismatch = "ANCHOR_MISMATCH",
    // Several workers
    QuorumNotReached = "QUORUM_NOT_REACHED",
    AllWorkersFailed = "ALL_WORKERS_FAILED",
    DuplicateWorker = "DUPLICATE_WORKER",
    // Relay
    AuthMissing = "AUTH_MISSING",
    AuthStale = "AUTH_STALE",
    AuthReplayed = "AUTH_REPLAYED",
    AuthBadSignature = "AUTH_BAD_SIGNATURE",
    AuthWrongMailbox = "AUTH_WRONG_MAILBOX",
    AuthWrongAction = "AUTH_WRONG_ACTION",
    AuthWrongAudience = "AUTH_WRONG_AUDIENCE",
    AuthCacheFull = "AUTH_CACHE_FULL",
    MailboxFull = "MAILBOX_FULL",
    EnvelopeExpired = "ENVELOPE_EXPIRED",
    EnvelopeIdReused = "ENVELOPE_ID_REUSED",
    RateLimited = "RATE_LIMITED",
    EndpointBlocked = "ENDPOINT_BLOCKED",
    RelayUnreachable = "RELAY_UNREACHABLE",
}

impl Code {
    /// What whoever meets it can do, where nothing better is known of the case. Commands are named as
    /// people call them, and the models' tools beside them.
    #[must_use]
    pub const fn todo(self) -> &'static str {
        match self {
            Self::BadJson
            | Self::TooLarge
            | Self::TooDeep
            | Self::DuplicateMember
            | Self::BadNumber
            | Self::UnsafeInteger
            | Self::UnknownMember
            | Self::MissingMember
            | Self::BadField
            | Self::BadDid
            | Self::BadTime
            | Self::BadId => "correct the member that is named, or ask for the object again",
            Self::UnsupportedVersion | Self::UnsupportedSuite => {
                "update commsd here or there: one side is newer than the other knows"
            }
            Self::BadSignature
            | Self::WrongSigner
            | Self::WrongRole
            | Self::DigestMismatch
            | Self::DecryptFailed
            | Self::ChainBroken
            | Self::ApprovalMismatch
            | Self::OutputDigestMismatch => {
                "do not rely on it: it was damaged or changed; ask its author for it again"
            }
            Self::StaleKey => "order it again: the peer has another key by now",
            Self::CallIdReused => "give a new call id to another call",
            Self::CallOutcomeUnknown => {
                "look whether the tool has done it; then call again with a new call id"
            }
            Self::TokenRevoked
            | Self::TokenExpired
            | Self::TokenNotYetValid
            | Self::UntrustedIssuer
            | Self::DepthExceeded
            | Self::WrongAudience
            | Self::AttenuationViolation
            | Self::CapabilityNotGranted
            | Self::UsesExhausted => {
                "the requester grants tools with its order (--tool, --tool-uses); it has to order anew with more"
            }
            Self::ContractNotCountersigned => {
                "wait until the worker has accepted: `commsd acp task ID`"
            }
            Self::OfferExpired | Self::DeadlinePassed | Self::PeerTimeout => {
                "order it again, with a later --deadline; look whether the other side runs"
            }
            Self::ManifestInvalid => "correct the order; the message names what is wrong with it",
            Self::InputInvalid => "give an input that fits --input-schema, or another schema",
            Self::SchemaInvalid => "correct the JSON Schema (2020-12; docs/acp.md has its bounds)",
            Self::InviteRevoked | Self::InviteExpired | Self::InviteExhausted | Self::BadInvite => {
                "ask the worker's owner for a new invite (`commsd acp invite create` there)"
            }
            Self::WorkerBusy | Self::MailboxFull | Self::RateLimited | Self::AuthCacheFull => {
                "try again later"
            }
            Self::IllegalTransition => {
                "see how the task stands: `commsd acp task ID`, or acp_task_status"
            }
            Self::SeqConflict | Self::SeqGap => {
                "nothing: the two sides bring their logs together by themselves"
            }
            Self::AuditFork | Self::DivergedUnilateral => {
                "keep the log, it is the proof (`commsd acp task ID --audit FILE`); settle it with the peer's owner"
            }
            Self::UnknownTask => "`commsd acp tasks`, or acp_list_tasks, lists the tasks",
            Self::ApprovalRequired | Self::ApprovalExpired | Self::ApprovalUsed => {
                "`commsd acp approvals list` shows what waits for its owner's answer"
            }
            Self::ApprovalDenied => "ask the owner who said no, then order it again",
            Self::PolicyChanged => "see [acp-gates] in the configuration, then try again",
            Self::IsolationUnavailable | Self::IsolationDowngrade => {
                "ask for a weaker --isolation, or for a worker whose machine has that level (docs/sandbox.md)"
            }
            Self::SandboxFailed | Self::AdapterFailed | Self::OutputNotJson => {
                "whoever runs the program sees why: at the worker `commsd acp task ID` shows its last words"
            }
            Self::OutputTooLarge | Self::BudgetExceeded => "order it again with a larger --budget",
            Self::Cancelled => "order it again if it is still wanted",
            Self::SchemaMismatch | Self::CheckFailed | Self::AttestationMissing => {
                "the result was not taken; order it again, or from another worker"
            }
            Self::AuditInvalid | Self::AuditTruncated | Self::AnchorMismatch => {
                "do not rely on this log; ask both sides for theirs (`commsd acp audit-compare`)"
            }
            Self::QuorumNotReached | Self::AllWorkersFailed => {
                "see each task (`commsd acp task ID`); ask other workers, or for a smaller quorum"
            }
            Self::DuplicateWorker => "name each worker once",
            Self::AuthMissing
            | Self::AuthStale
            | Self::AuthReplayed
            | Self::AuthBadSignature
            | Self::AuthWrongMailbox
            | Self::AuthWrongAction
            | Self::AuthWrongAudience => {
                "check this machine's clock, and that the relay is named by the URL of its --origin"
            }
            Self::EnvelopeExpired | Self::EnvelopeIdReused => "send it again, as a new envelope",
            Self::EndpointBlocked => {
                "name another relay; http and ws beyond this machine need acp-allow-insecure in the \
                 configuration, or --allow-insecure-transport with --key"
            }
            Self::RelayUnreachable => {
                "check the relay's URL and that it runs (`commsd acp relay start` there), then try again"
            }
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What went wrong: a code, where in the object, and a sentence for people.
///
/// The message never holds a payload, a key, or a stranger's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}{}{path}: {message}", if path.is_empty() { "" } else { " at " })]
pub struct Error {
    code: Code,
    path: String,
    message: String,
    todo: Option<Cow<'static, str>>,
}

/// A result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error at no particular member.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, path: String::new(), message: message.into(), todo: None }
    }

    /// The same error, where more is known than its code's [`Code::todo`].
    #[must_use]
    pub fn with_todo(mut self, todo: impl Into<Cow<'static, str>>) -> Self {
        self.todo = Some(todo.into());
        self
    }

    /// The same error, found inside the member or element `name`.
    #[must_use]
    pub fn inside(mut self, name: &str) -> Self {
        self.path = format!("/{name}{}", self.path);
        self
    }

    /// Its code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// JSON pointer of the member, empty for the whole.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The sentence for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> &str {
        self.todo.as_deref().unwrap_or_else(|| self.code.todo())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_read_back() {
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            let text = code.as_str();
            assert!(seen.insert(text));
            assert!(text.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{text}");
            assert_eq!(Code::parse(text), Some(*code));
            assert_eq!(serde_json::to_value(code).unwrap(), text);
        }
        assert_eq!(Code::parse("token_revoked"), None);
        // The list of design section 16 and one code of decision 41.
        assert_eq!(seen.len(), 88);
    }

    #[test]
    fn an_errors_own_advice_goes_before_that_of_its_code() {
        let error = Error::new(Code::BadField, "no relay");
        assert_eq!(error.todo(), Code::BadField.todo());
        let error = error.with_todo("name one").inside("relayUrls");
        assert_eq!(error.todo(), "name one");
    }

    #[test]
    fn errors_name_their_place() {
        let error = Error::new(Code::BadTime, "not a time").inside("expiresAt").inside("limits");
        assert_eq!(error.to_string(), "BAD_TIME at /limits/expiresAt: not a time");
    }
}
