#!/usr/bin/env python3
"""Time `commsd vault` against the portable Python runtime and against ripgrep, as whole processes.

    cargo build --release && benches/vault.py [--runs N] [--pages 10,200,5000] [--no-git]

Every command is run N times by both engines in turns, each engine in a vault of its own with the same pages of
about 1 KB, by default in a committed Git repository.  Printed are medians in milliseconds and how many times
longer the portable runtime took.  Where rg is there, `rg -F -i -c` is timed over the same pages in the same run:
it reads each page once, on all cores, which no command that looks at every page can avoid.  The last column is
the binary's time by that floor.
The figures hold for a warm cache and for this machine; compare ratios, not milliseconds.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target" / "release" / "commsd"
RUNTIME = ROOT / "src" / "vault" / "portable" / "echoes_vault.py"
PAGES = Path("EchoesVault/pages")
NO_MATCH = "there is no such text"
FILLER = "The boundary is checked by the service that owns the data, never by the caller alone. " * 10


def page_text(number: int) -> str:
    return ("---\ntype: note\nstack: [rust, python]\nstatus: active\nsummary: Page %d about one decision.\n---\n\n"
            "# Page %d\n\nneedle %d\n\n%s\n" % (number, number, number, FILLER))


class Engine(NamedTuple):
    name: str
    prefix: List[str]
    workspace: Path

    def command(self, *words: str) -> List[str]:
        return [*self.prefix, "--workspace", str(self.workspace), *words]

    def run(self, words: Sequence[str], given: Optional[bytes] = None) -> None:
        run(self.command(*words), given)


def run(command: Sequence[str], given: Optional[bytes] = None, allowed: Tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, input=given or b"", stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode not in allowed:
        raise SystemExit("%s: exit %d: %s" % (" ".join(command), done.returncode, done.stderr.decode()[-500:]))


def git(workspace: Path, *words: str) -> None:
    run(["git", "-C", str(workspace), "-c", "user.name=Bench", "-c", "user.email=bench@example.invalid", *words])


def make_vault(engine: Engine, pages: int, in_git: bool) -> None:
    folder = engine.workspace / PAGES
    folder.mkdir(parents=True)
    for number in range(pages):
        (folder / ("page-%05d.md" % number)).write_text(page_text(number), encoding="utf-8")
    if in_git:
        git(engine.workspace, "init", "-q")
    engine.run(["init"])
    if in_git:
        git(engine.workspace, "add", "-A")
        git(engine.workspace, "commit", "-q", "-m", "Vault")


class Case(NamedTuple):
    """A command, and the payload of its n-th run."""
    name: str
    words: List[str]
    payload: Optional[Callable[[Path, int], Dict[str, object]]] = None


def updated_page(workspace: Path, run_number: int) -> Dict[str, object]:
    name = "page-00003.md"
    old = (workspace / PAGES / name).read_text(encoding="utf-8")
    return {"filename": name, "content": page_text(3) + "Run %d.\n" % run_number,
            "expectedSha256": hashlib.sha256(old.encode("utf-8")).hexdigest()}


def new_page(prefix: str) -> Callable[[Path, int], Dict[str, object]]:
    return lambda _, number: {"filename": "%s-%d.md" % (prefix, number), "content": page_text(number)}


CASES = (
    Case("protocol", ["protocol"]),
    Case("hash", ["hash", "page-00003"]),
    Case("search, no match", ["search", NO_MATCH]),
    Case("search, 500 matches", ["search", "needle", "--limit", "500"]),
    Case("append", ["append"], lambda _, number: {"entry": "- Note %d." % number, "agent": "bench"}),
    Case("upsert, update", ["upsert"], updated_page),
    Case("upsert, new", ["upsert"], new_page("new")),
    Case("hydrate", ["hydrate"]),
    Case("rebuild-index", ["rebuild-index"]),
    Case("inspect", ["inspect"]),
    Case("status, card", ["status", "--format", "card"]),
    Case("configure-agents", ["configure-agents"]),
    Case("end", ["end", "--confirm-explicit-user-end"],
         lambda workspace, number: {"dailySummary": "- Done %d." % number, "agent": "bench",
                                    "pages": [new_page("end")(workspace, number)]}),
    Case("start", ["start"]),
    Case("init", ["init"]),
)


def timed(command: Sequence[str], given: Optional[bytes] = None, allowed: Tuple[int, ...] = (0,)) -> float:
    begin = time.perf_counter()
    run(command, given, allowed)
    return (time.perf_counter() - begin) * 1000


def measure(case: Case, engines: Sequence[Engine], runs: int) -> List[float]:
    """Medians per engine; the engines take turns, and the first turn only warms up."""
    spent: List[List[float]] = [[] for _ in engines]
    for number in range(runs + 1):
        for engine, times in zip(engines, spent):
            given = None
            if case.payload is not None:
                given = json.dumps(case.payload(engine.workspace, number)).encode("utf-8")
            took = timed(engine.command(*case.words), given)
            if number > 0:
                times.append(took)
    return [statistics.median(times) for times in spent]


def searched(engine: Engine, query: str, runs: int) -> Tuple[float, Optional[float]]:
    """Medians of the binary's search and of rg, in turns; rg exits 1 where nothing matches."""
    native: List[float] = []
    grep: List[float] = []
    for number in range(runs + 1):
        mine = timed(engine.command("search", query, "--limit", "500"))
        theirs = None
        if shutil.which("rg") is not None:
            theirs = timed(["rg", "-F", "-i", "-c", query, str(engine.workspace / PAGES)], None, (0, 1))
        if number > 0:
            native.append(mine)
            grep += [theirs] if theirs is not None else []
    return statistics.median(native), statistics.median(grep) if grep else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(BINARY))
    parser.add_argument("--runtime", default=str(RUNTIME))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--pages", default="10,200,5000")
    parser.add_argument("--no-git", action="store_true", help="plain folders instead of repositories")
    args = parser.parse_args()
    if not os.access(args.binary, os.X_OK):
        raise SystemExit("%s is missing; run `cargo build --release` first" % args.binary)

    print("Python %s, %s, %d cores, %d runs each" % (
        platform.python_version(), platform.platform(), os.cpu_count() or 0, args.runs))
    print("%-20s %7s %12s %12s %8s %8s" % ("command", "pages", "portable ms", "commsd ms", "ratio", "by rg"))
    for pages in (int(count) for count in args.pages.split(",")):
        home = Path(tempfile.mkdtemp(prefix="vault-bench-"))
        try:
            bench(args, home, pages)
        finally:
            shutil.rmtree(home)
    return 0


def bench(args: argparse.Namespace, home: Path, pages: int) -> None:
    portable = Engine("portable", [sys.executable, args.runtime], home / "portable")
    native = Engine("commsd", [args.binary, "vault"], home / "native")
    for engine in (portable, native):
        make_vault(engine, pages, not args.no_git)
    # the project's own copy does the work; the one in the sources would only start it
    portable = portable._replace(prefix=[sys.executable, str(portable.workspace / ".echoes-vault/echoes_vault.py")])
    nothing, reading = searched(native, NO_MATCH, args.runs)
    for case in CASES:
        slow, fast = measure(case, (portable, native), args.runs)
        print("%-20s %7d %12.1f %12.1f %7.1fx %8s" % (
            case.name, pages, slow, fast, slow / fast, by_floor(fast, reading)), flush=True)
    everything, grep = searched(native, "needle", args.runs)
    for label, mine, theirs in (("no match", nothing, reading), ("every page", everything, grep)):
        if theirs is None:
            print("search against rg: rg is not installed")
        else:
            print("search against rg, %s, %d pages: commsd %.1f ms, rg -F -i -c %.1f ms, %.2f times rg" % (
                label, pages, mine, theirs, mine / theirs), flush=True)


def by_floor(took: float, floor: Optional[float]) -> str:
    return "-" if floor is None else "%.2f" % (took / floor)


if __name__ == "__main__":
    sys.exit(main())
