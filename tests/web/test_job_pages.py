"""Pages of jobs: schedules, jobs and one of each, servers and agents; the forms that act on them."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import urlencode

import pytest

from tests.support.api_server import new_key
from tests.support.job_world import JobWorld, claim, report
from tests.web.conftest import aside, unreadable

pytestmark = pytest.mark.long
EVIL = '<script>alert("x")</script>'


@pytest.fixture
def operator(reader, pages_dsn):
    return reader.with_key(aside(new_key, pages_dsn))


@pytest.fixture
def world(reader, operator, tmp_path):
    return JobWorld(reader.client.with_key(operator.key), tmp_path)


def failed_job(world):
    """A schedule, and a job of it whose second attempt has failed; and their agent."""
    host = world.host()
    agent, retry = world.credential(host), {"maxRetries": 1, "backoffMs": 0}
    schedule = world.schedule(host, payload={"note": EVIL}, name=f"Nightly {EVIL}", retryPolicy=retry)
    job = world.run(schedule)
    for _ in range(2):
        (claimed,) = claim(agent, wait=5).json["jobs"]
        log = {"fence": claimed["fence"], "offset": 0, "text": f"line of {claimed['attempt']} {EVIL}\n"}
        assert agent.post(f"/api/agent/job-runs/{claimed['jobRunId']}/logs", log).status == 200
        assert report(agent, claimed, "failed", errorCode="EXIT_CODE", error=EVIL, exitCode=7).status == 200
    return schedule, job, agent


def act(operator, name, place, back):
    """Press a button of the page: open its form and submit it; return where it leads."""
    link = re.findall(rf'href="(/ui/do/{name}/{place}[^"]*)"', operator.get(back).body.decode())[0]
    form = operator.get(link.replace("&amp;", "&"))
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form.body.decode()))
    done = operator.post(f"/ui/do/{name}/{place}", urlencode(hidden))
    assert done.status == 303, done.body
    return done.headers["Location"]


def test_a_job_shows_its_attempts_and_logs_and_is_retried_and_cancelled(operator, reader, world, fill):
    schedule, job, _ = failed_job(world)
    listed = operator.shown(f"/ui/jobs?schedule={schedule}&status=failed")
    assert f"Nightly {EVIL} failed noop 2 of 2 EXIT_CODE" in listed
    assert "No matching jobs" in operator.shown(f"/ui/jobs?schedule={schedule}&status=running")
    page = f"/ui/jobs/{job}"
    shown = operator.shown(page)
    assert f"EXIT_CODE {EVIL} exit code 7" in shown
    assert f"Attempt 2 line of 2 {EVIL} Attempt 1 line of 1 {EVIL}" in shown
    assert EVIL not in operator.get(page).body.decode()
    assert "Retry" not in reader.shown(page)
    fill("UPDATE job_agents SET last_seen_at = now() - interval '2 minutes'"
         " WHERE host_id = (SELECT host_id FROM jobs WHERE id = %s)", job)  # fmt: skip
    again = act(operator, "retry_job", job, page)
    assert again != page
    assert "No agent of its host has been online since" in operator.shown(again)
    assert "pending" in operator.shown(again)
    assert act(operator, "cancel_job", again.rpartition("/")[2], again) == again
    assert "CANCELLED The job was cancelled before an agent claimed it." in operator.shown(again)
    assert operator.get("/ui/jobs/none").status == 404


def test_a_schedule_shows_due_times_and_jobs_and_is_run_and_paused(operator, world, fill):
    schedule, job, _ = failed_job(world)
    page = f"/ui/jobs/schedules/{schedule}"
    fill("INSERT INTO schedule_slots (schedule_id, tenant_id, due_at, state, reason, decided_at) SELECT schedule_id,"
         " tenant_id, '2026-03-02 10:00Z', 'missed', 'no scheduler', now() FROM job_schedules WHERE id = %s",
         schedule)  # fmt: skip
    shown = operator.shown(page)
    assert "Due times that failed 0" in shown
    assert "Last result failed" in shown  # of a job that was made by hand: no due time has made one
    assert "Fri 2027-01-01 00:00 +0000" in shown or "-01-01 00:00 +0000" in shown
    assert "2026-03-02 10:00:00 missed no scheduler" in shown
    assert f'href="/ui/jobs/{job}"' in operator.get(page).body.decode()
    made = act(operator, "run_job_schedule", schedule, page)
    assert "pending" in operator.shown(made)
    assert act(operator, "pause_job_schedule", schedule, page) == page
    assert "The schedule is paused." in operator.shown(page)
    assert act(operator, "resume_job_schedule", schedule, page) == page
    assert f"Nightly {EVIL}" in operator.shown("/ui/jobs/schedules")


def entered(operator, address, **given):
    """Open a form and submit it with what it shows and these entries; return the answer."""
    body = operator.get(address).body.decode()
    shown = dict(re.findall(r'<input[^>]* name="([\w.]+)"[^>]*? value="([^"]*)"', body))
    for name, options in re.findall(r'<select[^>]* name="([\w.]+)"[^>]*>(.*?)</select>', body, re.DOTALL):
        shown |= dict.fromkeys([name], *re.findall(r'value="([^"]*)" selected', options)[:1])
    shown |= {name: unescape(text) for name, text in re.findall(r'name="([\w.]+)" rows=[^>]*>\n([^<]*)<', body)}
    return operator.post(address.partition("?")[0], urlencode({**shown, **given}))


def test_servers_and_schedules_are_created_and_edited_by_forms(operator, reader, world):
    host, name = world.host(), "Server by a form"
    body = operator.get("/ui/jobs/servers").body.decode()
    link = re.findall(rf'href="(/ui/do/create_job_server[^"]*host_id={host}[^"]*)"', body)[0].replace("&amp;", "&")
    assert entered(operator, link, name=name).headers["Location"] == "/ui/jobs/servers"
    (server,) = [one for one in world.api.get("/api/jobs/servers?limit=200").json["servers"] if one["name"] == name]
    assert server["hostId"] == host
    edit = f"/ui/do/change_job_server/{server['id']}"
    assert f'value="{name}"' in operator.get(edit).body.decode()
    assert entered(operator, edit, name="Renamed").status == 303
    assert world.api.get(f"/api/jobs/servers/{server['id']}").json["name"] == "Renamed"
    given = {"name": "By a form", "cron_expression": "0 2 * * *", "job_type": "noop", "retry_policy.max_retries": "3"}
    new = f"/ui/do/create_job_schedule?server_instance_id={server['id']}"
    made = entered(operator, new, payload='{"maxSize": 1}', **given).headers["Location"]
    assert "By a form" in operator.shown(made)
    edit = f"/ui/do/change_job_schedule/{made.rpartition('/')[2]}"
    form = operator.get(edit).body.decode()
    assert 'name="retry_policy.max_retries" value="3"' in form.replace('type="number" ', "")
    assert "maxSize" in form
    wrong = entered(operator, edit, cron_expression="0 2 * *")
    assert (wrong.status, "4 fields" in wrong.body.decode()) == (422, True)
    assert entered(operator, edit, cron_expression="0 3 * * *").status == 303
    schedule = world.api.get(f"/api{made.removeprefix('/ui')}").json
    assert (schedule["cronExpression"], schedule["payload"]) == ("0 3 * * *", {"maxSize": 1})
    assert schedule["retryPolicy"]["maxRetries"] == 3
    assert "/ui/do/" not in reader.get("/ui/jobs/servers").body.decode()


def test_general_pages_link_to_the_page_of_a_job_schedule_and_offer_only_what_works(operator, world, fill):
    schedule = world.schedule(world.host(), name="Only jobs")
    row = fill("SELECT schedule_id FROM job_schedules WHERE id = %s", schedule)
    fill("INSERT INTO schedule_slots (schedule_id, tenant_id, due_at, state, reason, decided_at)"
         " VALUES (%s, 'default', '2026-03-02 10:00Z', 'failed', 'no server', now())", row)  # fmt: skip
    own = f'href="/ui/jobs/schedules/{schedule}"'
    listed = operator.get("/ui/schedules").body.decode()
    assert own in listed
    assert f"/ui/do/run_schedule/{row}?" not in listed
    general = operator.get(f"/ui/schedules/{row}").body.decode()
    assert own in general
    assert "2026-03-02 10:00:00 failed no server" in operator.shown(f"/ui/schedules/{row}")
    assert not re.findall(rf"/ui/do/(run|change)_schedule/{row}", general)
    assert act(operator, "disable_schedule_of_flow", row, f"/ui/schedules/{row}") == f"/ui/schedules/{row}"
    runs = operator.get("/ui/runs").body.decode()
    assert "<option>test</option>" in runs
    assert "<option>jobs</option>" not in runs
    assert f'<option value="{row}">' not in runs
    assert f"ecluse schedules run {row}" not in runs


def test_agents_are_listed_with_what_they_do_and_are_revoked(operator, world, fill):
    _, _, agent = failed_job(world)
    body = operator.get("/ui/jobs/servers").body.decode()
    assert '<a href="/ui/jobs" aria-current="page">Jobs</a>' in body
    assert "online" in operator.shown("/ui/jobs/servers")
    named = fill("SELECT id FROM job_agents ORDER BY id DESC LIMIT 1")
    assert act(operator, "revoke_job_agent", named, "/ui/jobs/servers") == "/ui/jobs/servers"
    assert "revoked" in operator.shown("/ui/jobs/servers")
    assert claim(agent).status == 401


def test_a_host_gets_a_token_that_is_shown_once_and_is_deleted(operator, reader, world):
    host = world.host()
    home = "/ui/jobs/servers"
    body = operator.get(home).body.decode()
    assert f"/ui/do/delete_job_host/{host}" in body
    made = entered(operator, f"/ui/do/create_enrolment_token/{host}?back={home}").body.decode()
    assert "not shown again" in made
    (token,) = re.findall(r"<code>(ecl_enrol_[^<]+)</code>", made)
    about = {"token": token, "hostname": "here", "version": "1", "platform": "test"}
    assert world.api.with_key(None).post("/api/agent/enrol", about).status == 201
    job = world.job(host)
    form = f"/ui/do/delete_job_host/{host}"
    assert "Pending 1 Running 0" in operator.shown(form)
    refused = entered(operator, form)
    assert (refused.status, "is on this host" in refused.body.decode()) == (409, True)
    assert world.api.ask("DELETE", f"/api/jobs/servers/{world.shown(job)['serverInstanceId']}").status == 200
    assert act(operator, "delete_job_host", host, home) == home
    assert f"/ui/do/delete_job_host/{host}" not in operator.get(home).body.decode()
    assert "Its host was deleted at" in operator.shown(f"/ui/jobs/{job}")


def test_a_schedule_is_listed_with_the_status_of_its_last_job(operator, world):
    host = world.host()
    agent = world.credential(host)
    schedule = world.schedule(host, name="Runs still", timezone="Europe/Paris")
    world.run(schedule)
    claim(agent, wait=5)
    listed = re.findall(r"Runs still running At (.*?) Pause", operator.shown("/ui/jobs/schedules"))
    assert "(Europe/Paris) noop" in listed[0]
    assert " success 1 Run now" in listed[0]
    body = operator.get(f"/ui/jobs/schedules/{schedule}").body.decode()
    assert '<span class="badge succeeded">success</span>' not in body
    assert f'<option value="{schedule}">Runs still</option>' in operator.get("/ui/jobs").body.decode()
    assert f'<option value="{schedule}" selected>' in operator.get(f"/ui/jobs?schedule={schedule}").body.decode()


def test_an_agent_shows_how_long_ago_it_was_heard_of(operator, world, fill):
    agent = world.credential(world.host())
    claim(agent)
    fill("UPDATE job_agents SET last_seen_at = ecluse_now() - interval '40 seconds'"
         " WHERE id = (SELECT id FROM job_agents ORDER BY id DESC LIMIT 1)")  # fmt: skip
    assert re.search(r"online [-\d]+ [:\d]+ [-\d]+ [:\d]+ 4\d s ago", operator.shown("/ui/jobs/servers"))


def test_a_page_of_a_job_follows_it(operator, world, follow, paced):
    host = world.host()
    agent, job = world.credential(host), world.job(host)
    paced(operator.client, least=0.05, tick=0.2)
    page = follow(operator, f"/ui/jobs/{job}/live")
    assert "pending" in page.next()[1]
    (claimed,) = claim(agent, wait=5).json["jobs"]
    while "running" not in page.next()[1]:
        pass
    assert report(agent, claimed).status == 200
    while "succeeded" not in page.next()[1]:
        pass


PAGES = ("/ui/jobs", "/ui/jobs/{job}", "/ui/jobs/schedules", "/ui/jobs/schedules/{schedule}", "/ui/jobs/servers",
         "/ui/do/create_job_schedule")  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_are_accessible_on_any_screen(reader, visit, operator, world, path):
    schedule, job, _ = aside(failed_job, world)
    page = visit(reader.client, reduced_motion="reduce").enter(operator.key, path.format(job=job, schedule=schedule))
    found = unreadable(page)
    assert not found, "\n".join(found)
