"""The hierarchy of errors. The code that raises an error decides whether a retry makes sense, by its class; the engine
never reads status codes.

EcluseError                  carries a stable `code` and a message that says what to do
 ├─ SetUpError               the program cannot start: the message is shown to the operator, exit code 2
 ├─ InvalidInput             the caller sent something wrong: 4xx, exit code 2
 ├─ Conflict                 the current state does not allow it: 409, exit code 2
 ├─ NotFound                 no such run, flow or record: 404, exit code 2
 ├─ ForbiddenTransition      a status change that the flow does not declare; nothing was written
 ├─ NonRetriableError        from a story: ends the run at once, as failed; from the work of an item: fails the item
 │                           for good, without a retry or a further round, and the run goes on
 └─ VendorError              a call to a vendor failed
     ├─ PermanentError       the vendor refused: a retry makes no sense
     └─ TransientError       a retry may succeed; says when, and whether the vendor may have acted
         └─ NotSentError     the request was not sent: the vendor cannot have acted
"""

from __future__ import annotations

from decimal import Decimal
from typing import Self


class EcluseError(Exception):
    """Base class of the errors of Ecluse. `code` is stable and meant for programs, `message` is for people."""

    code = "ERROR"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return self.message


class SetUpError(EcluseError):
    """The program cannot start or run with this environment; the message is shown to the operator."""

    code = "SET_UP"


class InvalidInput(EcluseError):
    """The caller sent something wrong, which the message names."""

    code = "INVALID_INPUT"


class Conflict(EcluseError):
    """The request is valid, but the current state does not allow it."""

    code = "CONFLICT"


class NotFound(EcluseError):
    """There is no such run, flow or record, or not for this caller."""

    code = "NOT_FOUND"


class ForbiddenTransition(EcluseError):
    """A status change of a run that the flow does not declare. Nothing was written."""

    code = "FORBIDDEN_TRANSITION"

    def __init__(self, subject: str, from_status: str, to_status: str) -> None:
        super().__init__(f"{subject} cannot go from {from_status} to {to_status}")
        self.args = (subject, from_status, to_status)  # for pickle: a workflow stores the errors of its steps
        self.from_status = from_status
        self.to_status = to_status


class NonRetriableError(EcluseError):
    """Raised by a story: ends the run at once, as failed. Raised by the work of an item: fails the item for good,
    without a retry or a further round; the run goes on."""

    code = "NON_RETRIABLE"


class VendorError(EcluseError):
    """A failed call to a vendor. `ambiguous`: a write may have been applied although the call failed. `status` is the
    HTTP status, for people to read: the class of the error decides whether the call is retried. `cost`: the price of a
    paid call with an unusable answer, None if unknown."""

    code = "VENDOR_ERROR"
    ambiguous = True
    status: int | None = None
    cost: Decimal | None = None

    @property
    def throttled(self) -> bool:
        """Whether the vendor refused the call because there were too many: by a 429, or by THROTTLED in an answer with
        another status."""
        return self.status == 429 or self.code == "THROTTLED"

    def explained(self, message: str, *, code: str | None = None) -> Self:
        """Replace the message, and the code if given; return the same error."""
        self.message, self.args = message, (message,)
        self.code = code or self.code
        return self


class PermanentError(VendorError):
    """The vendor refused the call: a retry makes no sense."""

    code = "VENDOR_REFUSED"

    def __init__(self, message: str, *, code: str | None = None, ambiguous: bool = False) -> None:
        super().__init__(message, code=code)
        self.ambiguous = ambiguous


class TransientError(VendorError):
    """A failed call that may succeed if it is repeated. `retry_after`: seconds to wait, if the vendor gave them."""

    code = "VENDOR_UNAVAILABLE"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retry_after: float | None = None,
        ambiguous: bool = True,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after
        self.ambiguous = ambiguous


class NotSentError(TransientError):
    """The request was not sent, so the vendor cannot have acted; a retry may succeed."""

    code = "VENDOR_UNREACHABLE"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code, ambiguous=False)
