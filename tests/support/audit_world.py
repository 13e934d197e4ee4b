"""An engine that audits, with the sandbox as the model, and fiches whose recordings were written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from ecluse.engine import EphemeralEvent, Flow, Run, Stage, Start
from ecluse.engine.kit import Kit
from ecluse.engine.lead.story import Story
from ecluse.flows.audits import configs
from ecluse.flows.audits.configs import ConfigVersion
from ecluse.flows.audits.flow import Audit, Config, audit_stage
from ecluse.flows.audits.plan import plan_audits
from ecluse.flows.audits.store import record_failures
from ecluse.testing.sandbox import SandboxProcess
from tests.support.fiche_rows import call, details, save
from tests.support.outages import brief
from tests.support.runs import start_run, wait_for_run
from tests.support.vendor_clients import vendors_at

PATIENCE = timedelta(seconds=60)
STEPS = [
    {"name": "Consent", "criteria": "The customer is told that the call is recorded, and agrees.", "weight": 3.0},
    {"name": "Price", "criteria": "The monthly price is named.", "weight": 1.0, "max_score": 5},
]
SAID = ("Bonjour, cet appel est enregistré, en êtes-vous d'accord ?", "Oui, je suis d'accord avec cela, allez-y.")

WRITE_DOWN = """
UPDATE recordings SET has_transcription = true, transcription_text = %s, transcribed_at = ecluse_now()
WHERE fiche_cache_id = %s AND call_id = %s RETURNING id
"""
CHUNK = "INSERT INTO recording_transcription_chunks (recording_id, position, speaker, text) VALUES (%s, %s, %s, %s)"


def quick(stage: Stage, breaker: dict[str, Any] | None = None, **options: Any) -> Stage:
    """A second and four are not waited for in tests."""
    return brief(replace(stage, retry=replace(stage.retry, base=0.02, multiplier=1.0), **options), breaker)


def by_hand(sandbox: SandboxProcess, *, vendor: dict[str, Any] | None = None, **config: Any) -> Audit:
    made = Audit(Config(**config), vendors_at(sandbox, **(vendor or {})))
    made.stage = quick(made.stage)
    made.flow = replace(made.flow, stages=(made.stage,))
    return made


class Pairs(BaseModel):
    fiches: list[str]
    configs: list[list[Any]]
    use_rlm: bool = False
    schedule: int | None = None


def automation(sandbox: SandboxProcess, *, rounds: int = 0, **config: Any) -> Flow:
    """A flow like the one that will run audits as one of its stages: fiches are its targets."""
    stage = quick(audit_stage(Config(**config), rounds=rounds, poll=timedelta(seconds=0.2)), max_wait=PATIENCE)

    async def chosen(connection: Any, run: Run) -> Sequence[Any]:
        given = [ConfigVersion(*one) for one in run.input["configs"]]
        return await plan_audits(
            connection,
            run,
            run.input["fiches"],
            given,
            lane=stage.lane,
            use_rlm=run.input["use_rlm"],
            schedule_id=run.input["schedule"],
        )

    async def story(run: Story) -> None:
        await run.select(chosen)
        await run.fan_out(stage, chosen)
        await run.gate(stage)

    async def ended(connection: Any, runs: Sequence[Run]) -> Sequence[Any]:
        await record_failures(connection, [run.id for run in runs])
        return ()

    return Flow("automation", (stage,), story, Pairs, vendors=vendors_at(sandbox), ended=ended)


@dataclass
class World:
    kit: Kit
    flow: Flow
    sandbox: SandboxProcess
    query: Callable[..., list[Any]]
    lives: list[EphemeralEvent] = field(default_factory=list)
    _started: int = 0

    async def fiche(self, fiche_id: str, *said: Sequence[str], tenant: str = "default") -> int:
        """With a recording per argument, each of so many turns; one without turns is not written down."""
        calls = [call(f"{fiche_id}-{n}", start_time=f"2026-03-02T{8 + n:02d}:00:00Z") for n, _ in enumerate(said, 1)]
        async with self.kit.pool.connection() as connection:
            (number,) = await save(connection, (fiche_id, details(*calls)), tenant=tenant)
        for n, turns in enumerate(said, 1):
            if turns:
                ((recording,),) = self.query(WRITE_DOWN, " ".join(turns), number, f"{fiche_id}-{n}")
                for position, text in enumerate(turns):
                    self.query(CHUNK, recording, position, f"speaker_{position % 2}", text)
        return number

    async def config(self, *, tenant: str = "default", **given: Any) -> ConfigVersion:
        wanted = {"name": "Compliance", "steps": STEPS, **given}
        async with self.kit.pool.connection() as connection, connection.transaction():
            row = await configs.create(connection, tenant, wanted)
        return ConfigVersion(row["id"], row["version"], row["name"])

    async def start(self, *, tenant: str = "default", **given: Any) -> int:
        self._started += 1
        start = Start(self.flow, f"a-{self._started}", tenant_id=tenant, input=given)
        return (await start_run(self.kit, start)).run.id

    async def ended(self, run_id: int) -> dict[str, Any]:
        row = await wait_for_run(self.kit, run_id, PATIENCE)
        assert row["ended_at"] is not None
        return row

    async def run(self, **given: Any) -> dict[str, Any]:
        return await self.ended(await self.start(**given))

    async def audit(self, fiche_id: str, config: ConfigVersion, **given: Any) -> dict[str, Any]:
        return await self.run(fiche_id=fiche_id, audit_config_id=str(config.id), **given)

    def calls(self) -> list[str]:
        return [entry["ref"] for entry in self.sandbox.ledger(vendor="llm", kind="call")]

    def paid(self) -> list[str]:
        return [entry["ref"] for entry in self.sandbox.ledger(vendor="llm", kind="paid")]

    def emitted(self, name: str) -> list[dict[str, Any]]:
        """Return the payloads of the realtime events `audit.{name}`, in order."""
        return [dict(live.payload) for live in self.lives if live.event == f"audit.{name}"]
