"""What the first screens advise is run as it is printed."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys

import pytest

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
