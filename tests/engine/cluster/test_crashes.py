"""Real processes, really killed again and again: the run ends as it would have without, nothing is stored twice, and no
attempt is used up. (`tests/faults` kills at each named point.)"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psycopg
import pytest

from tests.engine.cluster.crash_child import SCHEMA, TARGETS

EXPECTED = ("partial", TARGETS, 384, 8, 8, "normal")


def replica(dsn: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.cluster.crash_child", dsn, "the-run"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def with_table(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)
    return dsn


def check_the_end(one, query):
    assert one("SELECT status, selected, successful, failed, ignored, end_cause FROM runs") == EXPECTED
    assert one("SELECT count(*), count(DISTINCT key) FROM saved") == (384, 384), "each effect stored exactly once"
    assert one("SELECT count(*) FROM items WHERE status = 'open'") == 0
    assert one("SELECT sum(taken - released), sum(in_flight) FROM claims") == (TARGETS, 0)
    assert one("SELECT sum(succeeded), sum(failed), sum(ignored) FROM claims") == (384, 8, 8)
    assert query("SELECT DISTINCT executions FROM items WHERE substr(key, 2)::int % 20 = 3") == [(2,)], (
        "a crash uses up no attempt"
    )
    assert one("SELECT count(*) FROM run_log WHERE message = 'running -> partial'") == 1


@pytest.mark.req("ENG-05", "ENG-24")
def test_killed_again_and_again_the_run_ends_as_without_the_kills(with_table, one, query):
    started = time.monotonic()
    kills = 0
    while kills < 6:
        with replica(with_table) as victim:
            time.sleep(0.9 + 0.15 * kills)
            if victim.poll() is not None:
                break
            victim.kill()
        kills += 1
    with replica(with_table) as survivor:
        out, _ = survivor.communicate(timeout=90)
        assert (survivor.returncode, out.strip()) == (0, "partial")
    assert kills >= 1, "nothing was killed: the test proves nothing"
    assert time.monotonic() - started < 110
    check_the_end(one, query)
