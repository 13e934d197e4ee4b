"""The auditor beside a system that goes on working: what happens while it looks is no violation."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import urlopen

from ecluse.base.errors import PermanentError, TransientError
from ecluse.engine import Done, Ignored, Item, Result, Start, WorkContext
from ecluse.testing.sandbox import SandboxProcess
from ecluse.verify import audit
from tests.support.engine_flows import flow, keys, stage
from tests.support.runs import start_run, wait_for_run
from tests.verify.world import World

AT_ONCE = timedelta(0)


@contextmanager
def busy(world: World, sandbox: SandboxProcess) -> Iterator[str]:
    """The sandbox, behind a proxy that makes more writes just before the ledger is read."""

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = world.effect(world.runs["running"], f"late {uuid.uuid4()}", "C1", {"name": "Étau", "price": "1.00"})
            world.write("POST", "", {"name": "Étau", "price": "1.00"}, Idempotency_Key=key)
            world.put("SKU-00009", "90.00", Idempotency_Key=str(world.effects["SKU-00009"]))
            world.put("SKU-00001", "2.00")
            with urlopen(f"{sandbox.url}{self.path}", timeout=10) as answer:  # noqa: S310
                body = answer.read()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_written_between_the_snapshot_and_the_ledger_is_not_judged(world: World) -> None:
    with busy(world, world.sandbox) as url:
        report = audit(world.dsn, url)
    assert report.violations == [], report.text()
    assert report.checked["ledger_effects"] == 12
    # Once more, they are old enough: a keyless write, and one call more than intended.
    found = audit(world.dsn, world.sandbox.url).violations
    assert [violation.invariant for violation in found] == ["I-06", "I-06"]


async def fickle(_: WorkContext, item: Item) -> Result:
    chance = random.Random(f"{item.key}/{item.round}/{item.executions}").random()  # noqa: S311
    await asyncio.sleep(chance / 10)
    if chance < 0.2:
        raise TransientError("try again")
    if chance < 0.25:
        raise PermanentError("no")
    return Ignored("gone") if chance < 0.3 else Done({"chance": chance})


async def test_an_engine_at_work_is_clean_at_every_instant(start_kit: Any, dsn: str) -> None:
    one = flow(stage(fickle))
    kit = await start_kit(one, hands=20)
    started = [
        await start_run(kit, Start(one, f"run-{n}", input={"targets": keys(150), "payload": None})) for n in range(4)
    ]
    looks = 0
    while True:
        report = await asyncio.to_thread(audit, dsn, None)
        assert report.violations == [], report.text()
        looks += 1
        shown = [await wait_for_run(kit, each.run.id, AT_ONCE) for each in started]
        if all(run["ended_at"] for run in shown):
            break
    assert looks > 1
    report = await asyncio.to_thread(audit, dsn, None)
    assert report.violations == []
    assert (report.checked["runs"], report.checked["items"], report.checked["I-11"]) == (4, 600, 8)
