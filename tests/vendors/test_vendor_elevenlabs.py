"""Speech to text against the sandbox, and against each shape in which ElevenLabs refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from tempfile import TemporaryFile
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.audio import Audio
from ecluse.vendors.elevenlabs import ElevenLabs, Speech, Transcript
from ecluse.vendors.http import VendorHttp
from tests.support.raw_server import NOW, answers, client_of, raw_server, response

URL = "https://crm.example/audio/1001-1.mp3?Expires=9&Signature=hush"


@pytest.fixture
async def speech_http(sandbox: SandboxProcess) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("elevenlabs", f"{sandbox.url}/elevenlabs", deadline=30, now=lambda: NOW)
    yield http
    await http.close()


@pytest.fixture
def speech(speech_http: VendorHttp) -> ElevenLabs:
    return ElevenLabs(speech_http, "k", Speech())


async def error_of(call: Any) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await call
    return caught.value


async def transcript_from(answer: Any) -> Transcript:
    script = answers(response(json.dumps(answer).encode()))
    async with raw_server(script) as server, client_of(server.port, deadline=30) as http:
        return await ElevenLabs(http, "k", Speech()).transcribe(source_url=URL)


async def refused_with(status: int, body: bytes, headers: dict[str, str] | None = None) -> VendorError:
    async with raw_server(answers(response(body, status=status, headers=headers))) as server:
        async with client_of(server.port, deadline=30) as http:
            error = await error_of(ElevenLabs(http, "k", Speech()).transcribe(source_url=URL))
        assert len(server.requests) == 1
    return error


async def test_a_recording_is_transcribed_by_its_url(speech: ElevenLabs, sandbox: SandboxProcess) -> None:
    transcript = await speech.transcribe(source_url=URL)
    assert transcript.language_code == "fra"
    assert len(transcript.words) > 50
    assert "".join(word.text for word in transcript.words) == transcript.text
    assert {word.speaker_id for word in transcript.words} == {"speaker_0", "speaker_1"}
    assert transcript.transcription_id
    assert transcript.audio_duration_secs
    [paid] = sandbox.ledger(vendor="elevenlabs", kind="paid")
    assert (paid["ref"], paid["value"]["by"], paid["value"]["model"]) == ("1001-1", "url", "scribe_v1")


@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_a_recording_is_transcribed_as_a_file(speech: ElevenLabs, sandbox: SandboxProcess, size: int) -> None:
    by_url = await speech.transcribe(source_url=URL)
    with TemporaryFile() as file:
        file.write(b"\r\n--\x00\xff" * (size // 6))
        file.seek(0)
        by_file = await speech.transcribe(file=Audio("1001-1.mp3", "audio/mpeg", file))
    assert (by_file.text, by_file.words) == (by_url.text, by_url.words)
    assert [paid["value"]["by"] for paid in sandbox.ledger(vendor="elevenlabs", kind="paid")] == ["url", "file"]


async def test_what_is_asked_for_is_what_identifies_a_result(speech_http: VendorHttp, sandbox: SandboxProcess) -> None:
    speech = ElevenLabs(speech_http, "k", Speech(model="scribe_v2", language="fr", diarize=False))
    transcript = await speech.transcribe(source_url=URL)
    assert transcript.language_code == "fr"
    assert {word.speaker_id for word in transcript.words} == {None}
    assert sandbox.ledger(kind="paid")[0]["value"]["model"] == "scribe_v2"


@pytest.mark.req("TRX-26")
@pytest.mark.parametrize("key", [None, "", "  "])
async def test_without_a_key_a_call_fails_for_good_before_it_is_sent(
    speech_http: VendorHttp, sandbox: SandboxProcess, key: str | None
) -> None:
    error = await error_of(ElevenLabs(speech_http, key, Speech()).transcribe(source_url=URL))
    assert (type(error), error.code, error.ambiguous) == (PermanentError, "NOT_CONFIGURED", False)
    assert "ELEVENLABS_API_KEY" in error.message
    assert sandbox.ledger() == []


@pytest.mark.req("TRX-67", "ENG-43")
@pytest.mark.parametrize(
    ("rule", "family", "code", "ambiguous"),
    [
        ({"kind": "throttle", "retry_after": None}, TransientError, "THROTTLED", False),
        ({"kind": "throttle", "retry_after": None, "concurrency": True}, TransientError, "CONCURRENCY", False),
        ({"kind": "server_error", "status": 408}, TransientError, "VENDOR_ERROR_408", True),
        ({"kind": "server_error", "status": 500}, TransientError, "VENDOR_ERROR_500", True),
        ({"kind": "server_error", "status": 503}, TransientError, "VENDOR_ERROR_503", True),
        ({"kind": "applied_then_error", "status": 502}, TransientError, "VENDOR_ERROR_502", True),
        ({"kind": "reset"}, TransientError, "VENDOR_DISCONNECTED", True),
        ({"kind": "invalid_json"}, TransientError, "BAD_ANSWER", True),
        ({"kind": "wrong_shape"}, TransientError, "BAD_ANSWER", True),
        ({"kind": "unauthorized"}, PermanentError, "UNAUTHORIZED", False),
        ({"kind": "not_found"}, PermanentError, "NOT_FOUND", False),
        ({"kind": "refused", "status": 400, "code": "invalid_audio"}, PermanentError, "VENDOR_REFUSED", False),
        ({"kind": "refused", "status": 400, "code": "quota_exceeded"}, PermanentError, "QUOTA_EXCEEDED", False),
        ({"kind": "refused", "status": 401, "code": "quota_exceeded"}, PermanentError, "QUOTA_EXCEEDED", False),
        ({"kind": "refused", "status": 403, "code": "plan"}, PermanentError, "FORBIDDEN", False),
    ],
    ids=lambda value: f"{value['kind']}-{value.get('status', '')}" if isinstance(value, dict) else None,
)
async def test_retriable_refusals_are_distinguished_from_permanent_ones(
    speech: ElevenLabs,
    sandbox: SandboxProcess,
    rule: dict[str, Any],
    family: type[VendorError],
    code: str,
    ambiguous: bool,
) -> None:
    sandbox.set_faults([rule])
    error = await error_of(speech.transcribe(source_url=URL))
    assert (type(error), error.code, error.ambiguous) == (family, code, ambiguous)
    assert [call["fault"] for call in sandbox.ledger(kind="call")] == [rule["kind"]]


@pytest.mark.req("TRX-67")
@pytest.mark.parametrize(
    ("detail", "code"),
    [
        ({"type": "rate_limit_error", "code": "rate_limit_exceeded", "message": "m"}, "THROTTLED"),
        ({"status": "system_busy", "message": "m"}, "THROTTLED"),
        ({"type": "rate_limit_error", "code": "concurrent_limit_exceeded", "message": "m"}, "CONCURRENCY"),
        ({"status": "too_many_concurrent_requests", "message": "m"}, "CONCURRENCY"),
        ("busy", "THROTTLED"),
        (None, "THROTTLED"),
    ],
)
async def test_both_kinds_of_429_keep_the_vendors_own_waiting_time(detail: Any, code: str) -> None:
    error = await refused_with(429, json.dumps({"detail": detail}).encode(), {"Retry-After": "7"})
    assert isinstance(error, TransientError)
    assert (error.code, error.retry_after, error.ambiguous, error.status) == (code, 7.0, False, 429)


@pytest.mark.req("TRX-67")
async def test_both_kinds_of_429_come_from_caps(speech: ElevenLabs, sandbox: SandboxProcess) -> None:
    sandbox.set_limits({"vendor": "elevenlabs", "concurrency": 0})
    many = await error_of(speech.transcribe(source_url=URL))
    sandbox.set_limits({"vendor": "elevenlabs", "per_minute": 1, "burst": 1})
    await speech.transcribe(source_url=URL)
    fast = await error_of(speech.transcribe(source_url=URL))
    assert isinstance(many, TransientError)
    assert isinstance(fast, TransientError)
    assert (many.code, many.retry_after) == ("CONCURRENCY", 1.0)
    assert (fast.code, fast.retry_after is not None and fast.retry_after > 1) == ("THROTTLED", True)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            422,
            {"detail": [{"loc": ["body", "model_id"], "msg": "Field required", "type": "missing"}]},
            "elevenlabs: 422 invalid: ['body', 'model_id']: Field required",
        ),
        (
            422,
            {"detail": {"code": "invalid_parameters", "message": "keyterms is for scribe_v2", "param": "keyterms"}},
            "elevenlabs: 422 invalid_parameters: keyterms is for scribe_v2",
        ),
        (400, {"detail": "no"}, "elevenlabs: 400 : no"),
        (400, {"detail": [7, {}]}, "elevenlabs: 400 invalid: None: None"),
        (400, {"message": "other"}, 'raw POST /v1/speech-to-text: 400 {"message": "other"}'),
        (400, [], "raw POST /v1/speech-to-text: 400 []"),
        (
            401,
            {"detail": {"status": "invalid_api_key", "message": "Invalid API key"}},
            "elevenlabs: 401 invalid_api_key: Invalid API key (check ELEVENLABS_API_KEY)",
        ),
        (
            401,
            {"detail": {"status": "quota_exceeded", "message": "0 credits left"}},
            "elevenlabs: 401 quota_exceeded: 0 credits left (the plan's quota is used up)",
        ),
    ],
)
async def test_each_shape_of_a_refusal_can_be_read(status: int, body: Any, said: str) -> None:
    error = await refused_with(status, json.dumps(body).encode())
    assert isinstance(error, PermanentError)
    assert (error.message, str(error), error.status) == (said, said, status)


@pytest.mark.parametrize("status", [400, 500])
async def test_the_error_of_a_refusal_that_repeats_the_url_omits_its_signature(status: int) -> None:
    error = await refused_with(status, json.dumps({"detail": {"code": "x", "message": f"cannot fetch {URL}"}}).encode())
    assert "hush" not in error.message
    assert "hush" not in repr(error)
    assert "https://crm.example/audio/1001-1.mp3?…" in error.message


def word(text: str, start: float | None, kind: str = "word", speaker: str | None = None) -> dict[str, Any]:
    return {"text": text, "start": start, "end": start, "type": kind, "speaker_id": speaker, "logprob": 0}


async def test_channels_are_joined_in_the_order_of_time() -> None:
    transcript = await transcript_from(
        {
            "transcripts": [
                {
                    "language_code": "fra",
                    "language_probability": 1,
                    "text": "Allô oui merci",
                    "words": [word("Allô", 0), word(" ", 0.1, "spacing"), word("oui", 2), word("merci", None)],
                    "channel_index": 0,
                },
                {
                    "language_code": "fra",
                    "language_probability": 1,
                    "text": "bonjour (rires)",
                    "words": [word("bonjour", 1, speaker="speaker_3"), word("(rires)", 3, "audio_event")],
                    "channel_index": 1,
                },
            ],
            "transcription_id": "t1",
            "audio_duration_secs": 4,
        }
    )
    assert transcript.text == "Allô bonjour oui merci (rires)"
    assert "".join(one.text for one in transcript.words) == transcript.text
    speakers = [one.speaker_id for one in transcript.words if one.type != "spacing"]
    first = "channel_0_speaker"
    assert speakers == [first, "channel_1_speaker_3", first, first, "channel_1_speaker"]
    assert (transcript.transcription_id, transcript.audio_duration_secs, transcript.language_code) == ("t1", 4, "fra")


async def test_channels_without_words_are_joined_one_after_the_other() -> None:
    one = {"language_code": "fra", "language_probability": 1, "text": "Allô", "words": []}
    transcript = await transcript_from({"transcripts": [one, {**one, "text": "Oui"}]})
    assert (transcript.text, transcript.words) == ("Allô\nOui", [])


@pytest.mark.parametrize(
    "answer",
    [
        {"message": "Request accepted", "request_id": "r", "transcription_id": "t"},
        {"language_code": "fra", "text": None, "words": []},
        {"language_code": "fra", "text": "a", "words": [{"text": "a", "start": "0", "type": "word"}]},
        {"language_code": "fra", "text": "a"},
    ],
)
async def test_an_answer_of_another_shape_is_a_bad_answer(answer: dict[str, Any]) -> None:
    error = await error_of(transcript_from(answer))
    assert (type(error), error.code) == (TransientError, "BAD_ANSWER")


async def test_silence_in_a_recording_is_an_answer_and_nul_bytes_can_be_stored() -> None:
    empty = {"language_code": "fra", "language_probability": 0, "text": "", "words": []}
    assert (await transcript_from(empty)).text == ""
    nul = await transcript_from({**empty, "text": "a\x00b", "words": [word("a\x00b", 0)]})
    assert (nul.text, nul.words[0].text) == ("a\N{REPLACEMENT CHARACTER}b", "a\N{REPLACEMENT CHARACTER}b")


async def test_silence_of_the_vendor_is_a_time_out(sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "timeout", "seconds": 60}])
    http = VendorHttp("elevenlabs", f"{sandbox.url}/elevenlabs", deadline=1, now=lambda: NOW)
    error = await error_of(ElevenLabs(http, "k", Speech()).transcribe(source_url=URL))
    await http.close()
    assert (type(error), error.code, error.ambiguous) == (TransientError, "TIMEOUT", True)
