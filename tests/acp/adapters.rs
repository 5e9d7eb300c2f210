//! Adapters over real processes: what a run is given, what is taken from it, and what of it is left.
//! Programs of models are stubs that answer as their public documentation shows.

use std::path::PathBuf;
use std::time::Duration;

use commsd::acp::code::Code;
use commsd::acp::objects::{ExitKind, Isolation, Network, SandboxPolicy};
use commsd::acp::value::{Count, Seq, TaskId};
use commsd::runtime::adapter::{
    Adapter, AdapterKind, AdapterOptions, ApiStyle, Control, Ended, Job, Progress, Ran,
};
use commsd::runtime::sandbox;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// No run of a test may take longer.
pub const HARD_LIMIT: Duration = Duration::from_secs(60);

/// A place for runs and stubs.
pub struct Bench {
    pub dir: TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub fn runs(&self) -> PathBuf {
        self.dir.path().join("runs")
    }

    /// A program of this text.
    pub fn program(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub fn options(&self, kind: AdapterKind) -> AdapterOptions {
        AdapterOptions {
            kind,
            cmd: None,
            tool: None,
            model: None,
            endpoint: None,
            api_style: ApiStyle::Openai,
            program: None,
            extra_args: Vec::new(),
            isolation: None,
            sandbox: sandbox::Settings {
                executable: Some(env!("CARGO_BIN_EXE_commsd").into()),
                ..sandbox::Settings::new(self.runs())
            },
        }
    }

    /// A command adapter whose program is `sh -c SCRIPT`.
    pub fn shell(&self, script: &str) -> Adapter {
        let mut options = self.options(AdapterKind::Command);
        options.cmd = Some("sh".to_owned());
        options.extra_args = vec!["-c".to_owned(), script.to_owned()];
        Adapter::from_options(options).unwrap()
    }

    /// A command adapter whose program is this Perl text.
    pub fn perl(&self, script: &str) -> Adapter {
        let mut options = self.options(AdapterKind::Command);
        options.cmd = Some("perl".to_owned());
        options.extra_args = vec!["-e".to_owned(), script.to_owned()];
        Adapter::from_options(options).unwrap()
    }

    /// Nothing of any run is on disk any more.
    pub fn is_clean(&self) -> bool {
        std::fs::read_dir(self.runs()).unwrap().next().is_none()
    }
}

pub fn policy(isolation: Isolation) -> SandboxPolicy {
    SandboxPolicy {
        isolation,
        allow_subprocess_fallback: false,
        network: Network::None,
        allow_hosts: Seq::default(),
        memory_max_bytes: Count::clamped(512 << 20),
        pids_max: Count::clamped(64),
        cpu_time_max_ms: Count::clamped(60_000),
        disk_max_bytes: Count::clamped(64 << 20),
    }
}

pub fn job(isolation: Isolation, input: Value) -> Job {
    Job {
        task_id: TaskId::parse("task_adapters01").unwrap(),
        input,
        policy: policy(isolation),
        isolation,
        max_wall_ms: 30_000,
        max_output_bytes: 512 << 10,
    }
}

/// What a run is controlled by, from outside.
pub struct Handle {
    pub cancel: CancellationToken,
    pub hold: watch::Sender<bool>,
    pub progress: mpsc::Receiver<Progress>,
}

pub fn control() -> (Control, Handle) {
    let cancel = CancellationToken::new();
    let (hold, held) = watch::channel(false);
    let (tell, progress) = mpsc::channel(64);
    let control = Control { cancel: cancel.clone(), hold: held, progress: tell };
    (control, Handle { cancel, hold, progress })
}

/// Runs a job to its end, within the hard limit.
pub async fn run(adapter: &Adapter, job: Job) -> Ran {
    let (control, _handle) = control();
    tokio::time::timeout(HARD_LIMIT, adapter.run(job, control))
        .await
        .expect("the run took too long")
}

pub fn output(ran: &Ran) -> &Value {
    match &ran.ended {
        Ended::Output(output) => output,
        other => panic!("{other:?} {:?}", ran.run),
    }
}

pub fn failed(ran: &Ran) -> Code {
    match &ran.ended {
        Ended::Failed { code, .. } => *code,
        other => panic!("{other:?} {:?}", ran.run),
    }
}

/// Every level that works on this machine.
pub fn levels() -> Vec<Isolation> {
    let bench = Bench::new();
    Adapter::from_options(AdapterOptions {
        cmd: Some("true".into()),
        ..bench.options(AdapterKind::Command)
    })
    .unwrap()
    .levels()
}

#[tokio::test]
async fn a_command_gets_its_input_twice_and_a_clean_environment() {
    let bench = Bench::new();
    let script = r#"printf '{"stdin":%s,"file":%s,"env":"%s","pwd":"%s","home":"%s","files":"%s"}' \
        "$(cat)" "$(cat "$TASK_INPUT_FILE")" "$(env | cut -d= -f1 | sort | tr '\n' ' ')" \
        "$PWD" "$HOME" "$(ls -A)""#;
    for level in levels() {
        let adapter = bench.shell(script);
        let ran = run(&adapter, job(level, json!({"x": [1, 2.5, "ä"]}))).await;
        let output = output(&ran);
        assert_eq!(output["stdin"], json!({"x": [1, 2.5, "ä"]}), "{level}");
        assert_eq!(output["file"], output["stdin"], "{level}");
        assert_eq!(output["pwd"], output["home"], "{level}");
        assert_eq!(output["files"], "", "{level}: the directory is not fresh");
        let env = output["env"].as_str().unwrap().trim();
        let expected =
            "COMMSD_RUN HOME LANG PATH PWD TASK_ID TASK_INPUT_FILE TASK_PROGRESS_FILE TMPDIR";
        let without_shell: Vec<&str> =
            env.split(' ').filter(|name| !["_", "SHLVL", "OLDPWD"].contains(name)).collect();
        assert_eq!(without_shell.join(" "), expected, "{level}");
        assert_eq!(ran.run.effective, level);
        assert_eq!((ran.run.exit.kind, ran.run.exit.code), (ExitKind::Exited, Some(0)));
        assert!(bench.is_clean(), "{level}");
    }
}
