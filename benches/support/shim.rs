//! `commsd mcp` as a harness starts it, as far as its start and its size go.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::daemon::{Daemon, Memory};

/// A session that has been answered and has called one tool.
pub struct Shim {
    child: Child,
    /// Its session lasts as long as this.
    stdin: Option<ChildStdin>,
    /// From its start to the answer to `initialize`.
    pub answered: Duration,
    /// After the call.
    pub memory: Memory,
}

impl Shim {
    pub fn start(daemon: &Daemon) -> Self {
        let begun = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_commsd"))
            .args(["mcp", "--no-start", "--home"])
            .arg(daemon.home())
            .current_dir(daemon.home())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let client = json!({"protocolVersion": "2025-06-18", "capabilities": {},
            "clientInfo": {"name": "bench", "version": "1"}});
        let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client});
        writeln!(stdin, "{hello}").unwrap();
        lines.next().unwrap().unwrap();
        let answered = begun.elapsed();
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        let params = json!({"name": "agent_comms", "arguments": {"action": "whoami"}});
        let call = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params});
        write!(stdin, "{ready}\n{call}\n").unwrap();
        lines.next().unwrap().unwrap();
        let memory = Memory::of(child.id());
        Self { child, stdin: Some(stdin), answered, memory }
    }

    /// What it takes now.
    pub fn memory_now(&self) -> Memory {
        Memory::of(self.child.id())
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}
