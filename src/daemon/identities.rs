//! The one thread that touches identity files: opens slots under their locks, writes tokens and
//! grants as they change (decision 4), releases slots. In order, so that nothing overtakes.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tokio::sync::{mpsc, oneshot};

use super::logging::{emit, event};
use crate::codec::time::UnixMillis;
use crate::identity::certificate::{self, Certificate};
use crate::identity::device::{DeviceId, DeviceKey};
use crate::identity::entropy::{self, Entropy, OsEntropy};
use crate::identity::files::BaseDir;
use crate::identity::issuer::{IssuerError, IssuerFile, IssuerKind, IssuerTable};
use crate::identity::keyfile::{Change, Opening};
use crate::identity::lock::{self, Claim, HeldLock};
use crate::identity::process::SystemProcesses;
use crate::identity::slot::{SlotFile, SlotName, SlotTable};
use crate::mesh::journal::Ticket;
use crate::mesh::node::{IdentityChange, TokenKey};
use crate::mesh::wire::cose::CoseSign1;
use crate::mesh::wire::room_path::RoomPath;
use crate::runtime::clock::unix_now;

/// Changes that may wait for the disk. A change is a few per join or consent, never per message.
const MAX_WAITING: usize = 4096;
/// Further slots of one harness and directory.
const MAX_NUMBERED: u32 = 64;

/// What is asked for.
pub struct SlotRequest {
    /// Harness.
    pub harness: String,
    /// Directory, or for `cli` the agent's name.
    pub key: String,
    /// An identity that ends with the connection.
    pub ephemeral: bool,
    /// Slots of this daemon that are in use: a further client gets a numbered one.
    pub in_use: Vec<String>,
}

/// An identity ready for service.
pub struct OpenSlot {
    /// The key.
    pub key: DeviceKey,
    /// Its certificate.
    pub certificate: Certificate,
    /// The slot as status and logs name it.
    pub slot: String,
    /// Ends with the connection.
    pub ephemeral: bool,
    /// Why it is not the slot that was asked for.
    pub reason: Option<String>,
    /// Room tokens it holds.
    pub tokens: Vec<(RoomPath, CoseSign1)>,
    /// Tokens for others' services that it holds.
    pub services: Vec<(TokenKey, CoseSign1)>,
    /// Grants it has issued.
    pub grants: Vec<(RoomPath, DeviceId, Vec<u8>)>,
}

/// A slot could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct OpenError {
    /// Stable word.
    pub code: &'static str,
    /// What happened.
    pub message: String,
}

enum Work {
    Open(SlotRequest, oneshot::Sender<Result<OpenSlot, OpenError>>),
    Save(Ticket, DeviceId, IdentityChange),
    Close(DeviceId, Option<oneshot::Sender<()>>),
}

/// Hands work to the thread.
#[derive(Clone)]
pub struct Identities {
    work: SyncSender<Work>,
}

impl Identities {
    /// Starts the thread for the directory; `saved` hears of every change that is on disk. It ends
    /// when the last handle is dropped, and releases every lock it holds.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        dir: BaseDir,
        entropy: OsEntropy,
        saved: mpsc::Sender<Ticket>,
    ) -> std::io::Result<(Self, std::thread::JoinHandle<()>)> {
        let (work, todo) = sync_channel(MAX_WAITING);
        let thread = std::thread::Builder::new()
            .name("identities".into())
            .spawn(move || Thread { dir, entropy, saved, slots: HashMap::new() }.run(&todo))?;
        Ok((Self { work }, thread))
    }

    /// Opens a slot.
    pub fn open(&self, request: SlotRequest) -> oneshot::Receiver<Result<OpenSlot, OpenError>> {
        let (tell, told) = oneshot::channel();
        if let Err(
            TrySendError::Full(Work::Open(_, tell))
            | TrySendError::Disconnected(Work::Open(_, tell)),
        ) = self.work.try_send(Work::Open(request, tell))
        {
            // Nobody may listen any more; then nobody needs the answer.
            let _ = tell.send(Err(OpenError {
                code: "identities_busy",
                message: "the identity files are busy; try again".into(),
            }));
        }
        told
    }

    /// Stores a change. What cannot be stored is an event.
    ///
    /// `false`: it was not even taken, which has been reported; no ticket will come.
    #[must_use]
    pub fn save(&self, ticket: Ticket, device: DeviceId, change: IdentityChange) -> bool {
        let taken = self.work.try_send(Work::Save(ticket, device, change)).is_ok();
        if !taken {
            report(device, "identities_busy", "too many changes wait for the disk");
        }
        taken
    }

    /// Releases a slot; the receiver completes once its lock is gone.
    pub fn close(&self, device: DeviceId) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        if self.work.try_send(Work::Close(device, Some(tell))).is_err() {
            report(device, "identities_busy", "the slot is released when the daemon ends");
        }
        told
    }
}

fn report(device: DeviceId, code: &str, reason: &str) {
    emit(
        &event("identity_write_failed")
            .with("agent", device)
            .with("code", code)
            .with("reason", reason),
    );
}

struct Held {
    slot: SlotFile,
    lock: HeldLock,
}

struct Thread {
    dir: BaseDir,
    entropy: OsEntropy,
    saved: mpsc::Sender<Ticket>,
    slots: HashMap<DeviceId, Held>,
}

impl Thread {
    fn run(mut self, todo: &Receiver<Work>) {
        while let Ok(work) = todo.recv() {
            match work {
                Work::Open(request, tell) => {
                    let opened = self.open(&request);
                    let device = opened.as_ref().ok().map(|slot| slot.key.id());
                    // The client has gone meanwhile: the slot goes back.
                    if tell.send(opened).is_err()
                        && let Some(device) = device
                    {
                        self.slots.remove(&device);
                    }
                }
                Work::Save(ticket, device, change) => {
                    self.save(device, &change);
                    // An owner that has ended waits for nothing.
                    let _ = self.saved.blocking_send(ticket);
                }
                Work::Close(device, tell) => {
                    self.slots.remove(&device);
                    if let Some(tell) = tell {
                        // Whoever asked may have given up waiting.
                        let _ = tell.send(());
                    }
                }
            }
        }
    }

    fn open(&mut self, request: &SlotRequest) -> Result<OpenSlot, OpenError> {
        let mut reason = None;
        if request.ephemeral {
            return self.ephemeral(&request.harness, Some("asked for".into()));
        }
        for number in 1..=MAX_NUMBERED {
            let name = if number == 1 {
                SlotName::new(&request.harness, &request.key)
            } else {
                SlotName::numbered(&request.harness, &request.key, number)
            }
            .map_err(|error| OpenError { code: error.code(), message: error.to_string() })?;
            if request.in_use.iter().any(|slot| slot == name.base()) {
                reason = Some("another client has this harness and directory".to_owned());
                continue;
            }
            let claim =
                lock::claim(&self.dir, &name.lock_file(), &SystemProcesses, &mut self.entropy)
                    .map_err(|error| OpenError {
                        code: error.code(),
                        message: error.to_string(),
                    })?;
            match claim {
                Claim::Won { lock, .. } => {
                    match self.load(&name, &request.key, lock, reason.clone())? {
                        Some(opened) => return Ok(opened),
                        None => reason = Some("another directory has the slot of this name".into()),
                    }
                }
                Claim::Held(holder) => {
                    let reason = holder.to_string();
                    emit(
                        &event("slot_unavailable")
                            .with("slot", name.base())
                            .with("reason", &reason),
                    );
                    return self.ephemeral(&request.harness, Some(reason));
                }
            }
        }
        self.ephemeral(&request.harness, Some("too many clients have this directory".into()))
    }

    /// The slot, unless it is another directory's: some have the same name.
    fn load(
        &mut self,
        name: &SlotName,
        place: &str,
        lock: HeldLock,
        reason: Option<String>,
    ) -> Result<Option<OpenSlot>, OpenError> {
        let opened = SlotFile::open(name, &lock, unix_now(), &mut self.entropy)
            .map_err(|error| OpenError { code: error.code(), message: error.to_string() })?;
        let mut slot = opened.slot;
        let device = slot.key().id();
        if slot.entry(SlotTable::Places, place).is_none() {
            if slot.entries(SlotTable::Places).next().is_some() {
                return Ok(None);
            }
            let (table, key) = (SlotTable::Places, place.to_owned());
            let change = Change { table, key, value: Some(serde_json::Value::Bool(true)) };
            if let Err(error) = slot.apply(&lock, &[change]) {
                report(device, error.code(), &error.to_string());
            }
        }
        let how = match opened.opening {
            Opening::Created => "created",
            Opening::Loaded => "loaded",
            Opening::Renewed => "renewed",
        };
        emit(
            &event("slot_opened").with("slot", name.base()).with("agent", device).with("how", how),
        );
        if let Some(path) = opened.kept_aside {
            emit(&event("slot_kept_aside").with("slot", name.base()).with("path", path.display()));
        }
        let tokens = slot
            .entries(SlotTable::RoomTokens)
            .filter_map(|(path, token)| {
                Some((RoomPath::parse(path).ok()?, CoseSign1::from_json(token).ok()?))
            })
            .collect();
        let services = slot
            .entries(SlotTable::ServiceTokens)
            .filter_map(|(key, token)| {
                let token = CoseSign1::from_json(token).ok()?;
                let owner = DeviceId::parse(key.split_once('/')?.0)?;
                Some((TokenKey::of(owner, &token)?, token))
            })
            .collect();
        let grants = slot
            .entries(SlotTable::IssuedGrants)
            .filter_map(|(key, id)| {
                let (path, member) = key.rsplit_once("::")?;
                let id = data_encoding::BASE64.decode(id.as_str()?.as_bytes()).ok()?;
                Some((RoomPath::parse(path).ok()?, DeviceId::parse(member)?, id))
            })
            .collect();
        let opened = OpenSlot {
            key: slot.key().clone(),
            certificate: slot.certificate().clone(),
            slot: name.base().to_owned(),
            ephemeral: false,
            reason,
            tokens,
            services,
            grants,
        };
        self.slots.insert(device, Held { slot, lock });
        Ok(Some(opened))
    }

    fn ephemeral(&mut self, harness: &str, reason: Option<String>) -> Result<OpenSlot, OpenError> {
        let key = entropy::draw_key(&mut self.entropy)
            .map_err(|error| OpenError { code: error.code(), message: error.to_string() })?;
        let certificate = own_certificate(&key, unix_now(), &mut self.entropy)?;
        Ok(OpenSlot {
            slot: format!("{harness} (ephemeral)"),
            key,
            certificate,
            ephemeral: true,
            reason,
            tokens: Vec::new(),
            services: Vec::new(),
            grants: Vec::new(),
        })
    }

    fn save(&mut self, device: DeviceId, change: &IdentityChange) {
        let change = match change {
            IdentityChange::DmGrant { bearer, token_id } => {
                if let Err(error) = self.save_dm_grant(*bearer, token_id.as_deref()) {
                    report(device, error.code(), &error.to_string());
                }
                return;
            }
            IdentityChange::RoomToken { path, token } => Change {
                table: SlotTable::RoomTokens,
                key: path.to_string(),
                value: token.as_ref().map(CoseSign1::to_json),
            },
            IdentityChange::ServiceToken { key, token } => Change {
                table: SlotTable::ServiceTokens,
                key: format!("{}/{}::{}", key.owner, key.path, key.capability),
                value: token.as_ref().map(CoseSign1::to_json),
            },
            IdentityChange::IssuedGrant { path, member, token_id } => Change {
                table: SlotTable::IssuedGrants,
                key: format!("{path}::{member}"),
                value: token_id.as_deref().map(id_value),
            },
        };
        // An ephemeral identity has no file.
        let Some(held) = self.slots.get_mut(&device) else { return };
        if let Err(error) = held.slot.apply(&held.lock, &[change]) {
            report(device, error.code(), &error.to_string());
        }
    }

    /// What the user has granted is in the user's file, for all of its programs.
    fn save_dm_grant(
        &mut self,
        bearer: DeviceId,
        token_id: Option<&[u8]>,
    ) -> Result<(), IssuerError> {
        let (mut user, _) =
            IssuerFile::open(&self.dir, IssuerKind::User, unix_now(), &mut self.entropy)?;
        let value = token_id.map(id_value);
        user.apply(&[Change { table: IssuerTable::IssuedDmGrants, key: bearer.hex(), value }])
    }
}

/// A token id as the files have it.
fn id_value(id: &[u8]) -> serde_json::Value {
    serde_json::Value::String(data_encoding::BASE64.encode(id))
}

fn own_certificate(
    key: &DeviceKey,
    now: UnixMillis,
    entropy: &mut dyn Entropy,
) -> Result<Certificate, OpenError> {
    certificate::self_signed(key, now, &entropy::draw::<16>(entropy))
        .map_err(|error| OpenError { code: "certificate", message: error.to_string() })
}
