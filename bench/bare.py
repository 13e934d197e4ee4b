"""Baseline of the automation flow: the same calls with the same clients, prompts and schema, made by an asyncio script
that stores nothing, retries nothing and serves no requests: `python -m bench.bare VENDORS --fiches N`.

A hundred workers (or `--concurrency`), each with one call in flight, take one fiche after another: read it, have its
recordings transcribed, ask the model once per config.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

import uvloop

from ecluse.flows.audits import prompts, steps
from ecluse.flows.audits.transcripts import ConfigContent, Recording, asked
from ecluse.flows.transcriptions.chunks import derive
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.llm import Llm

FIRST_FICHE = 20_000_000  # in this range the sandbox's fiches have exactly five recordings
RECORDINGS = 5
MODEL = "bench"
STEPS = (
    ("Identité", "Le conseiller se présente et vérifie à qui il parle."),
    ("Consentement", "L'appel est dit enregistré, et le client est d'accord."),
    ("Prix", "La cotisation mensuelle est dite en euros, tout compris."),
    ("Rétractation", "Le délai de quatorze jours est dit."),
)


def configs() -> list[dict[str, Any]]:
    """Return the two audit configs, as they are posted to `/api/audit-configs`."""
    made = [{"name": name, "criteria": criteria, "weight": 1, "max_score": 10} for name, criteria in STEPS]
    return [{"name": name, "steps": made} for name in ("Conformité", "Qualité")]


def as_asked() -> list[ConfigContent]:
    bare = {"description": "", "system_prompt": "", "model": None}
    return [asked({**bare, **config}) for config in configs()]


async def path(fiche: int, crm: Crm, speech: ElevenLabs, llm: Llm, wanted: list[ConfigContent]) -> None:
    details = await crm.fiche(str(fiche))
    said = []
    for recording in details.recordings:
        transcript = await speech.transcribe(source_url=recording.recording_url)
        chunks = derive(transcript.text, transcript.words) or ()
        speakers, texts = [chunk.speaker for chunk in chunks], [chunk.text for chunk in chunks]
        said.append(Recording(recording.call_id, recording.start_time, speakers, texts))
    text = prompts.transcript(said)
    for number, config in enumerate(wanted):
        answer = await llm.ask(
            system=prompts.system(config),
            user=text,
            schema=steps.schema(config.steps),
            read=partial(steps.read, config.steps),
            name=f"{fiche}-{number}",
        )
        steps.score(config.steps, [one.score for one in answer.answer])


async def script(vendors: str, fiches: int, concurrency: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:

        def client(name: str, url: str) -> VendorHttp:
            http = VendorHttp(name, url, deadline=600, connections=concurrency, now=lambda: datetime.now(UTC))
            stack.push_async_callback(http.close)
            return http

        crm = Crm(client("crm", f"{vendors}/crm"), "bench")
        speech = ElevenLabs(client("elevenlabs", f"{vendors}/elevenlabs"), "bench", Speech())
        llm = Llm(client("llm", f"{vendors}/llm/v1"), "bench", model=MODEL)
        wanted = as_asked()
        left: Iterator[int] = iter(range(FIRST_FICHE, FIRST_FICHE + fiches))

        async def work() -> None:
            for fiche in left:
                await path(fiche, crm, speech, llm, wanted)

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.bare", description=__doc__)
    parser.add_argument("vendors", help="the sandbox's URL")
    parser.add_argument("--fiches", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=100)
    options = parser.parse_args()
    found = uvloop.run(script(options.vendors, options.fiches, options.concurrency))
    found["all_cpu_s"] = time.process_time()  # including imports
    found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
