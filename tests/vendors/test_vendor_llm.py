"""A language model against the sandbox, and against each way in which an OpenAI-compatible server refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

from ecluse.base.errors import PermanentError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.llm import Completion, Llm, Price, Prices
from tests.support.raw_server import NOW, answers, client_of, raw_server, response

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 10}},
    "required": ["score"],
    "additionalProperties": False,
}


def read(content: Any) -> float:
    if not isinstance(content, dict) or set(content) != {"score"}:
        raise ValueError("no score")
    return float(content["score"])


@pytest.fixture
async def llm_http(sandbox: SandboxProcess) -> AsyncIterator[VendorHttp]:
    http = VendorHttp("llm", f"{sandbox.url}/llm/v1", deadline=30, now=lambda: NOW)
    yield http
    await http.close()


async def ask(llm: Llm, name: str = "audit-1", **more: Any) -> Completion[float]:
    return await llm.ask(system="Judge.", user="Yes, I agree.", schema=SCHEMA, read=read, name=name, **more)


async def error_of(llm: Llm) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await ask(llm)
    return caught.value


async def refused_with(status: int, body: Any, headers: dict[str, str] | None = None) -> VendorError:
    raw = response(json.dumps(body).encode(), status=status, headers=headers)
    async with raw_server(answers(raw)) as server:
        async with client_of(server.port, deadline=30) as http:
            error = await error_of(Llm(http, "k", model="m"))
        assert len(server.requests) == 1, "no hidden retry"
    return error


async def answered_with(choices: Any, usage: Any = None, model: str = "m-2026") -> Completion[float]:
    body = json.dumps({"model": model, "choices": choices, "usage": usage}).encode()
    async with raw_server(answers(response(body))) as server, client_of(server.port, deadline=30) as http:
        return await ask(Llm(http, "k", model="m", prices=Prices(other=Price(Decimal(1), Decimal(2)))))


def choice(content: Any = '{"score": 3}', refusal: Any = None, why: str = "stop") -> list[dict[str, Any]]:
    return [{"message": {"content": content, "refusal": refusal}, "finish_reason": why}]


async def test_a_long_name_of_the_model_that_answered_is_cut() -> None:
    assert (await answered_with(choice(), model="m" * 201)).model == "m" * 199 + "…"


async def test_a_question_is_answered_by_the_schema_and_its_tokens_are_counted(
    llm_http: VendorHttp, sandbox: SandboxProcess
) -> None:
    llm = Llm(llm_http, "k", model="gpt-4.1", prices=Prices({"gpt-4.1": Price(Decimal("2.5"), Decimal(10))}))
    first, again, other = await ask(llm), await ask(llm), await ask(llm, model="mini")
    assert first == again
    assert (0 <= first.answer <= 10, first.model, other.model) == (True, "gpt-4.1", "mini")
    paid = sandbox.ledger(vendor="llm", kind="paid")
    assert [one["ref"] for one in paid] == ["audit-1"] * 3
    assert first.input_tokens == paid[0]["value"]["prompt_tokens"] > 0
    assert first.output_tokens == paid[0]["value"]["completion_tokens"] > 0
    assert first.cost == (first.input_tokens * Decimal("2.5") + first.output_tokens * 10) / 1_000_000


@pytest.mark.parametrize(
    ("key", "model", "named"),
    [
        (None, "m", ["LLM_API_KEY"]),
        (" ", "m", ["LLM_API_KEY"]),
        ("k", None, ["LLM_MODEL"]),
        ("", "", ["LLM_API_KEY", "LLM_MODEL"]),
    ],
)
async def test_without_key_or_model_nothing_is_called(
    llm_http: VendorHttp, sandbox: SandboxProcess, key: str | None, model: str | None, named: list[str]
) -> None:
    error = await error_of(Llm(llm_http, key, model=model))
    assert (type(error), error.code) == (PermanentError, "NOT_CONFIGURED")
    assert [knob for knob in ("LLM_API_KEY", "LLM_MODEL") if knob in error.message] == named
    assert sandbox.ledger() == []


@pytest.mark.parametrize(
    ("kind", "code", "permanent"),
    [
        ("chat_refusal", "REFUSED", True),
        ("chat_filtered", "CONTENT_FILTERED", True),
        ("chat_length", "TRUNCATED", False),
        ("chat_empty", "EMPTY_ANSWER", False),
        ("chat_broken", "SCHEMA_BROKEN", False),
        ("invalid_json", "BAD_ANSWER", False),
        ("wrong_shape", "BAD_ANSWER", False),
        ("unauthorized", "UNAUTHORIZED", True),
        ("server_error", "VENDOR_ERROR_503", False),
        ("applied_then_reset", "VENDOR_DISCONNECTED", False),
    ],
)
async def test_each_useless_answer_has_its_name_and_says_whether_to_try_again(
    llm_http: VendorHttp, sandbox: SandboxProcess, kind: str, code: str, permanent: bool
) -> None:
    sandbox.set_faults([{"kind": kind, "vendor": "llm"}])
    error = await error_of(Llm(llm_http, "k", model="m"))
    assert (error.code, isinstance(error, PermanentError)) == (code, permanent)
    assert error.message
    assert isinstance(error, TransientError) is not permanent


@pytest.mark.parametrize(
    ("choices", "code"),
    [
        ([], "EMPTY_ANSWER"),
        (choice(content=""), "EMPTY_ANSWER"),
        (choice(content=" \n"), "EMPTY_ANSWER"),
        (choice(content="I think it is fine."), "SCHEMA_BROKEN"),
        (choice(content='{"score": 3'), "SCHEMA_BROKEN"),
        (choice(content='{"score": "x"}'), "SCHEMA_BROKEN"),
        (choice(content=None, refusal="no"), "REFUSED"),
        (choice(why="length"), "TRUNCATED"),
        (choice(why="content_filter"), "CONTENT_FILTERED"),
    ],
)
async def test_what_a_model_says_instead_of_an_answer(choices: Any, code: str) -> None:
    with pytest.raises(VendorError) as caught:
        await answered_with(choices)
    assert caught.value.code == code


async def test_the_cost_of_an_answer_without_usage_is_unknown() -> None:
    assert await answered_with(choice()) == (3, "m-2026", 0, 0, None)
    counted = await answered_with(choice(), {"prompt_tokens": 1_000_000, "completion_tokens": 500_000, "more": {}})
    assert counted == (3, "m-2026", 1_000_000, 500_000, 2)
    assert Prices({"other": Price(Decimal(1), Decimal(1))}).cost("m", 5, 5) is None


def wrong(code: str | None, kind: str = "invalid_request_error", message: str = "No.") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


@pytest.mark.req("G-83")
@pytest.mark.parametrize(
    ("status", "body", "headers", "code", "retry_after"),
    [
        (429, wrong("rate_limit_exceeded", "tokens"), {"Retry-After": "7"}, "THROTTLED", 7),
        (429, wrong("rate_limit_exceeded"), {"Retry-After-Ms": "1500", "Retry-After": "9"}, "THROTTLED", 1.5),
        (429, wrong("rate_limit_exceeded"), {"Retry-After-Ms": "soon"}, "THROTTLED", None),
        (429, wrong("insufficient_quota", "insufficient_quota"), {"Retry-After": "7"}, "QUOTA_EXCEEDED", "never"),
        (429, wrong(None, "insufficient_quota"), None, "QUOTA_EXCEEDED", "never"),
        (500, wrong(None, "server_error"), None, "VENDOR_ERROR_500", None),
        (408, wrong(None), None, "VENDOR_ERROR_408", None),
        (400, wrong("context_length_exceeded"), None, "INPUT_TOO_LONG", "never"),
        (400, wrong("content_filter"), None, "CONTENT_FILTERED", "never"),
        (400, wrong(None), None, "VENDOR_REFUSED", "never"),
        (401, wrong("invalid_api_key"), None, "UNAUTHORIZED", "never"),
        (404, wrong("model_not_found"), None, "MODEL_NOT_FOUND", "never"),
        (403, {"error": "no"}, None, "FORBIDDEN", "never"),
        (503, "overloaded", None, "VENDOR_ERROR_503", None),
    ],
)
async def test_refusals_of_the_server(status: int, body: Any, headers: Any, code: str, retry_after: Any) -> None:
    error = await refused_with(status, body, headers)
    assert (error.code, error.status) == (code, status)
    assert isinstance(error, PermanentError) is (retry_after == "never")
    if isinstance(error, TransientError):
        assert error.retry_after == retry_after


async def test_a_refused_key_names_its_knob_and_is_not_shown() -> None:
    error = await refused_with(401, wrong("invalid_api_key", message="Incorrect API key provided."))
    assert error.message == "llm: 401 invalid_api_key: Incorrect API key provided. (check LLM_API_KEY)"


async def test_a_call_can_be_found_by_its_name_whatever_that_is(llm_http: VendorHttp, sandbox: SandboxProcess) -> None:
    await ask(Llm(llm_http, "k", model="m"), name="audit-7-été\r\nX: " + "y" * 600)
    [call] = sandbox.ledger(vendor="llm", kind="call")
    assert (call["ref"][:27], len(call["ref"])) == ("audit-7-%C3%A9t%C3%A9%0D%0A", 512)
