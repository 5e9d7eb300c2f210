//! What the commands answer: members in the reference engine's order, the health of a vault judged
//! from facts, the status card and the text of `start` (specification, section 12).

use std::collections::HashSet;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::engine::{ADAPTER, ENGINE, Runtime};
use super::index;
use super::json::{self, Json};
use super::marker::{self, PROTOCOL};
use super::name;
use super::page::Meta;
use super::search::Match;
use super::state::{State, Stats};
use super::text::{nfc, strip, strip_end};

/// From one page more than this on, reports recommend targeted search.
pub const SCALE_LIMIT: usize = 200;

/// The names of the commands, as `protocol` lists them.
pub const COMMANDS: [&str; 15] = [
    "init",
    "migrate",
    "upgrade",
    "protocol",
    "configure-agents",
    "inspect",
    "hydrate",
    "start",
    "status",
    "search",
    "append",
    "upsert",
    "end",
    "hash",
    "rebuild-index",
];

/// Lower-case hex SHA-256 of a text.
pub fn sha256(text: &str) -> String {
    data_encoding::HEXLOWER.encode(&Sha256::digest(text.as_bytes()))
}

/// What is known of one page on disk.
#[derive(Clone, Debug)]
pub struct PageFact {
    /// Its file name.
    pub file: String,
    /// What the index needs of it, or what is wrong with it.
    pub meta: Result<Meta, String>,
    /// Whether its status is `deprecated`, also where the rest of it is invalid.
    pub deprecated: bool,
}

/// Counts for the state.
pub fn stats(pages: &[PageFact], daily: usize) -> Stats {
    Stats {
        total_pages: pages.len(),
        total_daily_logs: daily,
        deprecated_pages: pages.iter().filter(|page| page.deprecated).count(),
    }
}

/// The index of `pages`, which are sorted; all of them must be valid and distinct.
///
/// # Errors
/// What is wrong, every page with a fault named.
pub fn build_index(pages: &[PageFact]) -> Result<String, String> {
    if let Some((one, other)) = name::collision(pages.iter().map(|page| page.file.as_str())) {
        return Err(format!(
            "pages '{one}' and '{other}' have the same name after NFC and case folding; rename one"
        ));
    }
    let mut faults = Vec::new();
    let mut valid = Vec::with_capacity(pages.len());
    for page in pages {
        match &page.meta {
            Ok(meta) => valid.push((page.file.as_str(), meta)),
            Err(why) => faults.push(format!("page '{}' is invalid: {why}", page.file)),
        }
    }
    if faults.is_empty() { Ok(index::render(valid)) } else { Err(faults.join("; ")) }
}

/// How many rows a generated index has.
pub fn row_count(index: &str) -> usize {
    index::rows(index).count()
}

/// What a writer did to the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IndexRefresh {
    /// Whether the file was written.
    pub rebuilt: bool,
    /// Pages that a migration gave a summary.
    pub migrated_summaries: Vec<String>,
    /// Rows.
    pub page_count: usize,
    /// Hash of the index.
    pub sha256: String,
}

/// What `inspect` says of the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IndexPreview {
    rebuilt: bool,
    needs_refresh: bool,
    migrated_summaries: [String; 0],
    page_count: usize,
    sha256: Option<String>,
}

/// Answer of `init`, `migrate` and `upgrade`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Initialized {
    /// True.
    pub ok: bool,
    /// The command.
    pub operation: &'static str,
    /// Whether the marker was not valid before.
    pub created: bool,
    /// The vault's path.
    pub vault: String,
    /// The index's path.
    pub index: String,
    /// What became of it.
    pub index_refresh: IndexRefresh,
    /// What became of the adapters.
    pub agent_adapters: Adapters,
    /// The state written.
    pub state: State,
}

/// What became of the adapters; paths from the workspace's root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Adapters {
    protocol_version: &'static str,
    engine_version: &'static str,
    managed_adapter_version: &'static str,
    codex_adapter_version: &'static str,
    runtime_updated: bool,
    /// Whether the operational guide was written.
    pub protocol_updated: bool,
    /// Files whose managed block was written.
    pub guides_updated: Vec<&'static str>,
    /// Skills written.
    pub skills_updated: Vec<&'static str>,
    /// Commands written.
    pub commands_updated: Vec<&'static str>,
    /// Legacy skills replaced.
    pub legacy_skills_redirected: Vec<&'static str>,
    /// Legacy skills that belong to the user and stay.
    pub adapter_conflicts: Vec<&'static str>,
}

impl Default for Adapters {
    fn default() -> Self {
        Self {
            protocol_version: PROTOCOL,
            engine_version: ENGINE,
            managed_adapter_version: ADAPTER,
            codex_adapter_version: ADAPTER,
            runtime_updated: false,
            protocol_updated: false,
            guides_updated: Vec::new(),
            skills_updated: Vec::new(),
            commands_updated: Vec::new(),
            legacy_skills_redirected: Vec::new(),
            adapter_conflicts: Vec::new(),
        }
    }
}

/// Answer of `configure-agents`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Configured {
    /// True.
    pub ok: bool,
    /// What became of them.
    #[serde(flatten)]
    pub adapters: Adapters,
}

/// Answer of `hydrate`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hydrated {
    /// True.
    pub ok: bool,
    /// The index's path.
    pub index: String,
    /// What became of it.
    pub index_refresh: IndexRefresh,
    /// The state written.
    pub state: State,
}

/// Answer of `rebuild-index`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rebuilt {
    /// True.
    pub ok: bool,
    /// The index's path.
    pub index: String,
    /// What became of it.
    #[serde(flatten)]
    pub refresh: IndexRefresh,
}

/// Answer of `upsert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Upserted {
    /// True.
    pub ok: bool,
    /// `created` or `updated`.
    pub action: &'static str,
    /// The page's path.
    pub page: String,
    /// Hash of the text written.
    pub sha256: String,
    /// Whether the index was written.
    pub index_changed: bool,
}

/// Answer of `append`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Appended {
    /// True.
    pub ok: bool,
    /// The entry's path.
    pub daily_log: String,
    /// `scratchpad`.
    pub kind: &'static str,
    /// Who noted it.
    pub agent: Option<String>,
}

/// Answer of `end`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ended {
    /// True.
    pub ok: bool,
    /// The entry's path.
    pub daily_log: String,
    /// How many pages.
    pub pages_written: usize,
    /// The index's path.
    pub index: String,
    /// True.
    pub memory_saved: bool,
    /// Who ended it.
    pub agent: Option<String>,
}

/// Answer of `hash`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hashed {
    /// True.
    pub ok: bool,
    /// The page's path.
    pub page: String,
    /// Hash of its text, line ends read as LF.
    pub sha256: String,
}

/// Answer of `search`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// True.
    pub ok: bool,
    /// The query, trimmed.
    pub query: String,
    /// Whether the limit ended the search.
    pub truncated: bool,
    /// Matching lines, in the order of the index.
    pub results: Vec<Match>,
}

/// What is known of the marker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MarkerReport {
    /// Whether there is one.
    pub exists: bool,
    /// Whether a writer may go on.
    pub valid: bool,
    /// Its value as read.
    pub value: Json,
    /// What is wrong with it.
    pub error: Option<String>,
}

impl MarkerReport {
    /// One that cannot be read, and why.
    pub fn unreadable(why: String) -> Self {
        Self { exists: true, valid: false, value: Json::Null, error: Some(why) }
    }
}

/// Judges a marker's text; `None` stands for no file.
pub fn marker_report(text: Option<&str>) -> MarkerReport {
    let exists = text.is_some();
    let (value, error) = match marker::parse(text) {
        Ok(value) => {
            let error = marker::gate(&value).err();
            (value, error)
        }
        Err(error) => (Json::Null, Some(error)),
    };
    MarkerReport {
        exists,
        valid: error.is_none(),
        value,
        error: error.map(|error| error.to_string()),
    }
}

/// Answer of `protocol`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProtocolReport {
    ok: bool,
    managed_adapter_version: &'static str,
    codex_adapter_version: &'static str,
    engine_version: &'static str,
    supported_protocol_version: &'static str,
    vault_protocol_version: Json,
    marker: MarkerReport,
    project_runtime: Runtime,
    runtime: String,
    protocol: String,
    commands: [&'static str; 15],
}

/// Puts the answer of `protocol` together.
pub fn protocol(
    marker: MarkerReport,
    project_runtime: Runtime,
    runtime: String,
    protocol: String,
) -> ProtocolReport {
    ProtocolReport {
        ok: true,
        managed_adapter_version: ADAPTER,
        codex_adapter_version: ADAPTER,
        engine_version: ENGINE,
        supported_protocol_version: PROTOCOL,
        vault_protocol_version: marker.value.get("protocolVersion").cloned().unwrap_or(Json::Null),
        marker,
        project_runtime,
        runtime,
        protocol,
        commands: COMMANDS,
    }
}

/// What is known of the own state file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StateFile {
    /// Whether there is one.
    pub exists: bool,
    /// Whether it is as it should be.
    pub valid: bool,
    /// What is wrong with it.
    pub error: Option<String>,
}

/// What Git says of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Git {
    /// Whether it could be asked.
    pub available: bool,
    /// Whether nothing of the following is to be done.
    pub ready: bool,
    /// Local files that are committed.
    pub tracked_local_files: Vec<String>,
    /// Durable files that are not.
    pub untracked_durable_files: Vec<String>,
    /// Durable files that an ignore rule hides.
    pub ignored_durable_files: Vec<String>,
    runtime_ignored: bool,
    open_code_commands_ignored: Vec<String>,
    open_code_skills_ignored: Vec<String>,
    suggested_commands: Vec<String>,
}

/// `path` as one word of a POSIX shell.
fn quoted(path: &str) -> String {
    let bare = |b: u8| b.is_ascii_alphanumeric() || b"@%+=:,./-_".contains(&b);
    if !path.is_empty() && path.bytes().all(bare) {
        path.to_owned()
    } else {
        format!("'{}'", path.replace('\'', "'\"'\"'"))
    }
}

impl Git {
    /// Without Git.
    pub fn unavailable() -> Self {
        Self { ready: true, ..Self::default() }
    }

    /// Judges what Git lists; each list is sorted here.
    pub fn judge(
        mut tracked_local: Vec<String>,
        mut untracked: Vec<String>,
        mut ignored: Vec<String>,
    ) -> Self {
        for list in [&mut tracked_local, &mut untracked, &mut ignored] {
            list.sort_unstable();
            list.dedup();
        }
        let below = |prefix: &str| -> Vec<String> {
            ignored.iter().filter(|path| path.starts_with(prefix)).cloned().collect()
        };
        let suggest = |command: &str, files: &[&String]| {
            let files: Vec<String> = files.iter().map(|file| quoted(file)).collect();
            (!files.is_empty()).then(|| format!("{command} -- {}", files.join(" ")))
        };
        let hidden: HashSet<&String> = ignored.iter().collect();
        let open: Vec<&String> = untracked.iter().filter(|file| !hidden.contains(file)).collect();
        let suggested_commands = [
            suggest("git rm --cached", &tracked_local.iter().collect::<Vec<_>>()),
            suggest("git add -f", &ignored.iter().collect::<Vec<_>>()),
            suggest("git add", &open),
        ];
        Self {
            available: true,
            ready: tracked_local.is_empty() && untracked.is_empty() && ignored.is_empty(),
            runtime_ignored: ignored.iter().any(|path| path == marker::RUNTIME),
            open_code_commands_ignored: below(".opencode/commands/"),
            open_code_skills_ignored: below(".opencode/skills/"),
            suggested_commands: suggested_commands.into_iter().flatten().collect(),
            tracked_local_files: tracked_local,
            untracked_durable_files: untracked,
            ignored_durable_files: ignored,
        }
    }

    fn issues(&self) -> Vec<String> {
        let list = |what: &str, files: &[String]| -> Vec<String> {
            files.iter().map(|file| format!("{what}: {file}")).collect()
        };
        let mut out = list("tracked local file", &self.tracked_local_files);
        out.extend(list("untracked durable file", &self.untracked_durable_files));
        out.extend(list("ignored durable file", &self.ignored_durable_files));
        out
    }
}

/// What lies below the vault.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Storage {
    /// Bytes in regular files.
    pub total_bytes: u64,
    /// Regular files.
    pub total_files: usize,
    /// Those whose suffix is `.md` in any case.
    pub markdown_files: usize,
    /// Symbolic links, from the vault.
    pub symlinks: Vec<String>,
    /// Files and folders that cannot be read, from the vault.
    pub unreadable_files: Vec<String>,
    /// Newest modification time, local, or null.
    pub last_modified: Option<String>,
}

/// Everything that the health of a vault is judged from.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Pages in the order of the index.
    pub pages: Vec<PageFact>,
    /// Daily entries.
    pub daily: usize,
    /// Text of the index file.
    pub index: Option<String>,
    /// The marker.
    pub marker: MarkerReport,
    /// The runtime in the repository.
    pub runtime: Runtime,
    /// Names of managed parts that are not there.
    pub missing: Vec<&'static str>,
    /// Markdown files with conflict markers, from the vault, in order.
    pub conflicts: Vec<String>,
    /// Adapters that belong to somebody else.
    pub adapters: Vec<&'static str>,
    /// What Git says.
    pub git: Git,
    /// The state file.
    pub state_file: StateFile,
    /// Entries of today.
    pub today: usize,
    /// What lies below the vault.
    pub storage: Storage,
}

/// Health of a vault. The fourteen lists from `missing_structure` on are its issues.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Pages on disk.
    pub total_pages: usize,
    /// Daily entries.
    pub total_daily_logs: usize,
    /// Pages whose status is `deprecated`.
    pub deprecated_pages: usize,
    deprecated_slugs: Vec<String>,
    index_topics: usize,
    generated_index: bool,
    protocol_version: &'static str,
    engine_version: &'static str,
    managed_adapter_version: &'static str,
    codex_adapter_version: &'static str,
    /// Whether the marker is valid.
    pub initialized: bool,
    /// Whether there is a vault without a marker.
    pub legacy_vault_detected: bool,
    missing_structure: Vec<&'static str>,
    invalid_frontmatter: Vec<String>,
    duplicate_index_entries: Vec<String>,
    empty_descriptions: Vec<String>,
    orphan_pages: Vec<String>,
    missing_pages: Vec<String>,
    conflict_markers: Vec<String>,
    index_build_errors: Vec<String>,
    index_out_of_date: Vec<&'static str>,
    symbolic_links: Vec<String>,
    unreadable_files: Vec<String>,
    adapter_configuration: Vec<&'static str>,
    git_readiness: Vec<String>,
    outdated_runtime: Vec<String>,
    today_entries: usize,
    /// Whether there are more pages than [`SCALE_LIMIT`].
    pub scale_alert: bool,
    /// `healthy` or `attention`.
    pub integrity: &'static str,
    /// Issues in all.
    pub issue_count: usize,
    state_file: StateFile,
    marker: MarkerReport,
    project_runtime: Runtime,
    git: Git,
    storage: Storage,
}

/// Answer of `inspect` and `status`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    ok: bool,
    workspace: String,
    vault: String,
    /// The state as the next writer would take it over, with counts taken anew.
    pub state: State,
    index_refresh: IndexPreview,
    /// Health.
    pub health: Health,
}

/// Judges `facts`. `state` is the state taken over from the files.
pub fn inspect(workspace: String, vault: String, mut state: State, facts: Facts) -> Inspection {
    let built = build_index(&facts.pages);
    let stem = |page: &PageFact| name::stem(&page.file).to_owned();
    let rows: Vec<(String, String)> = facts
        .index
        .as_deref()
        .map(|text| index::rows(text).map(|(slug, text)| (slug.into(), text.into())).collect())
        .unwrap_or_default();
    let mut slugs: Vec<&str> = Vec::new();
    let mut seen = HashSet::new();
    let mut duplicates = Vec::new();
    for (slug, _) in &rows {
        if seen.insert(slug.as_str()) {
            slugs.push(slug);
        } else if !duplicates.contains(slug) {
            duplicates.push(slug.clone());
        }
    }
    let stems: Vec<String> =
        facts.pages.iter().map(|page| nfc(name::stem(&page.file)).into_owned()).collect();
    let present: HashSet<&str> = stems.iter().map(String::as_str).collect();
    let out_of_date = match &built {
        Ok(text) => facts.index.as_deref() != Some(text),
        Err(_) => false,
    };
    let stats = stats(&facts.pages, facts.daily);
    let outdated = facts.runtime.compatible && !facts.runtime.current;
    let outdated_runtime = outdated.then(|| {
        format!(
            "the project runtime is engine {}, this one is {ENGINE}",
            facts.runtime.engine_version.as_deref().unwrap_or("unknown")
        )
    });
    let mut missing = facts.missing;
    missing.sort_unstable();
    let mut adapters = facts.adapters;
    adapters.sort_unstable();
    let index_refresh = IndexPreview {
        rebuilt: false,
        needs_refresh: out_of_date,
        migrated_summaries: [],
        page_count: built.as_ref().map_or(facts.pages.len(), |text| row_count(text)),
        sha256: built.as_ref().ok().map(|text| sha256(text)),
    };
    let mut health = Health {
        total_pages: stats.total_pages,
        total_daily_logs: stats.total_daily_logs,
        deprecated_pages: stats.deprecated_pages,
        deprecated_slugs: facts.pages.iter().filter(|page| page.deprecated).map(stem).collect(),
        index_topics: rows.len(),
        generated_index: true,
        protocol_version: PROTOCOL,
        engine_version: ENGINE,
        managed_adapter_version: ADAPTER,
        codex_adapter_version: ADAPTER,
        initialized: facts.marker.valid,
        legacy_vault_detected: !facts.marker.exists
            && (facts.index.is_some() || !facts.pages.is_empty() || facts.daily > 0),
        missing_structure: missing,
        invalid_frontmatter: facts
            .pages
            .iter()
            .filter(|page| page.meta.is_err())
            .map(stem)
            .collect(),
        duplicate_index_entries: duplicates,
        empty_descriptions: rows
            .iter()
            .filter(|(_, text)| strip(text).is_empty())
            .map(|(slug, _)| slug.clone())
            .collect(),
        orphan_pages: stems.iter().filter(|stem| !seen.contains(stem.as_str())).cloned().collect(),
        missing_pages: slugs
            .into_iter()
            .filter(|slug| !present.contains(slug))
            .map(str::to_owned)
            .collect(),
        conflict_markers: facts.conflicts,
        index_build_errors: built.err().into_iter().collect(),
        index_out_of_date: out_of_date.then_some("index.md").into_iter().collect(),
        symbolic_links: facts.storage.symlinks.clone(),
        unreadable_files: facts.storage.unreadable_files.clone(),
        adapter_configuration: adapters,
        git_readiness: facts.git.issues(),
        outdated_runtime: outdated_runtime.into_iter().collect(),
        today_entries: facts.today,
        scale_alert: stats.total_pages > SCALE_LIMIT,
        integrity: "healthy",
        issue_count: 0,
        state_file: facts.state_file,
        marker: facts.marker,
        project_runtime: facts.runtime,
        git: facts.git,
        storage: facts.storage,
    };
    let listed: usize = health.issue_lists().iter().map(|(_, count)| count).sum();
    health.issue_count = listed + usize::from(!health.state_file.valid);
    if health.issue_count > 0 {
        health.integrity = "attention";
    }
    state.stats = stats;
    Inspection { ok: true, workspace, vault, state, index_refresh, health }
}

impl Health {
    /// Label and length of every list of issues.
    fn issue_lists(&self) -> [(&'static str, usize); 14] {
        [
            ("missing structure", self.missing_structure.len()),
            ("invalid frontmatter", self.invalid_frontmatter.len()),
            ("duplicate index entries", self.duplicate_index_entries.len()),
            ("empty descriptions", self.empty_descriptions.len()),
            ("orphan pages", self.orphan_pages.len()),
            ("missing pages", self.missing_pages.len()),
            ("Git conflict markers", self.conflict_markers.len()),
            ("index build errors", self.index_build_errors.len()),
            ("stale generated index", self.index_out_of_date.len()),
            ("symbolic links", self.symbolic_links.len()),
            ("unreadable files", self.unreadable_files.len()),
            ("adapter configuration conflicts", self.adapter_configuration.len()),
            ("Git readiness issues", self.git_readiness.len()),
            ("outdated project runtime", self.outdated_runtime.len()),
        ]
    }
}

/// A size as the card shows it.
#[allow(clippy::cast_precision_loss)] // One decimal is shown.
fn size(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = ["KB", "MB", "GB", "TB"].into_iter().peekable();
    let mut unit = units.next().unwrap_or("KB");
    while value >= 1024.0
        && let Some(next) = units.next()
    {
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

impl Inspection {
    /// The status card.
    #[must_use]
    pub fn card(&self) -> String {
        let Health { storage, issue_count, .. } = &self.health;
        let badge = if self.health.legacy_vault_detected {
            "△ Legacy vault detected".to_owned()
        } else if !self.health.initialized {
            "○ Not initialized".to_owned()
        } else if *issue_count == 0 {
            "✓ Healthy".to_owned()
        } else {
            format!("△ Needs attention ({issue_count})")
        };
        let session = &self.state.session;
        let session = match (json::truthy(&session.started), json::truthy(&session.saved)) {
            (false, _) => "not started",
            (true, false) => "active",
            (true, true) => "saved",
        };
        let mut blocks = vec![
            format!("### EchoesVault · {badge}"),
            format!(
                "| Storage | Knowledge | Session |\n|---|---|---|\n\
                 | {} · {} files | {} pages · {} logs | {session} |",
                size(storage.total_bytes),
                storage.total_files,
                self.health.total_pages,
                self.health.total_daily_logs,
            ),
        ];
        if self.health.legacy_vault_detected {
            blocks.push(
                "Legacy vault detected. Choose **Initialize or restore EchoesVault** to migrate it."
                    .into(),
            );
        } else if !self.health.initialized {
            blocks.push(
                "Choose **Initialize or restore EchoesVault** to create local Markdown memory."
                    .into(),
            );
        } else {
            let ready = if *issue_count == 0 { " · adapters ready" } else { "" };
            blocks.push(format!("Protocol: {PROTOCOL} · engine: {ENGINE}{ready}."));
            blocks.push(format!("Integrity: {}.", self.integrity_line()));
        }
        if self.health.scale_alert {
            blocks.push(format!(
                "> Scale alert: more than {SCALE_LIMIT} pages; prefer targeted search."
            ));
        }
        blocks.push(
            "Actions: **Initialize or restore** · **Show vault status** · **Save this session**"
                .into(),
        );
        blocks.join("\n\n") + "\n"
    }

    fn integrity_line(&self) -> String {
        let lists = self.health.issue_lists();
        let mut parts: Vec<String> = lists
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(label, count)| format!("{label}: {count}"))
            .collect();
        if !self.health.state_file.valid {
            parts.push("invalid runtime state".into());
        }
        if parts.is_empty() {
            "generated index, structure, metadata, and local paths are consistent".into()
        } else {
            parts.join("; ")
        }
    }
}

/// The text of `start`: the index, then entries (path below `daily`, text), newest first.
pub fn start(index: &str, entries: &[(String, String)], pages: usize) -> String {
    let mut blocks = vec![
        "# EchoesVault session context".to_owned(),
        "## Index".to_owned(),
        strip_end(index).to_owned(),
        format!("## Recent session entries ({})", entries.len()),
    ];
    for (path, text) in entries {
        blocks.push(format!("### {path}"));
        blocks.push(strip_end(text).to_owned());
    }
    if entries.is_empty() {
        blocks.push("No session entries found.".into());
    }
    if pages > SCALE_LIMIT {
        blocks.push(format!(
            "> [!warning] SCALE ALERT\n\
             > The vault exceeds {SCALE_LIMIT} pages. Prefer targeted search over loading every page."
        ));
    }
    blocks.join("\n\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal_above_a_kilobyte() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KB"),
            (1_048_575, "1024.0 KB"),
            (1_048_576, "1.0 MB"),
            (5_242_880, "5.0 MB"),
        ] {
            assert_eq!(size(bytes), shown);
        }
        assert_eq!(size(u64::MAX), "16777216.0 TB");
    }

    #[test]
    fn git_advice_is_quoted_for_a_shell() {
        let git = Git::judge(
            vec!["b".into(), "a".into()],
            vec!["it's é".into(), "x".into()],
            vec!["x".into()],
        );
        assert_eq!(
            git.suggested_commands,
            ["git rm --cached -- a b", "git add -f -- x", "git add -- 'it'\"'\"'s é'"]
        );
        assert!(!git.ready && git.available);
        assert!(Git::unavailable().ready);
    }

    #[test]
    fn every_faulty_page_is_named() {
        let page = |file: &str, meta| PageFact { file: file.into(), meta, deprecated: false };
        let pages = [page("a.md", Err("x".into())), page("b.md", Err("y".into()))];
        let why = build_index(&pages).unwrap_err();
        assert!(why.contains("a.md") && why.contains("b.md"));
        let meta = Meta { summary: "s".into(), deprecated: false };
        let twins = [page("A.md", Ok(meta.clone())), page("a.md", Ok(meta))];
        assert!(build_index(&twins).unwrap_err().contains("'A.md' and 'a.md'"));
    }
}
