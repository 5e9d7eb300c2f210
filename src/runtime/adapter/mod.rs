//! Adapters: what a worker does a task with (design 10.4). One type for all kinds; each is a few
//! lines about its program or API, and everything about processes is [`super::sandbox`]'s. Knows no
//! log and no signature: facts come out, and others sign them.

mod broker;
mod claude;
mod codex;
mod command;
mod dialogue;
mod drive;
mod http;
mod javascript;
mod local_http;
mod mcp;
mod provider;
mod proxy;
mod tools;
mod usage;

use std::path::{Path, PathBuf};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::broker::Broker;
use self::dialogue::Dialogue;
pub use self::provider::HostKeys;
use self::provider::Provider;
use self::proxy::Proxy;
pub use self::tools::ToolUse;
use self::tools::Tools;
use super::sandbox::{self, Launch, Sandbox, SandboxError};
use crate::acp::code::{Code, Error};
use crate::acp::json;
use crate::acp::objects::{Isolation, Runtime};
use crate::acp::owner::Profile;
pub use crate::acp::run::{Ended, Job, Progress, Ran, RunFacts};
use crate::acp::value::{Name, Word};

/// Most bytes of an input (design 17, the ceiling).
const INPUT_MAX: usize = 2 << 20;
/// Most characters of a step's name or a message of progress.
const TEXT_MAX: usize = 1_000;

/// What kinds of adapters there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// The owner's own command.
    Command,
    /// Claude Code.
    Claude,
    /// Codex CLI.
    Codex,
    /// A model's HTTP API.
    Openai,
    /// A tool of an MCP server.
    Mcp,
    /// Restricted JavaScript.
    Sandbox,
}

impl AdapterKind {
    /// Every kind.
    pub const ALL: &'static [Self] =
        &[Self::Command, Self::Claude, Self::Codex, Self::Openai, Self::Mcp, Self::Sandbox];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Openai => "openai",
            Self::Mcp => "mcp",
            Self::Sandbox => "sandbox",
        }
    }

    /// The kind that `word` names.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.as_str() == word)
    }
}

/// Whose HTTP API an endpoint speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiStyle {
    /// Chat Completions (`openai`).
    #[default]
    Openai,
    /// Messages (`anthropic`).
    Anthropic,
}

/// Why there is no such adapter.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// An option is missing.
    #[error("adapter {0} needs {1}")]
    Missing(&'static str, &'static str),
    /// An option cannot be used.
    #[error("{0} cannot be used: {1}")]
    Bad(&'static str, String),
    /// A program is not there.
    #[error("there is no program {0}; install it, or give its path")]
    NoProgram(String),
    /// The level asked for cannot be used here.
    #[error("isolation {0} cannot be used here: {1}")]
    NoIsolation(&'static str, String),
    /// No run can be made at all.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

impl AdapterError {
    /// Stable code of this error.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Missing(..) => "adapter_option_missing",
            Self::Bad(..) => "adapter_option_bad",
            Self::NoProgram(_) => "adapter_no_program",
            Self::NoIsolation(..) => "adapter_no_isolation",
            Self::Sandbox(error) => error.code(),
        }
    }
}

/// What an adapter is made of.
#[derive(Clone, Debug)]
pub struct AdapterOptions {
    /// The kind.
    pub kind: AdapterKind,
    /// `--cmd`: the command, the MCP server, or the JavaScript; split by POSIX shell-word rules
    /// without a shell, but for JavaScript.
    pub cmd: Option<String>,
    /// `--tool` of an MCP server.
    pub tool: Option<String>,
    /// `--model`.
    pub model: Option<String>,
    /// `--endpoint` of an HTTP API; the style's own by default.
    pub endpoint: Option<String>,
    /// `--api-style`.
    pub api_style: ApiStyle,
    /// Path of the program in place of `claude`, `codex` or `node`.
    pub program: Option<PathBuf>,
    /// Arguments after the program's own ones.
    pub extra_args: Vec<String>,
    /// `--isolation`: the one level to run at; every usable one by default.
    pub isolation: Option<Isolation>,
    /// The owner's keys of providers.
    pub keys: HostKeys,
    /// Whether an order's list of hosts may name addresses that are not public.
    pub private_hosts: bool,
    /// Where and how runs are made.
    pub sandbox: sandbox::Settings,
}

impl AdapterOptions {
    /// Of this kind, with this work directory, and everything else by default.
    #[must_use]
    pub fn new(kind: AdapterKind, work_dir: PathBuf) -> Self {
        Self {
            kind,
            cmd: None,
            tool: None,
            model: None,
            endpoint: None,
            api_style: ApiStyle::default(),
            program: None,
            extra_args: Vec::new(),
            isolation: None,
            keys: HostKeys::default(),
            private_hosts: false,
            sandbox: sandbox::Settings::new(work_dir),
        }
    }
}

/// What a run is told, and tells, while it goes on.
#[derive(Debug)]
pub struct Control {
    /// Ends the run.
    pub cancel: CancellationToken,
    /// Whether the run is held (decision 46).
    pub hold: watch::Receiver<bool>,
    /// Where progress goes; dropped when there is no room.
    pub progress: mpsc::Sender<Progress>,
    /// Where uses of the requester's tools go, if the job grants any; refused when there is no room.
    pub tools: mpsc::Sender<ToolUse>,
}

/// What a task is done with.
#[derive(Clone, Debug)]
pub struct Adapter {
    options: AdapterOptions,
    /// `--cmd` in words; the JavaScript alone.
    words: Vec<String>,
    sandbox: Sandbox,
    levels: Vec<Isolation>,
    provider: Option<Provider>,
}

impl Adapter {
    /// Makes an adapter, looks for its program, and tries the levels of isolation. Blocking.
    ///
    /// # Errors
    /// [`AdapterError`].
    pub fn from_options(options: AdapterOptions) -> Result<Self, AdapterError> {
        let words = match options.kind {
            AdapterKind::Command | AdapterKind::Mcp => command::words(&options)?,
            AdapterKind::Claude => command::program_words(&options, "claude")?,
            AdapterKind::Codex => command::program_words(&options, "codex")?,
            AdapterKind::Sandbox => javascript::words(&options)?,
            AdapterKind::Openai => Vec::new(),
        };
        if options.kind == AdapterKind::Mcp && options.tool.is_none() {
            return Err(AdapterError::Missing("mcp", "--tool NAME"));
        }
        if options.kind == AdapterKind::Openai && options.model.is_none() {
            return Err(AdapterError::Missing("openai", "--model MODEL"));
        }
        let provider = Provider::of(&options)?;
        let sandbox = Sandbox::new(options.sandbox.clone())?;
        let mut levels = sandbox.available();
        match options.kind {
            // The broker of the key is outside of every box, and a container has no such program.
            AdapterKind::Claude | AdapterKind::Codex => {
                levels.retain(|level| !sandbox::in_box(*level));
            }
            // No program runs, so what `subprocess` promises holds, and nothing more is claimed.
            AdapterKind::Openai => levels = vec![Isolation::Subprocess, Isolation::None],
            // It is never run without any level.
            AdapterKind::Sandbox => levels.retain(|level| *level != Isolation::None),
            AdapterKind::Command | AdapterKind::Mcp => {}
        }
        if let Some(only) = options.isolation {
            levels.retain(|level| *level == only);
            if levels.is_empty() {
                let level = sandbox.levels().iter().find(|level| level.isolation == only);
                let why = level.and_then(|level| level.missing.clone());
                let why = why.unwrap_or_else(|| "this adapter does not work in it".to_owned());
                return Err(AdapterError::NoIsolation(only.as_str(), why));
            }
        }
        Ok(Self { options, words, sandbox, levels, provider })
    }

    /// Its kind.
    #[must_use]
    pub const fn kind(&self) -> AdapterKind {
        self.options.kind
    }

    /// The word for it in receipts.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.options.kind.as_str()
    }

    /// The levels that its runs can have, strongest first.
    #[must_use]
    pub fn levels(&self) -> Vec<Isolation> {
        self.levels.clone()
    }

    /// Those of them at which a run can be let out to listed hosts.
    fn levels_with_hosts(&self) -> Vec<Isolation> {
        // The HTTP adapter starts no program that could use it.
        let starts_program = self.kind() != AdapterKind::Openai;
        let possible = |level: &Isolation| starts_program && sandbox::may_list_hosts(*level);
        self.levels.iter().copied().filter(possible).collect()
    }

    /// What a worker with this adapter offers, with so many runs at one time.
    #[must_use]
    pub fn profile(&self, max_runs: usize) -> Profile {
        Profile {
            adapter: Word::lossy(self.name()),
            levels: self.levels(),
            levels_with_hosts: self.levels_with_hosts(),
            foreign_code: self.kind() == AdapterKind::Sandbox,
            max_runs,
        }
    }

    /// Makes one run. Cancelling is by [`Control::cancel`]; dropped, the run is killed without a
    /// report.
    pub async fn run(&self, job: Job, control: Control) -> Ran {
        match &self.provider {
            Some(provider) if self.kind() == AdapterKind::Openai => {
                http::run(self, provider, job, control).await
            }
            _ => drive::run(self, job, control).await,
        }
    }

    /// What runs a job at `isolation`.
    fn runtime(&self, isolation: Isolation, has_ports: bool) -> Runtime {
        if self.kind() == AdapterKind::Openai {
            let version =
                concat!(env!("CARGO_PKG_VERSION"), "; no program runs; enforced: output time");
            return Runtime {
                name: Name::lossy("commsd"),
                version: Name::lossy(version),
                image_digest: None,
            };
        }
        self.sandbox.runtime(isolation, has_ports)
    }

    /// How the program is started and spoken to.
    fn launch(
        &self,
        job: &Job,
        broker: Option<&Broker>,
        tools: Option<&Tools>,
        proxy: Option<&Proxy>,
    ) -> Result<(Launch, Box<dyn Dialogue>), Error> {
        let input = json::canonical(&job.input)?;
        if input.len() > INPUT_MAX {
            return Err(Error::new(Code::TooLarge, "the input is larger than 2 MiB"));
        }
        let tools_port = tools.and_then(|tools| tools.port);
        let mut launch = Launch {
            task_id: job.task_id.clone(),
            argv: self.words.clone(),
            env: tools
                .iter()
                .flat_map(|tools| tools.environment())
                .chain(proxy.iter().flat_map(|proxy| proxy.environment()))
                .collect(),
            input,
            isolation: job.isolation,
            policy: sandbox::applied(&job.policy, job.isolation),
            max_wall_ms: job.max_wall_ms.min(sandbox::WALL_MAX_MS),
            max_stdout_bytes: job.max_output_bytes,
            ports: broker
                .iter()
                .map(|broker| broker.port)
                .chain(tools_port)
                .chain(proxy.iter().map(|proxy| proxy.port))
                .collect(),
            socket: tools.is_some_and(|tools| tools.port.is_none()),
        };
        let dialogue: Box<dyn Dialogue> = match self.kind() {
            AdapterKind::Command => Box::new(command::Plain::new(launch.input.clone())),
            AdapterKind::Sandbox => {
                launch.argv = javascript::argv(&self.words, job.isolation);
                Box::new(command::Plain::new(launch.input.clone()))
            }
            AdapterKind::Claude => {
                launch.argv.extend(claude::arguments(&self.options));
                launch.env.extend(claude::environment(broker));
                launch.max_stdout_bytes = dialogue::STREAM_MAX;
                Box::new(claude::Claude::new(claude::prompt(job)?))
            }
            AdapterKind::Codex => {
                launch.argv.extend(codex::arguments(&self.options, broker));
                launch.env.extend(codex::environment(broker));
                launch.max_stdout_bytes = dialogue::STREAM_MAX;
                Box::new(codex::Codex::new(claude::prompt(job)?))
            }
            AdapterKind::Mcp => {
                launch.max_stdout_bytes = dialogue::STREAM_MAX;
                let tool = self.options.tool.clone().unwrap_or_default();
                Box::new(mcp::Call::new(tool, job.input.clone()))
            }
            // It has a provider always, and starts no program.
            AdapterKind::Openai => {
                return Err(Error::new(Code::AdapterFailed, "the HTTP adapter has no provider"));
            }
        };
        Ok((launch, dialogue))
    }
}

/// Kills what is left of earlier runs below `work_dir` and removes their directories. Blocking; for
/// the start of the daemon, before there is any run.
pub fn reap_leftovers(work_dir: &Path) {
    sandbox::reap_leftovers(work_dir);
}

/// A program's text on one line, without control characters and within the bound.
fn bounded(text: &str) -> String {
    text.chars().take(TEXT_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
