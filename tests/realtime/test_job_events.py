"""The events of a job reach the channel of the job, for those who may read jobs."""

from __future__ import annotations

import pytest

from ecluse.api.realtime import permission_of
from ecluse.realtime.channels import Subject
from tests.realtime.conftest import app_of
from tests.support.api_server import new_key, serving
from tests.support.job_world import JobWorld, claim, report


@pytest.mark.req("ENG-71", "ENG-78")
def test_the_channel_of_a_job_tells_of_its_end_and_names_no_payload(dsn, node, stream, tmp_path):
    with serving(dsn, roles=frozenset({"api", "scheduler"})) as client:
        server = client.with_key(new_key(dsn))
        world = JobWorld(server, tmp_path)
        host = world.host()
        agent = world.credential(host)
        everything = stream(server)
        job = world.job(host, payload={"note": "of the payload"})
        channel = f"private-job-{job}"
        js = node.client(server, app_of(server)["key"]).connected().joined(channel)
        assert report(agent, claim(agent, wait=5).json["jobs"][0], output={"note": "of the output"}).status == 200
        (completed,) = js.expect(what="event", channel=channel, event="job.completed")
        data = completed["data"]
        assert (data["job_id"], data["host_id"], data["queue"]) == (job, host, "jobs:default")
        assert (data["status"], data["attempts"]) == ("succeeded", 1)
        created, ended = everything.heard(2)
        assert (created["name"], ended["name"], ended["channels"]) == ("job.created", "job.completed", [channel])
        assert "of the" not in f"{created} {ended}"


@pytest.mark.req("ENG-78")
@pytest.mark.parametrize(
    ("kind", "named", "permission"),
    [
        ("run", "7", "runs.read"),
        ("job", "cmf1w2x3y0000abcdefghijkl", "jobs.read"),
        ("job", "7", "requests.read"),
        ("job", "automation-run-7", "automation.read"),
    ],
)
def test_the_permission_of_a_channel_is_that_to_read_what_it_is_about(kind, named, permission):
    assert permission_of(Subject(kind, named)) == permission
