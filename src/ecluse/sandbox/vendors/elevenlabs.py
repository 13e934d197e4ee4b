"""ElevenLabs' speech to text: ``POST /v1/speech-to-text``, multipart, with any key but ``invalid`` as ``xi-api-key``.

The answer depends on the recording alone, which is the last part of the ``source_url``'s path, or the name of the
file, without its extension: that is also the ``ref`` in the ledger. Each answer is charged: one entry of kind ``paid``.
The URL is not fetched. Both kinds of 429 come from caps (``concurrency``, or a rate) and from ``throttle`` rules
(``"concurrency": true``); other refusals come from rules: ``{"kind": "refused", "status": 401, "code":
"quota_exceeded"}``. ``GET /v1/user`` answers with the account of a key; the key ``speech-only`` may not read it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import unquote

from ecluse.sandbox.vendor import Answer, Call, json_answer

ROUTE, USER = "/v1/speech-to-text", "/v1/user"
MODELS = ("scribe_v1", "scribe_v2")
# The sandbox's codes of refusals decided around a vendor -> this vendor's codes.
CODES = {
    "rate_limited": "rate_limit_exceeded",
    "concurrency": "concurrent_limit_exceeded",
    "unauthorized": "invalid_api_key",
    "server_error": "internal_server_error",
}
TYPES = {401: "authentication_error", 403: "authorization_error", 404: "not_found", 429: "rate_limit_error"}
DISPOSITION = re.compile(rb'name="([^"]*)"(?:;\s*filename="([^"]*)")?')

OPENING = ("Bonjour, je suis bien chez {name} ?", "Oui, bonjour, c'est moi.")
TURNS = (
    "Je vous appelle au sujet de votre contrat de mutuelle santé.",
    "D'accord, mais je n'ai pas beaucoup de temps ce matin.",
    "La cotisation serait de {euros} euros par mois, tout compris.",
    "Est-ce que les soins dentaires sont bien pris en charge ?",
    "Oui, à hauteur de deux cents pour cent, dès le premier jour.",
    "Et je peux résilier quand je veux, n'est-ce pas ?",
    "Vous avez quatorze jours pour vous rétracter, c'est la loi.",
    "Très bien, envoyez-moi le dossier par courriel, s'il vous plaît.",
    "Cet appel est enregistré, en êtes-vous d'accord ?",
    "Oui, je suis d'accord.",
)
NAMES = ("madame Lefèvre", "monsieur Béranger", "madame Dupré", "monsieur Noël", "madame Muñoz")


class ElevenLabs:
    """The simulated speech-to-text provider."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        return recording(form_of(call)) if call.path == ROUTE and call.method == "POST" else None

    def error(self, status: int, code: str, message: str) -> Answer:
        code = CODES.get(code, code)
        kind = TYPES.get(status, "server_error" if status >= 500 else "validation_error")
        detail = {"type": kind, "code": code, "message": message, "status": code, "request_id": "0" * 32}
        return json_answer({"detail": detail}, status)

    def handle(self, call: Call) -> Answer:
        if (call.method, call.path) not in (("POST", ROUTE), ("GET", USER)):
            return json_answer({"detail": "Not Found"}, 404)
        key = call.headers.get("xi-api-key", "")
        if key in ("", "invalid"):
            return self.error(401, "invalid_api_key", "Invalid API key")
        if call.path == USER and key == "speech-only":
            return self.error(401, "missing_permissions", "The API key lacks the permission user_read")
        if call.path == USER:
            return json_answer({"user_id": "sandbox", "subscription": {"tier": "creator"}})
        form = form_of(call)
        if "model_id" not in form:
            missing = {"type": "missing", "loc": ["body", "model_id"], "msg": "Field required", "input": None}
            return json_answer({"detail": [missing]}, 422)
        model, url = text(form, "model_id"), text(form, "source_url") or text(form, "cloud_storage_url")
        if model not in MODELS:
            return self.error(400, "invalid_model_id", f"'{model}' is not a valid model_id: {', '.join(MODELS)}")
        if ("file" in form) == bool(url):
            return self.error(422, "invalid_parameters", "Provide exactly one of file and source_url.")
        if url and not url.startswith(("http://", "https://")):
            return self.error(400, "invalid_url", f"The URL {url} cannot be fetched.")
        if text(form, "webhook") == "true":
            return self.error(400, "invalid_parameters", "This sandbox calls no webhooks.")
        ref = recording(form) or "recording"
        drawn = int.from_bytes(blake2b(f"{self._seed}/{ref}".encode(), digest_size=8).digest())
        worded = text(form, "timestamps_granularity") != "none"
        language, diarized = text(form, "language_code") or "fra", text(form, "diarize") == "true"
        made = transcript(drawn % 70, drawn // 16 % 5, language, diarized=diarized, worded=worded)
        call.paid(ref, {"model": model, "by": "url" if url else "file", "seconds": made.seconds})
        serial = blake2b(f"{self._seed}/{ref}/{call.entry.seq}".encode(), digest_size=10).hexdigest()
        return Answer(200, made.body.removesuffix(b"}") + f',"transcription_id":"{serial}"}}'.encode())


class Speech(NamedTuple):
    """A transcript ready to be sent."""

    body: bytes  # the answer without its id
    seconds: float


# Cached: there are few different transcripts, and serializing hundreds of words is expensive.
@lru_cache(1_000)
def transcript(drawn: int, longer: int, language: str, *, diarized: bool, worded: bool) -> Speech:
    """Return the transcript of a conversation chosen by `drawn`, with `longer` more turns than the shortest; `diarized`
    with speakers, `worded` word by word."""
    turns = [*OPENING, *(TURNS[(drawn + n) % len(TURNS)] for n in range(6 + longer))]
    sentences = [turn.format(name=NAMES[drawn % len(NAMES)], euros=20 + drawn) for turn in turns]
    words: list[dict[str, object]] = []
    at = 0.2
    for turn, sentence in enumerate(sentences):
        speaker = f"speaker_{turn % 2}" if diarized else None
        for spoken in sentence.split(" "):
            end = at + 0.08 * len(spoken)
            for word, kind, start, stop in ((spoken, "word", at, end), (" ", "spacing", end, end + 0.05)):
                words.append({"text": word, "start": round(start, 2), "end": round(stop, 2), "type": kind})
                words[-1] |= {"speaker_id": speaker, "logprob": -0.01, "characters": None}
            at = end + 0.05
        at += 0.4
    words.pop()
    answer = {
        "language_code": language,
        "language_probability": 0.98,
        "text": " ".join(sentences),
        "words": words if worded else [],
        "audio_duration_secs": round(at, 2),
        "additional_formats": None,
        "entities": None,
        "channel_index": None,
    }
    return Speech(json_answer(answer).body, round(at, 2))


def form_of(call: Call) -> dict[str, bytes]:
    """Return the fields of a multipart body; a file as its content, with its name as ``filename``."""
    boundary = re.search(r'boundary="?([^";]+)"?', call.headers.get("Content-Type", ""))
    form: dict[str, bytes] = {}
    for part in call.body.split(b"--" + boundary[1].encode())[1:-1] if boundary else ():
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if named := DISPOSITION.search(head):
            form[named[1].decode()] = content.removesuffix(b"\r\n")
            if named[2] is not None:
                form["filename"] = named[2]
    return form


def text(form: dict[str, bytes], name: str) -> str:
    """Return a field of the form as text; empty if it is missing or ``null``, as the official client writes it."""
    value = form.get(name, b"").decode(errors="replace")
    return "" if value == "null" else value


def recording(form: dict[str, bytes]) -> str | None:
    """Return the name of the recording that a request is about; None if it names none."""
    url = text(form, "source_url") or text(form, "cloud_storage_url")
    path = re.split(r"[?#]", url)[0] if url else text(form, "filename")
    name = unquote(path).rpartition("/")[2]
    return name.partition(".")[0] or None
