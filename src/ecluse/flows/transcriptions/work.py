"""The work functions of the stages: fetch the fiche again, settle a recording that needs no call, or have the provider
transcribe it. Retries, pauses, statuses and commits are the engine's."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

from ecluse.base.errors import NonRetriableError, PermanentError, TransientError
from ecluse.engine import Charge, Done, EphemeralEvent, Item, Postponed, Result, WorkContext
from ecluse.flows.connections.registry import Vendors
from ecluse.flows.fiches.fetch import fetch_fiche
from ecluse.flows.transcriptions import rules, traces
from ecluse.flows.transcriptions.chunks import derive
from ecluse.flows.transcriptions.config import Config
from ecluse.flows.transcriptions.precheck import Looks
from ecluse.vendors.audio import AudioSource
from ecluse.vendors.elevenlabs import ElevenLabs, Transcript

LOCKED_SECONDS = 5.0
UNCONFIGURED_SECONDS = 60.0


async def refresh(context: WorkContext, item: Item) -> Result:
    """Fetch a fiche again from the CRM. The work of the stage `refresh`. Raise NonRetriableError if there is no key for
    speech-to-text, PermanentError if the CRM does not know the fiche."""
    vendors: Vendors = context.vendors
    if not await vendors.has_key(context, item, "speech"):
        raise NonRetriableError(
            "There is no key for speech-to-text: set ELEVENLABS_API_KEY and start again.", code=rules.NOT_CONFIGURED
        )
    tracer, began = traces.orchestrator(item, item.key), time.monotonic()
    tracer.step("force-refresh-fiche", execution=item.executions + 1)
    answer = await vendors.crm(context, item, lambda crm: fetch_fiche(crm, item.key))
    tracer.done("force-refresh-fiche", time.monotonic() - began, not_found=not answer["found"])
    if not answer["found"]:
        raise PermanentError(f"The CRM has no fiche {item.key} (404).", code="NOT_FOUND")
    return Done({"recordings": len(answer["details"]["recordings"])}, kept=answer["details"])


async def settle_known(_: WorkContext, item: Item) -> Result:
    """Settle a recording without a call: it succeeds if its transcript was paid for earlier; otherwise it has no URL,
    and PermanentError is raised. The work of the stage `known`."""
    if item.payload["paid"] is None:
        raise PermanentError("The CRM has no URL for this recording.", code=rules.NO_URL)
    return Done({"cached": True})


async def transcribe_recording(config: Config, context: WorkContext, item: Item) -> Result:
    """Have the provider transcribe a recording. The work of the stage `recordings`. No call is made if the recording
    has a transcript by now; if it is gone or has no URL any more (PermanentError); or if there is no key in this
    process or another run holds the recording's lock (the item is postponed)."""
    vendors: Vendors = context.vendors
    if not await vendors.has_key(context, item, "speech"):
        # The key is missing in this process only; another replica may have it.
        why = "there is no key for speech-to-text here: set ELEVENLABS_API_KEY"
        return Postponed(context.now() + timedelta(seconds=UNCONFIGURED_SECONDS), why)
    tracer, fiche_id, began = traces.worker(item), item.payload["fiche_id"], time.monotonic()
    state = await vendors.shared(Looks).look(context, item)
    if state.url.strip() and not state.transcribed and state.holder == item.run_id:
        charge = Charge("elevenlabs", config.speech.model, config.cost(state.seconds))
        await context.pay(item, rules.recording_lock(fiche_id, item.key), charge)
    tracer.start(
        "transcribe-recording",
        index=item.payload["index"],
        total=item.payload["total"],
        url=rules.without_query(state.url),
        execution=item.executions + 1,
    )
    tracer.done("recording-lock", time.monotonic() - began, holder=state.holder)
    if not state.exists:
        raise PermanentError("The recording no longer exists.", code=rules.MISSING)
    if state.transcribed:
        return Done({"cached": True})
    if state.holder != item.run_id:
        # Postpone instead of reporting success: the other holder's call may still fail.
        holder = "another call" if state.holder is None else f"run {state.holder}"
        until = context.now() + timedelta(seconds=LOCKED_SECONDS)
        return Postponed(until, f"{holder} is transcribing this recording", "lease")
    if not state.url.strip():
        raise PermanentError("The CRM has no URL for this recording any more.", code=rules.NO_URL)
    payload = {**rules.about(fiche_id, item.run_id), "call_id": item.key, "execution": item.executions + 1}
    context.emit([EphemeralEvent(item.tenant_id, "transcription.recording_started", payload)])
    began = time.monotonic()
    tracer.step("speech-to-text")
    speech = await vendors.speech(context, item, partial(_have_written, vendors.audio, state.url))
    tracer.done("speech-to-text", time.monotonic() - began, characters=len(speech.text))
    chunks = derive(speech.text, speech.words)
    return Done(
        {"cached": False, "transcription_id": speech.transcription_id, "characters": len(speech.text)},
        kept={
            "transcription_id": speech.transcription_id,
            "text": speech.text,
            "chunks": None if chunks is None else [chunk._asdict() for chunk in chunks],
            "data": speech.model_dump(include={"text", "words"}) if chunks is None else None,
            "key": rules.speech_key(item.key, state.url, config.speech).hex(),
            "model": config.speech.model,
        },
        cost=config.cost(speech.seconds or state.seconds),
    )


async def _have_written(audio: AudioSource | None, url: str, speech: ElevenLabs) -> Transcript:
    """Return the provider's transcript of the recording at this URL. With `audio`, Ecluse downloads the recording and
    uploads it; without, the provider gets the URL. Errors of the download count as unambiguous: nothing was paid
    for."""
    if audio is None:
        return await speech.transcribe(source_url=url)
    try:
        file = await audio.download(url)
    # The store of the recordings is not the provider, which has not been called yet: the provider's lane stays open,
    # and nothing was paid for.
    except TransientError as error:
        raise TransientError(error.message, code=rules.AUDIO_UNAVAILABLE, ambiguous=False) from error
    except PermanentError as error:
        raise PermanentError(error.message, code=error.code, ambiguous=False) from error
    with file.content:
        return await speech.transcribe(file=file)


def bound(config: Config) -> dict[str, Any]:
    """Return the work functions by stage name."""
    return {
        rules.REFRESH: refresh,
        rules.KNOWN: settle_known,
        rules.RECORDINGS: partial(transcribe_recording, config),
    }
