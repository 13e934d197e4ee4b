"""Counts in sentences: one target is, two targets are; and headings of forms, whose words are in the right order."""

from __future__ import annotations

import pytest

from ecluse.base.text import count_of
from ecluse.web.actions import ACTIONS, in_words, titled


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (0, ("target",), "0 targets"),
        (1, ("target",), "1 target"),
        (1_200, ("target",), "1,200 targets"),
        (1, ("target is", "targets are"), "1 target is"),
        (2, ("target is", "targets are"), "2 targets are"),
    ],
)
def test_a_count_and_its_words_agree(number, words, said):
    assert count_of(number, *words) == said


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "No failed targets are applied again."),
        ({"FAILED": 1}, "1 failed target is applied again."),
        ({"FAILED": 2}, "2 failed targets are applied again."),
    ],
)
def test_a_form_says_how_many_records_it_changes(counts, said):
    assert in_words(ACTIONS["retry_rule_run"].says, {}, {"counts": counts}).startswith(said)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("cap_lane", {"name": "llm/acme"}, "Change caps: lane llm/acme"),
        ("pause_lane_now", {"name": "llm/acme"}, "Pause lane llm/acme"),
        ("redrive_run", {"run_id": "7"}, "Redrive run 7"),
        ("redeliver", {"delivery_id": "7"}, "Deliver again: delivery 7"),
    ],
)
def test_the_heading_of_a_form_names_the_action_and_then_the_record(name, values, said):
    assert titled(ACTIONS[name], values, {}) == said
