//! The service files that come with commsd.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn contrib(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib").join(name)
}

/// What a service file's command line says must be one that the binary takes.
fn checked(arguments: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_commsd"))
        .args(arguments)
        .arg("--check")
        .env_clear()
        .env("HOME", home.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

#[test]
fn the_systemd_unit_says_what_the_daemon_relies_on() {
    let text = std::fs::read_to_string(contrib("systemd/commsd.service")).unwrap();
    let mut section = "";
    let mut settings = HashMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => section = name,
            None => {
                let (key, value) = line.split_once('=').expect(line);
                let before = settings.insert((section, key), value);
                assert_eq!(before, None, "{line}");
            }
        }
    }
    for (section, key, value) in [
        ("Service", "Type", "notify"),
        ("Service", "Restart", "on-failure"),
        ("Service", "RestartPreventExitStatus", "64"),
        ("Service", "UMask", "0077"),
        ("Service", "NoNewPrivileges", "yes"),
        ("Install", "WantedBy", "default.target"),
    ] {
        assert_eq!(settings.get(&(section, key)), Some(&value), "{key}");
    }
    for (section, key) in [
        ("Unit", "StartLimitIntervalSec"),
        ("Unit", "StartLimitBurst"),
        ("Service", "WatchdogSec"),
        ("Service", "RestartSec"),
        ("Service", "TimeoutStopSec"),
    ] {
        let value: u32 = settings[&(section, key)].parse().unwrap();
        assert!(value > 0, "{key}");
    }
    let mut command = settings[&("Service", "ExecStart")].split(' ');
    assert!(command.next().unwrap().ends_with("/commsd"));
    checked(&command.collect::<Vec<_>>());
}

#[test]
fn systemd_understands_every_line_of_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let unit = std::fs::read_to_string(contrib("systemd/commsd.service")).unwrap();
    let unit = unit.replace("%h/.cargo/bin/commsd", env!("CARGO_BIN_EXE_commsd"));
    let path = dir.path().join("commsd.service");
    std::fs::write(&path, unit).unwrap();
    let verified = Command::new("systemd-analyze")
        .args(["--user", "--man=no", "verify"])
        .arg(&path)
        .env("XDG_RUNTIME_DIR", dir.path())
        .output();
    match verified {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no systemd-analyze on this machine");
        }
        Err(error) => panic!("{error}"),
        Ok(output) => {
            // It exits with 0 also when it ignores a line; other units may be complained of too.
            let complaints = String::from_utf8_lossy(&output.stderr);
            let ours: Vec<_> = complaints.lines().filter(|l| l.contains("commsd")).collect();
            assert!(output.status.success() && ours.is_empty(), "{complaints}");
        }
    }
}

#[test]
fn the_launchd_agent_says_what_the_daemon_relies_on() {
    let path = contrib("launchd/local.commsd.plist");
    let agent = plist::Value::from_file(&path).unwrap();
    let agent = agent.as_dictionary().unwrap();
    let string = |key: &str| agent.get(key).and_then(plist::Value::as_string);
    let number = |key: &str| agent.get(key).and_then(plist::Value::as_unsigned_integer);
    assert_eq!(string("Label"), path.file_stem().unwrap().to_str());
    assert_eq!(agent.get("RunAtLoad").and_then(plist::Value::as_boolean), Some(true));
    let keep_alive = agent.get("KeepAlive").and_then(plist::Value::as_dictionary).unwrap();
    let on_success = keep_alive.get("SuccessfulExit").and_then(plist::Value::as_boolean);
    assert_eq!((on_success, keep_alive.len()), (Some(false), 1));
    assert!(number("ThrottleInterval").unwrap() >= 10);
    assert_eq!(number("Umask"), Some(0o077));
    let arguments = agent.get("ProgramArguments").and_then(plist::Value::as_array).unwrap();
    let arguments: Vec<_> = arguments.iter().map(|a| a.as_string().unwrap()).collect();
    let (program, arguments) = arguments.split_first().unwrap();
    assert!(Path::new(program).is_absolute() && program.ends_with("/commsd"));
    checked(arguments);
    // launchd reads no keys that it does not know, and says nothing about them.
    let known = [
        "Label",
        "ProgramArguments",
        "RunAtLoad",
        "KeepAlive",
        "ThrottleInterval",
        "ExitTimeOut",
        "Umask",
    ];
    assert!(agent.keys().all(|key| known.contains(&key.as_str())));
}
