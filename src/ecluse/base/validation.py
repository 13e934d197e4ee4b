"""Validation errors of pydantic as messages for the caller, with field names as the caller spelled them. The prefixes
that pydantic puts before the messages of our own validators are removed. And models of partial updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

BEFORE_OURS = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
# A field name in a sentence; quoted text is a value.
NAME = re.compile(r"""(?<!['"\w-])[a-z]+(?:_[a-z]+)+(?!['"\w])""")

M = TypeVar("M", bound=BaseModel)
Spelling = Callable[[str], str]  # spells the name of a field


def as_it_is(name: str) -> str:
    return name


def as_sent(body: Any, *, guess: bool = True) -> Spelling:
    """Return the spelling of a JSON body: names that it contains in camelCase are written in camelCase. With `guess`,
    names that it does not contain are, too, if all of its own are."""
    sent = set(_names(body))
    camel = guess and any(name != name.lower() for name in sent) and not any("_" in name for name in sent)

    def spelled(name: str) -> str:
        other = to_camel(name)
        return other if name not in sent and (other in sent or camel) else name

    return spelled


def problem(error: Mapping[str, Any], spelled: Spelling = as_it_is) -> str:
    """Return the message of one entry of a model's `errors()`."""
    return respelled(str(error["msg"]).removeprefix(BEFORE_OURS.get(error["type"], "")), spelled)


def where(error: Mapping[str, Any], spelled: Spelling = as_it_is) -> str:
    return ".".join(spelled(part) if isinstance(part, str) else str(part) for part in error["loc"])


def respelled(text: str, spelled: Spelling) -> str:
    return NAME.sub(lambda found: spelled(found[0]), text)


def readable(error: ValidationError, spelled: Spelling = as_it_is) -> str:
    wrong = [(where(one, spelled), problem(one, spelled)) for one in error.errors()]
    return "; ".join(f"{place}: {what}" if place else what for place, what in wrong)


def partial_of(model: type[BaseModel]) -> Callable[[type[M]], type[M]]:
    """Decorate a model of changes to `model`: it gets the fields of `model` that it does not declare, all optional."""

    def completed(changes: type[M]) -> type[M]:
        fields: dict[str, Any] = {
            name: (_optional(field), Field(None, description=field.description, examples=field.examples))
            for name, field in model.model_fields.items()
            if name not in changes.model_fields
        }
        name, doc = changes.__name__, changes.__doc__
        return create_model(name, __base__=changes, __module__=changes.__module__, __doc__=doc, **fields)

    return completed


def _optional(field: FieldInfo) -> Any:
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    return kind | None


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _names(one)
