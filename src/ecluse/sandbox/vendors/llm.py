"""A language model behind OpenAI's API: ``POST /v1/chat/completions`` with any key but ``invalid`` as ``Bearer``.

The answer depends on the seed and the request alone. With a ``json_schema``, it is a value of that schema: numbers
within their bounds, the first of an enum, and as text of ``quotes`` passages of the last user message (the part of a
line before the first ``": "`` is taken for the speaker; lines that begin with ``#`` are headings). One quote in eight
is invented. Without a schema, the answer is a sentence.

The ``ref`` in the ledger is the caller's ``X-Client-Request-Id``. Each answer is charged: one entry of kind ``paid``.
Unusable answers come from rules: ``chat_refusal``, ``chat_length``, ``chat_filtered``, ``chat_broken``, ``chat_empty``;
an empty account from ``{"kind": "refused", "status": 429, "code": "insufficient_quota"}``. ``GET /v1/models`` lists
the models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from ecluse.sandbox.vendor import Answer, Call, json_answer

ROUTE, MODELS = "/v1/chat/completions", "/v1/models"
# The sandbox's codes of refusals decided around a vendor -> this vendor's codes.
CODES = {
    "rate_limited": "rate_limit_exceeded",
    "concurrency": "rate_limit_exceeded",
    "unauthorized": "invalid_api_key",
    "not_found": "model_not_found",
}
TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "requests"}
INVENTED = "Je certifie que ceci n'a jamais été dit au téléphone."
COMMENTS = (
    "Le conseiller a respecté la procédure du début à la fin.",
    "Le point est abordé, mais trop vite pour être compris.",
    "Le client n'a pas reçu l'information attendue.",
    "La formulation est claire et complète.",
)


class Llm:
    """The simulated language model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        return call.headers.get("X-Client-Request-Id")

    def error(self, status: int, code: str, message: str) -> Answer:
        code = CODES.get(code, code)
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        kind = "insufficient_quota" if code == "insufficient_quota" else kind
        answer = json_answer({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
        answer.headers["x-request-id"] = "req_" + "0" * 32
        return answer

    def handle(self, call: Call) -> Answer:
        if (call.method, call.path) not in (("POST", ROUTE), ("GET", MODELS)):
            return self.error(404, "unknown_url", f"Unknown request URL: {call.method} {call.path}.")
        scheme, _, key = call.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or key in ("", "invalid"):
            return self.error(401, "invalid_api_key", "Incorrect API key provided.")
        if call.path == MODELS:
            models = [{"id": name, "object": "model", "owned_by": "sandbox"} for name in ("gpt-4.1", "gpt-4.1-mini")]
            return json_answer({"object": "list", "data": models})
        try:
            body = json.loads(call.body)
            model, messages = body["model"], body["messages"]
            asked = [str(message["content"]) for message in messages if message["role"] == "user"]
            drawn = Drawn(blake2b(f"{self._seed}/".encode() + call.body, digest_size=16).digest())
            content = "Bien sûr."
            if (wanted := (body.get("response_format") or {}).get("json_schema")) is not None:
                schema = wanted["schema"]
                value = made(schema, schema.get("$defs", {}), drawn, asked[-1] if asked else "", "")
                content = json.dumps(value, ensure_ascii=False)
        except (ValueError, KeyError, TypeError, AttributeError):
            return self.error(400, "invalid_request", "We could not parse the JSON body of your request.")
        read, written = 1 + len(call.body) // 4, 1 + len(content) // 4
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        call.paid(call.subject, {"model": model, **usage})
        answer = json_answer(
            {
                "id": f"chatcmpl-{drawn.name}",
                "object": "chat.completion",
                "created": int(call.entry.at),
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": content, "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": usage,
            }
        )
        answer.headers["x-request-id"] = f"req_{drawn.name}"
        return answer


class Drawn:
    """Pseudo-random numbers that depend on the given bytes only."""

    def __init__(self, of: bytes) -> None:
        self.name = of.hex()
        self._numbers = self._draw(int.from_bytes(of))

    @staticmethod
    def _draw(state: int) -> Iterator[int]:
        while True:  # Knuth's multiplier: the high bits are random enough
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            yield state >> 33

    def below(self, most: int) -> int:
        """Return the next number from 0 to `most` - 1."""
        return next(self._numbers) % most


def made(schema: dict[str, Any], known: dict[str, Any], drawn: Drawn, spoken: str, name: str) -> Any:
    """Return a pseudo-random value of this schema. `known` has the schema's definitions, `drawn` yields the numbers,
    `spoken` is the text to quote from, `name` the property that the value is for."""
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        schema = schema["anyOf"][0]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {key: made(one, known, drawn, spoken, key) for key, one in schema.get("properties", {}).items()}
        case "array":
            count = max(schema.get("minItems", 0), min(1 + drawn.below(2), schema.get("maxItems", 2)))
            return [made(schema["items"], known, drawn, spoken, name) for _ in range(count)]
        case "number" | "integer":
            low, high = int(schema.get("minimum", 0)), int(schema.get("maximum", 100))
            return low + drawn.below(high - low + 1)
        case "boolean":
            return drawn.below(2) == 0
        case "null":
            return None
    return quote(spoken, drawn) if name in ("quote", "quotes") else COMMENTS[drawn.below(len(COMMENTS))]


def quote(spoken: str, drawn: Drawn) -> str:
    """Return up to twelve consecutive words of a line of `spoken`; one time in eight, an invented sentence instead."""
    if drawn.below(8) == 0:
        return INVENTED
    for _ in range(8):
        at = drawn.below(max(1, len(spoken)))
        line = spoken[spoken.rfind("\n", 0, at) + 1 : (spoken.find("\n", at) + 1 or len(spoken) + 1) - 1]
        words = "" if line.startswith("#") else (line.partition(": ")[2] or line)
        if words.strip():
            parts = words.split(" ")
            first = drawn.below(max(1, len(parts) - 11))
            return " ".join(parts[first : first + 12]).strip()
    return INVENTED
