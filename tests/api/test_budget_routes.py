"""Budgets over HTTP: set by admins, seen by all, and what they refuse."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from ecluse.api.budgets import BUDGETS, SPEND, BudgetRow, ChangedBudget
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.engine_flows import flow, stage

PAID = flow(stage(paid=True), "paid")
SPENT = """
WITH day AS (SELECT (ecluse_now() AT TIME ZONE 'UTC')::date AS today),
call AS (
    INSERT INTO paid_calls (item_id, claim_id, tenant_id, run_id, root_run_id, root_day, schedule_id, day, vendor,
                            model, priced, reserved, cost, state, at)
    SELECT n, 1, 'default', 1, 1, today, NULL, today, 'llm', 'm', n > 1, 0.5, CASE n WHEN 3 THEN NULL ELSE 0.45 END,
           CASE n WHEN 3 THEN 'unknown' ELSE 'settled' END, ecluse_now()
    FROM day, generate_series(1, 3) n)
INSERT INTO spend_totals (tenant_id, scope, subject_id, period, starts_on, spent, reserved)
SELECT 'default', 'tenant', 0, 'day', today, 1.4, 0.1 FROM day
"""
SETTINGS = {"LLM_API_KEY": "k", "LLM_MODEL": "gpt-4.1", "ELEVENLABS_PRICES": "scribe_v1=0.01"}


@pytest.fixture(scope="module")
def admin(shared_dsn):
    """With 1.4 spent and 0.1 reserved today, and a schedule of another tenant."""
    add_tenant(shared_dsn, "rival")
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        connection.execute(SPENT)
        connection.execute(
            "INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at)"
            " VALUES ('rival', 'test', 's', '', now(), now(), now())"
        )
        connection.execute(
            "INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at)"
            " VALUES ('rival', 'test', 'theirs', false, 'running', 'running', '{}', now())"
        )
    with serving(shared_dsn, FLOW, PAID, **SETTINGS) as client:
        yield client.with_key(new_key(shared_dsn, "admin"))


@pytest.fixture
def query(shared_dsn):
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM budgets")
        yield lambda sql: connection.execute(sql).fetchall()


def test_a_budget_is_set_shown_changed_and_deleted(admin, query):
    made = admin.post("/api/budgets", {"amount": "2.50", "period": "day"})
    assert made.status == 200
    row = ChangedBudget.model_validate(made.json)
    assert (row.scope, row.period, row.amount, row.spent, row.reserved) == ("tenant", "day", "2.5", "1.4", "0.1")
    assert (row.available, row.used_up, row.unknown) == ("1", False, "0.5")
    assert row.renews_at is not None
    assert row.renews_at > datetime.now(UTC)
    assert row.warnings == ["no price for gpt-4.1: budgets count its audits as 0; set LLM_PRICES"]
    assert admin.post("/api/budgets", {"amount": 3, "period": "day"}).json["id"] == row.id
    page = BUDGETS.page.model_validate(admin.get("/api/budgets").json)
    (listed,) = page.budgets  # type: ignore[attr-defined]
    assert BudgetRow.model_validate(listed.model_dump()).amount == "3"
    assert admin.ask("DELETE", f"/api/budgets/{row.id}").json == {"id": row.id, "deleted": True}
    assert admin.get("/api/budgets").json["budgets"] == []
    trail = admin.get("/api/audit-trail?limit=3").json["entries"]
    assert [one["action"] for one in trail] == ["budget.delete", "budget.set", "budget.set"]


def test_the_budget_of_a_deleted_schedule_is_listed_until_its_last_run_has_ended(admin, query):
    ((schedule,),) = query(
        "WITH r AS (INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, input, created_at)"
        " VALUES ('default', 'test', 'last', false, 'running', 'running', '{}', now()) RETURNING id)"
        " INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, last_run_id, created_at, updated_at)"
        " SELECT 'default', 'test', 'gone', '', now(), id, now(), now() FROM r RETURNING id"
    )
    assert admin.post("/api/budgets", {"amount": 5, "period": "day", "schedule_id": str(schedule)}).status == 200
    assert admin.ask("DELETE", f"/api/schedules/{schedule}").status == 200
    assert [one["schedule_id"] for one in admin.get("/api/budgets").json["budgets"]] == [str(schedule)]
    query("DELETE FROM runs WHERE event_key = 'last' RETURNING id")
    assert admin.get("/api/budgets").json["budgets"] == []


ADD_RUN = """
INSERT INTO runs (tenant_id, flow, event_key, parent_run_id, orchestrated, status, state, input, created_at)
VALUES ('default', 'test', '{key}', {parent}, false, 'running', 'running', '{{}}', now()) RETURNING id::text
"""
ENDED = """
UPDATE runs SET status = 'cancelled', state = 'cancelled', end_cause = 'operator', ended_by = 'a test',
    ended_at = now(), selected = 0, successful = 0, failed = 0, ignored = 0
"""
RUN_USED_UP = (
    "UPDATE spend_totals SET spent = 0.5, used_up = true WHERE scope = 'run' AND subject_id = {run} RETURNING 1"
)


def test_a_used_up_budget_of_a_run_holds_nothing_once_the_run_and_those_it_started_have_ended(admin, query):
    ((run,),) = query(ADD_RUN.format(key="parent", parent="NULL"))
    ((child,),) = query(ADD_RUN.format(key="child", parent=run))
    budget = admin.post("/api/budgets", {"amount": "0.50", "run_id": run}).json["id"]
    query(RUN_USED_UP.format(run=run))

    def shown():
        (listed,) = admin.get("/api/budgets").json["budgets"]
        assert listed == admin.get(f"/api/budgets/{budget}").json
        return listed["used_up"], listed["run_ended"]

    assert shown() == (True, False)
    query(f"{ENDED} WHERE id = {run} RETURNING 1")
    assert shown() == (True, False)  # the calls of the run that it started still wait
    assert admin.post("/api/budgets", {"amount": "0.75", "run_id": run}).json["amount"] == "0.75"
    query(RUN_USED_UP.format(run=run))  # as the change of the budget has cleared it
    query(f"{ENDED} WHERE id = {child} RETURNING 1")
    assert shown() == (False, True)
    refused = admin.post("/api/budgets", {"amount": "9", "run_id": run})
    assert (refused.status, refused.code) == (409, "ALREADY_ENDED")
    assert f"Run {run} has ended, with the runs that it started" in refused.body.decode()
    assert admin.get(f"/api/budgets/{budget}").json["amount"] == "0.75"
    assert admin.ask("DELETE", f"/api/budgets/{budget}").status == 200


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"amount": "-1", "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": "NaN", "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": "lots", "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": "1e30", "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": "1.4", "period": "day"}, 409, "BUDGET_BELOW_SPENT", "1.4 is spent and 0.1 reserved"),
        ({"amount": "5"}, 422, "INVALID_INPUT", "period"),
        ({"amount": "5", "period": "year"}, 422, "INVALID_INPUT", "period"),
        ({"amount": "5", "period": "day", "run_id": "1"}, 422, "INVALID_INPUT", "run_id"),
        ({"amount": "5", "run_id": "99"}, 404, "NOT_FOUND", "no run 99"),
        ({"amount": "5", "run_id": "{run of the rival}"}, 404, "NOT_FOUND", "no run"),
        ({"amount": "0", "period": "day"}, 409, "BUDGET_BELOW_SPENT", "cannot be 0"),
        ({"amount": "Infinity", "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": 1e300, "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": None, "period": "day"}, 422, "INVALID_INPUT", "amount"),
        ({"amount": "5", "period": "day", "schedule_id": "1"}, 404, "NOT_FOUND", "no schedule 1"),
    ],
)
def test_what_cannot_be_a_budget_is_refused_and_nothing_is_stored(admin, query, body, status, code, words):
    ((rivals,),) = query("SELECT id::text FROM runs WHERE tenant_id = 'rival'")
    answer = admin.post(
        "/api/budgets", {name: rivals if "rival" in str(value) else value for name, value in body.items()}
    )
    assert (answer.status, answer.code) == (status, code)
    assert words in answer.body.decode()
    assert query("SELECT count(*) FROM budgets") == [(0,)]


def test_operators_and_viewers_see_budgets_and_only_admins_of_the_tenant_change_them(admin, query, shared_dsn):
    budget = admin.post("/api/budgets", {"amount": "9", "period": "month"}).json["id"]
    for role in ("viewer", "operator"):
        other = admin.with_key(new_key(shared_dsn, role))
        assert len(other.get("/api/budgets").json["budgets"]) == 1
        assert other.post("/api/budgets", {"amount": "10", "period": "day"}).status == 403
        assert other.ask("DELETE", f"/api/budgets/{budget}").status == 403
    rival = admin.with_key(new_key(shared_dsn, "admin", "rival"))
    assert rival.get("/api/budgets").json["budgets"] == []
    assert rival.ask("DELETE", f"/api/budgets/{budget}").status == 404
    assert rival.post("/api/budgets", {"amount": "10", "period": "month"}).status == 200
    assert len(admin.get("/api/budgets").json["budgets"]) == 1


def test_what_was_spent_is_listed_by_day_vendor_and_model(admin):
    (row,) = SPEND.page.model_validate(admin.get("/api/spend").json).spend  # type: ignore[attr-defined]
    assert (row.vendor, row.model, row.calls, row.unpriced) == ("llm", "m", 3, 1)
    assert (row.cost, row.reserved, row.unknown, row.schedule_id) == ("0.9", "0", "0.5", None)
    assert admin.get(f"/api/spend?until={row.day}").json["spend"] == []
    assert len(admin.get(f"/api/spend?since={row.day}").json["spend"]) == 1


def test_a_start_is_refused_while_the_budget_is_used_up_and_only_of_flows_that_pay(admin, query):
    admin.post("/api/budgets", {"amount": "1.5", "period": "day"})
    assert admin.post("/api/runs", {"flow": "paid", "key": "first"}).status == 201
    query("UPDATE spend_totals SET used_up = true RETURNING 1")
    refused = admin.post("/api/runs", {"flow": "paid", "key": "second"})
    assert (refused.status, refused.code) == (409, "BUDGET_EXCEEDED")
    assert (
        "The day's budget of tenant default has 0.1 left, too little for the next call: 1.4 of 1.5 spent, 0.5 of it by"
        " calls whose cost is unknown. Nothing was started." in refused.body.decode()
    )
    assert admin.post("/api/runs", {"flow": "paid", "key": "first"}).status == 200  # known: nothing is started
    assert admin.post("/api/runs", {"flow": "test"}).status == 201
    assert query("SELECT count(*) FROM runs WHERE event_key = 'second'") == [(0,)]
    admin.post("/api/budgets", {"amount": "2", "period": "day"})
    assert admin.post("/api/runs", {"flow": "paid", "key": "second"}).status == 201
