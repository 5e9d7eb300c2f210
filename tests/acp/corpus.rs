//! The fuzz targets over their corpora, on every build.

use std::path::{Path, PathBuf};

#[path = "../../fuzz/acp.rs"]
mod targets;

fn corpus(target: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_target_holds_over_its_corpus() {
    for (name, target) in targets::ALL {
        let files = corpus(name);
        assert!(files.len() >= 12, "{name}: {} files only", files.len());
        for file in files {
            println!("{}", file.display());
            target(&std::fs::read(&file).unwrap());
        }
    }
}

/// Every byte of a corpus file left out, doubled or changed in one bit: a small fuzzer for a build
/// without one.
#[test]
fn every_target_holds_near_its_corpus() {
    for (name, target) in targets::ALL {
        for file in corpus(name) {
            let bytes = std::fs::read(&file).unwrap();
            // Of long files some places, of short ones all.
            let step = (bytes.len() / 60).max(1);
            for at in (0..bytes.len()).step_by(step) {
                let mut without = bytes.clone();
                without.remove(at);
                target(&without);
                for bit in [0, 5] {
                    let mut flipped = bytes.clone();
                    flipped[at] ^= 1 << bit;
                    target(&flipped);
                }
                target(&bytes[..at]);
            }
        }
    }
}

/// A corpus of inputs that are all refused at the door would show nothing.
#[test]
fn corpora_reach_behind_the_door() {
    use commsd::acp::{audit, did, endpoint, invite, json, objects, relay};
    let passes = |target: &str, judge: &dyn Fn(&[u8]) -> bool| {
        let files = corpus(target);
        let passed = files.iter().filter(|file| judge(&std::fs::read(file).unwrap())).count();
        assert!(passed > 0 && passed < files.len(), "{target}: {passed} of {}", files.len());
    };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap_or_default();
    passes("acp_json", &|bytes| json::parse(bytes, 1 << 20).is_ok());
    passes("acp_did", &|bytes| did::Did::parse(&text(bytes)).is_ok());
    passes("acp_resource", &|bytes| {
        let text = text(bytes);
        let parts = text.split_once('\n').unwrap_or_default();
        objects::Resource::parse(parts.0).is_ok() && objects::Resource::parse(parts.1).is_ok()
    });
    passes("acp_object", &|bytes| {
        commsd::acp::value::read_bytes::<objects::Envelope>(bytes, 1 << 20).is_ok()
    });
    passes("acp_jsonl", &|bytes| audit::read_jsonl(bytes).is_ok());
    passes("acp_text", &|bytes| invite::read_invite(&text(bytes)).is_ok());
    passes("acp_text", &|bytes| {
        endpoint::Endpoint::parse(&text(bytes), endpoint::EndpointPolicy::default()).is_ok()
    });
    let parts =
        |bytes: &[u8]| -> Vec<String> { text(bytes).splitn(4, '\n').map(str::to_owned).collect() };
    passes("acp_relay", &|bytes| match parts(bytes).as_slice() {
        [method, path, query, _] => relay::route::find(method, path, query).is_ok(),
        _ => false,
    });
    passes("acp_relay", &|bytes| {
        parts(bytes).last().is_some_and(|token| relay::auth::parse(token).is_ok())
    });
}
