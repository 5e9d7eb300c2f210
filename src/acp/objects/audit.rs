//! The log's own objects (design 7, 8): genesis, entries, bundles, checkpoints, anchors, and the
//! gateway journal's.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::sign::{Role, Signature, Signed, signed_by};
use crate::acp::value::{Count, Digest, Read, Seq, TaskId, Time, Word, bad, object, words};

words! {
    /// What happens to a task.
    pub enum Event {
        /// The work is offered.
        Propose = "PROPOSE",
        /// The worker does not take it.
        Reject = "REJECT",
        /// The requester takes the offer back.
        Withdraw = "WITHDRAW",
        /// The worker takes it.
        Accept = "ACCEPT",
        /// The work begins.
        Start = "START",
        /// How far it is.
        Progress = "PROGRESS",
        /// An owner's answer.
        Approval = "APPROVAL",
        /// The result.
        Deliver = "DELIVER",
        /// The checks passed.
        VerifyPass = "VERIFY_PASS",
        /// The checks failed, for good.
        VerifyFail = "VERIFY_FAIL",
        /// The checks failed; once more.
        Rework = "REWORK",
        /// The result is taken.
        Settle = "SETTLE",
        /// The result is not taken, though the checks passed.
        Decline = "DECLINE",
        /// The result is not needed any more.
        Supersede = "SUPERSEDE",
        /// The requester wants the work stopped.
        Cancel = "CANCEL",
        /// The work is stopped.
        Cancelled = "CANCELLED",
        /// The worker did not confirm in time.
        Abandon = "ABANDON",
        /// The work failed.
        Fail = "FAIL",
        /// A time ran out.
        Expire = "EXPIRE",
    }
}

words! {
    /// Where a task is.
    pub enum State {
        /// Offered.
        Proposed = "PROPOSED",
        /// Taken.
        Accepted = "ACCEPTED",
        /// Being worked on.
        InProgress = "IN_PROGRESS",
        /// Handed over.
        Delivered = "DELIVERED",
        /// Checked.
        Verified = "VERIFIED",
        /// Being stopped.
        Cancelling = "CANCELLING",
        /// Done.
        Settled = "SETTLED",
        /// Stopped.
        Cancelled = "CANCELLED",
        /// Not taken.
        Rejected = "REJECTED",
        /// Taken back.
        Withdrawn = "WITHDRAWN",
        /// Failed.
        Failed = "FAILED",
        /// The result was not accepted.
        Disputed = "DISPUTED",
        /// Too late.
        Expired = "EXPIRED",
        /// Not needed any more.
        Superseded = "SUPERSEDED",
    }
}

words! {
    /// One of the two sides of a task.
    pub enum Party {
        /// Who orders.
        Requester = "requester",
        /// Who works.
        Worker = "worker",
    }
}

impl Party {
    /// The other side.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Requester => Self::Worker,
            Self::Worker => Self::Requester,
        }
    }

    /// The role in which this side signs entries.
    #[must_use]
    pub const fn role(self) -> Role {
        match self {
            Self::Requester => Role::Requester,
            Self::Worker => Role::Worker,
        }
    }
}

object! {
    /// Where a log begins: its task and its two sides.
    pub struct AuditGenesis = "AuditGenesis" {
        "taskId" task_id: TaskId,
        /// Requester, then worker.
        "actors" actors: Actors,
    }
}

/// The two sides of a task, requester first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Actors {
    /// Who orders.
    pub requester: Did,
    /// Who works.
    pub worker: Did,
}

impl Serialize for Actors {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        [self.requester, self.worker].serialize(serializer)
    }
}

impl Read for Actors {
    fn read(value: Value) -> Result<Self> {
        match Seq::<Did, 2, 2>::read(value)?.into_vec().as_slice() {
            [requester, worker] => Ok(Self { requester: *requester, worker: *worker }),
            _ => Err(bad("not two dids")),
        }
    }
}

impl JsonSchema for Actors {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Actors".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        <Seq<Did, 2, 2>>::json_schema(generator)
    }
}

impl AuditGenesis {
    /// The genesis of a task between two different dids.
    ///
    /// # Errors
    /// `BAD_FIELD` for one did twice.
    pub fn new(task_id: TaskId, requester: Did, worker: Did) -> Result<Self> {
        let genesis = Self { task_id, actors: Actors { requester, worker } };
        genesis.check()?;
        Ok(genesis)
    }

    /// Whether the actors are two.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn check(&self) -> Result<()> {
        if self.actors.requester == self.actors.worker {
            return Err(bad(
                "requester and worker are one did; a gateway keeps a second one for its own worker",
            ));
        }
        Ok(())
    }

    /// The did of a side.
    #[must_use]
    pub fn actor(&self, party: Party) -> Did {
        match party {
            Party::Requester => self.actors.requester,
            Party::Worker => self.actors.worker,
        }
    }

    /// Which side `did` is on.
    #[must_use]
    pub fn party(&self, did: Did) -> Option<Party> {
        [Party::Requester, Party::Worker].into_iter().find(|party| self.actor(*party) == did)
    }

    /// Its digest: what `prev` of entry 0 says.
    ///
    /// # Errors
    /// As [`Digest::of`].
    pub fn digest(&self) -> Result<Digest> {
        Digest::of(self)
    }
}

object! {
    /// One step of a task, signed by its author, and by the other side once it is committed.
    pub struct AuditEntry = "AuditEntry" {
        "taskId" task_id: TaskId,
        "seq" seq: Count,
        /// Digest of the entry before, or of the genesis.
        "prev" prev: Digest,
        "event" event: Event,
        "fromState" from_state: Option<State>,
        "toState" to_state: State,
        "actorDid" actor_did: Did,
        "actorRole" actor_role: Party,
        "at" at: Time,
        /// Digest of the list of the payload objects' digests.
        "payloadDigest" payload_digest: Digest,
        /// Whether it may stand with its author's signature alone.
        "unilateral" unilateral: bool,
        /// The author's first.
        "signatures" signatures: Seq<Signature, 1, 2>,
    }
}

impl AuditEntry {
    /// The entry's digest, which the next one names: without signatures, so it never changes.
    ///
    /// # Errors
    /// As [`Digest::of`].
    pub fn digest(&self) -> Result<Digest> {
        crate::acp::sign::body_digest(self)
    }

    /// The author's signature.
    ///
    /// # Errors
    /// `BAD_FIELD`; a list of at least one has a first.
    pub fn author_signature(&self) -> Result<&Signature> {
        self.signatures.first().ok_or_else(|| bad("no signature"))
    }

    /// The second signature.
    #[must_use]
    pub fn countersignature(&self) -> Option<&Signature> {
        self.signatures.get(1)
    }

    /// Checks the author's signature and its time, and the second signature if there is one.
    ///
    /// # Errors
    /// `WRONG_SIGNER`, `WRONG_ROLE`, `BAD_SIGNATURE`, `BAD_TIME`.
    pub fn verify(&self, genesis: &AuditGenesis) -> Result<()> {
        let author = genesis.actor(self.actor_role);
        if self.actor_did != author {
            return Err(Error::new(Code::WrongSigner, "the actor is not who the genesis names"));
        }
        let signature = self.author_signature()?;
        if signature.signed_at != self.at {
            return Err(Error::new(Code::BadTime, "signed at another time than the entry's"));
        }
        crate::acp::sign::verify(self, signature, author, self.actor_role.role())?;
        match self.countersignature() {
            Some(second) => self.verify_countersignature(genesis, second),
            None => Ok(()),
        }
    }

    /// Checks a second signature.
    ///
    /// # Errors
    /// `WRONG_SIGNER`, `WRONG_ROLE`, `BAD_SIGNATURE`.
    pub fn verify_countersignature(
        &self,
        genesis: &AuditGenesis,
        second: &Signature,
    ) -> Result<()> {
        let other = self.actor_role.other();
        crate::acp::sign::verify(self, second, genesis.actor(other), other.role())
    }

    /// The entry with `second` as its second signature.
    ///
    /// # Errors
    /// `BAD_FIELD` when it has two already.
    pub fn with_countersignature(&self, second: Signature) -> Result<Self> {
        let mut signatures = self.signatures.to_vec();
        signatures.push(second);
        Ok(Self { signatures: Seq::new(signatures)?, ..self.clone() })
    }

    /// The entry with its author's signature alone, as it is sent.
    ///
    /// # Errors
    /// As [`Self::author_signature`].
    pub fn author_only(&self) -> Result<Self> {
        let signatures = Seq::new(vec![self.author_signature()?.clone()])?;
        Ok(Self { signatures, ..self.clone() })
    }
}

object! {
    /// An entry of a bundle with the digests of its payload.
    pub struct BundleEntry {
        "entry" entry: AuditEntry,
        "payload" payload: Seq<Digest, 0, 64>,
    }
}

/// The objects of a bundle by their digests.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct BundleObjects(pub BTreeMap<Digest, Value>);

impl Serialize for BundleObjects {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Read for BundleObjects {
    fn read(value: Value) -> Result<Self> {
        let Value::Object(members) = value else { return Err(bad("not an object")) };
        let read = |(name, value): (String, Value)| Ok((Digest::parse(&name)?, value));
        Ok(Self(members.into_iter().map(read).collect::<Result<_>>()?))
    }
}

impl JsonSchema for BundleObjects {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "BundleObjects".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let names = generator.subschema_for::<Digest>();
        json_schema!({ "type": "object", "propertyNames": names })
    }
}

object! {
    /// A whole log, signed by who exported it.
    pub struct AuditBundle = "AuditBundle" {
        "genesis" genesis: AuditGenesis,
        "entries" entries: Seq<BundleEntry, 0, 100_000>,
        "objects" objects: BundleObjects,
        /// Digest of the last entry; of the genesis when there is none.
        "head" head: Digest,
        "sealed" sealed: bool,
        "exportedAt" exported_at: Time,
        "exporterDid" exporter_did: Did,
        "signature" signature: Signature,
    }
}

object! {
    /// An owner's note of how far a log had come.
    pub struct AuditCheckpoint = "AuditCheckpoint" {
        "taskId" task_id: TaskId,
        "actors" actors: Actors,
        "seq" seq: Count,
        "head" head: Digest,
        "at" at: Time,
        "signature" signature: Signature,
    }
}

/// Either side's owner signs its own checkpoints; there is no member that names which.
impl Signed for AuditCheckpoint {
    const ROLE: Role = Role::Owner;
    fn signer(&self) -> Did {
        self.signature.signer_did
    }
    fn signature(&self) -> &Signature {
        &self.signature
    }
    fn signature_mut(&mut self) -> &mut Signature {
        &mut self.signature
    }
}

object! {
    /// What somebody got to know of a log by another way: a head, without a signature.
    pub struct TrustAnchor {
        "taskId" task_id: TaskId,
        "actors" actors: Actors,
        "head" head: Digest,
    }
}

object! {
    /// Where a gateway's journal begins.
    pub struct GatewayGenesis = "GatewayGenesis" {
        "did" did: Did,
    }
}

object! {
    /// One entry of a gateway's journal: something outside a task.
    pub struct GatewayEntry = "GatewayEntry" {
        "did" did: Did,
        "seq" seq: Count,
        "prev" prev: Digest,
        /// What happened, e.g. `CALL_REFUSED`.
        "event" event: Word,
        "at" at: Time,
        "payloadDigest" payload_digest: Digest,
        "signature" signature: Signature,
    }
}

signed_by! {
    AuditBundle.exporter_did as Exporter;
    GatewayEntry.did as Owner;
}
