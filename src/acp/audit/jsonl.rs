//! The JSONL file (design 8.2): one canonical JSON text a line, appended to, never rewritten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Value, json};

use super::AuditLog;
use crate::acp::code::{Code, Error, Result};
use crate::acp::json::{canonical, parse};
use crate::acp::log::{Committed, TaskLog, rules::MAX_ENTRIES};
use crate::acp::objects::{AuditCheckpoint, AuditEntry, AuditGenesis, Event};
use crate::acp::sign::Signature;
use crate::acp::value::{Count, Digest, Members, Read, Seq};

/// Bytes of a file that is read: ten thousand entries of ordinary size, and then some.
pub const MAX_AUDIT_FILE: usize = 256 << 20;

/// Bytes of a line: the largest input or output, and its frame.
const MAX_LINE: usize = 4 << 20;

const FORMAT: &str = "acp-audit-jsonl";

fn wrong(message: &str) -> Error {
    Error::new(Code::AuditInvalid, message)
}

/// Writes the lines of one file.
#[derive(Clone, Debug, Default)]
pub struct JsonlWriter {
    written: BTreeSet<Digest>,
    /// Whether user data (input, progress, deliverables) is left out.
    redact: bool,
}

impl JsonlWriter {
    /// A writer of a new file.
    #[must_use]
    pub fn new(redact: bool) -> Self {
        Self { written: BTreeSet::new(), redact }
    }

    /// A writer that goes on with a file which [`complete`] has brought up to `log`.
    #[must_use]
    pub fn after(log: &TaskLog, redact: bool) -> Self {
        let payload = log.entries().iter().flat_map(|committed| committed.payload.clone());
        Self { written: payload.collect(), redact }
    }

    fn line(value: &Value) -> Result<Vec<u8>> {
        let mut line = canonical(value)?;
        line.push(b'\n');
        Ok(line)
    }

    /// The first line.
    ///
    /// # Errors
    /// As [`canonical`].
    pub fn header(&self, genesis: &AuditGenesis) -> Result<Vec<u8>> {
        Self::line(&json!({
            "kind": "header",
            "format": FORMAT,
            "version": "1.0",
            "genesis": genesis,
            "genesisDigest": genesis.digest()?,
        }))
    }

    /// The lines of an entry: the objects that no line before has, then the entry. One write each.
    ///
    /// # Errors
    /// As [`canonical`].
    pub fn entry(
        &mut self,
        committed: &Committed,
        find: &dyn Fn(&Digest) -> Option<Value>,
    ) -> Result<Vec<Vec<u8>>> {
        let Committed { entry, payload } = committed;
        let mut lines = Vec::new();
        for (at, digest) in payload.iter().enumerate() {
            if self.redact && is_user_data(entry.event, at) {
                continue;
            }
            if !self.written.contains(digest)
                && let Some(object) = find(digest)
            {
                self.written.insert(*digest);
                let line = json!({ "kind": "object", "digest": digest, "object": object });
                lines.push(Self::line(&line)?);
            }
        }
        let line = json!({
            "kind": "entry", "digest": entry.digest()?, "payload": payload, "entry": entry,
        });
        lines.push(Self::line(&line)?);
        Ok(lines)
    }

    /// The line of a second signature that came late (decision 38).
    ///
    /// # Errors
    /// As [`canonical`].
    pub fn countersignature(seq: u64, signature: &Signature) -> Result<Vec<u8>> {
        Self::line(&json!({ "kind": "countersignature", "seq": seq, "signature": signature }))
    }

    /// The line of a checkpoint.
    ///
    /// # Errors
    /// As [`canonical`].
    pub fn checkpoint(checkpoint: &AuditCheckpoint) -> Result<Vec<u8>> {
        Self::line(&json!({ "kind": "checkpoint", "checkpoint": checkpoint }))
    }

    /// A whole file.
    ///
    /// # Errors
    /// As [`canonical`].
    pub fn whole(log: &AuditLog, redact: bool) -> Result<Vec<u8>> {
        let mut writer = Self::new(redact);
        let mut out = writer.header(&log.genesis)?;
        for committed in &log.entries {
            let find = |digest: &Digest| log.objects.get(digest).cloned();
            out.extend(writer.entry(committed, &find)?.concat());
        }
        for checkpoint in &log.checkpoints {
            out.extend(Self::checkpoint(checkpoint)?);
        }
        Ok(out)
    }
}

/// Whether the payload object at `place` of an `event` is user data, which a copy may leave out.
pub(super) fn is_user_data(event: Event, place: usize) -> bool {
    matches!((event, place), (Event::Propose, 1) | (Event::Progress | Event::Deliver, 0))
}

/// Reads a file: every line strict and canonical, everything in its place.
///
/// A last line without its end is left out, and [`AuditLog::torn`] says so.
///
/// # Errors
/// The code of the first line that is wrong, with its number as the path.
pub fn read_jsonl(bytes: &[u8]) -> Result<AuditLog> {
    if bytes.len() > MAX_AUDIT_FILE {
        return Err(Error::new(Code::TooLarge, "more than 256 MiB"));
    }
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let (whole, tail) = bytes.split_at(end);
    let mut reader: Option<Reader> = None;
    for (number, line) in whole.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let read = read_line(line).and_then(|(kind, members)| match reader.as_mut() {
            None => Reader::open(&kind, members).map(|opened| reader = Some(opened)),
            Some(reader) => reader.take(&kind, members),
        });
        read.map_err(|error| error.inside(&format!("line {}", number + 1)))?;
    }
    let mut log = reader.ok_or_else(|| wrong("no header"))?.close()?;
    log.torn = !tail.is_empty();
    Ok(log)
}

fn read_line(line: &[u8]) -> Result<(String, Members)> {
    let value = parse(line, MAX_LINE)?;
    if canonical(&value)? != line {
        return Err(wrong("not canonical JSON"));
    }
    let mut members = Members::open(value)?;
    let kind = members.take("kind")?;
    let kind = kind.as_str().ok_or_else(|| wrong("no kind"))?.to_owned();
    Ok((kind, members))
}

/// What has been read so far.
struct Reader {
    log: AuditLog,
    /// Objects since the last entry, in their order.
    waiting: VecDeque<(Digest, Value)>,
}

impl Reader {
    fn open(kind: &str, mut members: Members) -> Result<Self> {
        if kind != "header" {
            return Err(wrong("the first line is not the header"));
        }
        members.only(&["format", "version", "genesis", "genesisDigest"])?;
        if members.take("version")? != "1.0" {
            return Err(Error::new(Code::UnsupportedVersion, "only version 1.0 is known"));
        }
        if members.take("format")? != FORMAT {
            return Err(wrong("not an audit file"));
        }
        let genesis =
            AuditGenesis::read(members.take("genesis")?).map_err(|e| e.inside("genesis"))?;
        if Digest::read(members.take("genesisDigest")?)? != genesis.digest()? {
            return Err(Error::new(Code::DigestMismatch, "not the digest of the genesis"));
        }
        genesis.check()?;
        let (entries, objects, checkpoints) = (Vec::new(), BTreeMap::new(), Vec::new());
        let log = AuditLog { genesis, entries, objects, checkpoints, torn: false };
        Ok(Self { log, waiting: VecDeque::new() })
    }

    fn take(&mut self, kind: &str, mut members: Members) -> Result<()> {
        match kind {
            "object" => {
                members.only(&["digest", "object"])?;
                let digest = Digest::read(members.take("digest")?)?;
                let object = members.take("object")?;
                if Digest::of(&object)? != digest {
                    return Err(Error::new(Code::DigestMismatch, "not the digest of the object"));
                }
                if self.log.objects.contains_key(&digest) {
                    return Err(wrong("an object that was there before"));
                }
                self.waiting.push_back((digest, object));
                Ok(())
            }
            "entry" => {
                members.only(&["digest", "payload", "entry"])?;
                let entry =
                    AuditEntry::read(members.take("entry")?).map_err(|e| e.inside("entry"))?;
                if Digest::read(members.take("digest")?)? != entry.digest()? {
                    return Err(Error::new(Code::DigestMismatch, "not the digest of the entry"));
                }
                let payload = Seq::<Digest, 0, 64>::read(members.take("payload")?)?.into_vec();
                self.entry(entry, payload)
            }
            "countersignature" => {
                members.only(&["seq", "signature"])?;
                let seq = Count::read(members.take("seq")?)?.get();
                let signature = Signature::read(members.take("signature")?)?;
                let at = usize::try_from(seq).unwrap_or(usize::MAX);
                let committed = self.log.entries.get_mut(at);
                let committed = committed.ok_or_else(|| wrong("a signature of no entry"))?;
                committed.entry = committed.entry.with_countersignature(signature)?;
                Ok(())
            }
            "checkpoint" => {
                members.only(&["checkpoint"])?;
                let checkpoint = AuditCheckpoint::read(members.take("checkpoint")?)?;
                self.log.checkpoints.push(checkpoint);
                Ok(())
            }
            _ => Err(wrong("an unknown kind of line")),
        }
    }

    /// Every object stands right before the entry that first names it, in the order of the payload.
    fn entry(&mut self, entry: AuditEntry, payload: Vec<Digest>) -> Result<()> {
        if u64::try_from(self.log.entries.len()).unwrap_or(u64::MAX) >= MAX_ENTRIES {
            return Err(Error::new(Code::TooLarge, "more than 10,000 entries"));
        }
        for digest in &payload {
            if self.waiting.front().is_some_and(|(waiting, _)| waiting == digest)
                && let Some((digest, object)) = self.waiting.pop_front()
            {
                self.log.objects.insert(digest, object);
            }
        }
        self.log.entries.push(Committed { entry, payload });
        self.close_objects()
    }

    fn close_objects(&self) -> Result<()> {
        if self.waiting.is_empty() { Ok(()) } else { Err(wrong("an object that nobody uses here")) }
    }

    fn close(self) -> Result<AuditLog> {
        self.close_objects()?;
        Ok(self.log)
    }
}

/// The genesis that a file's header names: whose log it is.
///
/// # Errors
/// As [`read_jsonl`].
pub fn read_header(bytes: &[u8]) -> Result<AuditGenesis> {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let (kind, members) = read_line(line)?;
    Ok(Reader::open(&kind, members)?.log.genesis)
}

/// The bytes of the lines that stand: not a torn last line, and not the objects of an entry that was
/// not written any more.
fn whole_entries(file: &[u8]) -> usize {
    let mut keep = file.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    while let Some(whole) = file.get(..keep.saturating_sub(1)).filter(|_| keep > 0) {
        let begin = whole.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let line = whole.get(begin..).unwrap_or_default();
        if !read_line(line).is_ok_and(|(kind, _)| kind == "object") {
            break;
        }
        keep = begin;
    }
    keep
}

/// What brings a file up to its log after a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Bytes of the file that stay: a torn last line goes, and objects whose entry is not there.
    pub keep: usize,
    /// What to append, one write a line.
    pub append: Vec<Vec<u8>>,
}

/// Compares a file with the log of the store, which is the truth (decision 48).
///
/// # Errors
/// As [`read_jsonl`], and `AUDIT_INVALID` for a line that the store does not know.
pub fn complete(file: &[u8], log: &TaskLog, redact: bool) -> Result<Completion> {
    let mut writer = JsonlWriter::new(redact);
    let mut append = Vec::new();
    let keep = whole_entries(file);
    let mut there = 0;
    if keep == 0 {
        append.push(writer.header(log.view().genesis())?);
    } else {
        let read = read_jsonl(file.get(..keep).unwrap_or_default())?;
        if read.genesis != *log.view().genesis() {
            return Err(wrong("the file is another log's"));
        }
        for (ours, theirs) in read.entries.iter().zip(log.entries()) {
            if ours.entry.digest()? != theirs.entry.digest()? {
                return Err(wrong("the file has an entry that the store does not know"));
            }
            if ours.entry.countersignature().is_none()
                && let Some(second) = theirs.entry.countersignature()
            {
                append.push(JsonlWriter::countersignature(ours.entry.seq.get(), second)?);
            }
        }
        if read.entries.len() > log.entries().len() {
            return Err(wrong("the file has an entry that the store does not know"));
        }
        there = read.entries.len();
        writer.written = read.objects.into_keys().collect();
    }
    for committed in log.entries().iter().skip(there) {
        append.extend(writer.entry(committed, &|digest| log.object(digest).cloned())?);
    }
    Ok(Completion { keep, append })
}
