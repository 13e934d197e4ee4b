"""src/ecluse/cli/commands.json and docs/cli.md are generated (`make docs`): they say what the API offers."""

from pathlib import Path

import pytest

from ecluse.cli.document import commands_of
from tools.commands import as_document, as_json, document

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def commands() -> list[dict]:
    return commands_of(document())


def test_the_packaged_commands_are_those_of_the_document(commands) -> None:
    assert (ROOT / "src/ecluse/cli/commands.json").read_text() == as_json(commands)


def test_the_reference_is_the_one_that_the_commands_make(commands) -> None:
    assert (ROOT / "docs/cli.md").read_text() == as_document(commands)


def test_every_command_has_a_help_and_a_grammar_of_its_own(commands) -> None:
    names = [one["name"] for one in commands]
    assert len(names) == len(set(names))
    assert [one["name"] for one in commands if not one["help"]] == []
    for one in commands:
        options = [name for field in one["fields"] for name in (field["option"], field.get("short")) if name]
        assert len(options) == len(set(options)), one["name"]
        assert not {"--json", "--help", "--body", "--all"} & set(options), one["name"]
