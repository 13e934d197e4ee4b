"""Vendor clients of the transcription flow: the CRM, the speech-to-text provider and, if Ecluse downloads the
recordings itself, the guarded HTTP client that does so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ecluse.base.clock import Clock
from ecluse.engine import BatchedQuery
from ecluse.flows.transcriptions.precheck import Standing, look
from ecluse.vendors.audio import AudioSource
from ecluse.vendors.crm import Crm, CrmAccess, connected_crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp

LARGEST_TRANSCRIPT = 100_000_000  # bytes: hours of words, each with timestamps


@dataclass(frozen=True, kw_only=True)
class Access(CrmAccess):
    """Settings of the vendor clients. Without a key for speech-to-text, each call raises NOT_CONFIGURED."""

    speech_url: str = ""
    speech_key: str | None = field(default=None, repr=False)
    speech_deadline: float = 600
    speech: Speech = field(default_factory=Speech)
    upload: bool = False  # Ecluse downloads the recordings and uploads them to the provider
    allowed_networks: Sequence[str] = ()


class Vendors(NamedTuple):
    """The `vendors` of the transcription flow; `looks` batches the checks before a paid call."""

    crm: Crm
    speech: ElevenLabs
    audio: AudioSource | None  # None: the provider fetches recordings itself
    looks: BatchedQuery[Standing]


@asynccontextmanager
async def connected(access: Access, clock: Clock) -> AsyncIterator[Vendors]:
    """Open the vendor clients for the duration of the context."""
    async with AsyncExitStack() as open_:
        crm = await open_.enter_async_context(connected_crm(access, clock.now))
        speech = VendorHttp(
            "elevenlabs",
            access.speech_url,
            deadline=access.speech_deadline,
            largest_body=LARGEST_TRANSCRIPT,
            connections=access.connections,
            now=clock.now,
        )
        await open_.enter_async_context(speech)
        audio = None
        if access.upload:
            guarded = GuardedHttp(access.allowed_networks, deadline=access.speech_deadline)
            open_.push_async_callback(guarded.close)
            audio = AudioSource(guarded, now=clock.now)
        yield Vendors(crm, ElevenLabs(speech, access.speech_key, access.speech), audio, BatchedQuery(look))
