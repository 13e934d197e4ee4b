"""A replica takes no more connections than docs/operations.md says, however small its pools, and does its work."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ecluse.db.pools import most_connections
from tests.support.command_line import operating

FLOW = "hello_flow:FLOW"
ROOT = Path(__file__).resolve().parents[2]
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
OPEN = "SELECT count(*) FROM runs WHERE ended_at IS NULL"


@pytest.mark.parametrize("roles", [("api", "scheduler", "worker"), ("worker",)], ids=" ".join)
def test_many_runs_at_once_with_the_smallest_pools(serve, bare, sandbox, one, roles, dsn):
    with operating(bare, dsn) as operator:
        for number in range(12):
            operator.done("runs", "start", "hello", "--key", str(number), "--input", '{"articles": 20}')
    knobs = {"ECLUSE_DB_POOL": "3", "PRICE_LIST_URL": f"{sandbox.url}/price-list", "ECLUSE_FLOWS": FLOW}
    server = serve(*[part for role in roles for part in ("--role", role)], **knobs)
    most, until = 0, time.monotonic() + 90
    while one(OPEN) and time.monotonic() < until:
        most = max(most, one(SESSIONS))
    assert one("SELECT count(*) FROM runs WHERE state = 'succeeded'") == 12, server.end()
    assert most_connections((), 3) <= most <= most_connections(roles, 3)


def test_the_table_of_the_document_says_what_the_program_does():
    text = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \|.*\| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    told = {tuple(roles.split()): (int(most), int(least)) for roles, most, least in rows}
    assert told == {roles: (most_connections(roles, 10), most_connections(roles, 3)) for roles in told}
    assert {("api", "scheduler", "worker"), ("api",), ("worker",), ("scheduler",)} <= told.keys()
