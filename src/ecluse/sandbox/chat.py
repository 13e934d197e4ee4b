"""Unusable answers of a language model: how each ``chat_…`` rule spoils a good chat completion."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ecluse.sandbox.vendor import Answer, json_answer


def _refusal(choice: dict[str, Any]) -> None:
    choice["message"] |= {"content": None, "refusal": "I'm sorry, I can't help with that."}


def _length(choice: dict[str, Any]) -> None:
    choice["message"]["content"] = choice["message"]["content"][: len(choice["message"]["content"]) // 2]
    choice["finish_reason"] = "length"


def _filtered(choice: dict[str, Any]) -> None:
    choice["message"]["content"] = ""
    choice["finish_reason"] = "content_filter"


def _broken(choice: dict[str, Any]) -> None:
    choice["message"]["content"] = '{"something": "else"}'


def _empty(choice: dict[str, Any]) -> None:
    choice["message"]["content"] = None


SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "chat_refusal": _refusal,
    "chat_length": _length,
    "chat_filtered": _filtered,
    "chat_broken": _broken,
    "chat_empty": _empty,
}


def spoil(kind: str, answer: Answer) -> Answer:
    """Return the answer spoiled as the rule's `kind` says; an answer that is not a chat completion is returned
    unchanged."""
    value = json.loads(answer.body)
    if answer.status != 200 or not isinstance(value, dict) or value.get("object") != "chat.completion":
        return answer
    SPOILED[kind](value["choices"][0])
    return json_answer(value)
