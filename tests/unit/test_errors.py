"""The family of errors: who is whose kin, what each carries, and that a stored one comes back whole."""

from __future__ import annotations

import copy
import pickle

import pytest

from ecluse.base import errors
from ecluse.base.errors import (
    Conflict,
    EcluseError,
    ForbiddenTransition,
    InvalidInput,
    NonRetriableError,
    NotFound,
    NotSentError,
    PermanentError,
    SetUpError,
    TransientError,
    VendorError,
)

FAMILY = {thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)}
# Class, stable code, parent.
KIN = [
    (EcluseError, "ERROR", Exception),
    (SetUpError, "SET_UP", EcluseError),
    (InvalidInput, "INVALID_INPUT", EcluseError),
    (Conflict, "CONFLICT", EcluseError),
    (NotFound, "NOT_FOUND", EcluseError),
    (ForbiddenTransition, "FORBIDDEN_TRANSITION", EcluseError),
    (NonRetriableError, "NON_RETRIABLE", EcluseError),
    (VendorError, "VENDOR_ERROR", EcluseError),
    (PermanentError, "VENDOR_REFUSED", VendorError),
    (TransientError, "VENDOR_UNAVAILABLE", VendorError),
    (NotSentError, "VENDOR_UNREACHABLE", TransientError),
]
SPOKEN = [kind for kind, _, _ in KIN if kind is not ForbiddenTransition]

EXAMPLES = [
    *(kind("It went wrong") for kind in SPOKEN),
    *(kind("Étrange 🙂", code="OWN_CODE") for kind in SPOKEN),
    ForbiddenTransition("run", "APPLIED", "APPLYING"),
    TransientError("Too many requests", code="THROTTLED", retry_after=2.5, ambiguous=False),
    TransientError("No answer", retry_after=0.0),
]
STORED = [
    pytest.param(lambda error: pickle.loads(pickle.dumps(error)), id="pickled"),  # noqa: S301 - our own bytes
    pytest.param(copy.copy, id="copied"),
    pytest.param(copy.deepcopy, id="deep-copied"),
]


def test_every_class_of_the_family_is_in_these_tables() -> None:
    assert {kind for kind, _, _ in KIN} == FAMILY == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("restore", STORED)
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{type(error).__name__} {error.code}")
def test_an_error_that_was_stored_comes_back_whole(error, restore) -> None:
    back = restore(error)
    assert back is not error
    assert type(back) is type(error)
    assert (str(back), back.message, back.code, back.args) == (str(error), error.message, error.code, error.args)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(("kind", "code", "parent"), KIN)
def test_each_kind_has_its_stable_code_and_parent(kind, code, parent) -> None:
    assert kind.code == code
    assert kind.__base__ is parent


@pytest.mark.parametrize("kind", SPOKEN)
def test_an_error_says_its_message_and_may_carry_a_code_of_its_own(kind) -> None:
    own = kind("Set ECLUSE_DSN", code="OWN_CODE")
    assert (str(own), own.message, own.code) == ("Set ECLUSE_DSN", "Set ECLUSE_DSN", "OWN_CODE")
    assert kind("Set ECLUSE_DSN").code == kind.code != "OWN_CODE"


@pytest.mark.req("ENG-98")
def test_a_forbidden_transition_names_both_states() -> None:
    error = ForbiddenTransition("run", "APPLIED", "APPLYING")
    assert str(error) == "run cannot go from APPLIED to APPLYING"
    assert (error.from_status, error.to_status) == ("APPLIED", "APPLYING")


def test_a_transient_error_is_ambiguous_by_default() -> None:
    error = TransientError("No answer")
    assert (error.ambiguous, error.retry_after) == (True, None)
    known = TransientError("Too many requests", retry_after=3.0, ambiguous=False)
    assert (known.ambiguous, known.retry_after) == (False, 3.0)


def test_what_was_never_sent_cannot_have_happened() -> None:
    error = NotSentError("Connection refused")
    assert (error.ambiguous, error.retry_after) == (False, None)
