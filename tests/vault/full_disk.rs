//! A disk that is really full: a small file system in memory, mounted in a namespace of the tests' own.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::{BINARY, PAGE, Space, finish};

/// What is done on the full file system: `$1` is the binary, `$2` where it is mounted, `$3` where results
/// go. Every step prints its exit status; what it printed is in `$3`.
const SCRIPT: &str = r#"
set -u
binary=$1 disk=$2 results=$3
mount -t tmpfs -o size=1m,mode=0700 none "$disk" || exit 77
vault() { name=$1; shift; "$binary" vault --workspace "$disk" "$@" <"$results/in-$name" >"$results/out-$name" 2>"$results/err-$name"; echo "$name $?"; }
fill() { head -c 2000000 /dev/zero >"$disk/ballast" 2>/dev/null; }
empty() { : >"$disk/ballast"; }
listing() { (cd "$disk" && find . -type f ! -name ballast ! -name state.json -exec sha256sum {} + | sort) >"$results/list-$1"; }
fill; vault init-full init; find "$disk" -name '*.tmp' -o -name lock >"$results/left-init"
empty; vault init init
vault upsert upsert
listing before
# Room for the lock, which is created first, and for nothing else.
fill; rm -f "$disk/.echoes-vault/state.json.bak"
for command in append update new end upgrade hydrate; do
    case $command in
    update|new) vault $command-full upsert ;;
    end) vault end-full end --confirm-explicit-user-end ;;
    *) vault $command-full $command ;;
    esac
done
vault inspect-full inspect
find "$disk" -name '*.tmp' -o -name lock >"$results/left"
listing after
empty
vault append append; vault update upsert; vault new upsert
vault end end --confirm-explicit-user-end; vault upgrade upgrade; vault inspect inspect
find "$disk" -name '*.tmp' -o -name lock >"$results/left-after"
"#;

/// Runs the script in a mount namespace of its own; `None` where that is not permitted.
fn run(space: &Space, disk: &Path, results: &Path) -> Option<Vec<(String, i32)>> {
    // As root a mount namespace is enough; others need one of users as well.
    for flags in [&["-m"][..], &["-U", "-r", "-m"]] {
        let mut command = Command::new("unshare");
        command.args(flags).args(["sh", "-c", SCRIPT, "sh", BINARY]).arg(disk).arg(results);
        space.surround(&mut command);
        command.stdin(Stdio::piped());
        if Command::new("unshare")
            .args(flags)
            .arg("true")
            .output()
            .is_ok_and(|o| o.status.success())
        {
            let answer = finish(command, b"");
            if answer.code == Some(77) {
                continue;
            }
            assert_eq!(answer.code, Some(0), "{answer:?}");
            let step = |line: &str| {
                let (name, code) = line.split_once(' ').unwrap();
                (name.to_owned(), code.parse().unwrap())
            };
            return Some(answer.stdout.lines().map(step).collect());
        }
    }
    None
}

#[test]
fn a_full_disk_is_named_and_leaves_everything_as_it_was() {
    let space = Space::empty();
    let (disk, results) = (space.path("disk"), space.outside.clone());
    fs::create_dir(&disk).unwrap();
    let hash = {
        let other = Space::new();
        other.send(&["upsert"], &json!({"filename": "a", "content": PAGE})).json()["sha256"].clone()
    };
    let changed = format!("{PAGE}More.\n{}", "x".repeat(20_000));
    let update = json!({"filename": "a", "content": changed, "expectedSha256": hash});
    let new = json!({"filename": "b", "content": PAGE});
    let end = json!({"dailySummary": "- done", "pages": [{"filename": "c", "content": PAGE}]});
    let inputs = [
        ("upsert", json!({"filename": "a", "content": PAGE})),
        ("append", json!({"entry": "x".repeat(20_000)})),
        ("update", update),
        ("new", new),
        ("end", end),
    ];
    for name in
        ["init", "upsert", "append", "update", "new", "end", "upgrade", "hydrate", "inspect"]
    {
        let input = inputs.iter().find(|(of, _)| *of == name).map(|(_, input)| input.to_string());
        for suffix in ["", "-full"] {
            fs::write(results.join(format!("in-{name}{suffix}")), input.as_deref().unwrap_or(""))
                .unwrap();
        }
    }
    let Some(steps) = run(&space, &disk, &results) else {
        eprintln!(
            "skipped: this system lets the test neither make a mount namespace nor mount in one"
        );
        return;
    };
    let text = |name: &str| fs::read_to_string(results.join(name)).unwrap();
    assert_eq!(steps.len(), 16, "{steps:?}");
    for (name, code) in &steps {
        let (out, err) = (text(&format!("out-{name}")), text(&format!("err-{name}")));
        if !name.ends_with("-full") || name == "inspect-full" {
            assert_eq!((*code, err.as_str()), (0, ""), "{name}");
            continue;
        }
        assert_eq!((*code, out.as_str()), (2, ""), "{name}: {err}");
        let error: Value = serde_json::from_str(&err).unwrap();
        let message = error["error"].as_str().unwrap();
        assert_eq!(error["ok"], false);
        assert!(message.contains("No space left on device"), "{name}: {message}");
        assert!(
            message.contains("EchoesVault") || message.contains(".echoes-vault/"),
            "{name}: {message}"
        );
    }
    for left in ["left-init", "left", "left-after"] {
        assert_eq!(text(left), "", "{left}");
    }
    assert_eq!(text("list-after"), text("list-before"));
    assert!(text("list-before").contains("EchoesVault/pages/a.md"));
}
