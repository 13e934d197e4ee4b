"""Pages of pricing: projects, rules, rule runs and one of them; the forms that act on it, and how long it takes."""

from __future__ import annotations

import asyncio
import re
import time
from statistics import median
from urllib.parse import urlencode

import pytest

from ecluse.flows.pricing.rules import Terms
from ecluse.flows.pricing.runs import create_rule
from ecluse.flows.pricing.states import Move, move_runs, move_targets
from ecluse.web.pricing import sentence
from tests.support.api_server import new_key
from tests.support.pages import text
from tests.support.pricing_rows import BY, RULE, connected, new_project, new_run
from tests.web.conftest import aside, unreadable

pytestmark = pytest.mark.long

MANY, MOST = 10_000, 0.05  # targets, seconds
NAME_PRODUCTS = 'UPDATE pricing_rules SET selection = selection || \'{"products": ["a", "b"]}\' WHERE project_id = %s'
EVIL = '<script>alert("x")</script>'


def made(dsn, count=4, failed=1, name="Shop", code="PRICE_CONFLICT"):
    """A project with a rule, and a run of which some targets have failed and the others are applied."""

    async def rows():
        async with connected(dsn) as connection:
            project = await new_project(connection, name=name)
            await create_rule(connection, "default", project, f"Sale {EVIL}", Terms.model_validate(RULE), "a test")
            run = await new_run(connection, project, count, "QUEUED")
            sql = "SELECT id FROM rule_targets WHERE rule_run_id = %s ORDER BY id"
            ids = [one for (one,) in await (await connection.execute(sql, (run,))).fetchall()]
            moves = [Move(one, ("APPLYING", "FAILED"), code, EVIL) for one in ids[:failed]]
            moves += [Move(one, ("APPLYING", "APPLIED")) for one in ids[failed:]]
            async with connection.transaction():
                await move_runs(connection, {run: "APPLYING"}, BY)
                await move_targets(connection, moves, BY)
                await move_runs(connection, {run: "PARTIAL"}, BY)
            return project, run, await new_run(connection, project)

    return aside(lambda: asyncio.run(rows()))


@pytest.fixture
def operator(reader, pages_dsn):
    return reader.with_key(aside(new_key, pages_dsn))


def test_a_run_of_the_engine_says_which_execution_it_is_and_leads_to_its_rule_run(reader, pages_dsn, fill, ended_run):
    _, run, _ = made(pages_dsn, name="Named")
    execution = ended_run(flow="pricing")
    fill("INSERT INTO rule_executions VALUES (%s, %s, 'apply', 2)", execution, run)
    words = f"apply 2 of rule run #{run}"
    assert f"pricing #{execution} {words}" in reader.shown("/ui/runs?flow=pricing")
    assert words in reader.shown(f"/ui/runs/{execution}")
    assert f'<a href="/ui/pricing/runs/{run}">{words}</a>' in reader.get(f"/ui/runs/{execution}").body.decode()


def test_projects_rules_and_runs_are_listed_and_lead_to_each_other(reader, operator, pages_dsn, fill):
    project, run, preview = made(pages_dsn, name="Listed")
    shown = operator.shown("/ui/pricing/projects")
    assert "Listed shopify https://shop.example EUR" in shown
    assert "New project" in shown
    assert "New project" not in reader.shown("/ui/pricing/projects")
    rules = operator.shown("/ui/pricing/rules")
    assert f"Sale {EVIL} Listed prices from 0.00 EUR by -10 % any 1" in rules
    assert EVIL not in operator.get("/ui/pricing/rules").body.decode()
    fill(NAME_PRODUCTS, project)
    assert "2 products, prices from 0.00 EUR" in operator.shown("/ui/pricing/rules")
    runs = operator.shown(f"/ui/pricing?project={project}")
    assert f"Rule run #{run} PARTIAL Listed 4 0 key 7" in runs
    assert f"Rule run #{preview} PREVIEW Listed" in runs
    assert "No matching rule runs" in operator.shown(f"/ui/pricing?project={project}&status=FAILED")
    body = operator.get("/ui/pricing").body.decode()
    assert '<a href="/ui/pricing" aria-current="page">Pricing</a>' in body
    assert operator.get("/ui/pricing/runs/999999").status == 404


def test_a_run_shows_counts_prices_reasons_executions_and_history(operator, pages_dsn, fill):
    _, run, preview = made(pages_dsn, name="Shown")
    shown = operator.shown(f"/ui/pricing/runs/{run}")
    assert "3 applied, 1 failed of 4 targets" in shown
    assert "1 PRICE_CONFLICT" in shown
    assert f"Variant 0 s0 FAILED 10.00 EUR 9.00 EUR \N{MINUS SIGN}1.00 EUR PRICE_CONFLICT {EVIL}" in shown
    assert "APPLYING PARTIAL 0 key 7 (api)" in shown
    assert "1 because its new price is the one it has" in shown
    assert "Variant 0" not in operator.shown(f"/ui/pricing/runs/{run}?status=APPLIED")
    assert "4 prices would change. Nothing is changed until the run is queued." in operator.shown(
        f"/ui/pricing/runs/{preview}"
    )
    planned = fill("INSERT INTO rule_reconciliations (tenant_id, rule_run_id, kind, due_at, run_id, started_at,"
                   " finished_at, checked, mismatches) VALUES ('default', %s, 'on_demand', now(), 9, now(), now(), 3,"
                   " 1) RETURNING id", run)  # fmt: skip
    fill("INSERT INTO rule_mismatches (tenant_id, reconciliation_id, rule_run_id, rule_target_id, expected, actual)"
         " VALUES ('default', %s, %s, 77, 900, 905)", planned, run)  # fmt: skip
    fill("INSERT INTO alerts (flow, tenant_id, record_id, measure, alert, severity, summary, action, raised_at) SELECT"
         " 'pricing', 'default', project_id, 'dead letters', 'DLQ Backlog', 'warning', '51 dead letters', 'Retry.',"
         " now() FROM rule_runs WHERE id = %s", run)  # fmt: skip
    assert "DLQ Backlog 51 dead letters" in operator.shown(f"/ui/pricing/runs/{run}")
    assert "#77 9.00 EUR 9.05 EUR 0.05 EUR" in operator.shown(f"/ui/pricing/runs/{run}")


@pytest.mark.req("PRC-02")
def test_a_failed_preview_says_why_and_offers_another(operator, pages_dsn, fill):
    _, _, preview = made(pages_dsn, name="Refused")
    fill("UPDATE rule_runs SET plan_hash = NULL, totals = NULL, rule_id = (SELECT max(id) FROM pricing_rules),"
         " stopped_reason = 'the preview failed (refused)' WHERE id = %s RETURNING id", preview)  # fmt: skip
    address = f"/ui/pricing/runs/{preview}"
    shown, body = operator.shown(address), operator.get(address).body.decode()
    assert "There is no plan: the preview failed. The preview failed (refused)" in shown
    assert "Preview again" in shown
    assert "/ui/do/preview_rule?" in body
    assert re.search(r'class="badge failed"[^<]*>\s*PREVIEW', body)
    assert "the preview failed (refused)" in operator.shown("/ui/pricing")


@pytest.mark.req("G-12")
def test_rounds_and_executions_have_the_numbers_of_the_api(operator, pages_dsn, fill):
    _, run, _ = made(pages_dsn, name="Numbered")
    for number, execution in enumerate((900_001, 900_002)):
        fill("INSERT INTO rule_executions (run_id, rule_run_id, kind, number) VALUES (%s, %s, 'apply', %s)"
             " RETURNING run_id", execution, run, number)  # fmt: skip
    shown = operator.shown(f"/ui/pricing/runs/{run}")
    assert "apply 0 deleted by retention first" in shown
    assert "apply 1 deleted by retention" in shown
    assert "At From To Retry round By" in shown


@pytest.mark.req("PRC-22", "PRC-51")
def test_a_run_says_which_failed_targets_a_reconciliation_does_not_compare(operator, pages_dsn):
    _, run, _ = made(pages_dsn, name="Unknown", code="OUTCOME_UNKNOWN")
    shown = operator.shown(f"/ui/pricing/runs/{run}")
    assert "1 failed target is not compared, because the outcome is unknown" in shown
    _, known, _ = made(pages_dsn, name="Known")
    assert "not compared" not in operator.shown(f"/ui/pricing/runs/{known}")


def test_a_rollback_counts_the_restored_prices():
    run = {"counts": {"APPLIED": 414, "ROLLED_BACK": 30, "FAILED": 49}}
    said = "Rollback is under way: 30 prices are restored, 414 still as applied."
    assert sentence(run, [{"kind": "rollback"}]) == said
    assert sentence(run, [{"kind": "apply"}]) == "Apply is under way: 493 of 493 targets are settled."


@pytest.mark.parametrize(
    ("name", "label", "says"),
    [
        ("retry_rule_run", "Retry failed (2)", "2 failed targets are applied again."),
        ("roll_back_rule_run", "Roll back", "2 applied prices are set back to the former value in the shop"),
        ("reconcile_rule_run", "Reconcile", "2 applied prices are read from the shop and compared. No price changes."),
    ],
)
def test_a_form_says_what_will_change_and_does_it(operator, reader, pages_dsn, fill, name, label, says):
    _, run, _ = made(pages_dsn, failed=2, name=f"Of {name}")
    page = f"/ui/pricing/runs/{run}"
    assert label in operator.shown(page)
    assert label not in reader.shown(page)
    form = operator.get(f"/ui/do/{name}/{run}?back={page}")
    assert says in text(form)
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form.body.decode()))
    done = operator.post(f"/ui/do/{name}/{run}", urlencode(hidden))
    assert (done.status, done.headers["Location"]) == (303, page)
    kind = fill("SELECT kind FROM rule_executions WHERE rule_run_id = %s", run)
    assert kind == {"retry_rule_run": "apply", "roll_back_rule_run": "rollback"}.get(name, "reconcile")
    assert label not in operator.shown(page), "an execution is under way"

    # Until it is over, the execution can be ended, by the form of its run.
    assert f"End {kind}" in operator.shown(page)
    assert f"End {kind}" not in reader.shown(page)
    (ends,) = re.findall(r'href="(/ui/do/end_run/\d+\?back=[^"]*)"', operator.get(page).body.decode())
    form = operator.get(ends)
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form.body.decode()))
    ended = operator.post(ends.partition("?")[0], urlencode({**hidden, "reason": "wrong prices"}))
    assert (ended.status, ended.headers["Location"]) == (303, page)
    assert fill("SELECT r.ending OR r.ended_at IS NOT NULL FROM runs r JOIN rule_executions e ON e.run_id = r.id"
                " WHERE e.rule_run_id = %s", run)  # fmt: skip


def test_a_preview_is_queued_with_the_hash_of_its_plan_and_another_leads_to_its_page(operator, pages_dsn, fill):
    _, _, preview = made(pages_dsn, name="Queued")
    page = operator.get(f"/ui/pricing/runs/{preview}").body.decode()
    form = operator.get(re.findall(r'href="(/ui/do/queue_rule_run/[^"]*)"', page)[0].replace("&amp;", "&"))
    assert "4 prices change in the shop, exactly as planned." in text(form)
    hash_ = fill("SELECT plan_hash FROM rule_runs WHERE id = %s", preview)
    assert f'value="{hash_}"' in form.body.decode()
    rule = fill("SELECT max(id) FROM pricing_rules")
    form = operator.get(f"/ui/do/preview_rule?rule_id={rule}")
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form.body.decode()))
    done = operator.post("/ui/do/preview_rule", urlencode({**hidden, "rule_id": rule}))
    made_run = fill("SELECT max(id) FROM rule_runs")
    assert (done.status, done.headers["Location"]) == (303, f"/ui/pricing/runs/{made_run}")
    assert "The catalogue is being read." in operator.shown(f"/ui/pricing/runs/{made_run}")


def test_a_page_of_ten_thousand_targets_takes_fifty_milliseconds_of_work(operator, pages_dsn, fill):
    _, run, _ = made(pages_dsn, MANY, MANY // 50, name="Large")
    fill("ANALYZE rule_targets, rule_history, rule_runs")
    each = []
    for _ in range(9):
        began = time.perf_counter(), time.process_time()
        assert operator.get(f"/ui/pricing/runs/{run}").status == 200
        each.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    print(f"{1000 * median(one for one, _ in each):.0f} ms, of it {1000 * min(one for _, one in each):.0f} ms at work")
    assert min(one for _, one in each) < MOST


def test_the_pages_are_accessible_on_any_screen(reader, visit, pages_dsn):
    _, run, _ = made(pages_dsn, 12, 6, name="Seen")
    visitor = visit(reader.client, reduced_motion="reduce")
    page = visitor.log_in(aside(new_key, pages_dsn))
    found = []
    paths = ["/ui/pricing", "/ui/pricing/projects", "/ui/pricing/rules", f"/ui/pricing/runs/{run}"]
    for path in [*paths, f"/ui/do/retry_rule_run/{run}", "/ui/do/create_rule"]:
        visitor.go(path)
        found += unreadable(page)
    assert not found, "\n".join(found)
