"""Client of a large language model with an OpenAI-compatible API: a prompt in, an answer of a given JSON schema out.

Every answer is paid for, unusable ones too. Unusable answers that a retry may fix (cut off, empty, not of the schema)
are transient errors; refusals by the model or its content filter are permanent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.text import storable
from ecluse.vendors.http import VendorHttp

R = TypeVar("R")

PATH = "/chat/completions"
NAME = "answer"  # of the schema; the API requires one
LONGEST_NAME = 512  # of a call; the API requires ASCII
# Error codes of the API, each with our code and advice for the operator.
CODES = {
    "insufficient_quota": ("QUOTA_EXCEEDED", "the account's quota is used up"),
    "context_length_exceeded": ("INPUT_TOO_LONG", "shorten it, or use a model with a larger context"),
    "model_not_found": ("MODEL_NOT_FOUND", "check the config's model and LLM_MODEL"),
    "content_filter": ("CONTENT_FILTERED", "the vendor's filter refused the input"),
}


class Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class Choice(BaseModel):
    message: Message
    finish_reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatAnswer(BaseModel):
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Prices(NamedTuple):
    """Prices per million tokens of input and of output. None: not configured."""

    input: Decimal | None = None
    output: Decimal | None = None

    def cost(self, input_tokens: int, output_tokens: int) -> Decimal | None:
        """Return the price of a call; None if a price is not configured."""
        if self.input is None or self.output is None:
            return None
        return (input_tokens * self.input + output_tokens * self.output) / 1_000_000


class Completion(NamedTuple, Generic[R]):
    """A usable answer of the model, with its tokens and its cost; `cost` is None if prices or usage are unknown."""

    answer: R
    model: str  # the one that answered, as the vendor names it
    input_tokens: int
    output_tokens: int
    cost: Decimal | None


class Llm:
    """Client of the language model. Without a key or a model, each call raises NOT_CONFIGURED."""

    def __init__(
        self, http: VendorHttp, api_key: str | None, *, model: str | None = None, prices: Prices | None = None
    ) -> None:
        self._http = http
        self._api_key = api_key
        self._model = model
        self._prices = prices or Prices()

    async def ask(
        self,
        *,
        system: str,
        user: str,
        schema: Mapping[str, Any],
        read: Callable[[Any], R],
        name: str,
        model: str | None = None,
    ) -> Completion[R]:
        """Ask the model, with a `system` and a `user` message, for an answer of the JSON `schema`. `read` converts the
        parsed JSON, and raises ValueError if it is not of the schema. `name` is sent as the request id by which the
        vendor's support can find this call. `model` replaces the general one."""
        key, chosen = (self._api_key or "").strip(), model or self._model
        if not key or not chosen:
            missing = " and ".join(knob for knob, value in (("LLM_API_KEY", key), ("LLM_MODEL", chosen)) if not value)
            raise PermanentError(f"The language model is not configured: set {missing}.", code="NOT_CONFIGURED")
        wanted = {"type": "json_schema", "json_schema": {"name": NAME, "strict": True, "schema": schema}}
        answer = await self._http.call(
            "POST",
            PATH,
            ChatAnswer,
            json={
                "model": chosen,
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
                "response_format": wanted,
            },
            headers={"Authorization": f"Bearer {key}", "X-Client-Request-Id": quote(name)[:LONGEST_NAME]},
            explain=explain,
        )
        found, usage = self._content(answer, read), answer.usage or Usage()
        cost = self._prices.cost(usage.prompt_tokens, usage.completion_tokens) if answer.usage else None
        return Completion(found, answer.model, usage.prompt_tokens, usage.completion_tokens, cost)

    def _content(self, answer: ChatAnswer, read: Callable[[Any], R]) -> R:
        """Return the content of the answer, converted by `read`; raise a `VendorError` for an unusable one."""
        subject = f"{self._http.name}: {answer.model}"
        if not answer.choices:
            raise TransientError(f"{subject} gave no answer", code="EMPTY_ANSWER")
        message, why = answer.choices[0].message, answer.choices[0].finish_reason
        if message.refusal:
            raise PermanentError(storable(f"{subject} refused: {message.refusal}"), code="REFUSED")
        if why == "content_filter":
            raise PermanentError(f"{subject}: the answer was withheld by the vendor's filter", code="CONTENT_FILTERED")
        if why == "length":
            raise TransientError(f"{subject}: the answer was cut off at the model's length limit", code="TRUNCATED")
        if not (message.content or "").strip():
            raise TransientError(f"{subject} gave an empty answer", code="EMPTY_ANSWER")
        try:
            return read(json.loads(message.content or ""))
        except ValueError as error:  # not JSON, or rejected by `read`
            broken = storable(f"{subject}: the answer is not of the schema: {error}: {message.content}", 1_000)
            raise TransientError(broken, code="SCHEMA_BROKEN") from error


def explain(error: VendorError, answer: bytes) -> VendorError:
    """Return the error for a refusal: with a code of Ecluse and advice if the vendor's code is known, otherwise with
    the vendor's text."""
    code, kind, text = detail(answer)
    message = storable(f"llm: {error.status} {code or kind}: {text}" if text else error.message)
    known = CODES.get(code) or CODES.get(kind)
    if known is not None:
        ours, advice = known
        # Permanent even where the status is 429: no retry helps if the account's quota is used up.
        refused = PermanentError(f"{message} ({advice})", code=ours)
        refused.status = error.status
        return refused
    if error.status == 401:
        return error.explained(f"{message} (check LLM_API_KEY)")
    return error.explained(message)


def detail(answer: bytes) -> tuple[str, str, str]:
    """Return code, type and text of a refusal; empty where it has none."""
    try:
        given: Any = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return "", "", ""
    if not isinstance(given, dict):
        return "", "", str(given)
    return tuple(str(given.get(name) or "") for name in ("code", "type", "message"))  # type: ignore[return-value]
