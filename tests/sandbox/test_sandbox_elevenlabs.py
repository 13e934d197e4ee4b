"""The simulated speech to text, proved by the vendor's own client, and what only bare requests can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import FormData
from elevenlabs import AsyncElevenLabs, SpeechToTextChunkResponseModel
from elevenlabs.core.api_error import ApiError
from elevenlabs.errors import UnprocessableEntityError

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client, Reply

URL = "https://crm.example/audio/1001-1.mp3?Signature=x"
ONCE: Any = {"max_retries": 0}


@pytest.fixture
async def sdk(sandbox: SandboxProcess) -> AsyncIterator[AsyncElevenLabs]:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        yield AsyncElevenLabs(api_key="k", base_url=f"{sandbox.url}/elevenlabs", httpx_client=client)


async def post(http: Client, fields: dict[str, str], key: str = "k") -> Reply:
    form = FormData(default_to_multipart=True)
    for name, value in fields.items():
        form.add_field(name, value)
    return await http.post("elevenlabs/v1/speech-to-text", data=form, headers={"xi-api-key": key})


async def convert(sdk: AsyncElevenLabs, **what: Any) -> SpeechToTextChunkResponseModel:
    answer = await sdk.speech_to_text.convert(model_id="scribe_v1", diarize=True, request_options=ONCE, **what)
    assert isinstance(answer, SpeechToTextChunkResponseModel)
    return answer


async def test_the_official_client_reads_an_answer_by_url_and_by_file(
    sdk: AsyncElevenLabs, sandbox: SandboxProcess
) -> None:
    by_url = await convert(sdk, source_url=URL)
    by_file = await convert(sdk, file=("1001-1.mp3", b"ID3\r\n\x00--", "audio/mpeg"), language_code="fra")
    assert by_url.text == by_file.text
    assert by_url.transcription_id != by_file.transcription_id
    assert (by_url.language_code, len(by_url.words) > 50) == ("fra", True)
    assert {word.speaker_id for word in by_url.words} == {"speaker_0", "speaker_1"}
    starts = [word.start for word in by_url.words if word.start is not None]
    assert starts == sorted(starts)
    assert by_url.audio_duration_secs is not None
    assert by_url.audio_duration_secs >= starts[-1]
    assert "".join(word.text for word in by_url.words) == by_url.text


async def test_each_answer_is_charged_to_its_recording(sdk: AsyncElevenLabs, sandbox: SandboxProcess) -> None:
    await convert(sdk, source_url=URL)
    await convert(sdk, source_url=URL)
    sandbox.set_faults([{"kind": "server_error", "times": 1}, {"kind": "applied_then_error"}])
    for _ in range(2):
        with pytest.raises(ApiError):
            await convert(sdk, source_url=URL.replace("1001-1", "1001-2"))
    paid = sandbox.ledger(vendor="elevenlabs", kind="paid")
    assert [one["ref"] for one in paid] == ["1001-1", "1001-1", "1001-2"]
    assert sandbox.ledger(vendor="elevenlabs", kind="effect") == []
    stats = sandbox.stats()["elevenlabs"]
    assert (stats["calls"], stats["effects"]) == (4, 0)


async def test_another_recording_says_something_else(sdk: AsyncElevenLabs) -> None:
    texts = {(await convert(sdk, source_url=URL.replace("1001-1", f"1001-{k}"))).text for k in range(1, 6)}
    assert len(texts) == 5


@pytest.mark.parametrize(
    ("limit", "good", "code"),
    [
        ({"concurrency": 0}, 0, "concurrent_limit_exceeded"),
        ({"per_minute": 1, "burst": 1}, 1, "rate_limit_exceeded"),
    ],
)
async def test_the_official_client_sees_both_kinds_of_429(
    sdk: AsyncElevenLabs, sandbox: SandboxProcess, limit: dict[str, Any], good: int, code: str
) -> None:
    sandbox.set_limits({"vendor": "elevenlabs", **limit})
    for _ in range(good):
        await convert(sdk, source_url=URL)
    with pytest.raises(ApiError) as caught:
        await convert(sdk, source_url=URL)
    assert caught.value.status_code == 429
    assert caught.value.body["detail"]["code"] == code
    assert caught.value.headers is not None
    assert int(caught.value.headers["retry-after"]) >= 1
    assert sandbox.ledger(kind="call")[-1]["fault"] == "cap"


async def test_calls_at_once_are_counted_while_they_run(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "elevenlabs", "concurrency": 1})
    sandbox.set_faults([{"kind": "latency", "seconds": 1}])
    fields = {"model_id": "scribe_v1", "source_url": URL}
    first = asyncio.create_task(post(http, fields))
    while not sandbox.stats().get("elevenlabs", {}).get("in_flight"):
        await asyncio.sleep(0.01)
    second = await post(http, fields)
    assert ((await first).status, second.status) == (200, 429)
    assert second.json()["detail"]["code"] == "concurrent_limit_exceeded"


@pytest.mark.parametrize(
    ("rule", "status", "code"),
    [
        ({"kind": "throttle"}, 429, "rate_limit_exceeded"),
        ({"kind": "throttle", "concurrency": True}, 429, "concurrent_limit_exceeded"),
        ({"kind": "unauthorized"}, 401, "invalid_api_key"),
        ({"kind": "server_error", "status": 500}, 500, "internal_server_error"),
        ({"kind": "refused", "status": 401, "code": "quota_exceeded"}, 401, "quota_exceeded"),
    ],
)
async def test_faults_are_in_the_vendors_words(
    http: Client, sandbox: SandboxProcess, rule: dict[str, Any], status: int, code: str
) -> None:
    sandbox.set_faults([{**rule, "ids": ["1001-1"]}])
    reply = await post(http, {"model_id": "scribe_v1", "source_url": URL})
    detail = reply.json()["detail"]
    assert (reply.status, detail["code"], detail["status"]) == (status, code, code)
    assert set(detail) == {"type", "code", "message", "status", "request_id"}
    assert sandbox.ledger(kind="paid") == []


@pytest.mark.parametrize("key", ["", "invalid"])
async def test_a_key_that_is_none_is_refused(http: Client, key: str) -> None:
    reply = await post(http, {"model_id": "scribe_v1", "source_url": URL}, key)
    assert (reply.status, reply.json()["detail"]["code"]) == (401, "invalid_api_key")


async def test_the_official_client_sees_a_422(sdk: AsyncElevenLabs) -> None:
    with pytest.raises(UnprocessableEntityError) as caught:
        await convert(sdk)
    assert caught.value.body["detail"]["code"] == "invalid_parameters"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"source_url": URL}, 422),
        ({"model_id": "scribe_v9", "source_url": URL}, 400),
        ({"model_id": "scribe_v1", "source_url": "ftp://x/1.mp3"}, 400),
        ({"model_id": "scribe_v1", "source_url": URL, "webhook": "true"}, 400),
        ({"model_id": "scribe_v1", "source_url": URL, "entity_detection": "null", "webhook": "null"}, 200),
    ],
)
async def test_which_fields_are_accepted(http: Client, fields: dict[str, str], status: int) -> None:
    reply = await post(http, fields)
    assert reply.status == status
    if "model_id" not in fields:
        assert reply.json()["detail"][0]["loc"] == ["body", "model_id"]


async def test_words_and_speakers_only_when_asked_for(http: Client) -> None:
    fields = {"model_id": "scribe_v1", "source_url": URL, "timestamps_granularity": "none"}
    assert (await post(http, fields)).json()["words"] == []
    undiarized = (await post(http, {"model_id": "scribe_v1", "source_url": URL})).json()
    assert {word["speaker_id"] for word in undiarized["words"]} == {None}


async def test_what_is_no_form_is_refused(http: Client) -> None:
    headers = {"xi-api-key": "k"}
    assert (await http.post("elevenlabs/v1/speech-to-text", data=b"{}", headers=headers)).status == 422
    assert (await http.get("elevenlabs/v1/speech-to-text", headers=headers)).status == 404
