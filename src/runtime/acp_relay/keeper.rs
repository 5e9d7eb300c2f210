//! The one thread that decides and writes: it takes what has come together meanwhile, has the relay
//! decide it all, stores the records with one sync, and only then answers. When storing fails, the
//! relay is rebuilt from what is stored, and everything is refused until that has worked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::fault::Fault;
use super::waiters::Waiters;
use crate::acp::code::Result as AcpResult;
use crate::acp::did::Did;
use crate::acp::objects::{RelayAuth, RevocationNotice, WorkerCard};
use crate::acp::relay::{Cursor, Limits, Parcel, Record, Relay, Taken, Who};
use crate::codec::time::UnixMillis;
use crate::runtime::clock::unix_now;
use crate::store::StoreError;
use crate::store::acp_relay::RelayDisk;

/// Jobs that may wait: a second's worth at the rate that a disk takes in groups.
const MAX_WAITING: usize = 16 * 1024;
/// Jobs stored with one sync. More would keep the first of them waiting for the last.
const MAX_GROUP: usize = 1024;
/// How often an idle relay lets go of what is over.
const PRUNE_EVERY: Duration = Duration::from_secs(30);

/// What is to be decided and stored. Everything in it is verified.
pub(super) enum Job {
    /// Takes an envelope in.
    Send(Parcel),
    /// Uses a token up, and deletes up to a cursor.
    Use(RelayAuth, Option<Cursor>),
    /// Deletes up to a cursor; the token was used when the socket was opened.
    Acknowledge(Did, Cursor),
    /// Lists a card.
    Publish(WorkerCard),
    /// Takes a notice in.
    Revoke(RevocationNotice),
}

/// What came of it: where an envelope was taken, for [`Job::Send`].
type Done = Option<Taken>;

struct Queued {
    job: Job,
    answer: oneshot::Sender<Result<Done, Fault>>,
}

/// What the thread shares with those who read.
pub(super) struct Desk {
    relay: Mutex<Relay>,
    disk: RelayDisk,
    broken: AtomicBool,
    pub(super) waiters: Arc<Waiters>,
}

/// Hands jobs to the thread, which ends once this is dropped and everything is written.
pub(super) struct Keeper {
    jobs: SyncSender<Queued>,
}

impl Desk {
    /// Opens the file in `dir` and rebuilds the relay from it.
    pub(super) fn open(dir: &std::path::Path, limits: Limits) -> Result<Self, StoreError> {
        let mut relay = Relay::new(limits);
        let disk = RelayDisk::open(dir, |record| restore(&mut relay, record))?;
        relay.stored();
        let (broken, waiters) = (AtomicBool::new(false), Arc::default());
        Ok(Self { relay: Mutex::new(relay), disk, broken, waiters })
    }

    /// Looks something up. Not for what takes long.
    pub(super) fn with<T>(&self, look: impl FnOnce(&Relay) -> T) -> T {
        look(&self.relay.lock())
    }

    /// The bytes of envelopes. Reads the disk.
    pub(super) fn bodies(&self, cursors: Vec<Cursor>) -> Result<Vec<(Cursor, Vec<u8>)>, Fault> {
        self.disk.bodies(cursors).map_err(Fault::Store)
    }

    /// Whether records are stored.
    pub(super) fn is_whole(&self) -> bool {
        !self.broken.load(Ordering::Relaxed)
    }

    fn rebuild(&self) -> Result<(), StoreError> {
        let (limits, next) = self.with(|relay| (relay.limits().clone(), relay.next()));
        let mut relay = Relay::new(limits);
        self.disk.reopen(|record| restore(&mut relay, record))?;
        // Cursors of what could not be stored may have been answered by nobody, but are not reused.
        relay.begin_at(next);
        let envelopes = relay.load().0;
        *self.relay.lock() = relay;
        self.broken.store(false, Ordering::Relaxed);
        tracing::info!(event = "acp_relay_store_back", envelopes);
        Ok(())
    }

    fn failed(&self, error: &StoreError) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            tracing::error!(event = "acp_relay_store_failed", code = error.code(), %error);
        }
    }

    /// Decides, stores and answers a group.
    fn keep(&self, group: Vec<Queued>, now: UnixMillis) {
        if !self.disk.is_open()
            && let Err(error) = self.rebuild()
        {
            for queued in group {
                let _ = queued.answer.send(Err(Fault::Store(error.clone())));
            }
            return;
        }
        let (mut records, mut woken, mut answers) = (Vec::new(), Vec::new(), Vec::new());
        {
            let mut relay = self.relay.lock();
            relay.prune(now, &mut records);
            for Queued { job, answer } in group {
                let to = if let Job::Send(parcel) = &job { Some(parcel.to) } else { None };
                let done = decide(&mut relay, job, now, &mut records);
                woken.extend(to.filter(|_| matches!(&done, Ok(Some(taken)) if taken.fresh)));
                answers.push((answer, done.map_err(Fault::from)));
            }
        }
        let kept = self.disk.commit(&records);
        match &kept {
            Ok(()) => {
                self.relay.lock().stored();
                woken.into_iter().for_each(|who: Who| self.waiters.wake(who));
            }
            Err(error) => self.failed(error),
        }
        for (answer, done) in answers {
            // Whoever asked may have gone.
            let _ = answer.send(done.and_then(|done| {
                kept.as_ref().map(|()| done).map_err(|error| Fault::Store(error.clone()))
            }));
        }
    }
}

fn restore(relay: &mut Relay, record: Record) -> Result<(), String> {
    relay.restore(record).map_err(|error| error.to_string())
}

fn decide(
    relay: &mut Relay,
    job: Job,
    now: UnixMillis,
    records: &mut Vec<Record>,
) -> AcpResult<Done> {
    match job {
        Job::Send(parcel) => return relay.accept(parcel, now, records).map(Some),
        Job::Use(auth, up_to) => {
            relay.admit(&auth, now, records)?;
            if let Some(up_to) = up_to {
                relay.acknowledge(auth.did, up_to, now, records);
            }
        }
        Job::Acknowledge(did, up_to) => relay.acknowledge(did, up_to, now, records),
        Job::Publish(card) => relay.publish(card, now, records)?,
        Job::Revoke(notice) => relay.revoke(notice, now, records)?,
    }
    Ok(None)
}

impl Keeper {
    /// Starts the thread.
    pub(super) fn start(desk: Arc<Desk>) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, todo) = sync_channel(MAX_WAITING);
        let thread = std::thread::Builder::new()
            .name("acp-relay-store".into())
            .spawn(move || run(&desk, &todo))?;
        Ok((Self { jobs }, thread))
    }

    /// Has a job decided and stored. The bytes of what waits are bounded by whoever has read them.
    pub(super) async fn ask(&self, job: Job) -> Result<Done, Fault> {
        let (answer, answered) = oneshot::channel();
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.jobs.try_send(Queued { job, answer })
        {
            return Err(Fault::Store(StoreError::Busy));
        }
        answered.await.unwrap_or(Err(Fault::Store(StoreError::Busy)))
    }
}

fn run(desk: &Desk, todo: &Receiver<Queued>) {
    loop {
        let mut group = match todo.recv_timeout(PRUNE_EVERY) {
            Ok(first) => vec![first],
            Err(RecvTimeoutError::Timeout) => Vec::new(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        while group.len() < MAX_GROUP
            && let Ok(queued) = todo.try_recv()
        {
            group.push(queued);
        }
        desk.keep(group, unix_now());
    }
}
