"""A package of others brings flows, knobs, routes, migrations, metrics, checks and pages, as those in the box do."""

from __future__ import annotations

import psycopg
import pytest

from ecluse.bootstrap import load_flows, load_packages
from ecluse.migrations.runner import upgrade
from ecluse.settings import Settings
from ecluse.verify.snapshot import audit
from tests.support.api_server import FLOW, new_key, serving
from tests.support.notes_package import PACKAGE
from tests.support.servers import HEAD

NAME = "tests.support.notes_package:PACKAGE"


def test_a_package_is_loaded_by_name_and_makes_its_flows_from_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_FLOW", "memos")
    settings = Settings(ECLUSE_FLOWS=NAME)
    assert load_packages(settings) == [PACKAGE]
    assert [flow.name for flow in load_flows(settings)][-1] == "memos"


def test_its_migrations_are_applied_beside_ours(dsn: str) -> None:
    assert upgrade(dsn, packages=[PACKAGE]) == HEAD
    assert upgrade(dsn, packages=[PACKAGE]) == HEAD  # again: nothing to do
    assert upgrade(dsn) == HEAD  # a server without the package leaves its tables alone
    with psycopg.connect(dsn) as connection:
        known = connection.execute("SELECT version_num FROM alembic_version_notes").fetchall()
        assert known == [("0001",)]
        assert connection.execute("SELECT count(*) FROM notes").fetchone() == (0,)


def test_its_routes_metrics_and_pages_are_served(dsn: str) -> None:
    upgrade(dsn, packages=[PACKAGE])
    with serving(dsn, FLOW, packages=[PACKAGE]) as client:
        operator = client.with_key(new_key(dsn))
        made = operator.post("/api/notes", {"text": "first"})
        assert (made.status, made.json["text"]) == (201, "first")
        viewer = client.with_key(new_key(dsn, "viewer"))
        assert [one["text"] for one in viewer.get("/api/notes").json["notes"]] == ["first"]
        assert viewer.post("/api/notes", {"text": "second"}).code == "FORBIDDEN"
        assert b'ecluse_notes{tenant="default"} 1.0' in client.get("/metrics").body
        assert client.get("/ui/notes").body == b"notes of a package"
        assert "create_note" in client.app.state.operations  # type: ignore[union-attr]


def test_its_invariants_are_verified(dsn: str) -> None:
    upgrade(dsn, packages=[PACKAGE])
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO notes (tenant_id, text) VALUES ('default', '')")
    report = audit(dsn, None, PACKAGE.invariants)
    assert [(one.invariant, one.message) for one in report.violations] == [("N-1", "is empty")]
