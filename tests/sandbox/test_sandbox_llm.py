"""The simulated language model, proved by the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client

SAID = "# Recording 1\nspeaker_0: Cet appel est enregistré, en êtes-vous d'accord ?\nspeaker_1: Oui, tout à fait.\n"


class Step(BaseModel):
    quotes: list[str]
    comment: str
    score: float = Field(ge=0, le=5)
    passed: bool
    kind: str | None


class Judged(BaseModel):
    consent: Step
    price: Step


@pytest.fixture
async def sdk(sandbox: SandboxProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="k", base_url=f"{sandbox.url}/llm/v1", max_retries=0, timeout=30) as client:
        yield client


async def judge(sdk: AsyncOpenAI, said: str = SAID, **more: Any) -> Any:
    messages: Any = [{"role": "system", "content": "Judge."}, {"role": "user", "content": said}]
    return await sdk.chat.completions.parse(model="gpt-4.1", messages=messages, response_format=Judged, **more)


async def test_the_official_client_reads_an_answer_of_its_schema(sdk: AsyncOpenAI, sandbox: SandboxProcess) -> None:
    answer = await judge(sdk, extra_headers={"X-Client-Request-Id": "mine"})
    judged = answer.choices[0].message.parsed
    assert isinstance(judged, Judged)
    assert judged.consent.comment
    assert (answer.model, answer.choices[0].finish_reason) == ("gpt-4.1", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10
    [paid] = sandbox.ledger(vendor="llm", kind="paid")
    assert (paid["ref"], paid["value"]["prompt_tokens"]) == ("mine", answer.usage.prompt_tokens)


async def test_the_same_question_has_the_same_answer_and_most_quotes_were_said(sdk: AsyncOpenAI) -> None:
    assert (await judge(sdk)).choices == (await judge(sdk)).choices
    quotes = []
    for n in range(30):
        judged = (await judge(sdk, f"{SAID}speaker_0: Vous êtes le client numéro {n}.\n")).choices[0].message.parsed
        quotes += [(n, quote) for step in (judged.consent, judged.price) for quote in step.quotes]
    said = [quote in f"{SAID} Vous êtes le client numéro {n}." for n, quote in quotes]
    assert 0 < said.count(False) < len(said) / 2
    assert not any("speaker" in quote or "#" in quote for _, quote in quotes)


async def test_without_a_schema_it_says_something(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "Ça va ?"}])
    assert answer.choices[0].message.content


async def test_useless_answers_come_on_demand(sdk: AsyncOpenAI, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "chat_refusal", "vendor": "llm"}])
    refused = (await judge(sdk)).choices[0].message
    assert (refused.parsed, bool(refused.refusal)) == (None, True)
    sandbox.set_faults([{"kind": "chat_length", "vendor": "llm"}])
    with pytest.raises(openai.LengthFinishReasonError):
        await judge(sdk)
    sandbox.set_faults([{"kind": "chat_filtered", "vendor": "llm"}])
    with pytest.raises(openai.ContentFilterFinishReasonError):
        await judge(sdk)
    sandbox.set_faults([{"kind": "chat_empty", "vendor": "llm"}])
    assert (await judge(sdk)).choices[0].message.content is None
    sandbox.set_faults([{"kind": "chat_broken", "vendor": "llm"}])
    with pytest.raises(ValueError, match="Judged"):
        await judge(sdk)
    assert len(sandbox.ledger(vendor="llm", kind="paid")) == 5, "useless answers are charged, too"


@pytest.mark.parametrize(
    ("fault", "expected", "code"),
    [
        ({"kind": "throttle", "retry_after": 3}, openai.RateLimitError, "rate_limit_exceeded"),
        ({"kind": "refused", "status": 429, "code": "insufficient_quota"}, openai.RateLimitError, "insufficient_quota"),
        ({"kind": "server_error"}, openai.InternalServerError, "server_error"),
        ({"kind": "unauthorized"}, openai.AuthenticationError, "invalid_api_key"),
        ({"kind": "not_found"}, openai.NotFoundError, "model_not_found"),
    ],
)
async def test_the_official_client_understands_every_refusal(
    sdk: AsyncOpenAI, sandbox: SandboxProcess, fault: dict[str, Any], expected: type[openai.APIStatusError], code: str
) -> None:
    sandbox.set_faults([{**fault, "vendor": "llm"}])
    with pytest.raises(expected) as caught:
        await judge(sdk)
    assert (caught.value.code, bool(caught.value.request_id)) == (code, True)
    assert caught.value.response.headers.get("retry-after") == ("3" if fault["kind"] == "throttle" else None)
    assert sandbox.ledger(vendor="llm", kind="paid") == []


async def test_a_key_that_is_none_is_refused(sandbox: SandboxProcess) -> None:
    async with AsyncOpenAI(api_key="invalid", base_url=f"{sandbox.url}/llm/v1", max_retries=0, timeout=30) as client:
        with pytest.raises(openai.AuthenticationError):
            await judge(client)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"model": "m"}',
        b'{"model": "m", "messages": [7]}',
        b'{"model": "m", "messages": [], "response_format": {"json_schema": {}}}',
        b'{"model": "m", "messages": [], "response_format": {"json_schema": {"schema": {"$ref": "#/$defs/x"}}}}',
    ],
)
async def test_what_is_not_a_request_is_refused(http: Client, body: bytes) -> None:
    answer = await http.post("llm/v1/chat/completions", data=body, headers={"Authorization": "Bearer k"})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_there_is_nothing_else(http: Client) -> None:
    assert (await http.get("llm/v1/files")).status == 404
