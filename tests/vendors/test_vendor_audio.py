"""Downloading a recording: what comes back, what is refused, what is kept out of messages."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.audio import Audio, AudioSource, file_name
from ecluse.vendors.crm import Crm
from ecluse.vendors.elevenlabs import ElevenLabs, Speech
from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import VendorHttp
from tests.support.raw_server import NOW, RawServer, answers, raw_server, response


@pytest.fixture
async def guarded() -> AsyncIterator[GuardedHttp]:
    guarded = GuardedHttp(["127.0.0.1/32"], deadline=30)
    yield guarded
    await guarded.close()


@pytest.fixture
def audio(guarded: GuardedHttp) -> AudioSource:
    return AudioSource(guarded, largest=30_000, now=lambda: NOW)


@pytest.fixture
async def url(sandbox: SandboxProcess) -> str:
    """Of a recording, signed, as the CRM gives it."""
    http = VendorHttp("crm", f"{sandbox.url}/crm", deadline=30, now=lambda: NOW)
    fiche = await Crm(http, "k").fiche("1001")
    await http.close()
    return fiche.recordings[0].recording_url


@pytest.fixture
async def speech(sandbox: SandboxProcess) -> AsyncIterator[ElevenLabs]:
    http = VendorHttp("elevenlabs", f"{sandbox.url}/elevenlabs", deadline=30, now=lambda: NOW)
    yield ElevenLabs(http, "k", Speech())
    await http.close()


async def error_of(call: Any) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await call
    return caught.value


async def contents(audio: AudioSource, url: str) -> tuple[Audio, bytes]:
    downloaded = await audio.download(url)
    with downloaded.content as file:
        return downloaded, file.read()


async def test_a_recording_comes_with_its_name_and_type(audio: AudioSource, url: str) -> None:
    downloaded, content = await contents(audio, url)
    assert (downloaded.name, downloaded.content_type) == ("1001-1.mp3", "audio/mpeg")
    assert (len(content), content[:3]) == (20_000, b"ID3")


async def test_a_recording_may_be_read_as_often_as_one_likes(
    audio: AudioSource, url: str, sandbox: SandboxProcess
) -> None:
    assert (await contents(audio, url))[1] == (await contents(audio, url))[1]
    assert [call["ref"] for call in sandbox.ledger(vendor="audio", kind="call")] == ["1001-1", "1001-1"]


@pytest.mark.parametrize(
    ("rule", "family", "code"),
    [
        ({"kind": "not_found"}, PermanentError, "NOT_FOUND"),
        ({"kind": "refused", "status": 403, "code": "AccessDenied"}, PermanentError, "FORBIDDEN"),
        ({"kind": "server_error", "status": 503}, TransientError, "VENDOR_ERROR_503"),
        ({"kind": "throttle", "retry_after": 3}, TransientError, "THROTTLED"),
        ({"kind": "truncated"}, TransientError, "VENDOR_DISCONNECTED"),
        ({"kind": "reset"}, TransientError, "VENDOR_DISCONNECTED"),
        ({"kind": "huge_body", "bytes": 30_001}, PermanentError, "ANSWER_TOO_LARGE"),
        ({"kind": "redirect", "location": "http://169.254.169.254/"}, PermanentError, "FORBIDDEN_URL"),
    ],
)
async def test_each_fault_is_one_error_after_one_call(
    audio: AudioSource, url: str, sandbox: SandboxProcess, rule: dict[str, Any], family: type[VendorError], code: str
) -> None:
    sandbox.set_faults([{**rule, "vendor": "audio"}])
    error = await error_of(audio.download(url))
    assert (type(error), error.code) == (family, code)
    assert len(sandbox.ledger(vendor="audio", kind="call")) == 1
    assert "Signature" not in error.message


async def test_a_store_that_repeats_the_signature_is_not_quoted(audio: AudioSource, url: str) -> None:
    error = await error_of(audio.download(f"{url}&more=hush"))
    assert (type(error), error.code, error.status) == (PermanentError, "FORBIDDEN", 403)
    assert "hush" not in repr(error)
    assert "hush" not in error.message


async def test_a_private_address_is_refused_unless_it_is_allowed(url: str) -> None:
    guarded = GuardedHttp(deadline=30)
    error = await error_of(AudioSource(guarded, now=lambda: NOW).download(url))
    await guarded.close()
    assert (type(error), error.code) == (PermanentError, "FORBIDDEN_URL")


async def test_silence_is_a_time_out(guarded: GuardedHttp, url: str, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "slow_body", "chunk": 1, "delay": 0.2, "vendor": "audio"}])
    error = await error_of(AudioSource(guarded, deadline=1, now=lambda: NOW).download(url))
    assert (type(error), error.code) == (TransientError, "TIMEOUT")


async def test_a_type_that_is_not_given_is_any_bytes(audio: AudioSource) -> None:
    async with raw_server(answers(response(b"x"))) as server:
        downloaded, _ = await contents(audio, f"http://127.0.0.1:{server.port}/")
    assert (downloaded.name, downloaded.content_type) == ("recording", "application/octet-stream")


async def test_a_large_recording_is_not_held_in_memory(
    guarded: GuardedHttp, speech: ElevenLabs, sandbox: SandboxProcess
) -> None:
    """Neither when it is downloaded nor when it is uploaded."""
    pieces, piece = 400, b"\xff" * 100_000

    async def send(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {pieces * len(piece)}\r\n\r\n".encode())
        for _ in range(pieces):
            writer.write(piece)
            await writer.drain()

    tracemalloc.start()
    try:
        async with raw_server(send) as server:
            audio = AudioSource(guarded, now=lambda: NOW)
            downloaded = await audio.download(f"http://127.0.0.1:{server.port}/1001-1.mp3")
        with downloaded.content:
            assert (await speech.transcribe(file=downloaded)).text
            assert downloaded.content.tell() == pieces * len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://x.example/a/b.mp3?sig=1", "b.mp3"),
        ("https://x.example/a%2Fappel%20n%C2%B0%221%22.wav", "appeln1.wav"),
        ("https://x.example/a/b/", "b"),
        ("https://x.example", "recording"),
        (f"https://x.example/{'a' * 200}.mp3", f"{'a' * 96}.mp3"),
    ],
)
def test_a_file_is_named_after_the_path(url: str, name: str) -> None:
    assert file_name(url) == name
