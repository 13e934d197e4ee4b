"""One name, one test file: a line of a report says which file it is about."""

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def test_no_two_test_files_have_the_same_name() -> None:
    places = defaultdict(list)
    for file in TESTS.rglob("test_*.py"):
        places[file.name].append(str(file.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
