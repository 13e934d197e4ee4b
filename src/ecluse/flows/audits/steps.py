"""Steps of a config, as pure functions: their validation, the schema that an answer must have, and the score of an
answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from ecluse.base.text import storable

MOST_STEPS = 50
MOST_QUOTES = 20  # of one step; more are dropped
LONGEST_QUOTE = 2_000
LONGEST_COMMENT = 10_000


class Step(BaseModel):
    """One criterion of an audit. Its weight is its share in the score; a step of weight 0 is judged, but not scored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S", examples=["Consent"])]
    criteria: Annotated[
        str,
        Field(
            min_length=1,
            max_length=5_000,
            pattern=r"\S",
            examples=["The agent says that the call is recorded, and the customer agrees."],
        ),
    ]
    weight: Annotated[float, Field(ge=0, le=1_000, examples=[2])] = 1
    max_score: Annotated[int, Field(ge=1, le=100, examples=[10])] = 10


class Answered(NamedTuple):
    """The model's answer to one step."""

    score: float
    comment: str
    quotes: list[str]


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    quotes: list[str]
    comment: str
    score: float


_GIVEN = TypeAdapter(dict[str, _Given])


def checked(steps: list[Step]) -> list[Step]:
    """Return the steps if they can be scored: all names differ, and at least one step has a weight. Raise ValueError
    otherwise."""
    names = [step.name for step in steps]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each step has a name of its own; twice: {', '.join(twice)}")
    if not any(step.weight > 0 for step in steps):
        raise ValueError("at least one step needs a weight above 0: otherwise nothing is scored")
    return steps


Steps = Annotated[list[Step], Field(min_length=1, max_length=MOST_STEPS), AfterValidator(checked)]


def key_of(position: int) -> str:
    """Return the property name of a step in an answer, by its position from 1: the step's own name may be any text."""
    return f"step_{position}"


def schema(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the strict schema of an answer: each step exactly once, and nothing else. Quotes come first and the score
    last, because a model writes in this order."""
    properties = {
        key_of(n): {
            "type": "object",
            "properties": {
                "quotes": {"type": "array", "items": {"type": "string"}},
                "comment": {"type": "string"},
                "score": {"type": "number", "minimum": 0, "maximum": step.max_score},
            },
            "required": ["quotes", "comment", "score"],
            "additionalProperties": False,
        }
        for n, step in enumerate(steps, 1)
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read(steps: Sequence[Step], content: Any) -> list[Answered]:
    """Return the model's answers in the order of the steps; long comments and quotes are cut, and quotes beyond
    MOST_QUOTES dropped. Raise ValueError if the content breaks the schema, which not every server enforces."""
    given: Mapping[str, _Given] = _GIVEN.validate_python(content)
    wanted = {key_of(n): step for n, step in enumerate(steps, 1)}
    if set(given) != set(wanted):
        raise ValueError(f"it answers {', '.join(sorted(given)) or 'nothing'} instead of {', '.join(wanted)}")
    for key, step in wanted.items():
        if not 0 <= given[key].score <= step.max_score:
            raise ValueError(f"{key}: the score {given[key].score:g} is not from 0 to {step.max_score}")
    return [
        Answered(
            one.score,
            storable(one.comment, LONGEST_COMMENT),
            [storable(quote, LONGEST_QUOTE) for quote in one.quotes[:MOST_QUOTES]],
        )
        for one in (given[key] for key in wanted)
    ]


def score(steps: Sequence[Step], scores: Sequence[float]) -> float:
    """Return the score of an audit from 0 to 100: each step's share of its maximum, by weight."""
    weights = sum(step.weight for step in steps)
    shares = sum(step.weight * got / step.max_score for step, got in zip(steps, scores, strict=True))
    return round(100 * shares / weights, 2)
