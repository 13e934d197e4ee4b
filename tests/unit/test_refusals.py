"""Messages about input that a model refuses have our own words only, without pydantic's."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator, model_validator

from ecluse.base.errors import InvalidInput
from ecluse.base.validation import readable
from ecluse.engine.runs.start import valid_input
from tests.support.engine_flows import flow, stage


class Order(BaseModel):
    articles: int = 1
    code: str = "a"
    note: str = ""

    @field_validator("articles")
    @classmethod
    def _few(cls, articles: int) -> int:
        if articles > 9:
            raise AssertionError("no more than nine")
        return articles

    @field_validator("code")
    @classmethod
    def _short(cls, code: str) -> str:
        if len(code) > 3:
            raise ValueError("Value error, is how it begins")
        return code

    @model_validator(mode="after")
    def _together(self) -> Order:
        if self.note == self.code:
            raise ValueError("note and code are the same")
        return self


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"articles": 10}, "articles: no more than nine"),
        ({"code": "abcd"}, "code: Value error, is how it begins"),
        ({"note": "a"}, "note and code are the same"),
        ({"articles": "x"}, "articles: Input should be a valid integer, unable to parse string as an integer"),
        ({"articles": 10, "code": "abcd"}, "articles: no more than nine; code: Value error, is how it begins"),
    ],
)
def test_a_refusal_is_said_in_our_words_alone(given, said):
    with pytest.raises(ValidationError) as refused:
        Order.model_validate(given)
    assert readable(refused.value) == said
    with pytest.raises(InvalidInput) as answered:
        valid_input(flow(stage(), input=Order), given)
    assert answered.value.message == f"Input of flow test: {said}"
