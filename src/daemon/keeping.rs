//! How what the node wants kept reaches the store, and how the slots of shell agents come back into
//! service when the daemon starts.

use std::thread::JoinHandle;

use tokio::sync::mpsc;

use super::config::Config;
use super::health::condition;
use super::identities::SlotRequest;
use super::logging::{emit, event};
use super::owner::{Opening, Owner};
use crate::api::types::{self, AttachParams, Severity};
use crate::identity::slot::SlotName;
use crate::mesh::journal::{Record, Ticket};
use crate::mesh::node::{Input, Restorable};
use crate::store::{
    Committer, DiskStore, Found, MemoryStore, Place, Report, Store as _, StoreError,
};

/// Reports of whole groups that wait for the owner; the store's thread waits when it is full.
const REPORTS: usize = 256;

/// Where records go.
pub(super) enum Keeper {
    /// Nowhere that outlives the process.
    Memory(MemoryStore),
    /// To the store's thread, which reports later.
    Disk(Disk),
}

/// A store on disk.
pub(super) struct Disk {
    committer: Committer,
    thread: JoinHandle<()>,
    place: Place,
    found: Found,
}

/// What comes of opening a store: where records go, the reports, and what was in it.
pub(super) type Opened = (Keeper, mpsc::Receiver<Vec<Report>>, Option<Vec<Record>>);

impl Keeper {
    /// Opens the store that the configuration names.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn open(config: &Config) -> Result<Opened, StoreError> {
        let (reports, reported) = mpsc::channel(REPORTS);
        if config.ephemeral {
            return Ok((Self::Memory(MemoryStore::default()), reported, None));
        }
        let (mut store, records) = DiskStore::open(&config.store_dir(), config.store_bytes())?;
        let (place, found) = (store.place().clone(), store.found());
        if let Some((before, after)) = store.compacted() {
            emit(&event("store_compacted").with("before", before).with("after", after));
        }
        if found == Found::Nothing {
            emit(&event("store_created").with("path", config.store_dir().display()));
        }
        let records = store.begin(records)?;
        let report = move |group| {
            // An owner that has ended waits for nothing.
            let _ = reports.blocking_send(group);
        };
        let (committer, thread) = Committer::start(store, report).map_err(|error| {
            StoreError::Unavailable { path: config.store_dir(), reason: error.to_string() }
        })?;
        Ok((Self::Disk(Disk { committer, thread, place, found }), reported, Some(records)))
    }

    /// Has a batch kept; what the node is told where that is known at once.
    fn keep(
        &mut self,
        ticket: Ticket,
        records: Vec<Record>,
    ) -> Option<(Input, Option<StoreError>)> {
        let failed = |records, error| (Input::CommitFailed { ticket, records }, Some(error));
        match self {
            Self::Memory(store) => Some(match store.commit(&records) {
                Ok(()) => (Input::Committed(ticket), None),
                Err(error) => failed(records, error),
            }),
            Self::Disk(disk) => disk
                .committer
                .submit(ticket, records)
                .err()
                .map(|(error, back)| failed(back, error)),
        }
    }

    /// Writes what still waits; returns when it is on disk.
    pub(super) async fn finish(self) {
        if let Self::Disk(Disk { committer, thread, .. }) = self {
            drop(committer);
            // A thread that has panicked has written what it could.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Owner {
    pub(super) fn commit(&mut self, ticket: Ticket, records: Vec<Record>) {
        if let Some((input, error)) = self.store.keep(ticket, records) {
            if let Some(error) = error {
                self.store_failed(&error);
            }
            self.inputs.push_back(input);
        }
    }

    /// The store's thread has written a group, or could not.
    pub(super) fn stored(&mut self, reports: Vec<Report>) {
        for Report { ticket, result } in reports {
            let input = match result {
                Ok(()) => {
                    self.store_error = None;
                    Input::Committed(ticket)
                }
                Err((error, records)) => {
                    self.store_failed(&error);
                    Input::CommitFailed { ticket, records }
                }
            };
            self.inputs.push_back(input);
        }
    }

    fn store_failed(&mut self, error: &StoreError) {
        if self.store_error.as_ref().is_none_or(|known| known.code() != error.code()) {
            emit(&event("store_unwritable").with("code", error.code()).with("reason", error));
        }
        self.store_error = Some(error.clone());
    }

    /// The conditions of the store.
    pub(super) fn store_conditions(&self) -> Vec<types::Health> {
        let mut found = Vec::new();
        let mut gone = None;
        if let Keeper::Disk(disk) = &self.store {
            gone = disk.place.check().err();
            if disk.found == Found::Unmarked {
                found.push(condition(
                    "store_unmarked",
                    Severity::Warning,
                    "the store's mark was missing or unreadable at the start: whether the store had \
                     lost something could not be told",
                    "nothing to do if the mark was removed on purpose, or the power had failed",
                ));
            }
        }
        // One that is back at its place is seen here before the next commit is.
        let failed = self.store_error.as_ref().filter(|e| !matches!(e, StoreError::Gone { .. }));
        let wrong = match (&gone, failed) {
            (Some(error), _) => Some(("store_gone", error)),
            (None, failed) => failed.map(|error| ("store_unwritable", error)),
        };
        if let Some((code, error)) = wrong {
            found.push(condition(code, Severity::Error, error.to_string(), error.todo()));
        }
        found
    }

    /// Shell agents stay in service while the daemon runs, and come back with it.
    pub(super) fn restore_slots(&mut self) {
        for found in self.node.restorable(super::CLI_HARNESS) {
            self.restore_slot(found);
        }
    }

    fn restore_slot(&mut self, found: Restorable) {
        let Restorable { agent, harness, key, cwd } = found;
        let Ok(name) = SlotName::new(&harness, &key) else { return };
        let (Ok(harness_label), Ok(key_label)) =
            (harness.clone().try_into(), key.clone().try_into())
        else {
            return;
        };
        if let Some(error) = self.no_descriptors() {
            not_restored(name.base(), &error.message);
            return;
        }
        let params = AttachParams {
            harness: harness_label,
            cwd,
            pid: std::process::id(),
            key: Some(key_label),
            name: None,
            ephemeral: None,
            project_room: None,
            harness_pid: None,
        };
        self.opening_slots.push(name.base().to_owned());
        let request = SlotRequest { harness, key, ephemeral: false, in_use: Vec::new() };
        let opened = self.identities.open(request);
        self.open_later(opened, None, params, Some(agent));
    }

    /// A slot that was opened for nobody in particular. False when it cannot be served.
    pub(super) fn may_restore(&mut self, opening: &Opening) -> bool {
        let slot = super::requests::slot_key(&opening.params);
        match &opening.result {
            Err(error) => not_restored(&slot, &error.message),
            Ok(opened) if opened.ephemeral => {
                not_restored(&slot, opened.reason.as_deref().unwrap_or("in use"));
            }
            Ok(opened) if Some(opened.key.id()) != opening.expected => {
                not_restored(&slot, "it has another identity now");
                drop(self.identities.close(opened.key.id()));
            }
            Ok(opened) => {
                emit(&event("slot_restored").with("slot", &slot).with("agent", opened.key.id()));
                return true;
            }
        }
        false
    }
}

fn not_restored(slot: &str, reason: &str) {
    emit(&event("slot_not_restored").with("slot", slot).with("reason", reason));
}
