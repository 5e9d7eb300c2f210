//! Adapters over real processes: what a run is given, what is taken from it, and what of it is left.
//! Programs of models are stubs that answer as their public documentation shows.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use commsd::acp::code::Code;
use commsd::acp::objects::{ExitKind, Isolation, Network, SandboxPolicy, UsageSource};
use commsd::acp::owner::choose_level;
use commsd::acp::value::{Count, Digest, Read as _, Seq, TaskId};
use commsd::runtime::adapter::{
    Adapter, AdapterKind, AdapterOptions, ApiStyle, Control, Ended, HostKeys, Job, Progress, Ran,
    ToolUse,
};
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
        let mut options = AdapterOptions::new(kind, self.runs());
        options.sandbox.executable = Some(env!("CARGO_BIN_EXE_commsd").into());
        options
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
        title: "a title".into(),
        description: "what is to be done".into(),
        output_schema: Value::Bool(true),
        input,
        policy: policy(isolation),
        isolation,
        max_wall_ms: 30_000,
        max_output_bytes: 512 << 10,
        grants: Vec::new(),
    }
}

/// What a run is controlled by, from outside.
pub struct Handle {
    pub cancel: CancellationToken,
    pub hold: watch::Sender<bool>,
    pub progress: mpsc::Receiver<Progress>,
    pub tools: mpsc::Receiver<ToolUse>,
}

pub fn control() -> (Control, Handle) {
    let cancel = CancellationToken::new();
    let (hold, held) = watch::channel(false);
    let (tell, progress) = mpsc::channel(64);
    let (used, tools) = mpsc::channel(16);
    let control = Control { cancel: cancel.clone(), hold: held, progress: tell, tools: used };
    (control, Handle { cancel, hold, progress, tools })
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

#[tokio::test]
async fn what_is_no_json_or_ends_badly_is_no_output() {
    let bench = Bench::new();
    let level = Isolation::Subprocess;
    for (script, code) in [
        ("echo '{} {}'", Code::OutputNotJson),
        ("echo '{\"a\":1,\"a\":1}'", Code::OutputNotJson),
        ("true", Code::OutputNotJson),
        ("printf '\\377'", Code::OutputNotJson),
        ("echo 1; exit 3", Code::AdapterFailed),
        ("echo 1; kill -9 $$", Code::AdapterFailed),
    ] {
        assert_eq!(
            failed(&run(&bench.shell(script), job(level, json!(1))).await),
            code,
            "{script}"
        );
    }
    let ran = run(&bench.shell("kill -11 $$"), job(level, json!(1))).await;
    assert_eq!((ran.run.exit.kind, ran.run.exit.signal), (ExitKind::Signalled, Some(11)));
    // The largest input there is, to a program that does not read it and to one that does.
    let large = json!("x".repeat((2 << 20) - 2));
    assert_eq!(output(&run(&bench.shell("echo 5"), job(level, large.clone())).await), &json!(5));
    let count = bench.shell("wc -c");
    assert_eq!(output(&run(&count, job(level, large)).await), &json!(2 << 20));
    let larger = json!("x".repeat((2 << 20) - 1));
    assert_eq!(failed(&run(&bench.shell("echo 5"), job(level, larger)).await), Code::TooLarge);
}

#[tokio::test]
async fn the_end_of_stderr_is_kept_of_what_failed_however_much_there_was() {
    let bench = Bench::new();
    let complaint = async |script: &str| {
        let ran = run(&bench.shell(script), job(Isolation::Subprocess, Value::Null)).await;
        (ran.complaint, ran.run.stderr_digest)
    };
    let much = "head -c 300000 /dev/zero | tr '\\0' x >&2; echo; echo 'no such page' >&2; exit 3";
    let (said, digest) = complaint(much).await;
    let said = said.unwrap();
    assert!(said.len() <= 2048 && said.ends_with("xno such page"), "{said}");
    // The digest is over the beginning, as ever.
    assert_eq!(digest, Some(Digest::of_bytes(&[b'x'; 64 << 10])));
    let (said, _) = complaint("echo one >&2; echo two >&2; echo no JSON").await;
    assert_eq!(said.as_deref(), Some("one\ntwo"));
    assert_eq!(complaint("echo all is well >&2; echo 1").await.0, None);
    assert_eq!(complaint("exit 1").await.0, None);
}

#[tokio::test]
async fn progress_arrives_in_order_and_bounded() {
    let bench = Bench::new();
    for level in levels() {
        let adapter = bench.shell(
            r#"echo '{"percent":10,"step":"one","metrics":{"totalTokens":3}}' > $TASK_PROGRESS_FILE
               echo 'no progress' > $TASK_PROGRESS_FILE
               echo '{"percent":900,"message":"\u001b[2J"}' > $TASK_PROGRESS_FILE
               read line < /dev/null; sleep 0.1; echo 1"#,
        );
        let (control, mut handle) = control();
        let ran = tokio::time::timeout(HARD_LIMIT, adapter.run(job(level, json!({})), control));
        assert_eq!(output(&ran.await.unwrap()), &json!(1), "{level}");
        let first = handle.progress.recv().await.unwrap();
        assert_eq!((first.percent, first.step.as_str()), (Some(10), "one"), "{level}");
        assert_eq!(first.metrics.total_tokens, Some(Count::clamped(3)));
        let second = handle.progress.recv().await.unwrap();
        assert_eq!((second.percent, second.message.as_str()), (Some(100), " [2J"), "{level}");
        assert_eq!(handle.progress.recv().await, None);
    }
}

// Models' programs and APIs, with stubs.

/// The owner's key. Written in two parts, so that a search for it does not find the search.
fn canary() -> String {
    ["sk-owner", "canary-5c1f"].join("-")
}

/// A provider that answers as its public documentation shows, and keeps every request.
struct Provider {
    url: String,
    requests: std::sync::Arc<std::sync::Mutex<Vec<String>>>,
}

impl Provider {
    fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let kept = std::sync::Arc::clone(&requests);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                Self::serve(stream, &kept);
            }
        });
        Self { url, requests }
    }

    /// Notes a request, then answers it: whoever has the answer finds it noted.
    fn serve(mut stream: std::net::TcpStream, kept: &std::sync::Mutex<Vec<String>>) {
        use std::io::{Read, Write};
        let mut request = Vec::new();
        let mut buffer = [0; 4096];
        let wanted = loop {
            let text = String::from_utf8_lossy(&request).into_owned();
            if let Some((head, _)) = text.split_once("\r\n\r\n") {
                let length = head.to_ascii_lowercase();
                let length = length
                    .split("content-length: ")
                    .nth(1)
                    .map_or(0, |rest| rest.split("\r\n").next().unwrap().parse::<usize>().unwrap());
                break head.len() + 4 + length;
            }
            let count = stream.read(&mut buffer).unwrap();
            request.extend_from_slice(&buffer[..count]);
        };
        while request.len() < wanted {
            let count = stream.read(&mut buffer).unwrap();
            request.extend_from_slice(&buffer[..count]);
        }
        let request = String::from_utf8(request).unwrap();
        let (kind, body) = Self::answer(&request);
        kept.lock().unwrap().push(request);
        let status = if kind.is_empty() { "429 Too Many Requests" } else { "200 OK" };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nset-cookie: a=b\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
    }

    fn answer(request: &str) -> (&'static str, String) {
        let path = request.split(' ').nth(1).unwrap();
        let json = "application/json";
        let text = json!({"answer": 42}).to_string();
        match path {
            "/v1/messages" if request.contains("\"stream\":true") => (
                "text/event-stream",
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":100,\"output_tokens\":1}}}\n\n\
                 event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":50}}\n\n".to_owned(),
            ),
            "/v1/messages" => (
                json,
                json!({"type": "message", "model": "claude-x", "content": [{"type": "text", "text": text}],
                       "usage": {"input_tokens": 10, "output_tokens": 5}}).to_string(),
            ),
            "/api/v1/chat/completions" => (
                json,
                json!({"model": "local-x", "choices": [{"message": {"role": "assistant", "content": text}}],
                       "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}}).to_string(),
            ),
            "/v1/responses" => (
                "text/event-stream",
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"model\":\"gpt-y\",\"usage\":{\"input_tokens\":30,\"output_tokens\":7}}}\n\n".to_owned(),
            ),
            _ => ("", "{\"error\":{\"message\":\"slow down\"}}".to_owned()),
        }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// What the stub programs begin with: `ask(method, path, headers, body)` gives status and answer.
const ASK: &str = r#"#!/usr/bin/perl
use strict; use Socket;
my $url = $ENV{ANTHROPIC_BASE_URL} || join(' ', @ARGV);
my ($port, $base) = $url =~ m{http://127\.0\.0\.1:(\d+)([^"]*)};
sub ask {
    my ($method, $path, $headers, $body) = @_;
    socket(my $s, PF_INET, SOCK_STREAM, 0) or die "socket: $!";
    connect($s, pack_sockaddr_in($port, inet_aton('127.0.0.1'))) or die "connect: $!";
    syswrite $s, "$method $path HTTP/1.1\r\nHost: broker\r\n$headers\r\ncontent-length: " .
        length($body) . "\r\nconnection: close\r\n\r\n$body";
    my $answer = do { local $/; <$s> };
    my ($status) = $answer =~ m{^HTTP/1.1 (\d+)};
    return ($status, $answer);
}
my $prompt = do { local $/; <STDIN> };
"#;

fn everything_below(dir: &std::path::Path, found: &mut Vec<Vec<u8>>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            everything_below(&entry.path(), found);
        } else if entry.file_type().unwrap().is_file() {
            found.push(std::fs::read(entry.path()).unwrap_or_default());
        }
    }
}

#[tokio::test]
async fn claude_asks_through_the_broker_and_never_sees_the_key() {
    let program = format!(
        "{ASK}{}",
        r#"
my $h = "x-api-key: $ENV{ANTHROPIC_API_KEY}\r\nanthropic-version: 2023-06-01\r\ncookie: c=d\r\ncontent-type: application/json";
my @seen = map { ask(@$_) } (
    ['POST', "$base/v1/messages", $h, '{"max_tokens":1}'],
    ['POST', "$base/v1/messages", $h, '{"stream":true}'],
    ['POST', "$base/v1/messages", "x-api-key: wrong", '{}'],
    ['POST', "$base/v1/messages", "accept: a", '{}'],
    ['POST', "$base/v1/%2e%2e/admin", $h, '{}'],
    ['POST', "$base/v1/../admin", $h, '{}'],
    ['POST', "/other/v1/messages?x", $h, '{}'],
    ['DELETE', "$base/v1/messages", $h, ''],
);
my $seen = join ' ', @seen, %ENV, @ARGV, $prompt;
my @status = map { $seen[2 * $_] } 0 .. 7;
open my $cmd, '<', '/proc/self/cmdline'; $seen .= <$cmd> // '';
my $leak = $seen =~ /sk-owner[-]canary/ ? 'true' : 'false';
my $cookie = $seen =~ /set-cookie/i ? 'true' : 'false';
my $url = $prompt =~ /"question":6/ ? 'true' : 'false';
system('sh', '-c', 'env > env-of-child; cp env-of-child ' . $ENV{HOME} . '/copy');
my $result = "{\\\"status\\\":\\\"@status\\\",\\\"leak\\\":$leak,\\\"cookie\\\":$cookie,\\\"prompt\\\":$url,\\\"args\\\":\\\"@ARGV\\\"}";
print qq({"type":"result","subtype":"success","is_error":false,"result":"$result","usage":{"input_tokens":1,"output_tokens":1}});
"#
    );
    for level in [Isolation::Kernel, Isolation::Subprocess] {
        let (bench, provider) = (Bench::new(), Provider::start());
        let mut options = bench.options(AdapterKind::Claude);
        options.program = Some(bench.program("claude", &program));
        options.model = Some("sonnet".to_owned());
        options.endpoint = Some(provider.url.clone());
        options.keys = HostKeys::new(Some(canary()), None);
        assert!(!format!("{options:?}").contains(&canary()), "the key is in a debug text");
        let adapter = Adapter::from_options(options).unwrap();
        assert!(adapter.levels().contains(&level));
        let (control, mut handle) = control();
        let ran = adapter.run(job(level, json!({"question": 6})), control);
        let watching = async {
            let (mut told, mut files) = (Vec::new(), Vec::new());
            while let Some(progress) = handle.progress.recv().await {
                told.push(progress.metrics.total_tokens.unwrap().get());
                everything_below(bench.dir.path(), &mut files);
            }
            (told, files)
        };
        let (ran, (told, files)) =
            tokio::time::timeout(HARD_LIMIT, async { tokio::join!(ran, watching) }).await.unwrap();
        let output = output(&ran);
        assert_eq!(output["status"], "200 200 401 401 404 404 404 405", "{level}");
        assert_eq!(output["leak"], false, "{level}");
        assert_eq!((&output["cookie"], &output["prompt"]), (&json!(false), &json!(true)));
        assert_eq!(output["args"], "-p --output-format json --model sonnet");
        // The provider's numbers, not the program's.
        let usage = &ran.usage;
        let tokens = [usage.input_tokens, usage.output_tokens, usage.total_tokens];
        assert_eq!(tokens.map(|count| count.unwrap().get()), [110, 55, 165], "{level}");
        assert_eq!((ran.source, ran.model.as_deref()), (UsageSource::Provider, Some("claude-x")));
        assert!(
            told.windows(2).all(|two| two[0] <= two[1]) && told.last() <= Some(&165),
            "{told:?}"
        );
        let key = canary();
        assert!(files.iter().all(|f| !f.windows(key.len()).any(|part| part == key.as_bytes())));
        let requests = provider.requests();
        assert_eq!(requests.len(), 2, "{requests:?}");
        for request in requests {
            assert!(request.contains(&format!("x-api-key: {key}\r\n")), "{request}");
            assert!(!request.contains("cookie"), "{request}");
        }
        assert!(!format!("{ran:?}").contains(&key));
        assert!(bench.is_clean());
    }
}

#[tokio::test]
async fn codex_events_become_progress_and_the_broker_counts() {
    let program = format!(
        "{ASK}{}",
        r#"
my ($status) = ask('POST', "$base/responses", "authorization: Bearer $ENV{OPENAI_API_KEY}", '{"stream":true}');
$| = 1;
print qq({"type":"thread.started","thread_id":"t"}\n{"type":"turn.started"}\n);
print qq({"type":"item.completed","item":{"id":"item_0","type":"command_execution","command":"ls","aggregated_output":"","exit_code":0,"status":"completed"}}\n);
print qq({"type":"item.completed","item":{"id":"item_1","type":"agent_message","text":"{\\"status\\":$status}"}}\n);
print qq({"type":"turn.completed","usage":{"input_tokens":1,"cached_input_tokens":0,"output_tokens":1}}\n);
"#
    );
    let (bench, provider) = (Bench::new(), Provider::start());
    let mut options = bench.options(AdapterKind::Codex);
    options.program = Some(bench.program("codex", &program));
    options.endpoint = Some(format!("{}/v1", provider.url));
    options.keys = HostKeys::new(None, Some(canary()));
    let adapter = Adapter::from_options(options).unwrap();
    let (control, mut handle) = control();
    let ran = adapter.run(job(Isolation::Kernel, json!({})), control);
    let ran = tokio::time::timeout(HARD_LIMIT, ran).await.unwrap();
    assert_eq!(output(&ran), &json!({"status": 200}));
    let counts = [ran.usage.input_tokens, ran.usage.output_tokens, ran.usage.tool_calls];
    assert_eq!(counts.map(|count| count.unwrap().get()), [30, 7, 1]);
    let mut steps = Vec::new();
    while let Some(progress) = handle.progress.recv().await {
        steps.push(progress.step);
    }
    assert!(steps.contains(&"command_execution".to_owned()), "{steps:?}");
    let requests = provider.requests();
    assert!(requests[0].contains(&format!("authorization: Bearer {}\r\n", canary())));
}

#[tokio::test]
async fn the_broker_holds_calls_and_dies_with_the_run() {
    let program = format!(
        "{ASK}{}",
        r#"
open my $told, '>', $ENV{TASK_PROGRESS_FILE}; syswrite $told, qq({"step":"$port"}\n);
my ($status) = ask('POST', "$base/v1/messages", "x-api-key: $ENV{ANTHROPIC_API_KEY}", '{}');
print $status;
"#
    );
    let (bench, provider) = (Bench::new(), Provider::start());
    let mut options = bench.options(AdapterKind::Claude);
    options.program = Some(bench.program("claude", &program));
    options.endpoint = Some(provider.url.clone());
    options.keys = HostKeys::new(Some(canary()), None);
    let adapter = Adapter::from_options(options).unwrap();
    let (control, mut handle) = control();
    handle.hold.send(true).unwrap();
    let going =
        tokio::spawn(async move { adapter.run(job(Isolation::Kernel, json!({})), control).await });
    let quiet = std::time::Duration::from_millis(500);
    assert!(tokio::time::timeout(quiet, handle.progress.recv()).await.is_err());
    assert!(provider.requests().is_empty() && !going.is_finished());
    handle.hold.send(false).unwrap();
    // The broker's own reports may come before the program's.
    let port: u16 = loop {
        if let Ok(port) = handle.progress.recv().await.unwrap().step.parse() {
            break port;
        }
    };
    let ran = tokio::time::timeout(HARD_LIMIT, going).await.unwrap().unwrap();
    assert_eq!(output(&ran), &json!(200));
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "the broker lives on");
}

#[tokio::test]
async fn a_run_reaches_the_hosts_that_its_order_lists_and_nothing_else() {
    // The service: says what it hears, in capitals.
    let service = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = |listener: &std::net::TcpListener| listener.local_addr().unwrap().port();
    let (listed, unlisted) = (port(&service), port(&other));
    std::thread::spawn(move || {
        for stream in service.incoming().take(2) {
            let mut stream = stream.unwrap();
            let mut heard = [0; 5];
            stream.read_exact(&mut heard).unwrap();
            stream.write_all(&heard.to_ascii_uppercase()).unwrap();
        }
    });
    let program = r#"
use strict; use Socket; use JSON::PP; use MIME::Base64;
my ($user, $proxy) = $ENV{HTTPS_PROXY} =~ m{^http://(run:[\w-]{43})\@127\.0\.0\.1:(\d+)$};
sub reach { my ($port) = @_; socket(my $s, PF_INET, SOCK_STREAM, 0) or die; connect($s, pack_sockaddr_in($port, inet_aton('127.0.0.1'))) or return; return $s; }
sub through {
    my ($request, $shown) = @_;
    my $s = reach($proxy) or return [0, ''];
    syswrite $s, "$request HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic " . encode_base64($shown, '') . "\r\n\r\n";
    my $head = '';
    while ($head !~ /\r\n\r\n/) { sysread($s, $head, 4096, length $head) or last; }
    my ($status) = $head =~ m{^HTTP/1.1 (\d+)};
    my $said = '';
    if ($status == 200) { syswrite $s, 'hello'; sysread $s, $said, 5; }
    return [$status + 0, $said];
}
my $input = decode_json(do { local $/; <STDIN> });
my ($listed, $unlisted) = ($input->{listed}, $input->{unlisted});
print encode_json({
    direct => reach($listed) ? 1 : 0,
    listed => through("CONNECT 127.0.0.1:$listed", $user),
    unlisted => through("CONNECT 127.0.0.1:$unlisted", $user),
    other_name => through("CONNECT localhost:$listed", $user),
    stranger => through("CONNECT 127.0.0.1:$listed", 'run:' . 'x' x 43),
    fetched => through("GET http://127.0.0.1:$listed/", $user),
    proxy => $proxy + 0,
});
"#;
    let bench = Bench::new();
    let mut options = bench.options(AdapterKind::Command);
    options.cmd = Some("perl".to_owned());
    options.extra_args = vec!["-e".to_owned(), program.to_owned()];
    options.private_hosts = true;
    let adapter = Adapter::from_options(options.clone()).unwrap();
    assert_eq!(adapter.profile(1).levels_with_hosts, [Isolation::Kernel]);
    let mut open = job(Isolation::Kernel, json!({"listed": listed, "unlisted": unlisted}));
    open.policy.network = Network::Allowlist;
    open.policy.allow_hosts = Seq::read(json!([format!("127.0.0.1:{listed}")])).unwrap();
    let ran = run(&adapter, open.clone()).await;
    let told = output(&ran);
    assert_eq!(told["direct"], 0);
    assert_eq!(told["listed"], json!([200, "HELLO"]));
    assert_eq!(
        [&told["unlisted"], &told["other_name"], &told["stranger"], &told["fetched"]]
            .map(|said| said[0].clone()),
        [403, 403, 407, 405]
    );
    // What is attested says so.
    assert_eq!(ran.run.limits.allow_hosts, open.policy.allow_hosts);
    assert!(ran.run.runtime.version.contains("network by port number"));
    let proxy = u16::try_from(told["proxy"].as_u64().unwrap()).unwrap();
    let gone =
        async { while tokio::net::TcpStream::connect(("127.0.0.1", proxy)).await.is_ok() {} };
    tokio::time::timeout(HARD_LIMIT, gone).await.expect("the proxy lives on");
    // A list leads to no private address unless the worker's owner says so, and without a list there
    // is no way out.
    options.private_hosts = false;
    let adapter = Adapter::from_options(options).unwrap();
    assert_eq!(output(&run(&adapter, open.clone()).await)["listed"][0], 403);
    open.policy.network = Network::None;
    assert!(matches!(run(&adapter, open).await.ended, Ended::Failed { .. }), "no HTTPS_PROXY");
}

#[tokio::test]
async fn an_http_api_is_asked_with_or_without_a_key() {
    let (bench, provider) = (Bench::new(), Provider::start());
    let level = Isolation::Subprocess;
    let mut options = bench.options(AdapterKind::Openai);
    assert_eq!(
        Adapter::from_options(options.clone()).unwrap_err().code(),
        "adapter_option_missing"
    );
    options.model = Some("local".to_owned());
    options.endpoint = Some(format!("{}/api/v1/", provider.url));
    let adapter = Adapter::from_options(options.clone()).unwrap();
    let ran = run(&adapter, job(level, json!({"q": 1}))).await;
    assert_eq!(output(&ran), &json!({"answer": 42}));
    assert_eq!(ran.usage.total_tokens, Some(Count::clamped(13)));
    assert_eq!((ran.source, ran.model.as_deref()), (UsageSource::Provider, Some("local-x")));
    assert!(!provider.requests()[0].contains("authorization"));
    options.api_style = ApiStyle::Anthropic;
    options.endpoint = Some(provider.url.clone());
    options.keys = HostKeys::new(Some(canary()), None);
    let ran = run(&Adapter::from_options(options.clone()).unwrap(), job(level, json!(1))).await;
    assert_eq!(ran.usage.total_tokens, Some(Count::clamped(15)));
    assert!(provider.requests()[1].contains(&format!("x-api-key: {}\r\n", canary())));
    // An error of the provider fails the run, without its text.
    options.endpoint = Some(format!("{}/elsewhere", provider.url));
    let ran = run(&Adapter::from_options(options.clone()).unwrap(), job(level, json!(1))).await;
    assert_eq!(failed(&ran), Code::AdapterFailed);
    assert!(!format!("{:?}", ran.ended).contains("slow down"));
    for blocked in
        ["http://169.254.169.254/", "http://192.0.2.1/v1", "ftp://localhost/", "ws://127.0.0.1/"]
    {
        options.endpoint = Some(blocked.to_owned());
        let error = Adapter::from_options(options.clone()).unwrap_err();
        assert_eq!(error.code(), "adapter_option_bad", "{blocked}");
    }
}

#[tokio::test]
async fn a_tool_of_an_mcp_server_is_called_once() {
    let bench = Bench::new();
    let server = r#"#!/usr/bin/perl
$| = 1;
while (my $line = <STDIN>) {
    if ($line =~ /"method":"initialize"/) {
        print qq({"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"stub","version":"1"}}}\n);
    } elsif ($line =~ /"method":"tools\/call"/) {
        my ($n) = $line =~ /"n":(\d+)/;
        my ($tool) = $line =~ /"name":"(\w+)"/;
        print qq({"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":2,"progress":1,"total":2}}\n);
        print qq({"jsonrpc":"2.0","id":2,"result":{"content":[{"type":"text","text":"x"}],"structuredContent":{"tool":"$tool","double":) . 2 * $n . qq(}}}\n);
    }
}
"#;
    let mut options = bench.options(AdapterKind::Mcp);
    options.cmd = Some(bench.program("server", server).display().to_string());
    assert_eq!(
        Adapter::from_options(options.clone()).unwrap_err().code(),
        "adapter_option_missing"
    );
    options.tool = Some("double".to_owned());
    let adapter = Adapter::from_options(options).unwrap();
    for level in adapter.levels() {
        let (control, mut handle) = control();
        let ran = adapter.run(job(level, json!({"n": 21})), control);
        let ran = tokio::time::timeout(HARD_LIMIT, ran).await.unwrap();
        assert_eq!(output(&ran), &json!({"tool": "double", "double": 42}), "{level}");
        assert_eq!(ran.usage.tool_calls, Some(Count::clamped(1)));
        assert_eq!(handle.progress.recv().await.unwrap().percent, Some(50));
    }
}

#[tokio::test]
async fn javascript_runs_at_kernel_or_better() {
    let bench = Bench::new();
    let mut options = bench.options(AdapterKind::Sandbox);
    let Ok(echo) = Adapter::from_options(options.clone()) else {
        assert!(!std::path::Path::new("/usr/bin/node").exists());
        return;
    };
    let input = json!({"summary": "Hello", "findings": [1, 2]});
    for level in echo.levels() {
        assert_eq!(output(&run(&echo, job(level, input.clone())).await), &input, "{level}");
    }
    assert!(
        choose_level(&echo.profile(1), &policy(Isolation::Subprocess), true)
            .unwrap()
            .is_at_least(Isolation::Kernel)
    );
    let mut fallback = policy(Isolation::Subprocess);
    fallback.allow_subprocess_fallback = true;
    assert_eq!(choose_level(&echo.profile(1), &fallback, true).unwrap(), Isolation::Subprocess);
    options.cmd = Some(
        "const reach = async (what) => { try { await what(); return true } catch { return false } }; \
         return { read: await reach(() => import('node:fs').then((fs) => fs.readFileSync('/etc/hostname'))), \
                  net: await reach(() => fetch('http://127.0.0.1:9')), n: input.n + 1 };"
            .to_owned(),
    );
    let adapter = Adapter::from_options(options).unwrap();
    let ran = run(&adapter, job(Isolation::Kernel, json!({"n": 1}))).await;
    assert_eq!(output(&ran), &json!({"read": false, "net": false, "n": 2}));
}
