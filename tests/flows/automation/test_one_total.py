"""One total everywhere: a run selected what was successful, failed and ignored, whatever face is asked for it."""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter

import pytest

from tests.support.api_server import new_key, serving
from tests.support.automation_scenes import ONLY_DETAILS
from tests.support.pages import Reader

GOOD, REFUSED, UNKNOWN = ("1000", "1002"), ("1001",), ("9300",)


@pytest.mark.req("AUT-15", "AUT-122")
async def test_list_page_export_and_command_say_the_same_total(automate, dsn, bare):
    world = await automate()
    world.sandbox.set_faults([{"kind": "unauthorized", "vendor": "crm", "ids": list(REFUSED)}])
    run = await world.run_over(*GOOD, *REFUSED, *UNKNOWN, **ONLY_DETAILS)
    run_id, total = run["id"], {"selected": 4, "successful": 2, "failed": 1, "ignored": 1}

    def ask() -> None:
        with serving(dsn) as server:
            key = new_key(dsn, "viewer")
            client, reader = server.with_key(key), Reader(server, key)
            (listed,) = [one for one in client.get("/api/runs").json["runs"] if one["id"] == str(run_id)]
            assert {name: listed[name] for name in total} == total
            for found in (client.get("/api/automation/runs").json["runs"][0],
                          client.get(f"/api/automation/runs/{run_id}").json):  # fmt: skip
                counted = {name: found[f"{name}_fiches"] for name in ("successful", "failed", "ignored")}
                assert {"selected": found["selected"], **counted} == total
            for path in ("/ui/runs", f"/ui/runs/{run_id}"):
                assert "2 successful, 1 failed, 1 ignored of 4" in reader.shown(path)
            rows = csv.DictReader(io.StringIO(client.get(f"/api/runs/{run_id}/outcomes.csv").body.decode()))
            assert Counter(row["outcome"] for row in rows) == {"successful": 2, "failed": 1, "ignored": 1}
            at = {"ECLUSE_URL": f"http://127.0.0.1:{server.port}", "ECLUSE_KEY": key}
            (line,) = [
                one.split() for one in bare("runs", "list", **at).out.splitlines() if one.startswith(str(run_id))
            ]
            assert line[3:8] == ["4", "2", "1", "0", "1"]  # none was cancelled
            assert "4 = 2 successful + 1 failed + 1 ignored" in bare("runs", "watch", str(run_id), **at).out

    await asyncio.to_thread(ask)
