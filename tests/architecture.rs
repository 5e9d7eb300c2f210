//! The house keeps its floors: a room uses only rooms below it, the protocol floors read no clock,
//! no randomness and no runtime, and stdout belongs to the command line.

// Clippy's leave for tests does not reach the helpers beside them.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Floor of a room, from its path below `src`.
fn floor(module: &str) -> Option<u8> {
    let first = module.split('/').next().unwrap_or(module).trim_end_matches(".rs");
    Some(match first {
        "codec" | "identity" => 1,
        "api" if module.starts_with("api/client") => 5,
        "api" => 1,
        "mesh" | "vault" | "acp" => 2,
        "store" | "runtime" => 3,
        "daemon" => 4,
        "cli" | "mcp" | "web" => 5,
        _ => return None,
    })
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            out.push(path);
        }
    }
}

/// Every source file with its path below `src` and its text without comments and unit tests.
fn code() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    files
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
            let text = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .collect::<Vec<_>>()
                .join("\n");
            (name, text)
        })
        .filter(|(name, _)| !name.ends_with("tests.rs"))
        .collect()
}

/// Rooms that a text names by `crate::`.
fn used(text: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for part in text.split("crate::").skip(1) {
        let path: String =
            part.chars().take_while(|c| c.is_alphanumeric() || "_:".contains(*c)).collect();
        rooms.push(path.replace("::", "/"));
    }
    rooms
}

#[test]
fn nobody_takes_the_stairs_the_wrong_way() {
    let mut wrong = Vec::new();
    for (name, text) in code() {
        let Some(here) = floor(&name) else { continue };
        for room in used(&text) {
            let Some(there) = floor(&room) else { continue };
            if there > here {
                wrong.push(format!("{name} (floor {here}) uses {room} (floor {there})"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn surfaces_use_only_the_api_and_the_first_floor() {
    let mut wrong = Vec::new();
    for (name, text) in code() {
        if floor(&name) != Some(5) {
            continue;
        }
        for room in used(&text) {
            // A project's own vault is worked on in process, without a daemon (decision 31): by its
            // command line, and by the tool for models.
            let on_vault = name.starts_with("cli/vault") || name == "mcp/vault.rs";
            let in_process = on_vault && room.starts_with("vault");
            // So are keys, objects and logs of the collaboration protocol, and a relay's registry
            // (decision 53).
            let on_acp = name.starts_with("cli/acp/");
            let below = ["acp/", "runtime/acp_transport", "runtime/clock"];
            let in_process = in_process || on_acp && below.iter().any(|p| room.starts_with(p));
            // An owner's office may be a process of its own.
            let hosted = name.starts_with("cli/acp/hosted/");
            let office = ["daemon/acp/", "runtime/adapter"];
            let in_process = in_process || hosted && office.iter().any(|p| room.starts_with(p));
            // The page's server knows nothing of what it serves (decision 190).
            let page = name.starts_with("web") && room.starts_with("runtime/page_server");
            // That a client is gone the system tells, by a call that needs unsafe code (decision 242).
            let stdin = name == "mcp/transport.rs" && room.starts_with("runtime/sys");
            let in_process = in_process || page || stdin;
            if matches!(floor(&room), Some(2..=4)) && !in_process {
                wrong.push(format!("{name} uses {room}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_protocol_floors_take_time_and_randomness_as_input() {
    let forbidden = [
        "Instant::now",
        "SystemTime::now",
        "tokio",
        "thread_rng",
        "rand::",
        "getrandom",
        "std::net::Tcp",
        "std::net::Udp",
        "std::fs",
        "std::thread",
    ];
    let mut wrong = Vec::new();
    for (name, text) in code() {
        let pure = ["codec/", "mesh/", "acp/", "vault/plan"].iter().any(|p| name.starts_with(p));
        // Checking signatures is arithmetic; a log has tens of thousands, and all cores do it.
        let counts = |word: &str| name == "acp/audit/verify.rs" && word == "std::thread";
        for word in forbidden.iter().filter(|word| pure && text.contains(**word) && !counts(word)) {
            wrong.push(format!("{name} names {word}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_command_line_prints() {
    let mut wrong = Vec::new();
    for (name, text) in code() {
        let allowed = name.starts_with("cli/") || name == "main.rs";
        if !allowed && (text.contains("println!") || text.contains("eprint")) {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Names and versions of all packages of the build without optional features.
fn packages() -> BTreeSet<(String, String)> {
    let read = |file: &str| -> toml::Table {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        fs::read_to_string(path).unwrap().parse().unwrap()
    };
    let manifest = read("Cargo.toml");
    assert!(manifest["features"].get("default").is_none());
    let optional: BTreeMap<&String, &str> = manifest["dependencies"]
        .as_table()
        .unwrap()
        .iter()
        .filter(|(_, said)| said.get("optional").and_then(toml::Value::as_bool) == Some(true))
        .map(|(name, said)| (name, said["version"].as_str().unwrap()))
        .collect();
    let lock = read("Cargo.lock");
    let text = |value: &toml::Value| value.as_str().unwrap().to_owned();
    let all = lock["package"].as_array().unwrap();
    let mut found = BTreeSet::new();
    let mut open = vec![("commsd".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    while let Some((name, version)) = open.pop() {
        if !found.insert((name.clone(), version.clone())) {
            continue;
        }
        let is_it = |p: &&toml::Value| text(&p["name"]) == name && text(&p["version"]) == version;
        let package = all.iter().find(is_it).unwrap();
        let needs = package.get("dependencies").and_then(toml::Value::as_array);
        for need in needs.into_iter().flatten().map(text) {
            // "name", or "name version" where there are several.
            let (need, which) = need.split_once(' ').unwrap_or((&need, ""));
            let versions = all.iter().filter(|p| text(&p["name"]) == need);
            let version =
                versions.map(|p| text(&p["version"])).find(|v| which.is_empty() || v == which);
            let version = version.unwrap();
            let left_out = optional.iter().any(|(o, at)| *o == need && version.starts_with(at));
            if !(name == "commsd" && left_out) {
                open.push((need.to_owned(), version));
            }
        }
    }
    found
}

#[test]
fn one_generation_of_cryptography_and_one_provider() {
    let packages = packages();
    let versions = |wanted: &str| packages.iter().filter(|(name, _)| name == wanted).count();
    for name in
        ["p256", "ed25519-dalek", "curve25519-dalek", "sha2", "elliptic-curve", "rustls", "ring"]
    {
        assert_eq!(versions(name), 1, "{name} must be in the build once");
    }
    for name in ["aws-lc-rs", "openssl", "native-tls", "ciborium", "minicbor", "pgp", "rsa"] {
        assert_eq!(versions(name), 0, "{name} must not be in the build");
    }
}

/// What `docs/findings.md` has a row for: D1 to D32 of the reference, and the field reports.
const REPORTS: &[(&str, &[u8])] = &[
    ("L", &[1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 20]),
    ("W", &[1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 14]),
    ("I", &[1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18]),
    ("K", &[1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 16, 17, 19, 20]),
    ("S", &[1, 2, 3, 5, 6, 7, 8, 11, 12, 14]),
    ("X", &[1, 2, 4, 5, 7, 8, 9, 10, 11, 12]),
    ("R", &[1, 2, 4, 5, 6, 7, 8]),
    ("N", &[1, 2, 4, 5]),
    ("C", &[1, 2, 3, 5]),
    ("H", &[2, 3, 5]),
];

/// What went wrong elsewhere, row by row, and the test that shows it is not so here.
#[test]
fn every_finding_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("tests"), &mut files);
    let all: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let document = fs::read_to_string(root.join("docs/findings.md")).unwrap();
    let rows: Vec<Vec<&str>> = document
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| id |"))
        .filter(|line| !line.starts_with("| --- |"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let ids: Vec<String> = rows.iter().map(|row| row[0].to_owned()).collect();
    let mut wanted: Vec<String> = (1..=32).map(|n| format!("D{n}")).collect();
    wanted.extend(
        REPORTS.iter().flat_map(|(kind, numbers)| {
            numbers.iter().map(move |number| format!("{kind}{number}"))
        }),
    );
    assert_eq!(ids, wanted);
    for row in rows {
        let test = row.last().unwrap().trim_matches('`');
        let is_test = |text: &String| {
            text.split(&format!("fn {test}()")).next().is_some_and(|before| {
                before.len() < text.len()
                    && before.rsplit("\n\n").next().is_some_and(|head| head.contains("test"))
            })
        };
        assert!(all.iter().any(is_test), "{}: no test {test}", row[0]);
    }
}
