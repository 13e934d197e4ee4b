"""`ecluse vendors …`: lanes looked at, paused and resumed by an operator."""

from __future__ import annotations

import pytest

LANES = """
INSERT INTO lanes (name, max_in_flight, per_second, burst, held_until, held_reason) VALUES
    ('crm', NULL, NULL, 1, now() + interval '1 hour', 'Retry-After: 429'), ('speech', 5, 10 / 60.0, 2, NULL, NULL)
"""


def test_every_lane_is_shown_with_its_caps_and_why_nothing_starts(ecluse, query):
    assert "no lanes yet" in ecluse("vendors", "list").out
    query(LANES)
    crm, speech = ecluse("vendors", "list").out.splitlines()
    assert crm.startswith("crm ")
    assert "no caps" in crm
    assert "HELD until" in crm
    assert crm.endswith("Retry-After: 429")
    assert "5 at once, 10/min burst 2" in speech
    assert speech.endswith("0 waiting  open")


def test_an_operator_pauses_and_resumes_a_lane_by_its_name(ecluse, query, one):
    query(LANES)
    assert ecluse("vendors", "pause", "speech", "--reason", "invoice unpaid").code == 0
    by, reason = one("SELECT paused_by, paused_reason FROM lanes WHERE paused_at IS NOT NULL")
    assert (by.split(":")[0], reason) == ("cli", "invoice unpaid")
    assert f"PAUSED by {by} at " in ecluse("vendors", "list").out
    assert ecluse("vendors", "resume", "speech", "--reason", "paid").out == "speech goes on\n"
    assert one("SELECT count(*) FROM lanes WHERE paused_at IS NOT NULL") == 0
    assert query("SELECT actor, action, subject, reason FROM audit_trail ORDER BY id") == [
        (by, "lane.pause", "lane:speech", "invoice unpaid"),
        (by, "lane.resume", "lane:speech", "paid"),
    ]
    assert "was not paused" in ecluse("vendors", "resume", "speech", "--reason", "paid").err


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_an_unknown_lane_is_exit_code_2_and_the_known_ones_are_named(ecluse, query, command):
    query(LANES)
    answer = ecluse("vendors", command, "speach", "--reason", "x")
    assert (answer.code, answer.err) == (2, "ecluse: There is no lane 'speach' (known: crm, speech).\n")
