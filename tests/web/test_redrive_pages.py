"""Redrives on the pages: under their run, named as what they are, and where the targets stand after them."""

from __future__ import annotations

import pytest

from ecluse.web import figures
from ecluse.web.advice import advice
from tests.support.api_server import new_key
from tests.web.conftest import aside
from tests.web.test_page_contents import rows, schedule

GOOD, BAD = ("successful", None, None), ("failed", "BAD", "no")


@pytest.fixture
def redriven(ended_run, fill):
    """A run of a schedule of which two of three targets failed, and its redrive, which one of them failed in again."""

    def make(tenant: str) -> tuple[int, int, int]:
        nightly = schedule(fill, "nightly prices")
        fill("UPDATE schedules SET tenant_id = %s WHERE id = %s", tenant, nightly)
        given = {"tenant": tenant, "status": "partial", "state": "partial", "schedule": nightly}
        first = ended_run(("a", *GOOD), ("b", *BAD), ("c", *BAD), **given)
        again = ended_run(("b", *GOOD), ("c", *BAD), **given, parent=first, redrive_of=first)
        fill("UPDATE schedules SET last_run_id = %s WHERE id = %s", first, nightly)
        return first, again, nightly

    return make


def test_a_redrive_stands_under_its_run_and_the_run_says_where_its_targets_stand(of, redriven, ended_run):
    mine = of("redriven")
    first, again, nightly = redriven("redriven")
    later = ended_run(tenant="redriven")
    stands = "2 successful, 1 failed, 0 ignored of 3"
    for path in ("/ui/runs", f"/ui/schedules/{nightly}"):
        shown = mine.shown(path)
        assert rows(shown)[-2:] == [str(first), str(again)]
        assert f"test #{again} redrive of #{first} partial" in shown
    assert rows(mine.shown("/ui/runs")) == [str(later), str(first), str(again)]
    assert f'id="run-{again}" class="folded"' in mine.get("/ui/runs").body.decode()
    assert f"After redrives: {stands}" in mine.shown(f"/ui/runs/{first}")
    assert f"after redrives: {stands}" in mine.shown("/ui/schedules")
    assert f"Redrive of #{first}" in mine.shown(f"/ui/runs/{again}")
    assert "After redrives" not in mine.shown(f"/ui/runs/{again}")
    assert rows(mine.shown("/ui/runs?state=partial")) == [str(again), str(first)], "a state finds every run in it"


def test_redrives_do_not_count_in_the_pages_of_a_list(of, ended_run):
    mine = of("folding")
    top = [ended_run(tenant="folding") for _ in range(27)]
    redrives = {run: ended_run(tenant="folding", parent=run, redrive_of=run) for run in (top[0], top[26])}
    newest = list(reversed(top))
    page, rest = mine.shown("/ui/runs"), mine.shown("/ui/runs?offset=25")
    assert rows(page) == [str(run) for run in (top[26], redrives[top[26]], *newest[1:25])]
    assert rows(rest) == [str(run) for run in (top[1], top[0], redrives[top[0]])]
    assert "1 to 25" in page
    assert "26 to 27" in rest


def test_of_many_redrives_the_latest_are_shown_and_the_others_counted(of, ended_run):
    mine = of("often")
    run = before = ended_run(tenant="often")
    redrives = []
    for _ in range(figures.FOLDED + 3):
        before = ended_run(tenant="often", parent=before, redrive_of=before)
        redrives.append(before)
    shown = mine.shown("/ui/runs")
    assert rows(shown) == [str(one) for one in (run, *redrives[-figures.FOLDED :])]
    assert f"redrive of #{redrives[-2]} , and 3 more before" in shown


def test_a_redrive_that_is_not_there_any_more_is_left_out(of, ended_run, fill):
    mine = of("pruned")
    run = ended_run(tenant="pruned")
    gone, kept = (ended_run(tenant="pruned", parent=run, redrive_of=run) for _ in range(2))
    fill("UPDATE runs SET tenant_id = 'rival' WHERE id = %s", gone)  # found by its chain, not by its tenant's list
    assert rows(mine.shown("/ui/runs")) == [str(run), str(kept)]


@pytest.mark.parametrize(("code", "offered"), [("UNAUTHORIZED", True), ("TIMEOUT", True), ("NO_URL", False)])
def test_a_redrive_is_offered_beside_the_advice_that_it_may_succeed(reader, pages_dsn, ended_run, code, offered):
    operator = reader.with_key(aside(new_key, pages_dsn))
    given = {"flow": "automation", "status": "failed", "state": "failed"}
    run = ended_run(("1", "failed", code, "no"), **given)
    body = operator.get(f"/ui/runs/{run}").body.decode()
    failures = body.split('aria-label="Failures by reason"')[1].split("</ul>")[0]
    assert (f"/ui/do/redrive_run/{run}" in failures) is offered
    assert ("A redrive fails again" in failures) is not offered


def test_the_advice_for_a_missing_transcript_does_not_contradict_the_preview():
    assert "The preview counts" in advice("NO_TRANSCRIPT")
