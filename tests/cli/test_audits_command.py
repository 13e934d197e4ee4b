"""`ecluse audits`: the same facts as over HTTP, for whoever sits at the machine, and one more audit."""

from __future__ import annotations

import asyncio
import json

import psycopg
import pytest

from ecluse.flows.audits import configs
from tests.support.fiche_rows import call, details, save

RESULT = {
    "steps": [
        {
            "name": "Consent",
            "score": 4.5,
            "max": 5,
            "weight": 2,
            "comment": "Clear\x1b[2J.",
            "evidence": [
                {"quote": "yes", "call_id": "c", "position": 3, "verified": True},
                {"quote": "no", "call_id": None, "position": None, "verified": False},
            ],
        }
    ]
}
FINISH = """
UPDATE audits SET status = 'completed', is_latest = true, score = 90, result = %s, model = 'm', input_tokens = 10,
    output_tokens = 5, started_at = ecluse_now(), finished_at = ecluse_now() WHERE id = %s
"""


@pytest.fixture
def config(dsn) -> int:
    async def fill() -> int:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await save(connection, ("171", details(call("c"))))
            given = {"name": "Compliance", "steps": [{"name": "Consent", "criteria": "agrees", "weight": 2}]}
            return (await configs.create(connection, "default", {**given, "run_automatically": True}))["id"]

    return asyncio.run(fill())


def test_where_there_is_nothing_it_says_so(ecluse):
    assert "no configs yet" in ecluse("audits", "configs").out
    assert ecluse("audits", "list").out == "no matching audits\n"
    missing = ecluse("audits", "show", "7")
    assert (missing.code, "there is no audit 7" in missing.err) == (2, True)


@pytest.mark.req("G-91")
def test_an_audit_is_asked_for_listed_and_shown_with_what_its_quotes_are_worth(ecluse, config, query):
    (listed,) = ecluse("audits", "configs").out.splitlines()
    assert "v1, 1 steps, automatic" in listed
    assert "Compliance" in listed
    started = ecluse("audits", "run", "171", str(config), "--use-rlm").json
    assert query("SELECT run_id::text, status, use_rlm FROM audits WHERE id = %s", int(started["audit_id"])) == [
        (started["run_id"], "pending", True)
    ]
    assert ecluse("audits", "list", "--status", "completed").out == "no matching audits\n"
    query(FINISH, json.dumps(RESULT), int(started["audit_id"]))
    (line,) = ecluse("audits", "list", "--latest", "--fiche", "171").out.splitlines()
    assert line.split() == ["default", started["audit_id"], "171", "completed", "90.00", "/", "100", "Compliance", "v1"]
    shown = ecluse("audits", "show", started["audit_id"])
    assert shown.code == 0
    assert "\x1b" not in shown.out
    step, verified, unverified = shown.out.splitlines()[-3:]
    assert "4.5/5  Consent: Clear" in step
    assert "« yes » (c at 3)" in verified
    assert "« no » (NOT IN ANY TRANSCRIPT)" in unverified
    assert ecluse("audits", "show", started["audit_id"], "--json").json["result"] == RESULT


def test_what_is_not_there_cannot_be_audited(ecluse, config, query):
    for fiche, number, said in (("999", config, "there is no fiche 999"), ("171", 999, "there is no audit config 999")):
        refused = ecluse("audits", "run", fiche, str(number))
        assert (refused.code, said in refused.err) == (2, True)
    assert query("SELECT count(*) FROM runs") == [(0,)]
