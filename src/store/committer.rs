//! The one thread that writes: takes what has come together meanwhile, keeps it with one sync, and
//! reports. Whoever asks never waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use super::{Store, StoreError};
use crate::mesh::journal::{Record, Ticket};

/// Batches that may wait: a second's worth at the rate that a disk takes in groups. Beyond it the
/// disk does not answer, and whoever asks has to know.
const MAX_WAITING: usize = 32 * 1024;
/// Bytes of texts and events that may wait.
const MAX_WAITING_BYTES: usize = 64 * 1024 * 1024;
/// Batches kept with one sync. More would keep the first of them waiting for the last.
const MAX_GROUP: usize = 1024;

/// What became of a batch. One that was not kept comes back.
#[derive(Debug)]
pub struct Report {
    /// Which.
    pub ticket: Ticket,
    /// Kept, or why not.
    pub result: Result<(), (StoreError, Vec<Record>)>,
}

struct Job {
    ticket: Ticket,
    records: Vec<Record>,
    bytes: usize,
}

/// Hands batches to the thread. It ends, when everything that waits is written, once this is
/// dropped.
pub struct Committer {
    jobs: SyncSender<Job>,
    waiting: Arc<AtomicUsize>,
}

impl Committer {
    /// Starts the thread. `report` is called on it, in the order of the batches.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        store: impl Store + Send + 'static,
        report: impl Fn(Vec<Report>) + Send + 'static,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (jobs, todo) = sync_channel(MAX_WAITING);
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&waiting);
        let thread = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || run(store, &todo, &left, report))?;
        Ok((Self { jobs, waiting }, thread))
    }

    /// Has a batch kept.
    ///
    /// # Errors
    /// Too much waits already: the batch comes back, and no report will come.
    pub fn submit(
        &self,
        ticket: Ticket,
        records: Vec<Record>,
    ) -> Result<(), (StoreError, Vec<Record>)> {
        let bytes = records.iter().map(Record::weight).sum();
        if self.waiting.fetch_add(bytes, Ordering::Relaxed) > MAX_WAITING_BYTES {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
            return Err((StoreError::Busy, records));
        }
        self.jobs.try_send(Job { ticket, records, bytes }).map_err(|refused| {
            let (TrySendError::Full(job) | TrySendError::Disconnected(job)) = refused;
            self.waiting.fetch_sub(job.bytes, Ordering::Relaxed);
            (StoreError::Busy, job.records)
        })
    }
}

fn run(
    mut store: impl Store,
    todo: &Receiver<Job>,
    waiting: &AtomicUsize,
    report: impl Fn(Vec<Report>),
) {
    while let Ok(first) = todo.recv() {
        let mut group = vec![first];
        while group.len() < MAX_GROUP
            && let Ok(job) = todo.try_recv()
        {
            group.push(job);
        }
        let batches: Vec<&[Record]> = group.iter().map(|job| job.records.as_slice()).collect();
        let results = store.commit_all(&batches);
        let reports = group
            .into_iter()
            .zip(results)
            .map(|(job, result)| {
                waiting.fetch_sub(job.bytes, Ordering::Relaxed);
                Report { ticket: job.ticket, result: result.map_err(|error| (error, job.records)) }
            })
            .collect();
        report(reports);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::codec::time::UnixMillis;
    use crate::identity::device::DeviceId;
    use crate::store::MemoryStore;

    /// Takes one group only when told to.
    struct Gated {
        store: MemoryStore,
        gate: mpsc::Receiver<()>,
        groups: mpsc::Sender<usize>,
    }

    impl Store for Gated {
        fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
            self.store.commit(records)
        }

        fn commit_all(&mut self, batches: &[&[Record]]) -> Vec<Result<(), StoreError>> {
            self.gate.recv().unwrap();
            self.groups.send(batches.len()).unwrap();
            batches.iter().map(|batch| self.commit(batch)).collect()
        }

        fn live(&self) -> Result<Vec<Record>, StoreError> {
            self.store.live()
        }
    }

    fn mail(seq: u64, bytes: usize) -> Vec<Record> {
        let agent = DeviceId([1; 32]);
        vec![Record::Mailbox { agent, seq, at: UnixMillis(1), event: vec![7; bytes] }]
    }

    #[test]
    fn what_comes_together_is_kept_together_and_reported_in_order() {
        let (open, gate) = mpsc::channel();
        let (groups, sizes) = mpsc::channel();
        let (told, reports) = mpsc::channel();
        let store = Gated { store: MemoryStore::with_limit(4096), gate, groups };
        let (committer, thread) = Committer::start(store, move |reports| {
            for report in reports {
                told.send(report).unwrap();
            }
        })
        .unwrap();
        for n in 1..=64 {
            let bytes = if n == 10 { 8000 } else { 1 };
            committer.submit(Ticket(n), mail(n, bytes)).unwrap();
        }
        // Whoever waits for the sync under way forms the next group.
        open.send(()).unwrap();
        open.send(()).unwrap();
        open.send(()).unwrap();
        let reports: Vec<Report> = (1..=64).map(|_| reports.recv().unwrap()).collect();
        for (n, report) in (1..).zip(&reports) {
            assert_eq!(report.ticket, Ticket(n));
            assert_eq!(report.result.is_err(), n == 10);
        }
        let (error, back) = reports[9].result.as_ref().unwrap_err();
        assert_eq!((error.code(), back), ("store_full", &mail(10, 8000)));
        drop(committer);
        thread.join().unwrap();
        let sizes: Vec<usize> = sizes.iter().collect();
        assert!(sizes.len() <= 3 && sizes.iter().sum::<usize>() == 64, "{sizes:?}");
    }

    #[test]
    fn a_disk_that_does_not_answer_makes_nobody_wait() {
        let (open, gate) = mpsc::channel();
        let (groups, _sizes) = mpsc::channel();
        let store = Gated { store: MemoryStore::default(), gate, groups };
        let (committer, thread) = Committer::start(store, |_| {}).unwrap();
        let mut taken = 0;
        let error = loop {
            match committer.submit(Ticket(taken), mail(taken, 1 << 20)) {
                Ok(()) => taken += 1,
                Err((error, back)) => {
                    assert_eq!(back, mail(taken, 1 << 20));
                    break error;
                }
            }
        };
        assert_eq!(error.code(), "store_busy");
        assert!((60..70).contains(&taken), "{taken}");
        drop(committer);
        // Everything that was taken is still written.
        open.send(()).unwrap();
        open.send(()).unwrap();
        thread.join().unwrap();
    }
}
