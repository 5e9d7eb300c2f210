//! Tools that an owner lets workers use through this gateway, and the answers that runs wait for.
//!
//! A tool is a command of the owner's, run as the owner: it gets { resource, action, arguments } as JSON
//! on stdin and answers with one JSON text. What may be called is the guard's to say; here it is only
//! run.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;

use crate::acp::code::{Code, Error, Result};
use crate::acp::json::{canonical, parse};
use crate::acp::objects::ToolCall;
use crate::acp::tool::ToolName;
use crate::acp::value::{CallId, Digest};

/// How long a tool may take: well within the life of a call.
const TOOL_TIME: Duration = Duration::from_secs(120);

/// Bytes of a tool's answer: it travels in one envelope.
const MAX_ANSWER: usize = 512 * 1024;

/// Tools of one owner.
pub const MAX_TOOLS: usize = 256;

/// One tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// What it answers for.
    pub name: ToolName,
    /// The command and its arguments; no shell.
    pub command: Vec<String>,
}

impl Tool {
    /// The tool `name` that is done by `command`, a line that POSIX shell-word rules divide and no shell
    /// sees.
    ///
    /// # Errors
    /// `BAD_FIELD`.
    pub fn new(name: ToolName, command: &str) -> Result<Self> {
        let words = shlex::split(command).filter(|words| !words.is_empty());
        let text = "a tool's command has no words, or an open quote";
        let command = words.ok_or_else(|| Error::new(Code::BadField, text))?;
        Ok(Self { name, command })
    }
}

type Answers = BTreeMap<(Digest, CallId), oneshot::Sender<Result<Value>>>;

/// The tools, and the calls of this side's work that wait.
#[derive(Default)]
pub struct Toolbox {
    tools: Vec<Tool>,
    waiting: Mutex<Answers>,
}

impl Toolbox {
    /// These tools; of two that answer for the same the first does.
    ///
    /// # Errors
    /// `BAD_FIELD` for too many.
    pub fn new(tools: Vec<Tool>) -> Result<Self> {
        if tools.len() > MAX_TOOLS {
            return Err(Error::new(Code::BadField, "more than 256 tools"));
        }
        Ok(Self { tools, waiting: Mutex::new(BTreeMap::new()) })
    }

    /// The tool that does what `name` says.
    fn find(&self, name: &ToolName) -> Option<&Tool> {
        self.tools.iter().find(|tool| name.is_within(&tool.name))
    }

    /// Whether there is a tool for everything that `name` names.
    ///
    /// # Errors
    /// `BAD_FIELD` when there is none.
    pub(super) fn offers(&self, name: &ToolName) -> Result<()> {
        self.find(name).map(drop).ok_or_else(|| {
            let todo = "name one of [acp-tools] in the daemon's configuration, or add it there; with --key, \
                        --tool 'RESOURCE:ACTION=COMMAND'";
            Error::new(Code::BadField, format!("there is no tool {name} here")).with_todo(todo)
        })
    }

    /// Runs the tool that a call names.
    pub(super) async fn call(&self, call: &ToolCall) -> Result<Value> {
        let name = ToolName { resource: call.resource.clone(), action: call.action.clone() };
        let Some(Tool { command, .. }) = self.find(&name) else {
            return Err(Error::new(Code::AdapterFailed, "this gateway has no such tool"));
        };
        let asked = json!({
            "resource": call.resource, "action": call.action, "arguments": call.arguments,
        });
        let ran = tokio::time::timeout(TOOL_TIME, run(command, &canonical(&asked)?)).await;
        ran.unwrap_or_else(|_| Err(Error::new(Code::AdapterFailed, "the tool took too long")))
    }

    /// The answer to a call of this side's work goes to whoever waits.
    pub(super) fn answered(&self, task: &Digest, call: &CallId, result: Result<Value>) {
        if let Some(waiter) = self.waiting.lock().remove(&(*task, call.clone())) {
            // The run may have ended meanwhile.
            let _ = waiter.send(result);
        }
    }

    /// Waits for the answer to a call.
    pub(super) fn wait(&self, task: Digest, call: CallId) -> oneshot::Receiver<Result<Value>> {
        let (tell, told) = oneshot::channel();
        self.waiting.lock().insert((task, call), tell);
        told
    }
}

/// A command that was started, in a process group of its own: given up, it is killed with whatever it
/// has started.
struct Started(Option<Pid>);

impl Started {
    fn new(child: &tokio::process::Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Self(id.and_then(Pid::from_raw))
    }

    /// It has ended by itself; its number may be another's soon.
    fn ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _gone_already = kill_process_group(group, Signal::KILL);
        }
    }
}

async fn run(command: &[String], input: &[u8]) -> Result<Value> {
    let failed = |_| Error::new(Code::AdapterFailed, "the tool could not be run");
    let [program, arguments @ ..] = command else { return Err(failed(())) };
    let mut child = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|_| failed(()))?;
    let mut started = Started::new(&child);
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(failed(()));
    };
    let mut output = Vec::new();
    let mut bounded = stdout.take(MAX_ANSWER as u64 + 1);
    let feed = async {
        // A tool need not read what it is given.
        let _ = stdin.write_all(input).await;
        drop(stdin);
    };
    let (_, read) = tokio::join!(feed, bounded.read_to_end(&mut output));
    read.map_err(|_| failed(()))?;
    if output.len() > MAX_ANSWER {
        return Err(Error::new(Code::OutputTooLarge, "the tool's answer is too long"));
    }
    let status = child.wait().await.map_err(|_| failed(()))?;
    started.ended();
    if !status.success() {
        return Err(Error::new(Code::AdapterFailed, format!("the tool ended with {status}")));
    }
    parse(&output, MAX_ANSWER)
        .map_err(|_| Error::new(Code::OutputNotJson, "the tool's answer is no JSON"))
}
