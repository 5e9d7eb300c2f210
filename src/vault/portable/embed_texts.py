#!/usr/bin/env python3
"""Copy the texts of ../texts into the constants of echoes_vault.py.

    python3 embed_texts.py          rewrite the constants
    python3 embed_texts.py --check  exit 1 if they differ from the files

The table in ../texts/README.md says which file is which constant.
"""
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
RUNTIME = HERE / "echoes_vault.py"
TEXTS = HERE.parent / "texts"
SECTION = re.compile(r"(?<=\n)# -+ installed texts\n.*?\n(?=\n\nif __name__)", re.DOTALL)
ROW = re.compile(r"^\| `([\w.-]+)` \| .*?\| `([A-Z_]+)` \|", re.MULTILINE)


def section() -> str:
    parts = ["# ----------------------------------------------------------------------------- installed texts\n"]
    for name, constant in ROW.findall((TEXTS / "README.md").read_text(encoding="utf-8")):
        text = (TEXTS / name).read_text(encoding="utf-8")
        if "\\" in text or '"""' in text or not text.endswith("\n"):
            raise SystemExit(name + ": a backslash, three quotes, or no final newline")
        parts.append('%s = """\\\n%s"""\n' % (constant, text))
    return "\n".join(parts)


def main() -> int:
    source = RUNTIME.read_text(encoding="utf-8")
    wanted, count = SECTION.subn(lambda _: section(), source)
    if count != 1:
        raise SystemExit("the section of texts was not found once")
    if "--check" in sys.argv[1:]:
        return int(wanted != source)
    RUNTIME.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
