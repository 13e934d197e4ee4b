"""What a config asks and what an answer is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ecluse.flows.audits import prompts, steps
from ecluse.flows.audits.steps import Step, Steps
from ecluse.flows.audits.transcripts import ConfigContent

CHECKED = TypeAdapter(Steps)


def step(name="Consent", **given):
    return {"name": name, "criteria": "The customer agrees.", **given}


def many(*given):
    return [Step.model_validate(one) for one in given]


GOOD = {"quotes": ["yes"], "comment": "fine", "score": 1}


@pytest.mark.parametrize(
    "given",
    [
        [],
        [step(str(n)) for n in range(51)],
        [step("a"), step("a")],
        [step(weight=0), step("b", weight=0)],
        [step(weight=-1)],
        [step(weight=float("nan"))],
        [step(weight=float("inf"))],
        [step(weight=1_001)],
        [step(weight="1")],
        [step(max_score=0)],
        [step(max_score=101)],
        [step(max_score=1.5)],
        [step(name="")],
        [step(name=" \t")],
        [step(name="n" * 201)],
        [step(criteria="  ")],
        [step(criteria="c" * 5_001)],
        [{"name": "no criteria"}],
        [step(more=1)],
    ],
)
def test_steps_that_cannot_be_asked_are_refused(given):
    with pytest.raises(ValidationError):
        CHECKED.validate_python(given)


def test_steps_have_a_default_weight_and_best_score():
    (one,) = CHECKED.validate_python([step()])
    assert (one.weight, one.max_score) == (1, 10)
    assert len(CHECKED.validate_python([step(str(n), weight=0 if n else 1) for n in range(50)])) == 50


@pytest.mark.parametrize(
    ("weights", "best", "got", "score"),
    [
        ((1,), (10,), (10,), 100),
        ((1,), (10,), (0,), 0),
        ((1, 1), (10, 5), (10, 0), 50),
        ((3, 1), (10, 5), (5, 5), 62.5),
        ((1, 0), (10, 10), (7, 0), 70),
        ((1, 1, 1), (10, 10, 10), (10, 10, 0), 66.67),
        ((0.5, 1.5), (1, 100), (1, 50), 62.5),
    ],
)
def test_the_score_is_each_steps_share_of_its_best_by_weight(weights, best, got, score):
    asked = many(*(step(str(n), weight=w, max_score=b) for n, (w, b) in enumerate(zip(weights, best, strict=True))))
    assert steps.score(asked, got) == score


@given(st.lists(st.tuples(st.floats(0, 1_000), st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=50))
def test_a_score_is_from_0_to_100_whatever_the_weights(given):
    asked = many(*(step(str(n), weight=w, max_score=b) for n, (w, b, _) in enumerate(given)), step("last", weight=1))
    got = [share * best for _, best, share in given]
    assert 0 <= steps.score(asked, [*got, 0]) <= steps.score(asked, [*got, 10]) <= 100


def test_the_schema_wants_every_step_once_and_nothing_else():
    schema = steps.schema(many(step("a"), step("b", max_score=5)))
    assert list(schema["properties"]) == schema["required"] == ["step_1", "step_2"]
    assert schema["additionalProperties"] is False
    second = schema["properties"]["step_2"]
    assert second["required"] == list(second["properties"]) == ["quotes", "comment", "score"]
    assert (second["additionalProperties"], second["properties"]["score"]["maximum"]) == (False, 5)


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        {},
        {"step_1": GOOD},
        {"step_1": GOOD, "step_3": GOOD},
        {"step_1": GOOD, "step_2": GOOD, "step_3": GOOD},
        {"step_1": GOOD, "step_2": {**GOOD, "score": 6}},
        {"step_1": GOOD, "step_2": {**GOOD, "score": -1}},
        {"step_1": GOOD, "step_2": {**GOOD, "score": "3"}},
        {"step_1": GOOD, "step_2": {**GOOD, "quotes": "yes"}},
        {"step_1": GOOD, "step_2": {"score": 1, "comment": ""}},
        {"step_1": GOOD, "step_2": {**GOOD, "more": 1}},
    ],
)
def test_an_answer_that_is_not_of_the_schema_is_refused(content):
    with pytest.raises(ValueError, match=r"step_|Given|dict|instead"):
        steps.read(many(step("a"), step("b", max_score=5)), content)


def test_an_answer_is_read_in_the_order_of_the_steps_and_cut_to_size():
    asked = many(step("a"), step("b", max_score=5))
    content = {"step_2": {**GOOD, "score": 2.5}, "step_1": {**GOOD, "quotes": ["q\x00" * 2_000] * 30}}
    first, second = steps.read(asked, content)
    assert (first.score, second.score, second.quotes) == (1, 2.5, ["yes"])
    assert (len(first.quotes), len(first.quotes[0]), "\x00" in first.quotes[0]) == (20, 2_000, False)


@pytest.mark.req("G-91")
def test_the_prompt_has_every_step_with_its_criteria_and_best_score():
    asked = ConfigContent("Compliance", "", "You know the law.", None, many(step("a"), step("b", max_score=5)))
    prompt = prompts.system(asked)
    assert prompt.startswith("You know the law.\n")
    assert "# Compliance" in prompt
    assert "## step_1: a (0 to 10)\nThe customer agrees." in prompt
    assert "## step_2: b (0 to 5)\nThe customer agrees." in prompt
