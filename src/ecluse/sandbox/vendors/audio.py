"""Simulated storage of recordings: ``GET /recordings/{call_id}.mp3`` with the query that the CRM signed, else 403. The
bytes are computed from the call id, always the same, and are not real audio."""

from __future__ import annotations

import re
from hashlib import blake2b

from ecluse.sandbox.vendor import Answer, Call, json_answer

FILE = re.compile(r"([\w-]+)\.mp3")
EXPIRES = "4102444800"
SIZE = 20_000  # bytes


def signature(seed: int, call_id: str) -> str:
    """Return the signature of a recording's URL."""
    return blake2b(f"{seed}/recording/{call_id}".encode(), digest_size=20).hexdigest()


def recording_path(seed: int, call_id: str) -> str:
    """Return the signed path of a recording below the sandbox's address, as the CRM gives it."""
    return f"/audio/recordings/{call_id}.mp3?Expires={EXPIRES}&Signature={signature(seed, call_id)}"


class Audio:
    """The simulated storage of recordings."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        match call.path.split("/")[1:]:
            case ["recordings", name] if found := FILE.fullmatch(name):
                return found[1]
        return None

    def error(self, status: int, code: str, message: str) -> Answer:
        return json_answer({"Code": code, "Message": message}, status)

    def handle(self, call: Call) -> Answer:
        call_id = self.ref(call)
        if call_id is None or call.method != "GET":
            return self.error(404, "NoSuchKey", "there is no such recording")
        signed = {"Expires": EXPIRES, "Signature": signature(self._seed, call_id)}
        if dict(call.query) != signed:
            return self.error(403, "AccessDenied", f"{call.request.path_qs} is not signed as it must be")
        content = b"ID3" + blake2b(call_id.encode(), digest_size=50).digest() * (SIZE // 50)
        return Answer(200, content[:SIZE], {"Content-Type": "audio/mpeg"})
