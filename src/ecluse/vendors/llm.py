"""Client of a large language model with an OpenAI-compatible API: a prompt in, an answer of a given JSON schema out.

Every answer is paid for, unusable ones too. Unusable answers that a retry may fix (cut off, empty, not of the schema)
are transient errors; refusals by the model or its content filter are permanent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import ROUND_UP, Decimal
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.base.masking import masked
from ecluse.base.text import LONGEST_FOREIGN_ID, storable
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.names import Names

R = TypeVar("R")

NAMES = Names("LLM_BASE_URL", "LLM_API_KEY", "LLM_MODEL")
PING_SECONDS = 15.0
PATH = "/chat/completions"
NAME = "answer"  # of the schema; the API requires one
LONGEST_NAME = 512  # of a call; the API requires ASCII
# A token of European languages has three to four bytes, of others at least two: an upper bound for what is reserved.
BYTES_PER_TOKEN = 2
FRAMING = 200  # tokens that the API adds for roles and schema
SMALLEST = Decimal("0.000000001")  # of an amount
# Error codes of the API, each with our code and advice for the operator; {model} is the name of the setting.
CODES = {
    "insufficient_quota": ("QUOTA_EXCEEDED", "the account's quota is used up"),
    "context_length_exceeded": ("INPUT_TOO_LONG", "shorten it, or use a model with a larger context"),
    "model_not_found": ("MODEL_NOT_FOUND", "check the config's model and {model}"),
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


class Models(BaseModel):
    """The models that a key may use; none of its fields is read."""


class Price(NamedTuple):
    """Price of a million tokens of input and of output."""

    input: Decimal
    output: Decimal


class Prices(NamedTuple):
    """Prices by model, and that of all other models (None: not configured). `output_tokens` are reserved per call."""

    models: Mapping[str, Price] = {}
    other: Price | None = None
    output_tokens: int = 4_000

    def cost(self, model: str, input_tokens: int, output_tokens: int) -> Decimal | None:
        """Return the cost of a call with these numbers of tokens, rounded up; None if the model has no price."""
        price = self.models.get(model, self.other)
        if price is None:
            return None
        total = (input_tokens * price.input + output_tokens * price.output) / 1_000_000
        return total.quantize(SMALLEST, ROUND_UP)


class Completion(NamedTuple, Generic[R]):
    """A usable answer of the model, with its tokens and its cost; `cost` is None if prices or usage are unknown."""

    answer: R
    model: str  # the one that answered, as the vendor names it
    input_tokens: int
    output_tokens: int
    cost: Decimal | None


class Llm:
    """Client of the language model. `model` is used where a call names none; a call without a key or any model raises
    NOT_CONFIGURED. `names`: the settings that errors advise to change."""

    def __init__(
        self,
        http: VendorHttp,
        api_key: str | None,
        *,
        model: str | None = None,
        prices: Prices | None = None,
        names: Names = NAMES,
    ) -> None:
        self._http = http
        self._api_key = (api_key or "").strip()
        self._model = model
        self._prices = prices or Prices()
        self._names = names
        http.hide(self._api_key)

    async def ping(self) -> None:
        """Make a cheap call with the key; raise a `VendorError` if the vendor does not accept it, or is unavailable:
        NOT_CONFIGURED if the client has no key or no model of its own, even if audits name models."""
        headers, explained = self._headers(self._model), partial(explain, names=self._names)
        await self._http.call("GET", "/models", Models, headers=headers, explain=explained, deadline=PING_SECONDS)

    def chosen(self, model: str | None) -> str:
        """Return the model that a call with `model` uses: that one or, if None, the client's own; empty without one."""
        return model or self._model or ""

    def most(self, model: str | None, *texts: str) -> Decimal | None:
        """Return an upper bound of the cost of a call with these texts; None if its model has no price."""
        tokens = sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN + FRAMING
        return self._prices.cost(self.chosen(model), tokens, self._prices.output_tokens)

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
        vendor's support can find this call. `model` replaces the client's own. Raise a `VendorError` for an unusable
        answer, with its cost."""
        chosen = self.chosen(model)
        headers = self._headers(chosen)
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
            headers={**headers, "X-Client-Request-Id": quote(name)[:LONGEST_NAME]},
            explain=partial(explain, names=self._names),
        )
        usage = answer.usage or Usage()
        cost = self._prices.cost(chosen, usage.prompt_tokens, usage.completion_tokens) if answer.usage else None
        try:
            found = self._content(answer, read)
        except VendorError as error:
            error.cost = cost  # an answer of no use is paid for, too
            raise
        answered = storable(answer.model, LONGEST_FOREIGN_ID)
        return Completion(found, answered, usage.prompt_tokens, usage.completion_tokens, cost)

    def _headers(self, model: str | None) -> dict[str, str]:
        """Return the headers of a call; raise NOT_CONFIGURED if the key or the model is missing."""
        needed = ((self._names.key, self._api_key), (self._names.model, model))
        if missing := " and ".join(name for name, value in needed if not value):
            raise PermanentError(f"The language model is not configured: set {missing}.", code="NOT_CONFIGURED")
        return {"Authorization": f"Bearer {self._api_key}"}

    def _content(self, answer: ChatAnswer, read: Callable[[Any], R]) -> R:
        """Return the content of the answer, converted by `read`; raise a `VendorError` for an unusable one."""
        subject = f"{self._http.name}: {answer.model}"
        if not answer.choices:
            raise TransientError(f"{subject} gave no answer", code="EMPTY_ANSWER")
        message, why = answer.choices[0].message, answer.choices[0].finish_reason
        if message.refusal:
            raise PermanentError(storable(f"{subject} refused: {self._http.said(message.refusal)}"), code="REFUSED")
        if why == "content_filter":
            raise PermanentError(f"{subject}: the answer was withheld by the vendor's filter", code="CONTENT_FILTERED")
        if why == "length":
            raise TransientError(f"{subject}: the answer was cut off at the model's length limit", code="TRUNCATED")
        if not (message.content or "").strip():
            raise TransientError(f"{subject} gave an empty answer", code="EMPTY_ANSWER")
        try:
            return read(json.loads(message.content or ""))
        except ValueError as error:  # not JSON, or rejected by `read`
            said = self._http.said(f"{error}: {message.content}")
            broken = storable(f"{subject}: the answer is not of the schema: {said}", 1_000)
            raise TransientError(broken, code="SCHEMA_BROKEN") from error


def explain(error: VendorError, answer: bytes, *, names: Names) -> VendorError:
    """Return the error for a refusal: with a code of Ecluse and advice if the vendor's code is known, otherwise with
    the vendor's text."""
    code, kind, text = detail(answer)
    message = storable(f"llm: {error.status} {code or kind}: {masked(text)}" if text else error.message)
    known = CODES.get(code) or CODES.get(kind)
    if known is not None:
        ours, advice = known
        # Permanent even where the status is 429: no retry helps if the account's quota is used up.
        refused = PermanentError(f"{message} ({advice.format(model=names.model)})", code=ours)
        refused.status = error.status
        return refused
    if error.status == 401:
        return error.explained(f"{message} (check {names.key})")
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
