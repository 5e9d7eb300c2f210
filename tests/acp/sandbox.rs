//! Attacks on the machine, each real (it works where nothing stops it) and each with the weakest level
//! that stops it (decision 50, `docs/sandbox.md`); limits, and the end of every process.

use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use commsd::acp::code::Code;
use commsd::acp::objects::{ExitKind, Isolation};
use commsd::acp::owner::choose_level;
use commsd::acp::value::Count;
use commsd::runtime::adapter::{self, Ended};
use serde_json::json;

use crate::adapters::{Bench, HARD_LIMIT, control, failed, job, levels, output, run};

/// Runs `script` at every level; it prints `true` if the attack worked. From `weakest` on it must
/// not, and below it must, or the attack would prove nothing.
async fn attack(weakest: Isolation, script: &str) {
    for level in levels() {
        let bench = Bench::new();
        let ran = run(&bench.shell(script), job(level, json!({}))).await;
        let worked = output(&ran) == &json!(true);
        assert_eq!(worked, !level.is_at_least(weakest), "{level}: {script}\n{:?}", ran.run);
        assert!(bench.is_clean());
    }
}

/// The same with Perl.
async fn attack_in_perl(weakest: Isolation, script: &str) {
    for level in levels() {
        let bench = Bench::new();
        let ran = run(&bench.perl(script), job(level, json!({}))).await;
        let worked = output(&ran) == &json!(true);
        assert_eq!(worked, !level.is_at_least(weakest), "{level}: {script}\n{:?}", ran.run);
    }
}

/// Whether a process has this word among its arguments.
fn is_running(word: &str) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).any(|arg| arg == word.as_bytes()))
    })
}

/// Waits until a process has this word among its arguments.
async fn runs(word: &str) {
    let late = Instant::now() + HARD_LIMIT;
    while !is_running(word) {
        assert!(Instant::now() < late, "the attack does not work");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A number of seconds that no other process sleeps.
fn unique_sleep() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}.{:03}", 1_000_000 + std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[test]
fn this_machine_has_a_level_to_show_something_with() {
    let levels = levels();
    assert!(levels.contains(&Isolation::Subprocess) && levels.contains(&Isolation::None));
    if cfg!(target_os = "linux") {
        assert!(levels.contains(&Isolation::Kernel), "no Landlock of ABI 6, or no seccomp");
    }
}

// Command injection.

#[tokio::test]
async fn no_shell_ever_sees_a_command_or_an_input() {
    let hostile = json!({"a": "\"; touch pwned; $(touch pwned) `touch pwned` ' | touch pwned\n"});
    for level in levels() {
        let bench = Bench::new();
        let mut options = bench.options(adapter::AdapterKind::Command);
        options.cmd = Some(r#"printf %s '"$(touch pwned);`id`|ls"'"#.to_owned());
        let adapter = adapter::Adapter::from_options(options).unwrap();
        let ran = run(&adapter, job(level, hostile.clone())).await;
        assert_eq!(output(&ran), "$(touch pwned);`id`|ls", "{level}");
        let echo = bench.shell("cat; if test -e pwned; then printf 1; fi");
        assert_eq!(output(&run(&echo, job(level, hostile.clone())).await), &hostile, "{level}");
    }
}

// Host secrets.

#[tokio::test]
async fn files_of_the_owner_are_out_of_reach() {
    let bench = Bench::new();
    let secret = bench.dir.path().join("secret.private.json");
    std::fs::write(&secret, "canary-4711").unwrap();
    let path = secret.display();
    let found = "grep -q canary-4711 && echo true || echo false";
    attack(Isolation::Kernel, &format!("cat {path} 2>/dev/null | {found}")).await;
    attack(Isolation::Kernel, &format!("ln -s {path} link; cat link 2>/dev/null | {found}")).await;
    attack(
        Isolation::Kernel,
        &format!("ln {path} link 2>/dev/null; cat link 2>/dev/null | {found}; rm -f link"),
    )
    .await;
    let planted = bench.dir.path().join("planted");
    let path = planted.display();
    attack(Isolation::Kernel, &format!("(echo x > {path}) 2>/dev/null && echo true || echo false"))
        .await;
}

#[tokio::test]
async fn the_environment_and_memory_of_the_daemon_are_out_of_reach() {
    // The environment test shows that nothing is inherited; this is the way round it.
    let me = std::process::id();
    // Runs keep no capabilities, so a daemon that has some (root's) cannot be looked into anyway.
    let is_root = commsd::runtime::sys::uid() == 0;
    attack(
        if is_root { Isolation::Subprocess } else { Isolation::Kernel },
        &format!("(tr '\\0' '\\n' < /proc/{me}/environ) 2>/dev/null | grep -q ^PATH= && echo true || echo false"),
    )
    .await;
    attack(
        Isolation::Kernel,
        &format!("cat /proc/{me}/cmdline 2>/dev/null | grep -q acp && echo true || echo false"),
    )
    .await;
}

// Bleeding from one run into another.

#[tokio::test]
async fn a_run_finds_nothing_of_the_one_before() {
    for level in levels() {
        let bench = Bench::new();
        let leave = bench.shell("cat > left-behind; echo 1 > $HOME/left; echo 0");
        assert_eq!(output(&run(&leave, job(level, json!({"secret": 1}))).await), &json!(0));
        let look = bench.shell("ls -A | wc -l");
        assert_eq!(output(&run(&look, job(level, json!({}))).await), &json!(0), "{level}");
    }
}

#[tokio::test]
async fn a_run_cannot_read_the_one_beside_it() {
    for level in levels() {
        let bench = Bench::new();
        let (other_control, mut other) = control();
        let waiting = bench.shell("cat > secret; echo '{}' > $TASK_PROGRESS_FILE; sleep 600");
        let other_job = job(Isolation::Subprocess, json!("canary-0815"));
        let first = tokio::spawn(async move { waiting.run(other_job, other_control).await });
        tokio::time::timeout(HARD_LIMIT, other.progress.recv()).await.unwrap().unwrap();
        let runs = bench.runs();
        let script = format!(
            "cat {}/*/work/secret {0}/*/input.json 2>/dev/null | grep -q canary && echo true || echo false",
            runs.display()
        );
        let ran = run(&bench.shell(&script), job(level, json!({}))).await;
        let worked = output(&ran) == &json!(true);
        assert_eq!(worked, !level.is_at_least(Isolation::Kernel), "{level}");
        other.cancel.cancel();
        let first = tokio::time::timeout(HARD_LIMIT, first).await.unwrap().unwrap();
        assert_eq!(first.ended, Ended::Cancelled);
        assert!(bench.is_clean());
    }
}

// Resources. From `subprocess` on.

fn confined() -> impl Iterator<Item = Isolation> {
    levels().into_iter().filter(|level| level.is_at_least(Isolation::Subprocess))
}

#[tokio::test]
async fn a_fork_bomb_is_ended_and_nothing_of_it_is_left() {
    for level in confined() {
        let bench = Bench::new();
        let sleep = unique_sleep();
        // Bounded, should nothing stop it.
        let script =
            format!("i=0; while [ $i -lt 2000 ]; do sleep {sleep} & i=$((i+1)); done; wait");
        let ran = run(&bench.shell(&script), job(level, json!({}))).await;
        // Where the kernel keeps the limit, the shell gives up instead.
        let code = failed(&ran);
        assert!(matches!(code, Code::SandboxFailed | Code::AdapterFailed), "{level}: {code}");
        if code == Code::SandboxFailed {
            assert_eq!(&*ran.run.denials.first().unwrap().kind, "pids", "{level}");
        }
        assert!(!is_running(&sleep), "{level}");
        assert!(bench.is_clean());
    }
}

#[tokio::test]
async fn memory_has_an_end() {
    for level in confined() {
        let bench = Bench::new();
        let mut job = job(level, json!({}));
        job.policy.memory_max_bytes = Count::clamped(64 << 20);
        // One process is stopped by the kernel, several together by the supervisor.
        let one = bench.perl(r#"my $x = "x" x (256 << 20); print length $x;"#);
        assert_eq!(failed(&run(&one, job.clone()).await), Code::AdapterFailed, "{level}");
        let many =
            r#"for (1..8) { fork or do { my $x = "x" x (24 << 20); sleep 600; exit } } wait;"#;
        let ran = run(&bench.perl(many), job).await;
        assert_eq!(failed(&ran), Code::SandboxFailed, "{level}");
        assert_eq!(&*ran.run.denials.first().unwrap().kind, "memory", "{level}");
    }
}

#[tokio::test]
async fn disk_has_an_end() {
    for level in confined() {
        let bench = Bench::new();
        let mut job = job(level, json!({}));
        job.policy.disk_max_bytes = Count::clamped(8 << 20);
        let script = "i=0; while [ $i -lt 40 ]; do head -c 1048576 /dev/zero > f$i || exit 3; \
                      i=$((i+1)); done; sleep 600";
        let ran = run(&bench.shell(script), job).await;
        let code = failed(&ran);
        if level == Isolation::Namespace {
            assert_eq!((code, ran.run.exit.code), (Code::AdapterFailed, Some(3)));
        } else {
            assert_eq!(code, Code::SandboxFailed, "{level}");
            assert_eq!(&*ran.run.denials.first().unwrap().kind, "disk", "{level}");
        }
        assert!(bench.is_clean());
    }
}

#[tokio::test]
async fn output_and_stderr_have_an_end_at_every_level() {
    for level in levels() {
        let bench = Bench::new();
        let mut job = job(level, json!({}));
        job.max_output_bytes = 4096;
        let ran = run(&bench.shell("yes"), job.clone()).await;
        assert_eq!(failed(&ran), Code::OutputTooLarge, "{level}");
        // Exactly as much as may be is taken: a text with its quotes.
        let fits = bench.perl(r#"print '"' . ("x" x 4094) . '"'"#);
        assert_eq!(output(&run(&fits, job.clone()).await).as_str().unwrap().len(), 4094);
        let over = bench.perl(r#"print '"' . ("x" x 4095) . '"'"#);
        assert_eq!(failed(&run(&over, job.clone()).await), Code::OutputTooLarge);
        let noisy = bench.shell("yes | head -c 3000000 >&2; echo 1");
        let ran = run(&noisy, job).await;
        assert_eq!(output(&ran), &json!(1), "{level}");
        assert!(ran.run.stderr_digest.is_some());
    }
}

#[tokio::test]
async fn processor_time_has_an_end() {
    for level in confined() {
        let bench = Bench::new();
        let mut job = job(level, json!({}));
        job.policy.cpu_time_max_ms = Count::clamped(1_000);
        let ran = run(&bench.perl("fork; while (1) {}"), job).await;
        assert!(matches!(failed(&ran), Code::SandboxFailed | Code::AdapterFailed), "{level}");
        let used = ran.usage.cpu_time_ms.unwrap().get();
        assert!((500..4_000).contains(&used), "{level}: {used}");
    }
}

#[tokio::test]
async fn wall_time_has_an_end_also_for_one_who_does_not_listen() {
    let bench = Bench::new();
    let mut job = job(Isolation::Subprocess, json!({}));
    job.max_wall_ms = 300;
    let ran = run(&bench.shell("trap '' TERM; while :; do sleep 1; done"), job.clone()).await;
    assert_eq!(failed(&ran), Code::BudgetExceeded);
    assert_eq!(ran.run.exit.kind, ExitKind::Timeout);
    assert!(ran.usage.wall_time_ms.unwrap().get() >= 5_300);
    let ran = run(&bench.shell("sleep 600"), job).await;
    assert!(ran.usage.wall_time_ms.unwrap().get() < 5_000, "SIGTERM is enough for one who listens");
}

// Reaching out.

#[tokio::test]
async fn nothing_can_be_connected_to() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connect = |socket: &str, address: &str| {
        format!(
            "use Socket; my $s; \
             print +((socket($s, {socket}) && connect($s, {address})) ? 'true' : 'false');"
        )
    };
    let address = format!("pack_sockaddr_in({port}, inet_aton('127.0.0.1'))");
    attack_in_perl(Isolation::Kernel, &connect("PF_INET, SOCK_STREAM, 0", &address)).await;
    // Datagrams "connect" wherever a socket can be made at all, so sending is what counts.
    let receiver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let port = receiver.local_addr().unwrap().port();
    for level in levels() {
        let bench = Bench::new();
        let script = format!(
            "use Socket; my $s; socket($s, PF_INET, SOCK_DGRAM, 0); \
             send($s, 'x', 0, pack_sockaddr_in({port}, inet_aton('127.0.0.1'))); print 1;"
        );
        run(&bench.perl(&script), job(level, json!({}))).await;
        let received = receiver.recv(&mut [0; 8]).is_ok();
        assert_eq!(received, !level.is_at_least(Isolation::Kernel), "{level}");
    }
}

#[tokio::test]
async fn the_daemons_own_socket_cannot_be_connected_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("daemon.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let script = format!(
        "use Socket; my $s; print +((socket($s, PF_UNIX, SOCK_STREAM, 0) && \
         connect($s, pack_sockaddr_un('{}'))) ? 'true' : 'false');",
        path.display()
    );
    attack_in_perl(Isolation::Kernel, &script).await;
    // By way of a datagram pair, which could be connected elsewhere.
    let path = dir.path().join("datagrams.sock");
    let _receiver = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    let script = format!(
        "use Socket; my ($a, $b); print +((socketpair($a, $b, PF_UNIX, SOCK_DGRAM, 0) && \
         connect($a, pack_sockaddr_un('{}'))) ? 'true' : 'false');",
        path.display()
    );
    attack_in_perl(Isolation::Kernel, &script).await;
}

#[tokio::test]
async fn system_calls_that_go_round_the_rules_are_refused() {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    // Numbers of x86-64. `none` shows that each would be answered otherwise.
    for (name, call) in [
        ("unshare(CLONE_NEWUSER)", "syscall(272, 0x10000000)"),
        ("io_uring_setup", "syscall(425, 1, my $p = chr(0) x 120)"),
        ("clone(CLONE_NEWUSER)", "syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    ] {
        let script = format!(
            "my $r = {call}; if ($r == 0 && '{name}' =~ /^clone/) {{ exit 0 }} \
             print $r >= 0 ? 'true' : 'false';"
        );
        attack_in_perl(Isolation::Kernel, &script).await;
    }
    // The x32 number of getpid: answered with "no such call" by the filter or by the kernel.
    let bench = Bench::new();
    let script = "my $r = syscall(0x40000000 + 41, 2, 1, 0); print $!{ENOSYS} ? 'true' : 'false';";
    let script = format!("use Errno; {script}");
    let ran = run(&bench.perl(&script), job(Isolation::Kernel, json!({}))).await;
    assert_eq!(output(&ran), &json!(true));
}

// Other processes, and the end.

#[tokio::test]
async fn the_supervisor_cannot_be_signalled() {
    for level in levels() {
        let bench = Bench::new();
        let sleep = unique_sleep();
        let script = format!("setsid sleep {sleep} & kill -9 $PPID 2>/dev/null; sleep 0.2; echo 1");
        let ran = run(&bench.shell(&script), job(level, json!({}))).await;
        if level.is_at_least(Isolation::Kernel) {
            assert_eq!(output(&ran), &json!(1), "{level}");
        } else {
            // It hurts its own run, and still leaves nothing behind.
            assert_eq!(failed(&ran), Code::SandboxFailed, "{level}");
        }
        assert!(!is_running(&sleep), "{level}");
        assert!(bench.is_clean(), "{level}");
    }
}

#[tokio::test]
async fn a_grandchild_that_leaves_its_session_ends_with_the_run() {
    for level in levels() {
        for cancelled in [true, false] {
            let bench = Bench::new();
            let sleep = unique_sleep();
            let script = format!(
                "setsid sh -c 'setsid sleep {sleep} & exit' </dev/null >/dev/null 2>&1; \
                 echo '{{\"percent\":1}}' > $TASK_PROGRESS_FILE; {}",
                if cancelled { "sleep 600" } else { "echo 1" }
            );
            let adapter = bench.shell(&script);
            let (control, mut handle) = control();
            let job = job(level, json!({}));
            let going = tokio::spawn(async move { adapter.run(job, control).await });
            let told = tokio::time::timeout(HARD_LIMIT, handle.progress.recv()).await.unwrap();
            assert_eq!(told.unwrap().percent, Some(1), "{level}");
            if cancelled {
                runs(&sleep).await;
                handle.cancel.cancel();
            }
            let ran = tokio::time::timeout(HARD_LIMIT, going).await.unwrap().unwrap();
            assert_eq!(ran.ended == Ended::Cancelled, cancelled, "{level}");
            assert!(!is_running(&sleep), "{level}");
            assert!(bench.is_clean());
        }
    }
}

#[tokio::test]
async fn a_dropped_run_leaves_nothing() {
    for level in levels() {
        let bench = Bench::new();
        let sleep = unique_sleep();
        let adapter =
            bench.shell(&format!("setsid sleep {sleep} & echo '{{}}' > $TASK_PROGRESS_FILE; wait"));
        let (control, mut handle) = control();
        let job = job(level, json!({}));
        let going = tokio::spawn(async move { adapter.run(job, control).await });
        tokio::time::timeout(HARD_LIMIT, handle.progress.recv()).await.unwrap().unwrap();
        runs(&sleep).await;
        going.abort();
        assert!(going.await.unwrap_err().is_cancelled());
        assert!(!is_running(&sleep), "{level}");
        assert!(bench.is_clean());
    }
}

#[tokio::test]
async fn a_held_run_stands_still_and_goes_on() {
    for level in levels() {
        let bench = Bench::new();
        let adapter = bench.shell(
            "i=0; while [ $i -lt 20 ]; do echo '{}' > $TASK_PROGRESS_FILE; i=$((i+1)); sleep 0.05; done; echo 7",
        );
        let (control, mut handle) = control();
        let job = job(level, json!({}));
        let began = Instant::now();
        let going = tokio::spawn(async move { adapter.run(job, control).await });
        handle.progress.recv().await.unwrap();
        handle.hold.send(true).unwrap();
        // What was under way arrives; then there is silence.
        let quiet = Duration::from_millis(700);
        while tokio::time::timeout(quiet, handle.progress.recv()).await.is_ok() {}
        assert!(!going.is_finished(), "{level}: it was not held");
        handle.hold.send(false).unwrap();
        let ran = tokio::time::timeout(HARD_LIMIT, going).await.unwrap().unwrap();
        assert_eq!(output(&ran), &json!(7), "{level}");
        // The time held does not count.
        let counted = Duration::from_millis(ran.usage.wall_time_ms.unwrap().get());
        assert!(counted + Duration::from_millis(600) < began.elapsed(), "{level}: {counted:?}");
    }
}

#[test]
fn leftovers_of_a_crash_are_killed_and_nobody_else() {
    let bench = Bench::new();
    let dir = bench.runs().join("run-aaaaaaaaaaaaaaaaaaaaaaaaaa");
    std::fs::create_dir_all(dir.join("work")).unwrap();
    let start = |run: &str| {
        Command::new("sleep")
            .arg("600")
            .env("COMMSD_RUN", run)
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut leftover = start("run-aaaaaaaaaaaaaaaaaaaaaaaaaa");
    let mut other = start("run-bbbbbbbbbbbbbbbbbbbbbbbbbb");
    // A record that names a process by id, but with another start time: the id changed hands.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let record = json!({"boot": boot.trim(), "processes": [[other.id(), 1]], "container": null});
    std::fs::write(dir.join("run.json"), record.to_string()).unwrap();
    std::fs::write(bench.runs().join("notes"), "the owner's").unwrap();
    let began = Instant::now();
    let reaper = std::thread::spawn({
        let runs = bench.runs();
        move || adapter::reap_leftovers(&runs)
    });
    assert!(!leftover.wait().unwrap().success());
    reaper.join().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(other.try_wait().unwrap().is_none(), "a stranger was killed");
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!dir.exists());
    assert!(bench.runs().join("notes").exists());
}

// Isolation that is only said.

#[tokio::test]
async fn a_program_cannot_say_how_it_was_kept_apart() {
    let bench = Bench::new();
    let forged = json!({"effectiveIsolation": "oci", "exit": {"kind": "exited", "code": 0}});
    let ran =
        run(&bench.shell(&format!("echo '{forged}'")), job(Isolation::Kernel, json!({}))).await;
    assert_eq!(output(&ran), &forged);
    assert_eq!(ran.run.effective, Isolation::Kernel);
    assert_eq!(ran.run.limits.isolation, Isolation::Kernel);
    assert!(ran.run.runtime.version.contains("enforced: files network"));
    // One that imitates a stage which refused only spoils its own run.
    let imitation = bench.shell("echo 'commsd sandbox: all is well' >&2; exit 125");
    let ran = run(&imitation, job(Isolation::Kernel, json!({}))).await;
    assert_eq!(failed(&ran), Code::SandboxFailed);
}

#[tokio::test]
async fn a_level_that_is_not_there_is_refused_and_not_replaced() {
    let bench = Bench::new();
    let mut options = bench.options(adapter::AdapterKind::Command);
    options.cmd = Some("true".into());
    options.sandbox.engine = Some(bench.dir.path().join("no-such-engine"));
    options.isolation = Some(Isolation::Oci);
    let error = adapter::Adapter::from_options(options.clone()).unwrap_err();
    assert_eq!(error.code(), "adapter_no_isolation");
    options.isolation = None;
    let adapter = adapter::Adapter::from_options(options).unwrap();
    let mut asked = job(Isolation::Oci, json!({})).policy;
    assert_eq!(
        choose_level(&adapter.profile(1), &asked, true).unwrap_err().code(),
        Code::IsolationUnavailable
    );
    asked.allow_subprocess_fallback = true;
    assert!(
        choose_level(&adapter.profile(1), &asked, true).unwrap().is_at_least(Isolation::Subprocess)
    );
    // And when such a run is made all the same, nothing runs.
    let ran = run(&adapter, job(Isolation::Oci, json!({}))).await;
    assert_eq!(failed(&ran), Code::SandboxFailed);
    assert_eq!(ran.run.exit.kind, ExitKind::SpawnFailed);
}

#[tokio::test]
async fn a_container_gets_every_restriction_and_is_removed() {
    let bench = Bench::new();
    let log = bench.dir.path().join("engine.log");
    // Answers for the image, records its arguments, and runs what stands behind the image.
    let engine = bench.program(
        "podman",
        &format!(
            "#!/bin/sh\nfor word in \"$@\"; do printf '%s\\n' \"$word\"; done >> {0}\n\
             case $1 in\n\
             image) echo 1111111111111111111111111111111111111111111111111111111111111111 ;;\n\
             run) echo '{{\"ran\":true}}' ;;\n\
             esac\necho -- >> {0}\n",
            log.display()
        ),
    );
    let mut options = bench.options(adapter::AdapterKind::Command);
    options.cmd = Some("node /app/main.js 'an argument'".into());
    options.sandbox.engine = Some(engine);
    let adapter = adapter::Adapter::from_options(options).unwrap();
    assert_eq!(adapter.levels().first(), Some(&Isolation::Oci));
    let ran = run(&adapter, job(Isolation::Oci, json!({"canary": 1}))).await;
    assert_eq!(output(&ran), &json!({"ran": true}));
    assert_eq!(
        ran.run.runtime.image_digest.unwrap().to_string(),
        format!("sha256:{}", "1".repeat(64))
    );
    let mut text = String::new();
    std::fs::File::open(&log).unwrap().read_to_string(&mut text).unwrap();
    let calls: Vec<Vec<&str>> = text.split("--\n").map(|call| call.lines().collect()).collect();
    assert_eq!(calls[0][..2], ["image", "inspect"]);
    let started = &calls[1];
    for wanted in [
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pull=never",
        "--rm",
        "--memory=536870912",
        "--memory-swap=536870912",
        "--pids-limit=64",
        "/work:rw,mode=1777,size=67108864",
        "TASK_INPUT_FILE=/run/input.json",
        "TASK_ID=task_adapters01",
    ] {
        assert!(started.contains(&wanted), "{wanted} is missing in {started:?}");
    }
    let image = started.iter().position(|word| *word == "node:22-bookworm-slim").unwrap();
    assert_eq!(started[image + 1..], ["/app/main.js", "an argument"]);
    assert!(!text.contains("canary"), "the input is on a command line");
    let name = started[started.iter().position(|word| *word == "--name").unwrap() + 1];
    assert!(calls.iter().any(|call| call[..] == ["rm", "--force", name]));
}
