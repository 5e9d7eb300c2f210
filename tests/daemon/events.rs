//! `docs/events.md` and the code name the same events with the same fields.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use commsd::daemon::logging;
use commsd::mesh::log::{self, Level, Spec};
use commsd::runtime::{self, local_socket};

fn table(specs: &[Spec]) -> String {
    let mut out = String::from("| event | level | fields | meaning |\n| --- | --- | --- | --- |\n");
    for (name, level, fields, meaning) in specs {
        let level = match level {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
        };
        let fields = fields.iter().map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
        writeln!(out, "| `{name}` | {level} | {fields} | {meaning} |").unwrap();
    }
    out
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

#[test]
fn the_document_holds_every_event_with_its_fields() {
    let text = fs::read_to_string(root().join("docs/events.md")).unwrap();
    for specs in [log::CATALOGUE, logging::CATALOGUE, runtime::CATALOGUE, local_socket::CATALOGUE] {
        let expected = table(specs);
        assert!(
            text.contains(&expected),
            "docs/events.md must contain this table as it stands:\n{expected}"
        );
    }
    let rows = text.lines().filter(|line| line.starts_with("| `")).count();
    let known = log::CATALOGUE.len()
        + logging::CATALOGUE.len()
        + runtime::CATALOGUE.len()
        + local_socket::CATALOGUE.len();
    assert_eq!(rows, known, "no other rows");
}

#[test]
fn events_written_directly_are_in_the_catalogue() {
    fn walk(dir: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else {
                let text = fs::read_to_string(&path).unwrap_or_default();
                for part in text.split("event = \"").skip(1) {
                    found.push(part.split('"').next().unwrap().to_owned());
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join("src"), &mut found);
    assert!(!found.is_empty());
    for name in found {
        assert!(
            logging::CATALOGUE
                .iter()
                .chain(runtime::CATALOGUE)
                .chain(local_socket::CATALOGUE)
                .any(|(known, ..)| *known == name),
            "event {name} is not in the catalogue"
        );
    }
}
