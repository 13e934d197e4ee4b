"""ElevenLabs speech-to-text client: one recording in, its transcript word by word out.

Every call is paid for. Its two kinds of 429 are distinguished: THROTTLED is the rate limit, CONCURRENCY the limit on
our calls in flight at the vendor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, RootModel

from ecluse.base.errors import PermanentError, VendorError
from ecluse.base.masking import masked
from ecluse.base.text import storable
from ecluse.vendors.audio import Audio
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.names import Names

NAMES = Names("ELEVENLABS_BASE_URL", "ELEVENLABS_API_KEY")
# The second code is that of older answers.
CONCURRENCY = {"concurrent_limit_exceeded", "too_many_concurrent_requests"}
QUOTA = "quota_exceeded"
FEW_RIGHTS = "missing_permissions"  # of a key that is known, but may not make this call
PING_SECONDS = 15.0


class Word(BaseModel):
    """A word, space or sound of a transcript, with its times in seconds."""

    text: str
    start: float | None = None
    end: float | None = None
    type: str  # word, spacing or audio_event
    speaker_id: str | None = None


class Transcript(BaseModel):
    """The transcript of a recording, as text and word by word."""

    language_code: str
    text: str
    words: list[Word]
    transcription_id: str | None = None
    audio_duration_secs: float | None = None

    @property
    def seconds(self) -> float | None:
        """The length of the recording in seconds, as the answer states it, else the end of the last word; None if
        neither is known."""
        return self.audio_duration_secs or max((word.end for word in self.words if word.end is not None), default=None)


class Channels(BaseModel):
    """The answer for a recording with one speaker per channel."""

    transcripts: list[Transcript]
    transcription_id: str | None = None
    audio_duration_secs: float | None = None


class SpeechAnswer(RootModel[Transcript | Channels]):
    root: Transcript | Channels = Field(union_mode="left_to_right")  # most answers are the first kind: do not try both


class User(BaseModel):
    """The account of a key; none of its fields is read."""


@dataclass(frozen=True)
class Speech:
    """Options of a transcription request: model, language code (None: detected) and whether speakers are distinguished.
    The result depends on these and the recording."""

    model: str = "scribe_v1"
    language: str | None = None
    diarize: bool = True


class ElevenLabs:
    """Client of the speech-to-text provider. Without a key, each call raises NOT_CONFIGURED. `names`: the settings that
    errors advise to change."""

    def __init__(self, http: VendorHttp, api_key: str | None, wanted: Speech, names: Names = NAMES) -> None:
        self.wanted = wanted
        self._http = http
        self._api_key = api_key
        self._names = names
        http.hide(api_key)

    async def ping(self) -> None:
        """Make a cheap call with the key; raise a `VendorError` if the provider does not accept it, or is unavailable.
        A key that may not read its account, because it is limited to speech to text, counts as accepted."""
        headers, explained = self._headers(), partial(explain, source_url="", names=self._names)
        try:
            await self._http.call("GET", "/v1/user", User, headers=headers, explain=explained, deadline=PING_SECONDS)
        except PermanentError as error:
            if FEW_RIGHTS not in error.message:
                raise

    async def transcribe(self, *, source_url: str | None = None, file: Audio | None = None) -> Transcript:
        """Transcribe either a recording that the vendor downloads (`source_url`) or an uploaded `file`. Raise
        ValueError if neither is given."""
        headers = self._headers()
        form: dict[str, str | Audio] = {
            "model_id": self.wanted.model,
            "diarize": "true" if self.wanted.diarize else "false",
            "timestamps_granularity": "word",
        }
        if self.wanted.language:
            form["language_code"] = self.wanted.language
        if file is not None:
            form["file"] = file
        elif source_url is not None:
            form["source_url"] = source_url
        else:
            raise ValueError("neither an address nor a file")
        answer = await self._http.call(
            "POST",
            "/v1/speech-to-text",
            SpeechAnswer,
            form=form,
            headers=headers,
            explain=partial(explain, source_url=source_url or "", names=self._names),
        )
        return answer.root if isinstance(answer.root, Transcript) else joined(answer.root)

    def _headers(self) -> dict[str, str]:
        """Return the headers of a call; raise NOT_CONFIGURED if the key is missing."""
        if not (self._api_key or "").strip():
            message = f"Speech to text is not configured: set {self._names.key}."
            raise PermanentError(message, code="NOT_CONFIGURED")
        return {"xi-api-key": self._api_key or ""}


def joined(channels: Channels) -> Transcript:
    """Merge the transcripts of the channels into one, in the order of time; speakers are named by their channel."""
    placed: list[tuple[float, Word]] = []
    for number, transcript in enumerate(channels.transcripts):
        at = 0.0
        for word in transcript.words:
            at = at if word.start is None else word.start
            if word.type != "spacing":
                speaker = word.speaker_id or "speaker"
                placed.append((at, word.model_copy(update={"speaker_id": f"channel_{number}_{speaker}"})))
    words: list[Word] = []
    for _, word in sorted(placed, key=lambda one: one[0]):
        if words:
            before = words[-1]
            space = Word(text=" ", start=before.end, end=before.end, type="spacing", speaker_id=before.speaker_id)
            words.append(space)
        words.append(word)
    text = "".join(word.text for word in words) or "\n".join(one.text for one in channels.transcripts)
    return Transcript(
        language_code=channels.transcripts[0].language_code if channels.transcripts else "",
        text=text,
        words=words,
        transcription_id=channels.transcription_id,
        audio_duration_secs=channels.audio_duration_secs,
    )


def explain(error: VendorError, answer: bytes, *, source_url: str, names: Names) -> VendorError:
    """Set code and message of a refusal by the meaning of the provider's answer; the query of `source_url`, which is
    signed, is removed."""
    code, text = detail(answer)
    query = urlsplit(source_url).query
    # If the vendor could not download the recording, its answer may repeat the URL with its signature.
    text, whole = masked(text), error.message
    for spelled in {query, masked(f"?{query}")[1:]} if query else ():
        text, whole = text.replace(spelled, "…"), whole.replace(spelled, "…")
    message = storable(f"elevenlabs: {error.status} {code}: {text}" if text else whole)
    if error.status == 429:
        return error.explained(message, code="CONCURRENCY" if code in CONCURRENCY else "THROTTLED")
    if code == QUOTA and isinstance(error, PermanentError):
        return error.explained(f"{message} (the plan's quota is used up)", code="QUOTA_EXCEEDED")
    if error.status in (401, 403):
        return error.explained(f"{message} (check {names.key})")
    return error.explained(message)


def detail(answer: bytes) -> tuple[str, str]:
    """Return code and text of a refusal, whose body has one of three shapes; empty where there is none."""
    try:
        given: Any = json.loads(answer)["detail"]
    except (ValueError, KeyError, TypeError):
        return "", ""
    if isinstance(given, list):
        return "invalid", "; ".join(f"{one.get('loc')}: {one.get('msg')}" for one in given if isinstance(one, dict))
    if isinstance(given, dict):
        return str(given.get("code") or given.get("status") or ""), str(given.get("message") or "")
    return "", str(given)
