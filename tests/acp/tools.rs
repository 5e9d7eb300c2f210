//! Tools of a requester, used by work in its box: over real processes, at every level of this machine.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use commsd::acp::code::{Code, Error};
use commsd::acp::objects::{Action, CapabilityToken, Gate, Isolation, Resource};
use commsd::acp::owner::{Grant, Order};
use commsd::acp::tool::ToolName;
use commsd::acp::value::Read as _;
use commsd::daemon::acp::delegation;
use commsd::daemon::acp::{Local, Tool};
use commsd::runtime::adapter::{Adapter, AdapterKind, Job};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::adapters::{Bench, HARD_LIMIT, control, job, levels, output};
use crate::offices::{Open, Silent, alice, bob, order, patiently};

/// A program's way to its tools: `ask(method, path, token, body)` gives status and answer, `post(call)`
/// the answer to a call.
const ASK: &str = r#"
use strict; use Socket; use JSON::PP;
my ($port) = ($ENV{TASK_TOOLS_URL} || '') =~ m{^http://127\.0\.0\.1:(\d+)$};
sub open_way {
    my $path = $ENV{TASK_TOOLS_SOCKET};
    socket(my $s, $path ? PF_UNIX : PF_INET, SOCK_STREAM, 0) or die "socket: $!";
    my $to = $path ? pack_sockaddr_un($path) : pack_sockaddr_in($port, inet_aton('127.0.0.1'));
    connect($s, $to) or die "connect: $!";
    return $s;
}
sub send_to {
    my ($s, $method, $path, $token, $body) = @_;
    my $head = "$method $path HTTP/1.1\r\nHost: tools\r\nAuthorization: Bearer $token\r\n";
    my $text = "${head}content-length: " . length($body) . "\r\nconnection: close\r\n\r\n$body";
    local $SIG{PIPE} = 'IGNORE';
    while (length $text) { my $n = syswrite($s, $text) or last; substr($text, 0, $n) = ''; }
}
sub ask {
    my ($method, $path, $token, $body) = @_;
    my $s = open_way();
    send_to($s, $method, $path, $token, $body);
    my $answer = do { local $/; <$s> };
    my ($status, $said) = $answer =~ m{^HTTP/1.1 (\d+).*?\r\n\r\n(.*)$}s;
    return ($status, $said);
}
sub post {
    my ($call) = @_;
    my ($status, $said) = ask('POST', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, encode_json($call));
    $status == 200 or die "$status $said";
    return decode_json($said);
}
my $input = decode_json(do { local $/; <STDIN> });
"#;

fn tool(name: &str, command: &str) -> Tool {
    Tool::new(ToolName::parse(name).unwrap(), command).unwrap()
}

fn granting(order: Order, name: &str, max_uses: u64) -> Order {
    let capabilities = vec![ToolName::parse(name).unwrap().capability().unwrap()];
    Order { grants: vec![Grant { capabilities, max_uses, max_depth: 0 }], ..order }
}

/// A tool that notes its use below `dir`, and gives back what it was given.
fn noting(dir: &Path) -> Tool {
    let log = dir.join("used");
    tool("mcp:docs/**:read", &format!("/bin/sh -c 'echo used >> {}; cat'", log.display()))
}

fn uses(dir: &Path) -> usize {
    std::fs::read_to_string(dir.join("used")).unwrap_or_default().lines().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_uses_the_requesters_tools_at_every_level() {
    let program = format!(
        "{ASK}{}",
        r#"
my ($listed, $list) = ask('GET', '/v1/tools', $ENV{TASK_TOOLS_TOKEN}, '');
my $page = {callId => 'call_program001', resource => 'mcp:docs/a', action => 'read', arguments => {page => 1}};
my $first = post($page);
my $again = post($page);
my $other = post({%$page, arguments => {page => 2}});
my $foreign = post({%$page, callId => 'call_program002', resource => 'mcp:other/a'});
my ($token) = ask('POST', '/v1/tools/call', 'x' x 43, encode_json($page));
my ($method) = ask('GET', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, '');
my ($path) = ask('GET', '/v1/tools/', $ENV{TASK_TOOLS_TOKEN}, '');
my ($member) = ask('POST', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, encode_json({%$page, more => 1}));
my ($twice) = ask('POST', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, '{"action":"read","action":"read"}');
my ($large) = ask('POST', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, '"' . ('x' x (512 << 10)) . '"');
my $s;
my $elsewhere = socket($s, PF_INET, SOCK_STREAM, 0)
    && connect($s, pack_sockaddr_in($input->{port}, inet_aton('127.0.0.1'))) ? 1 : 0;
print encode_json({
    list => decode_json($list), first => $first, again => $again, other => $other, foreign => $foreign,
    statuses => [map { $_ + 0 } $listed, $token, $method, $path, $member, $twice, $large],
    elsewhere => $elsewhere, environment => [sort grep { /^TASK_TOOLS/ } keys %ENV],
});
"#
    );
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    for level in levels() {
        let dir = tempfile::tempdir().unwrap();
        let local = Local::default();
        let mut options = bob(dir.path(), &local, "perl");
        let (adapter, _) = options.work.as_mut().unwrap();
        adapter.isolation = Some(level);
        adapter.extra_args = vec!["-e".into(), program.clone()];
        let bob = Open::new(options).await.unwrap();
        let mut options = alice(dir.path(), &local);
        options.auto = vec![Gate::ExternalSend];
        options.tools = vec![noting(dir.path())];
        let alice = Open::new(options).await.unwrap();
        let mut order = granting(order(2, json!({ "port": port })), "mcp:docs/*:read", 5);
        order.sandbox.isolation = level;
        let never = CancellationToken::new();
        let done = delegation::delegate(&alice.office, order, &Silent, &never);
        let standing = patiently(done).await.unwrap();
        assert_eq!(standing.status(), "SETTLED", "{level}: {standing:?}");
        let said = standing.output.unwrap();
        let grant = &said["list"]["grants"][0];
        assert_eq!(grant["capabilities"][0]["resource"], "mcp:docs/*", "{level}");
        assert_eq!(grant["limits"]["maxUses"], 5);
        let read =
            json!({ "resource": "mcp:docs/a", "action": "read", "arguments": { "page": 1 } });
        assert_eq!(said["first"], json!({ "output": read }), "{level}");
        assert_eq!(said["again"], said["first"]);
        assert_eq!(uses(dir.path()), 1, "{level}: asked twice, run twice");
        assert_eq!(said["other"]["error"]["code"], "CALL_ID_REUSED");
        assert_eq!(said["foreign"]["error"]["code"], "CAPABILITY_NOT_GRANTED");
        assert_eq!(said["statuses"], json!([200, 401, 405, 404, 400, 400, 413]), "{level}");
        let kept = matches!(level, Isolation::Kernel | Isolation::Namespace | Isolation::Oci);
        assert_eq!(said["elsewhere"], i32::from(!kept), "{level}: another port");
        let boxed = matches!(level, Isolation::Namespace | Isolation::Oci);
        let socket = boxed.then_some("TASK_TOOLS_SOCKET");
        let names: Vec<&str> =
            socket.into_iter().chain(["TASK_TOOLS_TOKEN", "TASK_TOOLS_URL"]).collect();
        assert_eq!(said["environment"], json!(names), "{level}");
        // The receipt says what ran, and no more.
        assert_eq!(standing.usage.unwrap()["toolCalls"], 1, "{level}");
        alice.close().await;
        bob.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tool_is_bounded_and_says_why_it_failed() {
    let program = format!(
        "{ASK}{}",
        r#"
my @said = map { post({resource => "mcp:tool/$_", action => 'read', arguments => undef}) } @{$input->{tools}};
print encode_json({codes => [map { $_->{error}{code} || $_->{output} } @said]});
"#
    );
    let dir = tempfile::tempdir().unwrap();
    let local = Local::default();
    let mut options = bob(dir.path(), &local, "perl");
    options.work.as_mut().unwrap().0.extra_args = vec!["-e".into(), program];
    let bob = Open::new(options).await.unwrap();
    let mut options = alice(dir.path(), &local);
    options.auto = vec![Gate::ExternalSend];
    let mark = format!("{}", 90_000 + std::process::id() % 9999);
    options.tools = vec![
        tool(
            "mcp:tool/large:read",
            &format!("sh -c 'sleep {mark} & head -c 600000 /dev/zero; wait'"),
        ),
        tool("mcp:tool/words:read", "echo no JSON"),
        tool("mcp:tool/fails:read", "false"),
        tool("mcp:tool/missing:read", "/nowhere/tool"),
        tool("mcp:tool/good:read", "echo '\"$HOME `id` &\"'"),
        tool("mcp:tool/good:write", "false"),
    ];
    let alice = Open::new(options).await.unwrap();
    let tools = ["large", "words", "fails", "missing", "none", "good", "good"];
    let order = granting(order(2, json!({ "tools": tools })), "mcp:tool/*:read", 6);
    let never = CancellationToken::new();
    let done = delegation::delegate(&alice.office, order, &Silent, &never);
    let standing = patiently(done).await.unwrap();
    let codes = json!([
        "OUTPUT_TOO_LARGE",
        "OUTPUT_NOT_JSON",
        "ADAPTER_FAILED",
        "ADAPTER_FAILED",
        "ADAPTER_FAILED",
        // No shell has seen it.
        "$HOME `id` &",
        "USES_EXHAUSTED",
    ]);
    assert_eq!(standing.output.unwrap()["codes"], codes);
    // Nothing of the one that was given up is left.
    assert!(!crate::programs::sleeping(&mark));
    alice.close().await;
    bob.close().await;
}

/// A job that may use `mcp:docs/*`.
fn granted(level: Isolation) -> Job {
    let (digest, time) = (format!("sha256:{}", "0".repeat(64)), "2026-01-01T00:00:00.000Z");
    let did = crate::support::person(1).did.to_string();
    let token = json!({
        "type": "CapabilityToken", "version": "1.0", "tokenId": "cap_aaaaaaaa", "issuerDid": did,
        "audienceDid": did, "taskId": "task_adapters01", "parentDigest": digest, "depth": 0,
        "capabilities": [{ "resource": "mcp:docs/*", "actions": ["read"], "argsSchemas": [],
            "maxBytesPerUse": null }],
        "limits": { "notBefore": time, "expiresAt": time, "maxUses": 1, "maxDepth": 0 },
        "issuedAt": time, "nonce": "A".repeat(22),
        "signature": { "alg": "Ed25519", "role": "issuer", "signerDid": did, "signedAt": time,
            "value": "A".repeat(86) },
    });
    Job { grants: vec![CapabilityToken::read(token).unwrap()], ..job(level, json!({})) }
}

#[tokio::test]
async fn calls_wait_while_a_run_is_held_are_found_again_and_end_with_it() {
    // Asks twice by one id, and reads the second answer only.
    let program = format!(
        "{ASK}{}",
        r#"
open my $told, '>', $ENV{TASK_PROGRESS_FILE}; syswrite $told, qq({"step":"$port"}\n);
my $call = {callId => 'call_program001', resource => 'mcp:docs/a', action => 'read', arguments => 1};
my $first = open_way();
send_to($first, 'POST', '/v1/tools/call', $ENV{TASK_TOOLS_TOKEN}, encode_json($call));
print encode_json(post($call));
"#
    );
    let bench = Bench::new();
    let adapter = bench.perl(&program);
    let (control, mut handle) = control();
    handle.hold.send(true).unwrap();
    let going = tokio::spawn(async move { adapter.run(granted(Isolation::Kernel), control).await });
    let quiet = tokio::time::timeout(Duration::from_millis(500), handle.tools.recv());
    assert!(quiet.await.is_err() && !going.is_finished());
    handle.hold.send(false).unwrap();
    let port: u16 = handle.progress.recv().await.unwrap().step.parse().unwrap();
    let used = tokio::time::timeout(HARD_LIMIT, handle.tools.recv()).await.unwrap().unwrap();
    assert_eq!(used.request.resource, Resource::parse("mcp:docs/a").unwrap());
    assert_eq!(used.request.action, Action::parse("read").unwrap());
    used.answer(Err(Error::new(Code::ApprovalDenied, "no")));
    let ran = tokio::time::timeout(HARD_LIMIT, going).await.unwrap().unwrap();
    assert_eq!(output(&ran), &json!({ "error": { "code": "APPROVAL_DENIED", "message": "no" } }));
    assert!(handle.tools.try_recv().is_err(), "asked for again, made again");
    assert_eq!(ran.usage.tool_calls.map(|calls| calls.get()), Some(0));
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "the tools live on");
    assert!(bench.is_clean());
}

#[tokio::test]
async fn a_container_is_shown_a_socket_and_its_token_stands_on_no_command_line() {
    if std::process::Command::new("curl").arg("--version").output().is_err() {
        return;
    }
    let bench = Bench::new();
    let log = bench.dir.path().join("engine.log");
    // Answers for the image, and asks for the tools as what runs in the container would.
    let engine = bench.program(
        "podman",
        &format!(
            r#"#!/bin/sh
printf '%s\n' "$@" >> {}
case $1 in
image) echo 1111111111111111111111111111111111111111111111111111111111111111 ;;
run)
    socket=$(printf '%s\n' "$@" | sed -n 's/^type=bind,source=\(.*\),target=.run.tools.sock$/\1/p')
    curl -s --unix-socket "$socket" -H "Authorization: Bearer $TASK_TOOLS_TOKEN" http://localhost/v1/tools
    echo "$TASK_TOOLS_TOKEN" > {}
    ;;
esac
"#,
            log.display(),
            bench.dir.path().join("token").display(),
        ),
    );
    let mut options = bench.options(AdapterKind::Command);
    options.cmd = Some("node /app/main.js".into());
    options.sandbox.engine = Some(engine);
    let adapter = Adapter::from_options(options).unwrap();
    let ran = crate::adapters::run(&adapter, granted(Isolation::Oci)).await;
    assert_eq!(output(&ran)["grants"][0]["capabilities"][0]["resource"], "mcp:docs/*");
    let token = std::fs::read_to_string(bench.dir.path().join("token")).unwrap();
    assert_eq!(token.trim().len(), 43);
    let words = std::fs::read_to_string(log).unwrap();
    assert!(words.contains("\n--env\nTASK_TOOLS_TOKEN\n") && !words.contains(token.trim()));
}

#[tokio::test]
async fn who_is_granted_nothing_has_no_way_to_tools() {
    let bench = Bench::new();
    let adapter = bench.shell("env | grep -c ^TASK_TOOLS");
    let (control, _handle) = control();
    let ran =
        tokio::time::timeout(HARD_LIMIT, adapter.run(job(Isolation::Kernel, Value::Null), control));
    // grep finds nothing, which is its exit code 1.
    assert_eq!(crate::adapters::failed(&ran.await.unwrap()), Code::AdapterFailed);
}
