"""docs/state_machines.md is generated (`make docs`)."""

from pathlib import Path

from ecluse.engine import PLAIN, State
from tools.state_machines import BEGIN, MACHINES, NEUTRAL, RUNS, page

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "state_machines.md"


def test_the_page_is_the_one_that_the_tables_print() -> None:
    assert DOCUMENT.read_text() == page()


def test_every_state_has_a_meaning_and_can_be_reached() -> None:
    assert set(NEUTRAL) == set(State)
    for machine in MACHINES:
        reached = {after for moves in machine.moves.values() for after in moves}
        assert reached == set(machine.meaning), machine.title
        assert set(machine.moves) <= {BEGIN, *machine.meaning}, machine.title


def test_the_moves_of_a_run_are_those_that_the_engine_obeys() -> None:
    assert {word: set(to) for word, to in RUNS.moves.items() if word} == {w: set(to) for w, to in PLAIN.moves.items()}
