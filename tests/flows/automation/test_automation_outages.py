"""A CRM, a speech provider or a model that is down while a run needs it: nothing fails, and the run says since when.
Breakers pause a fortieth of what they do in the box, and an outage is a fortieth of a minute; `slow` is the truth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from ecluse.engine import VENDOR_DOWN
from ecluse.testing.sandbox import SandboxProcess
from ecluse.verify import audit
from tests.support.automation_scenes import MONDAY, ONLY_DETAILS, over
from tests.support.automation_world import World
from tests.support.transcription_world import until

pytestmark = pytest.mark.long

SCALE = 40
# On a busy machine an outage takes longer than its fortieth, and must still be over before the doubt is.
BREAKER = {"pause": VENDOR_DOWN.pause / SCALE, "longest": VENDOR_DOWN.longest / SCALE, "doubt": VENDOR_DOWN.doubt / 8}
AS_IN_THE_BOX = {name: getattr(VENDOR_DOWN, name) for name in ("pause", "longest", "doubt")}
FICHES = [str(number) for number in range(1000, 1012)]
VENDORS = ("crm", "elevenlabs", "llm")  # and the lanes to them
WAYS = ("503", "refused", "hangs")


@dataclass
class Door:
    """A proxy to the sandbox that can be shut: then new connections are refused and open ones are closed."""

    sandbox: SandboxProcess
    port: int = 0
    _server: asyncio.Server | None = None
    _inside: set[asyncio.StreamWriter] = field(default_factory=set)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._through, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._inside):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = urlsplit(self.sandbox.url)
        there, back = await asyncio.open_connection(behind.hostname, behind.port)
        self._inside |= {writer, back}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65_536):
                    sink.write(data)
                    await sink.drain()
            except ConnectionError:
                pass
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))
        self._inside -= {writer, back}


@dataclass
class Outages:
    """Of one vendor, in each of the ways in which it may be down."""

    sandbox: SandboxProcess
    door: Door
    vendor: str

    @asynccontextmanager
    async def one(self, way: str) -> AsyncIterator[None]:
        if way == "refused":
            await self.door.shut()
        else:
            kind = {"kind": "server_error"} if way == "503" else {"kind": "timeout", "seconds": 600}
            self.sandbox.set_faults([{**kind, "vendor": self.vendor}])
        yield
        if way == "refused":
            await self.door.open()
        else:
            self.sandbox.set_faults([])


@pytest.fixture
async def door(sandbox):
    door = Door(sandbox)
    await door.open()
    yield door
    await door.shut()


Make = Callable[..., Awaitable[World]]


@pytest.fixture
def behind_a_door(automate, sandbox, door) -> Make:
    """An engine that reaches one vendor through the door, and waits a second for its answer."""

    async def make(breaker: dict[str, Any], vendor: str) -> World:
        url = dict.fromkeys(VENDORS, sandbox.url) | {vendor: f"http://127.0.0.1:{door.port}"}
        patience = dict.fromkeys(VENDORS, 30.0) | {vendor: 1.0}
        model = {"llm_url": f"{url['llm']}/llm/v1", "llm_deadline": patience["llm"]}
        crm = {"crm_url": f"{url['crm']}/crm", "crm_deadline": patience["crm"]}
        speech = {"speech_url": f"{url['elevenlabs']}/elevenlabs", "speech_deadline": patience["elevenlabs"]}
        return await automate(crm={**crm, **model}, speech={"access": {**crm, **speech}}, breaker=breaker)

    return make


async def went_through(world: World, outages: Outages, lane: str, way: str, lasts: float, *fiches: str) -> None:
    """A run over these fiches whose vendor is down from the start of its stage on."""
    query = world.query
    await world.config()
    schedule = await world.schedule(*fiches)
    async with outages.one(way):
        begun = time.monotonic()
        run_id = await world.trigger(schedule)
        down = "SELECT failing_since FROM lanes WHERE name = %s AND trips > 0"
        ((since,),) = await until(lambda: query(down, lane))
        await asyncio.sleep(max(0.0, begun + lasts - time.monotonic()))
        waiting = query("SELECT count(*) FROM items i JOIN lanes l ON l.id = i.lane_id WHERE name = %s", lane)
        assert waiting[0][0] > 0
        assert query("SELECT count(*) FROM items WHERE status = 'failed' AND error_code <> 'NO_URL'") == [(0,)]
    run = await world.ended(run_id, timedelta(seconds=lasts + 60))
    assert run["status"] == "completed", world.results(run_id)
    assert world.results(run_id) == dict.fromkeys(fiches, ("successful", None))
    said = [line for line in world.logs(run_id) if f"ane {lane}: " in line]
    assert f"lane {lane}: vendor down since {since:%Y-%m-%d %H:%M:%S}Z, next probe" in said[0]
    assert said[-1].startswith(f"Lane {lane}: the vendor answers again after ")
    assert query("SELECT bool_and(i.executions <= s.budget) FROM items i JOIN stages s USING (run_id, stage)") == [
        (True,)
    ]
    ((probes,),) = query("SELECT count(*) FROM attempts WHERE outage")
    assert probes > 0
    assert query("SELECT name FROM lanes WHERE trips > 0 OR failures > 0") == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", VENDORS)
async def test_a_vendor_that_is_down_for_a_while_fails_no_record(behind_a_door, sandbox, door, dsn, lane, way):
    world = await behind_a_door(BREAKER, lane)
    await went_through(world, Outages(sandbox, door, lane), lane, way, 60 / SCALE, *FICHES)
    assert audit(dsn, None).violations == []


@pytest.mark.parametrize("lane", VENDORS)
async def test_nor_does_it_fail_a_run_of_two(behind_a_door, sandbox, door, lane):
    """Too few to show that the vendor is down: they wait and see."""
    world = await behind_a_door(BREAKER, lane)
    await went_through(world, Outages(sandbox, door, lane), lane, "503", 60 / SCALE, "1000", "1004")


async def test_days_wait_for_a_crm_that_is_down(behind_a_door, sandbox, door, query):
    world = await behind_a_door(BREAKER, "crm")
    days = over(MONDAY, MONDAY + timedelta(days=6))
    schedule = await world.schedule(fiche_selection={**days, "max_fiches": 3}, **ONLY_DETAILS)
    async with Outages(sandbox, door, "crm").one("503"):
        run_id = await world.trigger(schedule)
        await until(lambda: query("SELECT 1 FROM lanes WHERE name = 'crm-sales' AND trips > 0"))
        await asyncio.sleep(1)
    run = await world.ended(run_id)
    assert (run["status"], run["error_details"]) == ("completed", None)
    assert query("SELECT count(*) FROM items WHERE stage = 'revalidate' AND status = 'succeeded'") == [(7,)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lane", VENDORS)
async def test_a_vendor_that_is_down_for_a_minute_fails_no_record(behind_a_door, sandbox, door, dsn, lane):
    world = await behind_a_door(AS_IN_THE_BOX, lane)
    await went_through(world, Outages(sandbox, door, lane), lane, "503", 60, *FICHES)
    assert audit(dsn, None).violations == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nor_does_a_minute_fail_a_run_of_one(behind_a_door, sandbox, door):
    world = await behind_a_door(AS_IN_THE_BOX, "llm")
    await went_through(world, Outages(sandbox, door, "llm"), "llm", "refused", 60, "1000")
