"""`ecluse fiches`: the same facts as over HTTP, for whoever sits at the machine."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tests.support.fiche_rows import call, details, save


@pytest.fixture
def fiches(dsn, query):
    query("INSERT INTO tenants (id, name, created_at) VALUES ('acme', 'Acme', ecluse_now())")

    async def fill() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            late = call("late", "https://x.test/1?sig=abcdef0123", start_time="2026-03-02T10:00:00Z")
            await save(connection, ("171", details(call("never", ""), late, ville="Lyon\x1b[2J")), ("172", None))
            await save(connection, ("171", details(groupe="Z")), tenant="acme")

    asyncio.run(fill())


def test_fiches_are_listed_of_everybody_or_of_one(ecluse, fiches):
    everybody = ecluse("fiches", "list").out.splitlines()
    assert [line.split()[:2] for line in everybody] == [["acme", "171"], ["default", "172"], ["default", "171"]]
    assert "not_found" in everybody[1]
    assert "0/2 transcribed" in everybody[2]
    assert [row["groupe"] for row in ecluse("fiches", "list", "--tenant", "acme", "--json").json["fiches"]] == ["Z"]
    assert ecluse("fiches", "list", "--groupe", "none").out == "no matching fiches\n"


def test_where_nothing_is_cached_it_says_so(ecluse):
    assert "no fiches yet" in ecluse("fiches", "list").out


@pytest.mark.req("TRX-94")
def test_a_fiche_is_shown_with_the_state_of_its_urls(ecluse, fiches):
    shown = ecluse("fiches", "show", "171")
    assert shown.code == 0
    *facts, first, second = shown.out.splitlines()
    assert "Lyon" in "".join(facts)
    assert "\x1b" not in shown.out
    assert first.split()[2:] == ["late", "has", "URL", "not", "transcribed"]
    assert second.split() == ["-", "never", "no", "URL", "not", "transcribed"]
    assert "abcdef0123" not in shown.out
    told = ecluse("fiches", "show", "171", "--json").json
    assert [(one["call_id"], one["url_missing"]) for one in told["recordings"]] == [("late", False), ("never", True)]
    assert "abcdef0123" not in str(told)


@pytest.mark.req("G-32")
def test_a_fiche_of_another_tenant_is_asked_for_by_name(ecluse, fiches):
    assert ecluse("fiches", "show", "171", "--tenant", "acme", "--json").json["groupe"] == "Z"
    refused = ecluse("fiches", "show", "172", "--tenant", "acme")
    assert (refused.code, "there is no fiche 172" in refused.err) == (2, True)
