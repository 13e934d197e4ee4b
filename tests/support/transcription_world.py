"""An engine that transcribes, with the sandbox as CRM and provider, and everything that it tells written down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ecluse.engine import EphemeralEvent, pause_lane, resume_lane
from ecluse.engine.kit import Kit
from ecluse.flows.transcriptions import queries
from ecluse.flows.transcriptions.config import Config
from ecluse.flows.transcriptions.flow import Transcription
from ecluse.flows.transcriptions.start import StartedFiche, start
from ecluse.testing.sandbox import SandboxProcess
from tests.support.outages import brief
from tests.support.runs import wait_for_run
from tests.support.vendor_clients import heard_by, vendors_at

PATIENCE = timedelta(seconds=60)
QUICK = {"configured": True, "per_minute": 60_000, "backoff_base": 0.02, "backoff_longest": 0.05}
LANE = "elevenlabs"

# As the sandbox numbers them.
FIVE, NONE, ONE_BLANK, UNKNOWN, TWELVE = "9000", "9100", "9200", "9300", "9400"


def transcription(
    sandbox: SandboxProcess,
    *,
    access: dict[str, Any] | None = None,
    breaker: dict[str, Any] | None = None,
    **config: Any,
) -> Transcription:
    wanted = Config(**{**QUICK, **config})
    given = {"speech": wanted.speech, "speech_key": "key" if wanted.configured else None, **(access or {})}
    made = Transcription(wanted, vendors_at(sandbox, **given))
    # The CRM is asked again after a second, and after four: not in tests.
    made.refresh = brief(replace(made.refresh, retry=replace(made.refresh.retry, base=0.02)), breaker)
    made.recordings = brief(made.recordings, breaker)
    made.flow = replace(made.flow, stages=(made.refresh, made.known, made.recordings))
    return made


class Gate:
    """A provider that does not hear before it is let."""

    def __init__(self) -> None:
        self.asked, self.let = asyncio.Event(), asyncio.Event()
        self._inner: Any = None

    def before(self, made: Transcription) -> None:
        made.flow = heard_by(made.flow, "speech", self._instead_of)

    def _instead_of(self, inner: Any) -> Gate:
        self._inner = inner
        return self

    async def transcribe(self, **given: Any) -> Any:
        self.asked.set()
        await self.let.wait()
        return await self._inner.transcribe(**given)


@dataclass
class World:
    kit: Kit
    made: Transcription
    sandbox: SandboxProcess
    query: Callable[..., list[Any]]
    lives: list[EphemeralEvent] = field(default_factory=list)
    tenant: str = "default"
    _started: int = 0

    async def start(self, *fiche_ids: str, event_ids: Sequence[str] = (), **options: Any) -> list[StartedFiche]:
        self._started += 1
        names = event_ids or [f"transcribe-{fiche_id}-{self._started}" for fiche_id in fiche_ids]
        async with self.kit.pool.connection() as connection:
            return await start(connection, self.made.flow, self.tenant, fiche_ids, event_ids=names, **options)

    async def ended(self, started: StartedFiche) -> dict[str, Any]:
        row = await wait_for_run(self.kit, started.run_id, PATIENCE)
        assert row["ended_at"] is not None
        return row

    async def transcribe(self, fiche_id: str, **options: Any) -> dict[str, Any]:
        (started,) = await self.start(fiche_id, **options)
        return await self.ended(started)

    async def status(self, fiche_id: str) -> dict[str, Any]:
        async with self.kit.pool.connection() as connection:
            return await queries.status(connection, self.tenant, fiche_id)

    async def pause(self) -> None:
        async with self.kit.pool.connection() as connection:
            await pause_lane(connection, LANE, reason="a test", by="test")

    async def resume(self) -> None:
        async with self.kit.pool.connection() as connection:
            await resume_lane(connection, LANE, reason="a test", by="test")

    def paid(self) -> list[str]:
        """The recordings that the provider charged for."""
        return sorted(entry["ref"] for entry in self.sandbox.ledger(vendor=LANE, kind="paid"))

    def calls(self, vendor: str = LANE) -> list[str]:
        return [entry["ref"] for entry in self.sandbox.ledger(vendor=vendor, kind="call")]

    def events(self, run_id: int) -> list[tuple[str, dict[str, Any]]]:
        """What the outbox has of a run, in the order of its aggregate, but for the engine's own."""
        rows = self.query(
            "SELECT event_type, payload FROM events_outbox WHERE aggregate = %s ORDER BY id", f"run:{run_id}"
        )
        return [(name, payload) for name, payload in rows if not name.startswith("transcription/")]

    def emitted(self, name: str) -> list[dict[str, Any]]:
        """Return the payloads of the realtime events `transcription.{name}`, in order."""
        return [dict(live.payload) for live in self.lives if live.event == f"transcription.{name}"]


async def until(true: Callable[[], Any] | Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
    """Waits for a condition, patiently."""
    async with asyncio.timeout(seconds):
        while True:
            found = true()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)
