//! Commands that change the vault. Each one checks everything that can be checked before its first
//! write, holds the lock, and asks before every single file whether the lock and the marker are still
//! what they were.

use std::cell::RefCell;

use super::clock::zoned;
use super::error::VaultError;
use super::lock::Lock;
use super::plan::adapter::{
    self, COMMANDS, Change, GUIDES, IGNORE_FILES, LEGACY_SKILLS, PROTOCOL_GUIDE, SKILLS,
};
use super::plan::daily::{self, Kind as EntryKind};
use super::plan::engine::Standing;
use super::plan::json::{self, Json};
use super::plan::marker::{self, MarkerError, RUNTIME};
use super::plan::payload::{AppendInput, EndInput, PageInput, PayloadError};
use super::plan::report::{
    self, Adapters, Appended, Configured, Ended, Hydrated, IndexRefresh, Initialized, PageFact,
    Rebuilt, Upserted, sha256,
};
use super::plan::state::State;
use super::plan::text::{decode, strip};
use super::plan::{index, name, page};
use super::scan::{self, DAILY, PAGES, VAULT};
use super::sweep;
use super::tree::{Kind, Place};
use super::workspace::{FOLDERS, INDEX, MARKER, STATE, Workspace};
use crate::identity::entropy::Entropy;

/// Tries for a daily entry's name that is free: two in one microsecond with the same four random
/// bytes do not happen twice.
const MAX_ENTRY_NAMES: usize = 4;
/// Most entries that `start` shows.
const MAX_RECENT: i64 = 10;

/// Entries that `start` shows without a number given.
pub const DEFAULT_RECENT: i64 = 3;

/// The three commands that set a vault up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// Creates or repairs.
    Init,
    /// Says that an old vault is to be taken over.
    Migrate,
    /// Says that runtime and adapters are to be renewed.
    Upgrade,
}

impl Setup {
    /// The command's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Migrate => "migrate",
            Self::Upgrade => "upgrade",
        }
    }
}

/// The random source of a workspace, drawn from by turns.
struct Draw<'a>(&'a Workspace);

impl Entropy for Draw<'_> {
    fn fill(&mut self, bytes: &mut [u8]) {
        self.0.draw(bytes);
    }
}

/// What a marker must be for the files of this session to be written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    /// Valid.
    Valid,
    /// Fit to be taken over.
    Setup,
}

/// A writer at work.
struct Session<'a> {
    workspace: &'a Workspace,
    lock: Lock,
    gate: Gate,
    written: RefCell<Vec<String>>,
}

/// A page checked and ready to be written.
struct Ready {
    file: String,
    page: page::Page,
    /// Hash of the text that it replaces.
    replaces: Option<String>,
}

impl Session<'_> {
    /// Whether this session may still change files.
    fn may_write(&self) -> Result<(), VaultError> {
        self.workspace.stop.check()?;
        self.lock.held()?;
        match self.gate {
            Gate::Valid => self.workspace.gate(),
            Gate::Setup => self.workspace.setup_gate().map(|_| ()),
        }
    }

    fn put(&self, path: &str, text: &str) -> Result<(), VaultError> {
        self.put_checked(path, text.as_bytes(), Place::Any, &|| Ok(()))
    }

    fn put_checked(
        &self,
        path: &str,
        bytes: &[u8],
        place: Place,
        check: &dyn Fn() -> Result<(), VaultError>,
    ) -> Result<(), VaultError> {
        let check = || self.may_write().and_then(|()| check());
        self.workspace.tree.replace(path, bytes, place, &mut Draw(self.workspace), &check)?;
        self.written.borrow_mut().push(path.to_owned());
        Ok(())
    }

    /// Writes a page that has been checked.
    fn put_page(&self, ready: &Ready) -> Result<(), VaultError> {
        let path = format!("{PAGES}/{}", ready.file);
        let unchanged = || match &ready.replaces {
            Some(hash) if self.workspace.page_hash(&ready.file)?.as_ref() != Some(hash) => {
                Err(VaultError::HashStale(ready.file.clone()))
            }
            _ => Ok(()),
        };
        let place = if ready.replaces.is_some() { Place::Any } else { Place::New };
        self.put_checked(&path, ready.page.text.as_bytes(), place, &unchanged)
    }

    /// Brings the index file up to date.
    fn refresh_index(&self, text: &str, migrated: Vec<String>) -> Result<IndexRefresh, VaultError> {
        let rebuilt = self.workspace.tree.text(INDEX)?.as_deref() != Some(text);
        if rebuilt {
            self.put(INDEX, text)?;
        }
        Ok(IndexRefresh {
            rebuilt,
            migrated_summaries: migrated,
            page_count: report::row_count(text),
            sha256: sha256(text),
        })
    }

    /// Writes a daily entry; answers its path from the root.
    fn put_entry(
        &self,
        kind: EntryKind,
        agent: Option<&str>,
        body: &str,
    ) -> Result<String, VaultError> {
        let mut tries = 0;
        loop {
            let now = zoned(&*self.workspace.clock);
            let mut random = [0; 4];
            self.workspace.draw(&mut random);
            let (folder, file) = daily::entry_name(&now, kind, agent, random);
            let path = format!("{DAILY}/{folder}/{file}");
            let text = daily::entry_text(&now, kind, agent, body);
            tries += 1;
            match self.put_checked(&path, text.as_bytes(), Place::New, &|| Ok(())) {
                Err(VaultError::Raced(_))
                    if tries < MAX_ENTRY_NAMES && self.workspace.tree.kind(&path)?.is_some() => {}
                done => return done.map(|()| path),
            }
        }
    }

    /// Writes the state, changed by `change`.
    fn put_state(
        &self,
        pages: &[PageFact],
        agent: Option<&str>,
        change: impl FnOnce(&mut State, String),
    ) -> Result<State, VaultError> {
        let workspace = self.workspace;
        let mut state = workspace.state()?;
        state.initialized = true;
        change(&mut state, daily::local_time(&zoned(&*workspace.clock)));
        state.stats = report::stats(pages, scan::daily(&workspace.tree)?.len());
        if let Some(agent) = agent {
            // Normalised once more: cutting a long name may have left a dash or dot at its end.
            state.last_writer.agent = daily::agent(agent);
            state.last_writer.adapter_version =
                workspace.adapter_version.clone().filter(|version| !strip(version).is_empty());
        }
        self.put(STATE, &json::pretty(&state))?;
        Ok(state)
    }
}

impl Workspace {
    /// The marker's value if `init` may take the vault over; `None` if there is no marker.
    fn setup_gate(&self) -> Result<Option<Json>, VaultError> {
        match marker::parse(self.marker_text()?.as_deref()) {
            Ok(value) => {
                marker::init_gate(&value)?;
                Ok(Some(value))
            }
            Err(MarkerError::Absent) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Runs `work` under the lock, after everything that stands before writing.
    fn writing<T>(
        &self,
        gate: Gate,
        needs_runtime: bool,
        work: impl FnOnce(&Session<'_>) -> Result<T, VaultError>,
    ) -> Result<T, VaultError> {
        self.confine()?;
        // Before the lock, so that a refusal leaves no folder behind; again before every write.
        match gate {
            Gate::Valid => self.gate()?,
            Gate::Setup => self.setup_gate().map(|_| ())?,
        }
        let standing = self.standing_for(gate, needs_runtime)?;
        self.refuse_link(STATE)?;
        // Dropped after the lock, which it stands for.
        let _working = self.stop.working()?;
        let lock = Lock::acquire(&self.tree, &*self.clock, &mut Draw(self), &self.stop)?;
        let session = Session { workspace: self, lock, gate, written: RefCell::default() };
        session.may_write()?;
        // A state that cannot be taken over stops the command here, not after pages are written.
        self.state()?;
        sweep::temporary_files(&self.tree, &*self.clock);
        let done = self.install_runtime(&session, standing).and_then(|()| work(&session));
        let written = session.written.take();
        match done {
            Err(source) if !written.is_empty() => {
                Err(VaultError::Partly { written, source: Box::new(source) })
            }
            done => done,
        }
    }

    /// Whether `append`, `upsert` and `end` would get as far as looking at their input.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn may_write(&self) -> Result<(), VaultError> {
        self.confine()?;
        self.gate()?;
        self.standing_for(Gate::Valid, false).map(|_| ())
    }

    /// How this engine stands to the repository's runtime, if that lets this command write.
    fn standing_for(&self, gate: Gate, needs_runtime: bool) -> Result<Standing, VaultError> {
        match self.runtime_for_writing() {
            Ok(Standing::Missing) if needs_runtime => Err(VaultError::NoRuntime),
            Err(VaultError::OlderRuntime(_)) if gate == Gate::Setup => Ok(Standing::Older),
            standing => standing,
        }
    }

    /// Puts our runtime where there is none or an older one. One of the same version is left alone,
    /// whatever its bytes.
    fn install_runtime(&self, session: &Session<'_>, seen: Standing) -> Result<(), VaultError> {
        if !matches!(seen, Standing::Missing | Standing::Older) {
            return Ok(());
        }
        // Another writer may have installed one while this one waited for the lock.
        if self.runtime()?.1 != seen {
            return self.standing_for(session.gate, false).map(|_| ());
        }
        let place = if seen == Standing::Missing { Place::New } else { Place::Any };
        session.put_checked(RUNTIME, adapter::RUNTIME, place, &|| Ok(()))
    }

    /// Refuses to replace a link.
    fn refuse_link(&self, path: &str) -> Result<(), VaultError> {
        match self.tree.own_kind(path)? {
            Some(Kind::Link) => Err(VaultError::SymbolicLink(path.to_owned())),
            Some(Kind::File) | None => Ok(()),
            Some(_) => Err(VaultError::NotRegular(path.to_owned())),
        }
    }

    /// Refuses early if the index will be written and cannot.
    fn index_is_writable(&self, text: &str) -> Result<(), VaultError> {
        if self.tree.text(INDEX)?.as_deref() == Some(text) {
            Ok(())
        } else {
            self.refuse_link(INDEX)
        }
    }

    /// Hash of a page on disk as [`Workspace::hash`] gives it; `None` if there is none.
    fn page_hash(&self, file: &str) -> Result<Option<String>, VaultError> {
        let Some(folder) = self.tree.folder(PAGES)? else { return Ok(None) };
        let Some(bytes) = folder.read(file)? else { return Ok(None) };
        let text = decode(bytes).ok_or_else(|| VaultError::NotUtf8(format!("{PAGES}/{file}")))?;
        Ok(Some(sha256(&text)))
    }

    /// The agent named on the command line, where an empty name is as none.
    fn default_agent(&self) -> Result<Option<String>, VaultError> {
        match self.agent.as_deref() {
            None | Some("") => Ok(None),
            Some(given) => normal_agent(given).map(Some),
        }
    }

    /// The agent of an entry: the payload's, or else the command line's, where an empty name is an
    /// error.
    fn entry_agent(&self, of_payload: Option<&str>) -> Result<Option<String>, VaultError> {
        of_payload
            .filter(|agent| !agent.is_empty())
            .or(self.agent.as_deref())
            .map(normal_agent)
            .transpose()
    }

    /// Checks a proposed page against what is on disk.
    fn ready(&self, input: &PageInput) -> Result<Ready, VaultError> {
        let file = name::page_file(&input.filename)
            .map_err(|why| VaultError::Name { name: input.filename.clone(), why })?;
        self.refuse_link(&format!("{PAGES}/{file}"))?;
        let stem = name::stem(&file).to_owned();
        let page = page::proposed(&input.content, input.index_description.as_deref(), &stem)
            .map_err(|why| VaultError::Page { file: file.clone(), why })?;
        let replaces = self.page_hash(&file)?;
        if let Some(hash) = &replaces {
            match input.expected_sha256.as_deref().unwrap_or_default() {
                "" => return Err(VaultError::HashMissing(file)),
                expected if expected != hash => return Err(VaultError::HashStale(file)),
                _ => {}
            }
        }
        Ok(Ready { file, page, replaces })
    }

    /// The vault's pages as they will be with `ready` written, and their index.
    fn prospect(&self, ready: &[Ready]) -> Result<(Vec<PageFact>, String), VaultError> {
        let mut pages = scan::facts(&self.tree, &self.stop)?;
        for Ready { file, page, .. } in ready {
            pages.retain(|old| old.file != *file);
            pages.push(PageFact {
                file: file.clone(),
                meta: Ok(page.meta.clone()),
                deprecated: page.meta.deprecated,
            });
        }
        if !ready.is_empty() {
            index::sort(&mut pages, |page| &page.file);
        }
        let index = report::build_index(&pages).map_err(VaultError::Index)?;
        Ok((pages, index))
    }

    /// `append`: notes something down in a file of its own.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn append(&self, input: &AppendInput) -> Result<Appended, VaultError> {
        if strip(&input.entry).is_empty() {
            return Err(PayloadError::Text("entry").into());
        }
        let agent = self.entry_agent(input.agent.as_deref())?;
        self.writing(Gate::Valid, false, |session| {
            let pages = scan::facts(&self.tree, &self.stop)?;
            let entry = session.put_entry(EntryKind::Scratchpad, agent.as_deref(), &input.entry)?;
            session.put_state(&pages, agent.as_deref(), |_, _| {})?;
            Ok(Appended {
                ok: true,
                daily_log: self.at(&entry),
                kind: EntryKind::Scratchpad.name(),
                agent: agent.clone(),
            })
        })
    }

    /// `upsert`: writes a page.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn upsert(&self, input: &PageInput) -> Result<Upserted, VaultError> {
        let agent = self.default_agent()?;
        self.writing(Gate::Valid, false, |session| {
            let ready = [self.ready(input)?];
            let (pages, index) = self.prospect(&ready)?;
            self.index_is_writable(&index)?;
            let [ready] = ready;
            session.put_page(&ready)?;
            let refresh = session.refresh_index(&index, Vec::new())?;
            session.put_state(&pages, agent.as_deref(), |_, _| {})?;
            Ok(Upserted {
                ok: true,
                action: if ready.replaces.is_some() { "updated" } else { "created" },
                page: self.at(&format!("{PAGES}/{}", ready.file)),
                sha256: sha256(&ready.page.text),
                index_changed: refresh.rebuilt,
            })
        })
    }

    /// `end`: saves a session. `confirmed` says that the user has asked for it.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn end(&self, input: &EndInput, confirmed: bool) -> Result<Ended, VaultError> {
        if !confirmed {
            return Err(VaultError::Unconfirmed);
        }
        if strip(&input.daily_summary).is_empty() {
            return Err(PayloadError::Text("dailySummary").into());
        }
        let agent = self.entry_agent(input.agent.as_deref())?;
        self.writing(Gate::Valid, false, |session| {
            let mut ready: Vec<Ready> = Vec::with_capacity(input.pages.len());
            for page in &input.pages {
                let page = self.ready(page)?;
                if ready.iter().any(|other| other.file == page.file) {
                    return Err(VaultError::PageTwice(page.file));
                }
                ready.push(page);
            }
            let (pages, index) = self.prospect(&ready)?;
            self.refuse_link(INDEX)?;
            for page in &ready {
                session.put_page(page)?;
            }
            session.put(INDEX, &index)?;
            let entry =
                session.put_entry(EntryKind::Session, agent.as_deref(), &input.daily_summary)?;
            session.put_state(&pages, agent.as_deref(), |state, now| {
                state.session.saved = true.into();
                state.session.last_save = now.into();
            })?;
            Ok(Ended {
                ok: true,
                daily_log: self.at(&entry),
                pages_written: ready.len(),
                index: self.at(INDEX),
                memory_saved: true,
                agent: agent.clone(),
            })
        })
    }

    /// `start`: brings the index up to date, marks the session as started and gives the text that an
    /// agent reads: the index and the newest `recent` entries (taken into 0 to 10).
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn start(&self, recent: i64) -> Result<String, VaultError> {
        let agent = self.default_agent()?;
        let recent = usize::try_from(recent.clamp(0, MAX_RECENT)).unwrap_or(0);
        self.writing(Gate::Valid, false, |session| {
            let (pages, index) = self.prospect(&[])?;
            self.index_is_writable(&index)?;
            let entries = scan::newest(&self.tree, recent)?;
            session.refresh_index(&index, Vec::new())?;
            session.put_state(&pages, agent.as_deref(), |state, now| {
                state.session.started = true.into();
                state.session.saved = false.into();
                state.session.last_start = now.into();
            })?;
            Ok(report::start(&index, &entries, pages.len()))
        })
    }

    /// Index and state brought up to date.
    fn refresh(&self, needs_runtime: bool) -> Result<(IndexRefresh, State), VaultError> {
        let agent = self.default_agent()?;
        self.writing(Gate::Valid, needs_runtime, |session| {
            let (pages, index) = self.prospect(&[])?;
            self.index_is_writable(&index)?;
            let refresh = session.refresh_index(&index, Vec::new())?;
            let state = session.put_state(&pages, agent.as_deref(), |_, _| {})?;
            Ok((refresh, state))
        })
    }

    /// `hydrate`: brings the ignored, generated files up to date, and nothing else.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn hydrate(&self) -> Result<Hydrated, VaultError> {
        let (index_refresh, state) = self.refresh(true)?;
        Ok(Hydrated { ok: true, index: self.at(INDEX), index_refresh, state })
    }

    /// `rebuild-index`.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn rebuild_index(&self) -> Result<Rebuilt, VaultError> {
        let (refresh, _) = self.refresh(false)?;
        Ok(Rebuilt { ok: true, index: self.at(INDEX), refresh })
    }

    /// `init`, `migrate` or `upgrade`: everything that a vault consists of.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn set_up(&self, setup: Setup) -> Result<Initialized, VaultError> {
        let agent = self.default_agent()?;
        self.writing(Gate::Setup, false, |session| {
            let marker = self.setup_gate()?;
            let created = marker.as_ref().is_none_or(|value| marker::gate(value).is_err());
            let adapters = AdapterPlan::make(self)?;
            let migration = Migration::plan(self)?;
            self.index_is_writable(&migration.index)?;
            let agent_adapters = self.put_structure(session, marker.as_ref(), adapters)?;
            for (file, summary) in &migration.summaries {
                self.put_summary(session, file, summary)?;
            }
            let migrated = migration.summaries.into_iter().map(|(file, _)| file).collect();
            let index_refresh = session.refresh_index(&migration.index, migrated)?;
            let state = session.put_state(&migration.pages, agent.as_deref(), |_, _| {})?;
            Ok(Initialized {
                ok: true,
                operation: setup.name(),
                created,
                vault: self.at(VAULT),
                index: self.at(INDEX),
                index_refresh,
                agent_adapters,
                state,
            })
        })
    }

    /// `configure-agents`: guides, skills, commands, ignore rules and index brought up to date.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn configure_agents(&self) -> Result<Configured, VaultError> {
        let agent = self.default_agent()?;
        self.writing(Gate::Valid, false, |session| {
            let marker = self.setup_gate()?;
            let adapters = AdapterPlan::make(self)?;
            let (pages, index) = self.prospect(&[])?;
            self.index_is_writable(&index)?;
            let adapters = self.put_structure(session, marker.as_ref(), adapters)?;
            session.refresh_index(&index, Vec::new())?;
            session.put_state(&pages, agent.as_deref(), |_, _| {})?;
            Ok(Configured { ok: true, adapters })
        })
    }

    /// Writes folders, marker and adapters.
    fn put_structure(
        &self,
        session: &Session<'_>,
        marker: Option<&Json>,
        plan: AdapterPlan,
    ) -> Result<Adapters, VaultError> {
        session.may_write()?;
        for folder in FOLDERS {
            self.tree.make_folder(folder)?;
        }
        for (path, text) in &plan.ignore {
            session.put(path, text)?;
        }
        let canonical = marker::canonical();
        if !marker.is_some_and(|value| json::equal(value, &canonical)) {
            session.put(MARKER, &json::pretty(&canonical))?;
        }
        for (path, text) in &plan.files {
            session.put(path, text)?;
        }
        Ok(plan.report)
    }

    /// Gives a page its summary.
    fn put_summary(
        &self,
        session: &Session<'_>,
        file: &str,
        summary: &str,
    ) -> Result<(), VaultError> {
        let path = format!("{PAGES}/{file}");
        let text = self.tree.text(&path)?.ok_or_else(|| VaultError::Raced(path.clone()))?;
        let invalid = |why| VaultError::Page { file: file.to_owned(), why };
        let text = page::with_summary(&text, summary).map_err(invalid)?;
        page::meta(&text).map_err(invalid)?;
        session.put(&path, &text)
    }
}

fn normal_agent(given: &str) -> Result<String, VaultError> {
    daily::agent(given).ok_or_else(|| VaultError::Agent(given.to_owned()))
}

/// Adapter files to be written.
struct AdapterPlan {
    ignore: Vec<(&'static str, String)>,
    files: Vec<(&'static str, String)>,
    report: Adapters,
}

impl AdapterPlan {
    fn make(workspace: &Workspace) -> Result<Self, VaultError> {
        let tree = &workspace.tree;
        let mut plan = Self { ignore: Vec::new(), files: Vec::new(), report: Adapters::default() };
        for template in &IGNORE_FILES {
            // Git itself reads no ignore rules through a link, so even a complete one is refused.
            workspace.refuse_link(template.path)?;
            if let Change::Write(text) =
                adapter::ignore_file(template, tree.text(template.path)?.as_deref())
            {
                plan.ignore.push((template.path, text));
            }
        }
        let guide = adapter::protocol_guide(tree.text(PROTOCOL_GUIDE.path)?.as_deref());
        if guide == Change::Foreign {
            return Err(VaultError::ForeignFile(PROTOCOL_GUIDE.path));
        }
        plan.report.protocol_updated = plan.take(workspace, PROTOCOL_GUIDE.path, guide)?;
        for path in GUIDES {
            let change = adapter::guide(tree.text(path)?.as_deref())
                .map_err(|why| VaultError::Block { file: path, why })?;
            if plan.take(workspace, path, change)? {
                plan.report.guides_updated.push(path);
            }
        }
        for template in &SKILLS {
            let change = adapter::skill(template, tree.text(template.path)?.as_deref());
            if plan.take(workspace, template.path, change)? {
                plan.report.skills_updated.push(template.path);
            }
        }
        for template in &COMMANDS {
            let change = adapter::command(template, tree.text(template.path)?.as_deref());
            if plan.take(workspace, template.path, change)? {
                plan.report.commands_updated.push(template.path);
            }
        }
        for (template, tokens) in &LEGACY_SKILLS {
            let Some(text) = tree.text(template.path)? else { continue };
            let change = adapter::legacy_skill(template, tokens, &text);
            if change == Change::Foreign {
                plan.report.adapter_conflicts.push(template.path);
            } else if plan.take(workspace, template.path, change)? {
                plan.report.legacy_skills_redirected.push(template.path);
            }
        }
        Ok(plan)
    }

    /// Takes a change in; whether a file will be written.
    fn take(
        &mut self,
        workspace: &Workspace,
        path: &'static str,
        change: Change,
    ) -> Result<bool, VaultError> {
        let Change::Write(text) = change else { return Ok(false) };
        workspace.refuse_link(path)?;
        self.files.push((path, text));
        Ok(true)
    }
}

/// Pages that get their summary from the old index.
struct Migration {
    /// File name and summary.
    summaries: Vec<(String, String)>,
    /// All pages as they will be.
    pages: Vec<PageFact>,
    /// Their index.
    index: String,
}

impl Migration {
    fn plan(workspace: &Workspace) -> Result<Self, VaultError> {
        let looked = scan::pages(&workspace.tree, &workspace.stop)?;
        let wanting = looked.iter().any(|page| page.wants_summary);
        let old = if wanting { workspace.tree.text(INDEX)? } else { None };
        let old = old.unwrap_or_default();
        let mut summaries = Vec::new();
        let mut faults = Vec::new();
        let mut pages = Vec::with_capacity(looked.len());
        for looked in looked {
            let mut fact = looked.fact;
            if looked.wants_summary {
                match described(&old, name::stem(&fact.file)) {
                    Ok(summary) => {
                        let meta =
                            page::Meta { summary: summary.clone(), deprecated: fact.deprecated };
                        fact.meta = Ok(meta);
                        summaries.push((fact.file.clone(), summary));
                    }
                    Err(why) => faults.push(format!("page '{}' {why}", fact.file)),
                }
            } else if let Err(why) = &fact.meta {
                faults.push(format!("page '{}' is invalid: {why}", fact.file));
            }
            pages.push(fact);
        }
        if !faults.is_empty() {
            return Err(VaultError::Migration(faults.join("; ")));
        }
        for (file, summary) in &summaries {
            // A page with an empty summary key cannot be given another one.
            let text = workspace.tree.text(&format!("{PAGES}/{file}"))?.unwrap_or_default();
            page::with_summary(&text, summary)
                .and_then(|text| page::meta(&text))
                .map_err(|why| VaultError::Page { file: file.clone(), why })?;
        }
        let index = report::build_index(&pages).map_err(VaultError::Index)?;
        Ok(Self { summaries, pages, index })
    }
}

/// The one valid description that an old index has for a page.
fn described(index: &str, stem: &str) -> Result<String, String> {
    let mut rows = index::rows(index).filter(|(slug, _)| *slug == stem);
    match (rows.next(), rows.next()) {
        (None, _) => Err("has no summary, and the old index has no row for it".into()),
        (Some(_), Some(_)) => {
            Err("has no summary, and the old index has several rows for it".into())
        }
        (Some((_, text)), None) => page::summary(text, Some(stem)).map_err(|why| {
            format!("has no summary, and its row in the old index is unfit: its {why}")
        }),
    }
}
