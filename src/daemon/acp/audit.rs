//! Audit files (design 8.2, 8.5): the log of a task as JSONL, written as it grows, and a checkpoint
//! of every task at every change of state. The store is the truth; a file that was cut short by a
//! crash is completed from it (decision 48).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::OfficeError;
use crate::acp::audit::{JsonlWriter, MAX_AUDIT_FILE, checkpoint, complete, read_header};
use crate::acp::did::Secret;
use crate::acp::json::canonical;
use crate::acp::log::TaskLog;
use crate::acp::owner::Owner;
use crate::acp::value::Digest;
use crate::runtime::clock::unix_now;

/// The checkpoints of all tasks, below an owner's state directory.
const CHECKPOINTS: &str = "checkpoints.jsonl";

/// What is to be written.
#[derive(Clone, Debug, Default)]
pub struct AuditPlan {
    /// The file of the first task; those of later ones stand beside it, with the task's id in their
    /// names. None: no file.
    pub file: Option<PathBuf>,
    /// Whether input, progress and results are left out.
    pub redact: bool,
}

/// Lines for one file.
pub(super) struct Lines {
    to: To,
    lines: Vec<Vec<u8>>,
}

enum To {
    Task(Digest),
    Checkpoints,
}

struct Writer {
    file: File,
    path: PathBuf,
    lines: JsonlWriter,
    /// Entries that were written.
    entries: usize,
    /// Those of them that stand with one signature so far.
    alone: BTreeSet<usize>,
}

/// The files that are open.
pub struct AuditFiles {
    plan: AuditPlan,
    key: Secret,
    checkpoints: File,
    checkpoints_path: PathBuf,
    open: BTreeMap<Digest, Writer>,
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> OfficeError + '_ {
    move |error| OfficeError::Audit { path: path.to_owned(), reason: error.to_string() }
}

fn refused(path: &Path, reason: &str) -> OfficeError {
    OfficeError::Audit { path: path.to_owned(), reason: reason.to_owned() }
}

fn append_to(path: &Path, new: bool) -> io::Result<File> {
    OpenOptions::new().append(true).create(!new).create_new(new).mode(0o600).open(path)
}

impl AuditFiles {
    /// Opens what `plan` wants for `owner`, below whose `state` directory the checkpoints go. A file
    /// that is there must be the log of one of the owner's tasks; it is brought up to date.
    ///
    /// # Errors
    /// [`OfficeError::Audit`].
    pub fn open(
        plan: AuditPlan,
        state: &Path,
        key: Secret,
        owner: &Owner,
    ) -> Result<Self, OfficeError> {
        let checkpoints_path = state.join(CHECKPOINTS);
        let checkpoints = append_to(&checkpoints_path, false).map_err(failed(&checkpoints_path))?;
        let mut files = Self { plan, key, checkpoints, checkpoints_path, open: BTreeMap::new() };
        let Some(base) = files.plan.file.clone() else { return Ok(files) };
        if base.try_exists().map_err(failed(&base))? {
            let task = whose(&base)?;
            let task = task.filter(|task| owner.task(task).is_some());
            match task {
                Some(task) => files.take_up(&base, task, owner)?,
                // A crash came between making it and its first line.
                None if is_unbegun(&base)? => {}
                None => return Err(refused(&base, STRANGE)),
            }
        }
        for (task, log) in owner.gateway().tasks() {
            let path = beside(&base, log);
            if !files.open.contains_key(task) && path.try_exists().map_err(failed(&path))? {
                files.take_up(&path, *task, owner)?;
            }
        }
        Ok(files)
    }

    /// Goes on with a file, brought up to the log of its task.
    fn take_up(&mut self, path: &Path, task: Digest, owner: &Owner) -> Result<(), OfficeError> {
        let log = owner.task(&task).ok_or_else(|| refused(path, STRANGE))?;
        let bytes = read_whole(path)?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed(path))?;
        let completion = complete(&bytes, log, self.plan.redact)
            .map_err(|error| refused(path, &error.to_string()))?;
        file.set_len(completion.keep as u64).map_err(failed(path))?;
        for line in completion.append {
            (&file).write_all(&line).map_err(failed(path))?;
        }
        file.sync_all().map_err(failed(path))?;
        let writer = Writer {
            file,
            path: path.to_owned(),
            lines: JsonlWriter::after(log, self.plan.redact),
            entries: log.entries().len(),
            alone: alone(log, 0),
        };
        self.open.insert(task, writer);
        Ok(())
    }

    /// What is new in the log of a task.
    pub(super) fn lines(&mut self, task: &Digest, log: &TaskLog) -> Vec<Lines> {
        let mut all = Vec::new();
        match self.task_lines(task, log) {
            Ok(lines) => all.extend(lines),
            // The file is completed from the store at the next start.
            Err(error) => super::complain(&error),
        }
        // Of a proposal that is no contract there is nothing to be proved, and others make them.
        if !log.is_contract() {
            return all;
        }
        if let Ok(line) = checkpoint(log, &self.key, unix_now()).and_then(|at| canonical(&at)) {
            let line = [line, vec![b'\n']].concat();
            all.push(Lines { to: To::Checkpoints, lines: vec![line] });
        }
        all
    }

    fn task_lines(&mut self, task: &Digest, log: &TaskLog) -> Result<Option<Lines>, OfficeError> {
        let Some(base) = self.plan.file.clone() else { return Ok(None) };
        let mut lines = Vec::new();
        if !self.open.contains_key(task) {
            let path = if self.open.is_empty() { base } else { beside(&base, log) };
            // One that a crash has left without a line is begun again.
            let left = path.try_exists().map_err(failed(&path))? && is_unbegun(&path)?;
            let file = append_to(&path, !left).map_err(failed(&path))?;
            file.set_len(0).map_err(failed(&path))?;
            let writer = JsonlWriter::new(self.plan.redact);
            lines.push(writer.header(log.view().genesis())?);
            let writer = Writer { file, path, lines: writer, entries: 0, alone: BTreeSet::new() };
            self.open.insert(*task, writer);
        }
        let Some(writer) = self.open.get_mut(task) else { return Ok(None) };
        for at in writer.alone.clone() {
            let committed = log.entries().get(at);
            if let Some(second) = committed.and_then(|committed| committed.entry.countersignature())
            {
                writer.alone.remove(&at);
                lines.push(JsonlWriter::countersignature(at as u64, second)?);
            }
        }
        let from = writer.entries;
        for committed in log.entries().iter().skip(from) {
            lines.extend(writer.lines.entry(committed, &|digest| log.object(digest).cloned())?);
        }
        writer.entries = log.entries().len();
        writer.alone.extend(alone(log, from));
        Ok((!lines.is_empty()).then_some(Lines { to: To::Task(*task), lines }))
    }

    /// Closes the files of tasks that are forgotten; they stay where they are.
    pub(super) fn forget(&mut self, tasks: &[Digest]) {
        for task in tasks {
            self.open.remove(task);
        }
    }

    /// Appends lines, and waits for the disk: a countersignature leaves only then (design 8.2).
    pub(super) fn append(&mut self, lines: Vec<Lines>) -> Result<(), OfficeError> {
        for Lines { to, lines } in lines {
            match to {
                To::Task(task) => {
                    let Some(writer) = self.open.get(&task) else { continue };
                    for line in lines {
                        (&writer.file).write_all(&line).map_err(failed(&writer.path))?;
                    }
                    writer.file.sync_data().map_err(failed(&writer.path))?;
                }
                // A second copy for comparison; losing its end to a crash loses no evidence.
                To::Checkpoints => {
                    for line in lines {
                        (&self.checkpoints)
                            .write_all(&line)
                            .map_err(failed(&self.checkpoints_path))?;
                    }
                }
            }
        }
        Ok(())
    }
}

const STRANGE: &str = "it is there already, and is no log of this owner's";

fn read_whole(path: &Path) -> Result<Vec<u8>, OfficeError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed(path))?;
    file.take(MAX_AUDIT_FILE as u64 + 1).read_to_end(&mut bytes).map_err(failed(path))?;
    Ok(bytes)
}

/// The task that the header of a file names.
fn whose(path: &Path) -> Result<Option<Digest>, OfficeError> {
    let bytes = read_whole(path)?;
    Ok(read_header(&bytes).and_then(|genesis| genesis.digest()).ok())
}

/// Whether a file holds nothing, or the beginning of a header that a crash has cut.
fn is_unbegun(path: &Path) -> Result<bool, OfficeError> {
    let bytes = read_whole(path)?;
    Ok(bytes.is_empty() || (bytes.starts_with(b"{\"format\"") && !bytes.contains(&b'\n')))
}

/// Entries from `from` on that stand with one signature.
fn alone(log: &TaskLog, from: usize) -> BTreeSet<usize> {
    let entries = log.entries().iter().enumerate().skip(from);
    entries.filter(|(_, c)| c.entry.countersignature().is_none()).map(|(at, _)| at).collect()
}

/// `audit.jsonl` of another task: `audit-task_….jsonl`.
fn beside(base: &Path, log: &TaskLog) -> PathBuf {
    let id = log.view().task_id().as_str();
    let stem = base.file_stem().unwrap_or_default().to_string_lossy();
    let extension = base.extension().map(|e| format!(".{}", e.to_string_lossy()));
    base.with_file_name(format!("{stem}-{id}{}", extension.unwrap_or_default()))
}
