"""What a server says first: which program it is, what is wrong with its knobs, where to look at it, how to get in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from ecluse.cli.welcome import url_of
from tests.support.command_line import ROOT, Server

VERSION = re.compile(r"0\.[0-9]+\.[0-9]+(\+g[0-9a-f]{9})?")


@pytest.fixture(scope="module")
def head() -> str:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there is no commit")
    return subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short=9", "HEAD"], text=True).strip()


def said_by(server: Server) -> list[str]:
    server.wait_until_ready()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        build = [line for line in answer.read().decode().splitlines() if line.startswith("ecluse_build_info{")]
    status, health = server.get("/healthz")
    code, _, said = server.end()
    assert (code, status) == (0, 200)
    return [*said.splitlines(), health["version"], *build]


@pytest.mark.req("ENG-100", "G-36")
def test_the_first_lines_name_the_program_wrong_knobs_the_address_and_the_way_to_a_key(serve, head):
    server = serve(ECLUSE_LOG_FORMAT="json", ECLUSE_HANDS="0", ECLUSE_HEARTBEAT_SECONDS="0.01")
    *lines, healthy, build = said_by(server)
    records = [json.loads(line) for line in lines]  # nothing in another form, nothing on another stream
    assert VERSION.fullmatch(records[0]["version"])
    assert (records[0]["event"], records[0]["version"]) == ("ecluse: starting", healthy)
    assert healthy.endswith(f"+g{head}")
    assert build == f'ecluse_build_info{{commit="{head}",version="{healthy.partition("+")[0]}"}} 1.0'
    low = {
        one["name"]: one["minimum"] for one in records if one["event"].startswith("settings: value below its minimum")
    }
    assert low == {"ECLUSE_HANDS": 1, "ECLUSE_HEARTBEAT_SECONDS": 0.1}
    assert {one["level"] for one in records if one.get("name") in low} == {"warning"}
    (where,) = [one for one in records if one["event"] == "server: open the pages in a browser"]
    assert where["url"] == f"http://127.0.0.1:{server.port}/"
    (key,) = [one for one in records if "no API key exists" in one["event"]]
    second = serve("--role", "api")
    assert second.done(*key["command"].split()[1:])["key"].startswith("ecl_")
    assert not any("no API key exists" in line for line in said_by(serve("--role", "api")))
    assert not any("browser" in line for line in said_by(serve("--role", "worker")))


def test_the_version_is_said_with_the_commit(bare, head):
    assert bare("--version").out == f"ecluse 0.1.0+g{head}\n"


def test_a_wheel_is_stamped_with_its_commit(tmp_path, head):
    build = [sys.executable, "-m", "hatchling", "build", "--directory", tmp_path, "--target", "wheel"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = Path(tmp_path).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("ecluse/_commit").decode().strip() == head
    assert not (ROOT / "src/ecluse/_commit").exists()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("127.0.0.1", 8080), "http://127.0.0.1:8080/"),
        (("0.0.0.0", 80), "http://127.0.0.1:80/"),  # noqa: S104 - not listened on
        (("::", 8080), "http://[::1]:8080/"),
        (("192.168.0.7", 8080), "http://192.168.0.7:8080/"),
    ],
)
def test_an_address_to_listen_on_is_told_as_one_to_open(address, url):
    assert url_of(*address) == url


def test_a_command_of_the_host_warns_of_a_knob_on_the_stream_of_its_errors(ecluse):
    migrated = ecluse("migrate", ECLUSE_HANDS="0")
    assert migrated.out.startswith("schema ")
    assert re.fullmatch(r"\[\w+\|-\] !! WARN: settings: value below its minimum.* name=ECLUSE_HANDS .*\n", migrated.err)
