//! An opened workspace and what can be read of it without changing anything: nothing is created,
//! written or locked here.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use serde::Serialize;

use super::clock::{Clock, SystemClock, zoned};
use super::error::VaultError;
use super::git;
use super::lock;
use super::plan::adapter;
use super::plan::adapter::{
    COMMAND_FOLDER, COMMANDS, GUIDES, IGNORE_FILES, LEGACY_SKILLS, PROTOCOL_GUIDE, SKILLS,
    guide_is_current, is_current, is_redirected,
};
use super::plan::engine::{self, Found as FoundRuntime, Runtime, Standing};
use super::plan::marker::{self, MarkerError, RUNTIME};
use super::plan::name;
use super::plan::report::{
    self, Facts, Found, Git, Hashed, Inspection, MarkerReport, ProtocolReport, StateFile, Storage,
    sha256,
};
use super::plan::search::{MAX_LIMIT, Query};
use super::plan::state::{self, Source, State};
use super::plan::text::{decode, has_conflict, strip};
use super::plan::{daily, json};
use super::scan::{self, PAGES, VAULT};
use super::stop::Stop;
use super::tree::{Kind, MAX_FILE, Tree};
use crate::identity::entropy::{Entropy, EntropyError, OsEntropy};

/// The marker.
pub const MARKER: &str = "EchoesVault/.echoes-vault.json";
/// The generated index.
pub const INDEX: &str = "EchoesVault/index.md";
/// The folders of a vault.
pub const FOLDERS: [&str; 4] =
    ["EchoesVault/raw", "EchoesVault/pages", "EchoesVault/daily", "EchoesVault/assets"];
/// The state.
pub const STATE: &str = ".echoes-vault/state.json";

/// Bytes of a page whose text goes into an answer: more than people write, and what is made of it fits
/// into memory a few times.
const MAX_SHOWN_PAGE: u64 = 32 * 1024 * 1024;
/// Pages searched between two looks at the limit, so that a search with many matches does not read
/// the rest of the vault.
const SEARCH_ROUND: usize = 1024;

/// Who asks, and where time and chance come from.
pub struct Options {
    /// `--agent`: an agent's name as given.
    pub agent: Option<String>,
    /// `--adapter-version` as given.
    pub adapter_version: Option<String>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Chance.
    pub entropy: Box<dyn Entropy + Send>,
    /// Calls writers off.
    pub stop: Stop,
}

impl Options {
    /// The machine's clock and random source, nobody named.
    ///
    /// # Errors
    /// [`EntropyError`].
    pub fn system() -> Result<Self, EntropyError> {
        Ok(Self {
            agent: None,
            adapter_version: None,
            clock: Arc::new(SystemClock::default()),
            entropy: Box::new(OsEntropy::open()?),
            stop: Stop::default(),
        })
    }
}

/// A workspace: a folder that has, or may get, a vault.
pub struct Workspace {
    pub(super) tree: Tree,
    root: String,
    pub(super) agent: Option<String>,
    pub(super) adapter_version: Option<String>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) entropy: Mutex<Box<dyn Entropy + Send>>,
    pub(super) stop: Stop,
}

/// A page as it is on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PageText {
    /// True.
    pub ok: bool,
    /// Its path.
    pub page: String,
    /// Hash of the text, for a later update.
    pub sha256: String,
    /// Its text, line ends read as LF.
    pub text: String,
}

/// The index as its pages make it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IndexText {
    /// True.
    pub ok: bool,
    /// Rows.
    pub page_count: usize,
    /// Hash of the text.
    pub sha256: String,
    /// Its text.
    pub text: String,
}

impl Workspace {
    /// Opens the workspace that `start` is in: the top of its Git work tree, or else the folder itself.
    ///
    /// # Errors
    /// [`VaultError::Workspace`].
    pub fn open(start: &Path, options: Options) -> Result<Self, VaultError> {
        let refused = |why: &str| VaultError::Workspace { path: start.into(), why: why.into() };
        let start = start.canonicalize().map_err(|error| refused(&error.to_string()))?;
        if !start.is_dir() {
            return Err(refused("it is not a folder"));
        }
        Self::open_root(git::toplevel(&start).unwrap_or(start), options)
    }

    /// Opens a workspace by its root, which is not looked for.
    ///
    /// # Errors
    /// [`VaultError::Workspace`].
    pub fn open_root(root: PathBuf, options: Options) -> Result<Self, VaultError> {
        let refused = |why: String| VaultError::Workspace { path: root.clone(), why };
        let root = root.canonicalize().map_err(|error| refused(error.to_string()))?;
        let tree = Tree::open(&root)?;
        let root = root
            .into_os_string()
            .into_string()
            .map_err(|_| refused("its path is not valid UTF-8".into()))?;
        let Options { agent, adapter_version, clock, entropy, stop } = options;
        Ok(Self { tree, root, agent, adapter_version, clock, entropy: Mutex::new(entropy), stop })
    }

    /// The same, with `root` in the place of its path in answers: whoever asks from elsewhere is not
    /// told where it is.
    #[must_use]
    pub fn shown_as(self, root: String) -> Self {
        Self { root, ..self }
    }

    /// Whether there is a vault here that can be read.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn may_read(&self) -> Result<(), VaultError> {
        self.before_reading()
    }

    /// Its root.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.tree.path()
    }

    /// An absolute path, for answers.
    pub(super) fn at(&self, path: &str) -> String {
        if self.root == "/" { format!("/{path}") } else { format!("{}/{path}", self.root) }
    }

    /// Draws from the random source.
    pub(super) fn draw(&self, bytes: &mut [u8]) {
        self.entropy.lock().unwrap_or_else(PoisonError::into_inner).fill(bytes);
    }

    /// Refuses to go on if a managed path leads out of the workspace, or around in a loop.
    pub(super) fn confine(&self) -> Result<(), VaultError> {
        Self::managed_paths().try_for_each(|path| self.tree.confine(path))
    }

    /// As [`Workspace::confine`], for a report: a loop of links, which leads nowhere, is a finding there.
    fn confine_for_report(&self) -> Result<(), VaultError> {
        Self::managed_paths().try_for_each(|path| match self.tree.confine(path) {
            Err(VaultError::SymbolicLink(_)) => Ok(()),
            done => done,
        })
    }

    fn managed_paths() -> impl Iterator<Item = &'static str> {
        let sources = Source::ALL.map(Source::path);
        let single = [VAULT, INDEX, MARKER, lock::FOLDER, lock::PATH, RUNTIME, COMMAND_FOLDER];
        let templates = IGNORE_FILES.iter().chain(&SKILLS).chain([&PROTOCOL_GUIDE]);
        FOLDERS
            .into_iter()
            .chain(sources)
            .chain(single)
            .chain(GUIDES)
            .chain(templates.map(|template| template.path))
    }

    /// The marker's text.
    pub(super) fn marker_text(&self) -> Result<Option<String>, VaultError> {
        self.tree.text(MARKER)
    }

    fn marker(&self) -> Result<MarkerReport, VaultError> {
        match self.marker_text() {
            Err(error @ VaultError::Io { .. }) => Ok(MarkerReport::unreadable(error.to_string())),
            text => Ok(report::marker_report(text?.as_deref())),
        }
    }

    /// Lets through only what the marker allows.
    pub(super) fn gate(&self) -> Result<(), VaultError> {
        match marker::parse(self.marker_text()?.as_deref()) {
            Ok(value) => Ok(marker::gate(&value)?),
            Err(MarkerError::Absent) if self.is_legacy()? => Err(VaultError::Legacy),
            Err(MarkerError::Absent) => Err(VaultError::Uninitialized),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether there is a vault without a marker.
    fn is_legacy(&self) -> Result<bool, VaultError> {
        Ok(self.tree.own_kind(INDEX)? == Some(Kind::File)
            || !scan::page_names(&self.tree)?.1.is_empty()
            || !scan::daily(&self.tree)?.is_empty())
    }

    /// The runtime in the repository, and how this engine stands to it.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn runtime(&self) -> Result<(Runtime, Standing), VaultError> {
        match self.tree.confine(RUNTIME) {
            Ok(()) | Err(VaultError::SymbolicLink(_)) => {}
            Err(error) => return Err(error),
        }
        let found = match self.tree.own_kind(RUNTIME)? {
            None => FoundRuntime::Missing,
            Some(Kind::File) => match self.tree.text(RUNTIME) {
                Ok(Some(text)) => FoundRuntime::File(text),
                Ok(None) => FoundRuntime::Missing,
                Err(VaultError::NotUtf8(_)) => FoundRuntime::Unusable("it is not valid UTF-8"),
                Err(VaultError::Io { .. }) => FoundRuntime::Unusable("it cannot be read"),
                Err(error) => return Err(error),
            },
            Some(Kind::Link) => FoundRuntime::Unusable("it is a symbolic link"),
            Some(_) => FoundRuntime::Unusable("it is not a regular file"),
        };
        Ok(engine::judge(&found))
    }

    /// Refuses to work beside an older or foreign runtime.
    fn beside_runtime(&self) -> Result<Standing, VaultError> {
        let (runtime, standing) = self.runtime()?;
        match standing {
            Standing::Older => {
                Err(VaultError::OlderRuntime(runtime.engine_version.unwrap_or_default()))
            }
            Standing::Foreign => Err(VaultError::ForeignRuntime(foreign(&runtime))),
            Standing::Same | Standing::Newer | Standing::Missing => Ok(standing),
        }
    }

    /// What stands before `search`, `hash` and the like.
    fn before_reading(&self) -> Result<(), VaultError> {
        self.confine()?;
        self.gate()?;
        self.beside_runtime().map(|_| ())
    }

    /// What stands before writing beside the runtime that is there.
    pub(super) fn runtime_for_writing(&self) -> Result<Standing, VaultError> {
        match self.beside_runtime()? {
            Standing::Newer => {
                let version = self.runtime()?.0.engine_version.unwrap_or_default();
                Err(VaultError::NewerRuntime(version))
            }
            standing => Ok(standing),
        }
    }

    /// `protocol`: versions, paths, commands.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn protocol(&self) -> Result<ProtocolReport, VaultError> {
        self.confine_for_report()?;
        let (runtime, _) = self.runtime()?;
        let marker = self.marker()?;
        if marker.value.has_lone_surrogate() {
            return Err(lone_surrogate());
        }
        Ok(report::protocol(marker, runtime, self.at(RUNTIME), self.at(PROTOCOL_GUIDE.path)))
    }

    /// `search`: lines of pages that contain `query`, in the order of the index, at most `limit` of
    /// them (taken into 1 to 500).
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn search(&self, query: &str, limit: i64) -> Result<Found, VaultError> {
        self.before_reading()?;
        let query = strip(query);
        if query.is_empty() {
            return Err(VaultError::Query);
        }
        let limit = usize::try_from(limit).unwrap_or(1).clamp(1, MAX_LIMIT);
        let (folder, names) = scan::page_names(&self.tree)?;
        let ready = Query::new(query);
        let mut results = Vec::new();
        for round in names.chunks(SEARCH_ROUND) {
            let Some(folder) = &folder else { break };
            let found = scan::side_by_side(round, |name| {
                let path = || format!("{PAGES}/{name}");
                match folder.read(name)? {
                    Some(bytes) => {
                        ready.page(&bytes, limit, path).ok_or_else(|| VaultError::NotUtf8(path()))
                    }
                    None => Ok(Vec::new()),
                }
            });
            for matches in found {
                results.extend(matches?);
                if results.len() >= limit {
                    results.truncate(limit);
                    return Ok(Found {
                        ok: true,
                        query: query.to_owned(),
                        truncated: true,
                        results,
                    });
                }
            }
        }
        Ok(Found { ok: true, query: query.to_owned(), truncated: false, results })
    }

    /// Path and text of a page of at most `max` bytes.
    fn read_page(&self, name: &str, max: u64) -> Result<(String, String), VaultError> {
        self.before_reading()?;
        let file =
            name::page_file(name).map_err(|why| VaultError::Name { name: name.to_owned(), why })?;
        let path = format!("{PAGES}/{file}");
        if self.tree.kind(&path)? != Some(Kind::File) {
            return Err(VaultError::NoPage(file));
        }
        if self.tree.size(&path)?.is_some_and(|size| size > max) {
            return Err(VaultError::TooLarge { path, limit: max });
        }
        let text = self.tree.text(&path)?.ok_or(VaultError::NoPage(file))?;
        Ok((self.at(&path), text))
    }

    /// `hash`: path and hash of a page, for a later update.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn hash(&self, name: &str) -> Result<Hashed, VaultError> {
        let (page, text) = self.read_page(name, MAX_FILE)?;
        Ok(Hashed { ok: true, page, sha256: sha256(&text) })
    }

    /// A page's text with its hash, for somebody who cannot open the file.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn page(&self, name: &str) -> Result<PageText, VaultError> {
        let (page, text) = self.read_page(name, MAX_SHOWN_PAGE)?;
        Ok(PageText { ok: true, page, sha256: sha256(&text), text })
    }

    /// The index as the pages make it now, whatever the index file says.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn index(&self) -> Result<IndexText, VaultError> {
        self.before_reading()?;
        let text = report::build_index(&scan::facts(&self.tree, &self.stop)?)
            .map_err(VaultError::Index)?;
        Ok(IndexText {
            ok: true,
            page_count: report::row_count(&text),
            sha256: sha256(&text),
            text,
        })
    }

    /// The state that a writer takes over.
    pub(super) fn state(&self) -> Result<State, VaultError> {
        for source in Source::ALL {
            let text = match self.tree.text(source.path()) {
                Ok(Some(text)) => text,
                Ok(None)
                | Err(
                    VaultError::Io { .. } | VaultError::NotRegular(_) | VaultError::SymbolicLink(_),
                ) => continue,
                Err(error) => return Err(error),
            };
            match json::parse(&text) {
                // What cannot be written again is as what cannot be read.
                Ok(value) if !value.has_lone_surrogate() => {
                    return Ok(state::import(source, &value));
                }
                _ => {}
            }
        }
        Ok(State::default())
    }

    fn state_file(&self) -> Result<StateFile, VaultError> {
        let exists = self.tree.kind(STATE)?.is_some();
        let fault = if !exists {
            Some("there is no state; the next writing command makes one".to_owned())
        } else if self.tree.own_kind(STATE)? == Some(Kind::Link) {
            Some("the state is a symbolic link".to_owned())
        } else {
            match self.tree.text(STATE) {
                Ok(text) => match json::parse(&text.unwrap_or_default()) {
                    Ok(value) => state::fault(&value).map(str::to_owned),
                    Err(why) => Some(format!("the state cannot be read: {why}")),
                },
                Err(error @ VaultError::NotUtf8(_)) => return Err(error),
                Err(error) => Some(error.to_string()),
            }
        };
        Ok(StateFile { exists, valid: fault.is_none(), error: fault })
    }

    /// Whether a managed file is regular and its text, if it can be read, passes `test`; `None` if nothing
    /// is there.
    fn managed(&self, path: &str, test: fn(&str) -> bool) -> Result<Option<bool>, VaultError> {
        match self.tree.own_kind(path)? {
            None => Ok(None),
            Some(Kind::File) => match self.tree.text(path) {
                Ok(Some(text)) => Ok(Some(test(&text))),
                Ok(None) => Ok(None),
                Err(VaultError::NotUtf8(_) | VaultError::Io { .. }) => Ok(Some(false)),
                Err(error) => Err(error),
            },
            Some(_) => Ok(Some(false)),
        }
    }

    /// Names of managed parts that are not as they should be, and adapters of somebody else.
    fn structure(
        &self,
        marker: &MarkerReport,
        runtime: &Runtime,
    ) -> Result<(Vec<&'static str>, Vec<&'static str>), VaultError> {
        let mut missing = Vec::new();
        let mut foreign = Vec::new();
        let stamped = |text: &str| text.contains(adapter::STAMP);
        if self.tree.own_kind(INDEX)? != Some(Kind::File) {
            missing.push("index.md");
        }
        if !marker.valid {
            missing.push(".echoes-vault.json");
        }
        if self.managed(PROTOCOL_GUIDE.path, stamped)? != Some(true) {
            missing.push("AGENT_PROTOCOL.md");
        }
        for (folder, name) in FOLDERS.into_iter().zip(["raw/", "pages/", "daily/", "assets/"]) {
            if self.tree.own_kind(folder)? != Some(Kind::Folder) {
                missing.push(name);
            }
        }
        if !runtime.compatible {
            missing.push(RUNTIME);
        }
        for guide in GUIDES {
            if self.managed(guide, guide_is_current)? != Some(true) {
                missing.push(guide);
            }
        }
        for template in SKILLS.iter().chain(&COMMANDS) {
            if self.managed(template.path, is_current)? != Some(true) {
                missing.push(template.path);
            }
            if self.managed(template.path, stamped)? == Some(false) {
                foreign.push(template.path);
            }
        }
        for (template, _) in &LEGACY_SKILLS {
            if self.managed(template.path, is_redirected)? == Some(false) {
                foreign.push(template.path);
            }
        }
        Ok((missing, foreign))
    }

    /// `inspect` and `status`: the condition of the vault.
    ///
    /// # Errors
    /// [`VaultError`], also where a finding could not be written as UTF-8.
    pub fn inspect(&self) -> Result<Inspection, VaultError> {
        let (inspection, unwritable) = self.examine()?;
        unwritable.map_or(Ok(inspection), Err)
    }

    /// The same as a card of Markdown, which counts findings and names none.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn card(&self) -> Result<String, VaultError> {
        Ok(self.examine()?.0.card())
    }

    /// The condition of the vault, and what of it cannot be written as UTF-8.
    fn examine(&self) -> Result<(Inspection, Option<VaultError>), VaultError> {
        self.confine_for_report()?;
        // Git works while the files are read.
        let root = self.root();
        std::thread::scope(|scope| {
            let has_git = git::may_be_repository(root);
            let tracked = scope.spawn(move || has_git.then(|| git::tracked(root)).flatten());
            let untracked = scope.spawn(move || has_git.then(|| git::untracked(root)).flatten());
            let mut inventory = self.inventory()?;
            let durable = std::mem::take(&mut inventory.durable);
            let asked = durable.clone();
            let ignored = scope.spawn(move || match has_git {
                true => git::ignored(root, &asked),
                false => Vec::new(),
            });
            let (state, mut facts) = self.judge(&inventory)?;
            let ignored = ignored.join().unwrap_or_default();
            let lists = tracked.join().ok().flatten().zip(untracked.join().ok().flatten());
            facts.git = match lists {
                Some((tracked, untracked)) => judge_git(&durable, tracked, untracked, ignored),
                None => Git::unavailable(),
            };
            facts.storage = inventory.storage;
            let unwritable = unwritable(&facts);
            Ok((report::inspect(self.root.clone(), self.at(VAULT), state, facts), unwritable))
        })
    }

    /// What lies below the vault, and which files Git should know.
    fn inventory(&self) -> Result<Inventory, VaultError> {
        let mut inventory = Inventory::default();
        let managed = [MARKER, RUNTIME].into_iter().chain(GUIDES);
        let templates =
            IGNORE_FILES.iter().chain([&PROTOCOL_GUIDE]).chain(&SKILLS).chain(&COMMANDS);
        let legacy = LEGACY_SKILLS.iter().map(|(template, _)| template);
        let templates = templates.chain(legacy).map(|template| template.path);
        for path in managed.chain(templates) {
            if self.tree.kind(path)? == Some(Kind::File) {
                inventory.durable.push(path.to_owned());
            }
        }
        let Some(vault) = self.tree.folder(VAULT)? else { return Ok(inventory) };
        let walk = scan::walk(&vault)?;
        let mut newest = None;
        for run in walk.files.chunk_by(|a, b| a.folder == b.folder) {
            let at = run.first().map_or(0, |met| met.folder);
            let path = walk.folders.get(at).map_or(&[][..], Vec::as_slice);
            let folder = match path {
                [] => Some(vault.again()?),
                _ => Tree::real_folder(&vault, path)?,
            };
            let Some(folder) = folder else { continue };
            let measured = scan::side_by_side(run, |met| match met.kind {
                Kind::File => folder.measure(met.name()).ok(),
                _ => None,
            });
            for (met, measured) in run.iter().zip(measured) {
                let path = scan::path_text(&met.path);
                if let Some((size, modified, readable)) = measured {
                    inventory.add(&path, size, readable);
                    newest = newest.max(Some(modified));
                }
                if met.kind == Kind::Link {
                    inventory.storage.symlinks.push(path);
                }
            }
        }
        for folder in &walk.unreadable {
            inventory.storage.unreadable_files.push(scan::path_text(folder));
        }
        inventory.storage.symlinks.sort_unstable();
        inventory.storage.unreadable_files.sort_unstable();
        inventory.storage.last_modified = newest
            .and_then(|(seconds, _)| Timestamp::from_second(seconds).ok())
            .map(|time| time.to_zoned_datetime(self.clock.zone()))
            .filter(|time| time.year() >= 1)
            .map(|time| daily::local_time(&time));
        Ok(inventory)
    }

    /// The state and everything that the health is judged from, but for Git and storage.
    fn judge(&self, inventory: &Inventory) -> Result<(State, Facts), VaultError> {
        let marker = self.marker()?;
        let (runtime, _) = self.runtime()?;
        let (missing, adapters) = self.structure(&marker, &runtime)?;
        let looked = scan::pages(&self.tree, &self.stop)?;
        // Pages have been read already, unless their folder is reached through a link.
        let linked = self.tree.own_kind(PAGES)? != Some(Kind::Folder);
        let is_page = |path: &str| match path.strip_prefix("pages/") {
            Some(name) => !linked && !name.contains('/') && name::is_page(name),
            None => false,
        };
        let others: Vec<&String> =
            inventory.markdown.iter().filter(|path| !is_page(path)).collect();
        let conflicting = scan::side_by_side(&others, |path| {
            let path = scan::path_bytes(&format!("{VAULT}/{path}"));
            let bytes = self.tree.read_raw(&path).ok().flatten();
            bytes.and_then(decode).is_some_and(|text| has_conflict(&text))
        });
        let mut conflicts: Vec<String> = others
            .into_iter()
            .zip(conflicting)
            .filter(|(_, conflict)| *conflict)
            .map(|(path, _)| path.clone())
            .collect();
        if !linked {
            let pages = looked.iter().filter(|page| page.conflict).map(|page| &page.fact.file);
            conflicts
                .extend(pages.filter(|f| f.ends_with(".md")).map(|file| format!("pages/{file}")));
        }
        conflicts.sort_by(|a, b| a.split('/').cmp(b.split('/')));
        let now = zoned(&*self.clock);
        let facts = Facts {
            pages: looked.into_iter().map(|page| page.fact).collect(),
            daily: scan::daily(&self.tree)?.len(),
            index: match self.tree.own_kind(INDEX)? {
                Some(Kind::File) => match self.tree.text(INDEX) {
                    // It is there, and the storage names it among the unreadable files.
                    Err(VaultError::Io { .. }) => Some(String::new()),
                    text => text?,
                },
                _ => None,
            },
            marker,
            runtime,
            missing,
            conflicts,
            adapters,
            git: Git::unavailable(),
            state_file: self.state_file()?,
            today: scan::entries_of(&self.tree, &daily::dates(&now)),
            storage: Storage::default(),
        };
        Ok((self.state()?, facts))
    }
}

/// A finding that would have to be named and is not UTF-8.
fn unwritable(facts: &Facts) -> Option<VaultError> {
    if facts.marker.value.has_lone_surrogate() {
        return Some(lone_surrogate());
    }
    let Facts { storage, git, conflicts, .. } = facts;
    [
        &storage.symlinks,
        &storage.unreadable_files,
        conflicts,
        &git.untracked_durable_files,
        &git.ignored_durable_files,
    ]
    .into_iter()
    .flatten()
    .find(|path| !scan::is_utf8(path))
    .map(|path| {
        let path = scan::path_bytes(path);
        VaultError::NameNotUtf8(String::from_utf8_lossy(&path).into_owned())
    })
}

/// Why a marker cannot be shown.
fn lone_surrogate() -> VaultError {
    MarkerError::Broken("a string in it has a lone surrogate".into()).into()
}

/// What lies below the vault.
#[derive(Default)]
struct Inventory {
    storage: Storage,
    /// Files whose name ends in `.md`, from the vault.
    markdown: Vec<String>,
    /// Files that belong into Git, from the root.
    durable: Vec<String>,
}

impl Inventory {
    /// Takes in a regular file.
    fn add(&mut self, path: &str, size: u64, readable: bool) {
        self.storage.total_bytes += size;
        self.storage.total_files += 1;
        let file = path.rsplit('/').next().unwrap_or(path);
        self.storage.markdown_files += usize::from(name::is_page(file));
        if !readable {
            self.storage.unreadable_files.push(path.to_owned());
        }
        if path.ends_with(".md") {
            self.markdown.push(path.to_owned());
        }
        let below = path.split_once('/').map(|(folder, _)| folder);
        if matches!(below, Some("pages" | "daily" | "assets" | "raw")) {
            self.durable.push(format!("{VAULT}/{path}"));
        }
    }
}

/// Files that do not belong into Git.
fn is_local(path: &str) -> bool {
    path == INDEX || path == lock::PATH || Source::ALL.iter().any(|source| source.path() == path)
}

fn judge_git(
    durable: &[String],
    tracked: Vec<String>,
    untracked: Vec<String>,
    ignored: Vec<String>,
) -> Git {
    let durable: HashSet<&str> = durable.iter().map(String::as_str).collect();
    Git::judge(
        tracked.into_iter().filter(|path| is_local(path)).collect(),
        untracked.into_iter().filter(|path| durable.contains(path.as_str())).collect(),
        ignored,
    )
}

/// What is wrong with a foreign runtime, for a message.
fn foreign(runtime: &Runtime) -> String {
    match (&runtime.error, &runtime.protocol_version) {
        (Some(why), _) => why.clone(),
        (None, Some(protocol)) => format!("it speaks protocol {protocol}"),
        (None, None) => "it names no version".into(),
    }
}
