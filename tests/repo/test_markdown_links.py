"""A relative link in a document points to something that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
ELSEWHERE = ("http:", "https:", "mailto:", "#")


def documents() -> list[Path]:
    hidden_or_installed = (".", "node_modules")
    return [
        file
        for file in sorted(ROOT.rglob("*.md"))
        if not any(part.startswith(hidden_or_installed) for part in file.relative_to(ROOT).parts)
    ]


def test_relative_links_point_to_existing_files() -> None:
    broken = [
        f"{file.relative_to(ROOT)}: {target}"
        for file in documents()
        for target in LINK.findall(CODE.sub("", file.read_text()))
        if not target.startswith(ELSEWHERE) and not (file.parent / target.split("#")[0]).exists()
    ]
    assert broken == []
