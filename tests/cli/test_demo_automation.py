"""The demonstration, as people run it: it ends well although its server is killed, and leaves nothing behind."""

from __future__ import annotations

import json
import re

import psycopg
import pytest

from ecluse.demo import account
from ecluse.demo.scene import get
from tests.support.demos import PATIENCE

pytestmark = pytest.mark.long

FICHES = 40
REPORT = {
    "status": "partial",
    "selected": 3,
    "successful": 1,
    "failed": 1,
    "ignored": 1,
    "unexpected": [],
    "verify": "clean",
}


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.req("AUT-01", "ENG-05")
def test_every_fiche_gets_the_outcome_it_would_have_had_without_the_kill_and_all_stays_up_if_asked(demo):
    played = demo("automation", "--fiches", str(FICHES), "--json", "--keep")
    report = json.loads(played.wait_for(lambda: played.out)[-1])
    assert report["unexpected"] == []
    assert report["verify"] == "clean"
    assert (report["status"], report["selected"], report["kills"]) == ("partial", FICHES, 1)
    assert report["selected"] == report["successful"] + report["failed"] + report["ignored"]
    assert sum(one["fiches"] for one in report["outcomes"].values()) == FICHES
    assert set(report["outcomes"]) == {
        *("successful", "NO_RECORDINGS", "NO_URL", "VENDOR_REFUSED", "NOT_FOUND", "TOO_MANY_RECORDINGS")
    }
    assert report["vendor_calls"] == sum(one["calls"] for one in report["vendors"].values())
    assert report["throttled"] == sum(one["throttled"] for one in report["vendors"].values())
    assert report["run_id"].isdecimal()
    assert report["seconds"] > 0
    assert "kill -9 of the server, on purpose" in played.said
    assert "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE  10 → 4500" in played.said

    played.wait_for(lambda: "Ctrl-C" in played.said)
    url, key = re.findall(r"^  (http://127\.0\.0\.1:\d+)/ui\n  (\S+)$", played.said, re.MULTILINE)[0]
    runs = json.loads(get(f"{url}/api/automation/runs", key))["runs"]
    assert [run["id"] for run in runs] == [report["run_id"]]
    assert played.interrupt() == 0, played.said
    assert played.left() == []


@pytest.mark.timeout(2 * PATIENCE)
def test_an_interrupt_while_all_is_coming_up_leaves_nothing_behind(demo):
    played = demo("automation", "--fiches", str(FICHES))
    played.wait_for(lambda: any("serve" in one for one in played.left()))
    assert played.interrupt() == 130
    assert "stopped" in played.said
    assert "Traceback" not in played.said
    assert played.left() == []


@pytest.mark.parametrize(
    ("changed", "fine"),
    [
        ({}, True),
        ({"status": "completed"}, False),
        ({"selected": 4}, False),
        ({"ignored": 2}, False),
        ({"unexpected": ["fiche 1000: NOT_FOUND, not successful"]}, False),
        ({"verify": [{"invariant": "I-01"}]}, False),
    ],
)
def test_only_what_was_expected_is_a_success(changed, fine):
    assert account.as_expected({**REPORT, **changed}, 3) is fine


@pytest.mark.parametrize(
    ("fiche_id", "becomes"),
    [
        ("1006", "successful"),
        ("1007", "TOO_MANY_RECORDINGS"),
        ("9100", "NO_RECORDINGS"),
        ("9200", "NO_URL"),
        ("9300", "NOT_FOUND"),
        ("1939", "VENDOR_REFUSED"),
    ],
)
def test_what_is_to_become_of_a_fiche_is_known_beforehand(fiche_id, becomes):
    assert account.expected(fiche_id) == becomes


@pytest.mark.timeout(2 * PATIENCE)
def test_in_a_given_database_its_rows_stay_and_a_second_one_is_refused(demo, empty_dsn):
    first = demo("automation", "--fiches", "10", "--json", "--given-database", DATABASE_URL=empty_dsn)
    assert first.end() == 0, first.said
    report = json.loads(first.out[-1])
    assert (report["verify"], report["selected"], report["unexpected"]) == ("clean", 10, [])
    with psycopg.connect(empty_dsn) as connection:
        name = connection.info.dbname
        assert connection.execute("SELECT count(*) > 10 FROM runs").fetchone() == (True,)
    assert first.left() == []

    second = demo("automation", "--given-database", DATABASE_URL=empty_dsn)
    assert second.end() == 2
    assert f"The database {name} holds" in second.said
    assert "needs one without runs and schedules" in second.said


def test_a_given_database_that_is_not_given_is_missed(demo):
    played = demo("automation", "--given-database")
    assert (played.end(), played.said) == (
        2,
        "ecluse: --given-database needs DATABASE_URL: set it to the URL of an empty database.\n",
    )
