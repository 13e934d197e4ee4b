"""Messages about input that a model refuses have our own words only, without pydantic's."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator

from ecluse.base.errors import InvalidInput
from ecluse.base.validation import readable
from ecluse.engine.runs.start import valid_input
from tests.support.engine_flows import flow, stage


class Order(BaseModel):
    articles: int = 1
    code: str = "a"
    note: str = ""
    tags: list[str] = Field(["a"], min_length=1, max_length=3)
    secret: SecretStr = Field(SecretStr("a"), min_length=1, max_length=8)
    way: Literal["in", "out"] = "in"
    on: bool = True

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
        ({"articles": 0.5}, "articles: This should be a whole number"),
        ({"tags": []}, "tags: This may not be empty"),
        ({"tags": ["a"] * 4}, "tags: This should have at most 3 entries, not 4"),
        ({"secret": ""}, "secret: This may not be empty"),
        ({"secret": "x" * 9}, "secret: This should have at most 8 characters, not 9"),
        ({"way": "far"}, "way: This should be 'in' or 'out'"),
        ({"on": "perhaps"}, "on: This should be true or false"),
        ({"code": "abcd"}, "code: Value error, is how it begins"),
        ({"note": "a"}, "note and code are the same"),
        ({"articles": "x"}, "articles: This should be a whole number"),
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
