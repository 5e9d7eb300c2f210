//! The fuzz targets over their corpora: every input that once mattered, on every build.

use std::path::{Path, PathBuf};

#[path = "../../fuzz/targets.rs"]
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
        assert!(files.len() >= 20, "{name}: {} files only", files.len());
        for file in files {
            println!("{}", file.display());
            target(&std::fs::read(&file).unwrap());
        }
    }
}

/// A corpus of inputs that are all refused at the door would show nothing.
#[test]
fn corpora_reach_behind_the_door() {
    use commsd::api::types::rpc;
    use commsd::codec::time::UnixMillis;
    use commsd::mesh::first_contact::Datagram;
    use commsd::mesh::wire::cose::CoseSign1;
    use commsd::mesh::wire::frame::Frame;
    use commsd::mesh::wire::revocation::RevocationView;
    use commsd::mesh::wire::token::{ParsedToken, VerifyContext, verify};

    let passes = |target: &str, judge: &dyn Fn(&[u8]) -> bool| {
        let files = corpus(target);
        let passed = files.iter().filter(|file| judge(&std::fs::read(file).unwrap())).count();
        assert!(passed > 0 && passed < files.len(), "{target}: {passed} of {}", files.len());
    };
    let revocations = RevocationView::new();
    let context = VerifyContext {
        now: UnixMillis(1_800_000_000_000),
        bearer: None,
        revocations: &revocations,
    };
    passes("frame", &|bytes| Frame::decode(bytes).is_ok());
    passes("token", &|bytes| {
        CoseSign1::decode(bytes)
            .is_some_and(|token| verify(&ParsedToken::parse(&token), &context).is_ok())
    });
    passes("beacon", &|bytes| Datagram::parse(bytes).is_some());
    passes("mcp_frames", &|bytes| {
        let mut decoder = commsd::mcp::framing::Decoder::default();
        decoder.feed(bytes, &mut Vec::new());
        !decoder.is_over()
    });
    passes("api_line", &|bytes| rpc::read_request(bytes).is_ok_and(|raw| raw.request().is_ok()));
}
