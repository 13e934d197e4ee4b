"""How the tests are laid out: one name, one file; what several directories need is in tests/support."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
IMPORT = re.compile(r"^\s*(?:from|import) tests\.(\w+)", re.MULTILINE)


def test_no_two_test_files_have_the_same_name() -> None:
    places = defaultdict(list)
    for file in TESTS.rglob("test_*.py"):
        places[file.name].append(str(file.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_directories_of_tests_import_from_support_only() -> None:
    strangers = {
        (str(file.relative_to(ROOT)), directory)
        for file in TESTS.rglob("*.py")
        for directory in IMPORT.findall(file.read_text())
        if directory not in ("support", file.relative_to(TESTS).parts[0])
    }
    assert strangers == set()
