"""Readable messages from pydantic's validation errors: field names as the caller spelled them, without pydantic's
prefixes. And base classes of models: accepted in two spellings, or with the fields of another model."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

BEFORE_OURS = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
# A field name in a sentence; quoted text is a value.
NAME = re.compile(r"""(?<!['"\w-])[a-z]+(?:_[a-z]+)+(?!['"\w])""")
# What a text of a pattern is, in words, for messages.
FORMS = {
    r"\S": "a text that is not blank",
    r"^\S+$": "a word without spaces",
    r"^[1-9][0-9]{0,17}$": "an id, such as 7",
    r"^[0-9a-f]{64}$": "a hash: 64 hexadecimal digits",
}
# What a value should be, in words, by the type of pydantic's error about it.
KINDS = {
    "string_type": "a text",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("decimal_type", "decimal_parsing"), "a decimal number as text, such as 12.50"),
}
TAGS = ("union_tag_invalid", "union_tag_not_found")  # types of the error about a field that says which model it is
LENGTHS = {
    **dict.fromkeys(("too_short", "string_too_short"), ("min_length", "at least")),
    **dict.fromkeys(("too_long", "string_too_long"), ("max_length", "at most")),
}
SUBJECT = re.compile(r"^(?:Input|String|Value|List) should\b")  # in messages of pydantic
NULLS = "says_nothing"  # type of the error about fields that are null; their names are in its context
FIRST_VALUES = 1_000  # of a body: it may have a hundred thousand

M = TypeVar("M", bound=BaseModel)
Spelling = Callable[[str], str]  # spells the name of a field


def as_it_is(name: str) -> str:
    """Return the name unchanged: the spelling of callers that use our own names."""
    return name


def as_sent(body: Any, *, guess: bool = True) -> Spelling:
    """Return the spelling used in a JSON body: a field name that the body has in camelCase is spelled in camelCase.
    With `guess`, so are names that the body does not have, if it has a name with a capital letter and none with an
    underscore."""
    sent = set(names_in(body))
    camel = guess and any(name != name.lower() for name in sent) and not any("_" in name for name in sent)

    def spelled(name: str) -> str:
        other = to_camel(name)
        return other if name not in sent and (other in sent or camel) else name

    return spelled


def form(pattern: str, words: str) -> str:
    """Register `words`, which say in messages what a text must be to match the pattern ("a word without spaces");
    return the pattern."""
    FORMS[pattern] = words
    return pattern


def problem(error: Mapping[str, Any], spelled: Spelling = as_it_is, known: Collection[str] = ()) -> str:
    """Return the message of one entry of a model's `errors()`, without the name of the field that it is about. `known`:
    the field names that the message about an unknown field lists."""
    if error["type"] == "extra_forbidden":
        return "there is no such field" + (f" (known: {', '.join(map(spelled, known))})" if known else "")
    if error["type"] == "string_pattern_mismatch" and (words := FORMS.get(error["ctx"]["pattern"])):
        return f"This should be {words}"
    if (kind := KINDS.get(error["type"])) is not None:
        return f"This should be {kind}"
    if error["type"] in LENGTHS:
        return _length(error)
    if error["type"] == "union_tag_invalid":
        return f"This should be one of {error['ctx']['expected_tags']}, not {error['ctx']['tag']!r}"
    if error["type"] == "union_tag_not_found":
        return "Field required"
    message = str(error["msg"]).removeprefix(BEFORE_OURS.get(error["type"], ""))
    return respelled(SUBJECT.sub("This should", message), spelled)


def _length(error: Mapping[str, Any]) -> str:
    about = error["ctx"]
    limit, bound = LENGTHS[error["type"]]
    if bound == "at least" and about[limit] == 1:
        return "This may not be empty"
    # A secret text is called a value.
    texts = error["type"].startswith("string") or about["field_type"] == "Value"
    unit = "characters" if texts else "entries"
    found = f", not {about['actual_length']}" if "actual_length" in about else ""
    return f"This should have {bound} {about[limit]} {unit}{found}"


def where(error: Mapping[str, Any], spelled: Spelling = as_it_is) -> str:
    """Return the path of the field that one entry of a model's `errors()` is about, such as `fiche_selection.mode`;
    empty for the value as a whole."""
    tag = (error["ctx"]["discriminator"].strip("'"),) if error["type"] in TAGS else ()
    return ".".join(spelled(part) if isinstance(part, str) else str(part) for part in (*error["loc"], *tag))


def respelled(text: str, spelled: Spelling) -> str:
    """Return the text with the field names in it spelled by `spelled`; quoted words stay."""
    return NAME.sub(lambda found: spelled(found[0]), text)


def readable(error: ValidationError, spelled: Spelling = as_it_is) -> str:
    """Return all problems of a validation error as one text: `place: message; place: message`."""
    wrong = [(where(one, spelled), problem(one, spelled)) for one in error.errors()]
    return "; ".join(f"{place}: {what}" if place else what for place, what in wrong)


def partial_of(model: type[BaseModel]) -> Callable[[type[M]], type[M]]:
    """Decorate a model of changes to `model`: it gets the fields of `model` that it does not declare, all optional."""

    def optional(field: FieldInfo) -> tuple[Any, Any]:
        kind: Any = field.annotation
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        return kind | None, Field(None, description=field.description, examples=field.examples)

    return lambda changes: _completed(changes, model, optional)


def fields_of(model: type[BaseModel], *, without: Collection[str] = ()) -> Callable[[type[M]], type[M]]:
    """Decorate a model of answers: it gets the fields of `model` that it does not declare, except those in `without`,
    all required and without the constraints on input."""

    def shown(field: FieldInfo) -> tuple[Any, Any]:
        return field.annotation, Field(description=field.description, examples=field.examples)

    return lambda answer: _completed(answer, model, shown, without)


class EitherSpelling(BaseModel):
    """Base of models whose fields are accepted in snake_case or camelCase, and stored, documented and returned in
    snake_case. Unknown fields, and a field given in both spellings, are refused; types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _in_snake_case(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        names = {camel: name for name in cls.model_fields if (camel := to_camel(name)) != name}
        if twice := [camel for camel, name in names.items() if camel in given and name in given]:
            raise ValueError(f"{', '.join(twice)} is given in both spellings")
        return {names.get(name, name): value for name, value in given.items()}


class Partial(EitherSpelling):
    """Base of models of changes: fields that are not given stay unchanged, and null is refused unless the field is in
    `nullable`."""

    nullable: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        empty = {name for name in self.model_fields_set if getattr(self, name) is None} - set(self.nullable)
        if empty:
            about = {"names": ", ".join(sorted(empty))}
            raise PydanticCustomError(NULLS, "null says nothing about {names}: leave it out", about)
        return self


def in_camel_case(schema: dict[str, Any]) -> None:
    """Rename the fields of a JSON schema, in place, to camelCase, as the contract spells them; snake_case stays
    accepted."""
    schema["properties"] = {to_camel(name): told for name, told in schema["properties"].items()}
    schema["required"] = [to_camel(name) for name in schema.get("required", ())]


def _completed(
    incomplete: type[M],
    model: type[BaseModel],
    made: Callable[[FieldInfo], tuple[Any, Any]],
    without: Collection[str] = (),
) -> type[M]:
    """Return `incomplete` with the fields of `model` that it lacks, except those in `without`. `made` converts each of
    them into type and default."""
    left = [name for name in model.model_fields if name not in incomplete.model_fields and name not in without]
    fields: dict[str, Any] = {name: made(model.model_fields[name]) for name in left}
    name, doc = incomplete.__name__, incomplete.__doc__
    return create_model(name, __base__=incomplete, __module__=incomplete.__module__, __doc__=doc, **fields)


def names_in(value: Any) -> Iterator[str]:
    """Yield the names of all fields in a JSON value, level by level. Only its first FIRST_VALUES values are read."""
    left = deque([value])
    for _ in range(FIRST_VALUES):
        if not left:
            return
        one = left.popleft()
        if isinstance(one, Mapping):
            yield from one
            left += one.values()
        elif isinstance(one, list):
            left += one
