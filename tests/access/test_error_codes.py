"""The tables of error codes have every code of the source, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecluse.access.envelope import CODES, STATUS
from ecluse.access.error_codes import REFUSALS
from ecluse.engine.runs.start import KeyTaken
from ecluse.insight.outcome_codes import FAILURES
from ecluse.settings import Settings

SOURCE = Path(__file__).resolve().parents[2] / "src" / "ecluse"
# Packages whose errors reach callers and items. `cli` and `demo` raise none of their own that do.
ROOMS = ("access", "api", "engine", "flows", "insight", "notify", "realtime", "retention", "vendors", "web")
FILES = [path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py"))]
FILES = [path for path in FILES if path.name not in ("error_codes.py", "outcome_codes.py")]
FILES += [SOURCE / "base" / "errors.py", SOURCE / "db" / "reads.py"]
# Words in capitals that are no error codes, and codes that only a person at the command line sees.
OTHER_WORDS = {
    *("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "SELECT", "ASC", "DESC"),
    *("ALL", "GROUP", "SELF", "UTC", "NFKD", "WARNING", "RLM", "FAILED", "IGNORED", "TRANSCRIPTION"),
    *("MANUAL", "DAILY", "WEEKLY", "MONTHLY", "CRON"),
    *("ERROR", "SET_UP", "RUNS_LOCKED"),
    # Statuses of rule runs, a currency, and reasons why a rule leaves a variant out
    *("PREVIEW", "QUEUED", "APPLYING", "APPLIED", "PARTIAL", "ROLLED_BACK", "EUR"),
    # Registers, statuses and triggers of enrichment
    *("ENRICHMENT", "API_RECHERCHE_ENTREPRISES", "INPI_RNE", "API_ENTREPRISE_RCS", "PENDING", "RUNNING", "SUCCESS"),
    *("SIREN", "SWEEP", "REQUEST_CREATED", "REQUEST_OPENED", "MANUAL_REFRESH"),
    *("NO_COST", "NEGATIVE_PRICE", "ABSURD_PRICE", "FREE", "NO_PRICE_FITS", "REVERSED", "UNCHANGED"),
}


def words() -> dict[str, set[str]]:
    """Return the literals in capitals, and where they stand."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                quoted = re.findall(r"'([A-Z]+(?:_[A-Z]+)+)'", node.value)  # in SQL
                plain = [node.value] if re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", node.value) else []
                for word in (*quoted, *plain):
                    found.setdefault(word, set()).add(path.name)
    return found


def is_setting(word: str) -> bool:
    return any(name == word or (word.endswith("_") and name.startswith(word)) for name in Settings.model_fields)


def in_table(word: str) -> str:
    return "VENDOR_ERROR_*" if word.startswith("VENDOR_ERROR_") else word


def test_every_code_in_the_source_is_in_a_table():
    missing = {
        word: places
        for word, places in words().items()
        if in_table(word) not in REFUSALS | FAILURES and word not in OTHER_WORDS and not is_setting(word)
    }
    assert missing == {}


def test_no_table_has_a_code_that_the_source_does_not_have():
    used = {in_table(word) for word in words()}
    assert (REFUSALS | FAILURES).keys() - used == set()


def of_conflicts() -> Iterator[str]:
    """Yield the codes that are given to errors which have a status by their class."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {kind.__name__ for kind in STATUS}:
                yield from (ast.literal_eval(one.value) for one in node.keywords if one.arg == "code")


def test_every_refusal_in_the_table_is_one_of_the_api():
    answered = {code for _, _, code in refused()} | {*CODES.values(), *(kind.code for kind in STATUS), *of_conflicts()}
    answered.add(KeyTaken.code)
    assert REFUSALS.keys() - answered == set()


def refused() -> Iterator[tuple[str, int, str]]:
    """Yield file, status and code of every refusal that is written with both."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                match [one.value for one in node.args if isinstance(one, ast.Constant)]:
                    case [int() as status, str() as code, *_] if 400 <= status < 600 and re.fullmatch("[A-Z_]+", code):
                        yield path.name, status, code
                    case [str() as code, *_] if getattr(node.func, "id", "") == "limit_exceeded":
                        yield path.name, 429, code  # by a limit


def test_every_refusal_has_the_status_of_its_code():
    written = list(refused())
    assert len(written) > 40
    wrong = [one for one in written if one[1] not in (REFUSALS[one[2]].status, REFUSALS[one[2]].also)]
    assert wrong == []
    assert [one for status, one in CODES.items() if REFUSALS[one].status != status] == []
    assert [kind for kind, status in STATUS.items() if REFUSALS[kind.code].status != status] == []


@pytest.mark.parametrize("table", [REFUSALS, FAILURES], ids=["refusals", "failures"])
def test_meaning_and_remedy_are_sentences(table):
    texts = [text for one in table.values() for text in (one.meaning, one.remedy)]
    assert [text for text in texts if not (text[0].isupper() and text.endswith("."))] == []


def test_messages_of_refusals_are_sentences_or_begin_with_a_field():
    files = [*FILES, *(SOURCE / "base").rglob("*.py")]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    kinds = ("InvalidInput", "NotFound", "Conflict", "Refused", "BadCredentials", "limit_exceeded")
    given = [one for call in calls if getattr(call.func, "id", "") in kinds for one in call.args]
    first = [one.values[0] if isinstance(one, ast.JoinedStr) else one for one in given]
    texts = [one.value for one in first if isinstance(one, ast.Constant) and " " in str(one.value)]
    assert len(texts) > 100
    begins = re.compile(r"[A-Z]|[\w.-]+( or [\w.-]+)?: ")  # `period: …`, `fiche_ids or period: …`
    assert [text for text in texts if not begins.match(text)] == []
