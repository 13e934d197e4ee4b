"""What the first screens advise is run as it is printed."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from ecluse.flows.connections.clients import Access
from ecluse.flows.connections.records import KINDS
from tests.support.api_server import add_connections, new_key
from tests.support.command_line import environment


@pytest.fixture
def printed(reader, pages_dsn, fill):
    """Of a page in the eyes of a tenant: the commands it shows."""

    def ask(tenant: str, path: str) -> list[str]:
        body = reader.with_key(new_key(pages_dsn, "viewer", tenant)).get(path).body.decode()
        (block,) = re.findall(r"<pre><code>(.*?)</code></pre>", body, re.DOTALL)
        return html.unescape(block).splitlines()

    return ask


@pytest.fixture
def run(reader, pages_dsn):
    key = new_key(pages_dsn, "admin")

    def run(command: str) -> None:
        program, *arguments = shlex.split(command)
        assert program == "ecluse"
        done = subprocess.run(
            [sys.executable, "-m", "ecluse", *arguments],
            env=environment(ECLUSE_URL=f"http://127.0.0.1:{reader.client.port}", ECLUSE_KEY=key),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_the_advice_of_an_empty_page_works_as_printed(printed, run, fill, pages_dsn):
    add_connections(pages_dsn, "new")
    (make,) = printed("new", "/ui/runs")
    assert printed("new", "/ui/schedules") == [make]
    run(make)
    (start,) = printed("new", "/ui/runs")
    assert re.fullmatch(r"ecluse schedules run [0-9]+ --tenant new", start)
    run(start)
    assert fill("SELECT flow || ' ' || state FROM runs WHERE tenant_id = 'new'") == "automation queued"


@pytest.mark.parametrize("path", ["/ui/runs", "/ui/schedules"])
def test_connections_come_before_a_schedule(printed, pages_dsn, fill, path):
    fill("INSERT INTO tenants (id, name, created_at) VALUES ('bare', 'bare', ecluse_now()) ON CONFLICT DO NOTHING")
    make = "ecluse connections create"
    keys = "--base-url URL --api-key-file FILE"
    crm, speech, llm, schedule = printed("bare", path)
    assert (crm, speech) == (f"{make} crm {keys} --tenant bare", f"{make} speech {keys} --tenant bare")
    assert llm == f"{make} llm {keys} --model MODEL --tenant bare"
    assert schedule.startswith("ecluse schedules create")


def test_the_first_tenant_is_told_to_connect_what_the_environment_lacks(printed, reader, request):
    setup = reader.client.app.state.connections
    assert setup.given == [], "the server of these tests has no vendors"
    crm, _, _, schedule = printed("default", "/ui/schedules")
    assert (crm, schedule.split()[1]) == (
        "ecluse connections create crm --base-url URL --api-key-file FILE",
        "schedules",
    )
    assert "none, neither here nor in the server's environment" in reader.shown("/ui/connections")
    there = {kind: Access("http://vendor", "key", "model") for kind in KINDS}
    assert replace(setup, environment={**there, "llm": Access("http://vendor", "key")}).given == ["crm", "speech"]
    reader.client.app.state.connections = replace(setup, environment=there)
    request.addfinalizer(lambda: setattr(reader.client.app.state, "connections", setup))
    (schedule,) = printed("default", "/ui/schedules")
    assert schedule.startswith("ecluse schedules create")
    assert "set in the server's environment" in reader.shown("/ui/connections")
