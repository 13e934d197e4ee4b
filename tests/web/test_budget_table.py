"""Budgets on the page of the lanes: what each has left, and the forms that set and delete one."""

from __future__ import annotations

import re
from urllib.parse import urlencode

from tests.support.api_server import new_key
from tests.support.pages import Reader

SPENT = (
    "UPDATE spend_totals SET spent = 24.5, reserved = 0.25, used_up = true WHERE scope = 'tenant' AND period = 'day'"
)
UNKNOWN = """
INSERT INTO paid_calls (item_id, claim_id, tenant_id, run_id, root_run_id, root_day, day, vendor, model, priced,
                        reserved, state, at)
SELECT 1, 1, 'spender', 1, 1, today, today, 'llm', 'm', true, 0.5, 'unknown', ecluse_now()
FROM (SELECT (ecluse_now() AT TIME ZONE 'UTC')::date AS today) d
"""
RUN = """
INSERT INTO runs (id, tenant_id, flow, event_key, orchestrated, status, state, input, created_at)
OVERRIDING SYSTEM VALUE
VALUES ({run}, '{tenant}', 'test', 'budget-{run}', false, 'running', 'running', '{{}}', ecluse_now())
"""
ENDED = """
UPDATE runs SET status = 'cancelled', state = 'cancelled', end_cause = 'operator', ended_by = 'a test',
    ended_at = ecluse_now(), selected = 0, successful = 0, failed = 0, ignored = 0 WHERE id = 8
"""


def sent(who: Reader, address: str, **given: str) -> int:
    """Send the form at this address as it is shown, with what is entered."""
    body = who.get(address).body.decode()
    hidden = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', body))
    return who.post(address.partition("?")[0], urlencode({**hidden, **given})).status


def test_budgets_are_listed_set_and_deleted(reader, pages_dsn, fill):
    fill("INSERT INTO tenants (id, name, created_at) VALUES ('spender', 'spender', ecluse_now())")
    admin = reader.with_key(new_key(pages_dsn, "admin", "spender"))
    assert "Budgets No budgets: paid calls are not limited." in admin.shown("/ui/lanes")
    assert sent(admin, "/ui/do/put_budget?back=/ui/lanes", amount="25.00", period="day") == 303
    shown = admin.shown("/ui/lanes")
    assert "Of State Limit Spent Reserved Period Actions the tenant open 25 left until" in shown
    assert "25 0 0 day (UTC)" in shown
    fill(SPENT)
    fill(UNKNOWN)
    shown = admin.shown("/ui/lanes")
    assert "the tenant used up paid calls wait until" in shown
    assert "25 24.5 of it 0.5 unknown 0.25 day (UTC)" in shown
    theirs = reader.with_key(new_key(pages_dsn, "admin", "rival"))
    assert "No budgets" in theirs.shown("/ui/lanes")
    body = admin.get("/ui/lanes").body.decode()
    (change,) = re.findall(r'href="(/ui/do/put_budget\?[^"]*amount=25[^"]*)"', body)
    assert sent(admin, change.replace("&amp;", "&"), amount="30", period="day") == 303
    number = fill("SELECT id FROM budgets WHERE amount = 30")
    assert sent(admin, f"/ui/do/remove_budget/{number}?back=/ui/lanes") == 303
    assert "No budgets" in admin.shown("/ui/lanes")


def test_a_viewer_sees_budgets_without_forms(reader, pages_dsn, fill):
    fill(RUN.format(tenant="default", run=7))
    fill("INSERT INTO budgets (tenant_id, scope, subject_id, period, amount, created_at, updated_at)"
         " VALUES ('default', 'run', 7, 'all', 3, ecluse_now(), ecluse_now())")  # fmt: skip
    shown = reader.shown("/ui/lanes")
    assert "run 7 open 3 left 3 0 0 the whole run" in shown
    assert "/ui/do/" not in reader.get("/ui/lanes").body.decode()


def test_the_used_up_budget_of_a_run_that_has_ended_is_said_to_hold_nothing(reader, pages_dsn, fill):
    fill("INSERT INTO tenants (id, name, created_at) VALUES ('ender', 'ender', ecluse_now())")
    admin = reader.with_key(new_key(pages_dsn, "admin", "ender"))
    fill(RUN.format(tenant="ender", run=8))
    assert sent(admin, "/ui/do/put_budget?back=/ui/lanes", amount="2", run_id="8") == 303
    fill("UPDATE spend_totals SET spent = 2, used_up = true WHERE scope = 'run' AND subject_id = 8")
    assert "run 8 used up paid calls wait 2 2 0 the whole run Set budget Delete" in admin.shown("/ui/lanes")
    fill(ENDED)
    assert "run 8 over the run has ended: nothing waits 2 2 0 the whole run Delete" in admin.shown("/ui/lanes")
