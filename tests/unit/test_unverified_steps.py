"""A step of an audit whose quotes no transcript has is marked."""

from __future__ import annotations

import pytest

from ecluse.flows.audits.quotes import Spoken
from ecluse.flows.audits.steps import Answered, Step
from ecluse.flows.audits.work import _judged

SPOKEN = [Spoken("c-1", "Do you agree? Yes, I agree.")]


@pytest.mark.parametrize(
    ("quotes", "unverified"),
    [
        ([], False),
        (["I agree"], False),
        (["I agree", "never said"], False),
        (["never said"], True),
        (["never said", "nor this"], True),
    ],
)
def test_a_step_is_unverified_if_all_its_quotes_are(quotes, unverified):
    step = Step(name="Consent", criteria="The customer agrees.", max_score=5)
    answer = Answered(score=5, comment="Clear.", quotes=quotes)
    assert _judged(step, answer, SPOKEN)["unverified"] is unverified
