"""src/ecluse/cli/commands.json and docs/cli.md are generated (`make docs`): they say what the API offers."""

import re
from pathlib import Path

import pytest

from ecluse.cli.catalogue import CONNECTION, Local, find
from ecluse.cli.document import commands_of
from ecluse.cli.local import COMMANDS
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


QUOTED = re.compile(r"`ecluse ([^`\n]+)`|^ *\$ ecluse (.+)|^ {4}ecluse (.+)", re.MULTILINE)
EVERYWHERE = {"--json", "--help", "--body", "--all", "--yes", "--wait", "--timeout", "--no-wait", "--version"}


def test_commands_that_documents_and_messages_quote_have_the_options_they_name(commands) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    connection = {option.split()[0] for option in CONNECTION}
    wrong = []
    for page in pages:
        for quoted in QUOTED.findall(page.read_text()):
            words = "".join(quoted).replace('"', " ").split()
            named = [word.split("=")[0] for word in words if word.startswith("--")]
            found = find([*COMMANDS, *commands], [word for word in words if not word.startswith("--")]).command
            if found is None or isinstance(found, Local):
                continue
            known = {name for field in found["fields"] for name in (field["option"], f"--{field.get('short')}")}
            if unknown := set(named) - known - connection - EVERYWHERE:
                wrong.append((str(page.relative_to(ROOT)), " ".join(words), sorted(unknown)))
    assert wrong == []
