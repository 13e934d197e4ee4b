"""What the agent's file allows, and what the agent itself is made of."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import ecluse.agent
from ecluse.agent.job_types import Rejected, program_of
from ecluse.agent.settings import load

FILE = """
[shell]
allow = ["/bin/backup *", "/bin/report daily", "/bin/sync --host *.example"]
[http]
allow = ["https://hooks.example/jobs/", "https://one.example/exact"]
"""


@pytest.fixture
def allows(tmp_path):
    (tmp_path / "agent.toml").write_text(FILE)
    types = load(tmp_path / "agent.toml").types

    def allows(kind, payload):
        try:
            return bool(program_of(types, kind, payload))
        except Rejected as refused:
            return refused.code

    return allows


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("/bin/backup", True),
        ("/bin/backup --all 'two words'", True),
        ("/bin/backup; rm -rf /", "NOT_ALLOWED"),  # the first word is `/bin/backup;`
        ("/bin/report daily", True),
        ("/bin/report daily --more", "NOT_ALLOWED"),
        ("/bin/sync --host a.example", True),
        ("/bin/sync --host a.example x", "NOT_ALLOWED"),
        ("backup", "NOT_ALLOWED"),
        ("/bin/../bin/backup", "NOT_ALLOWED"),
        ("", "BAD_PAYLOAD"),
        ("'", "BAD_PAYLOAD"),
        (["/bin/backup", 1], "BAD_PAYLOAD"),
        (["/bin/backup", "a\0b"], "BAD_PAYLOAD"),
    ],
)
def test_commands_are_compared_word_by_word(allows, command, allowed):
    assert allows("shell", {"command": command}) == allowed


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hooks.example/jobs/7", True),
        ("https://HOOKS.example/jobs/7?x=1", True),
        ("https://one.example/exact", True),
        ("https://one.example/exact/more", "NOT_ALLOWED"),
        ("https://hooks.example/other", "NOT_ALLOWED"),
        ("https://hooks.example.net/jobs/7", "NOT_ALLOWED"),
        ("https://hooks.example@evil.example/jobs/7", "NOT_ALLOWED"),
        ("http://hooks.example/jobs/7", "NOT_ALLOWED"),
        ("https://hooks.example:8443/jobs/7", "NOT_ALLOWED"),
        ("https://hooks.example/jobs/../admin", "NOT_ALLOWED"),
        ("https://hooks.example/jobs/%2E%2e/admin", "NOT_ALLOWED"),
        ("https://hooks.example/jobs/a b", "NOT_ALLOWED"),
        ("https://hooks.example/jobs/\r\nX: y", "NOT_ALLOWED"),
    ],
)
def test_urls_are_compared_by_origin_and_path(allows, url, allowed):
    assert allows("http", {"url": url}) == allowed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "allows no job type"),
        ("slots = 99\n[noop]", "slots must be a whole number from 1 to 16"),
        ("[noop]\nallow = []", "unknown allow"),
        ("[backup]", "give `run`"),
        ("[shell]\nallow = 'x'", "allow must be a list of texts"),
        ("[shell", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, text, why):
    (tmp_path / "agent.toml").write_text(text)
    with pytest.raises(ValueError, match=why):
        load(tmp_path / "agent.toml")


def test_the_agent_uses_the_standard_library_alone_and_stays_small():
    files = sorted(Path(ecluse.agent.__file__).parent.glob("*.py"))
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            imported |= {one for one in names if not one.startswith("ecluse.agent")}
    assert {one.split(".")[0] for one in imported} <= sys.stdlib_module_names
    assert sum(len(file.read_text().splitlines()) for file in files) < 800
