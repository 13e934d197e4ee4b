"""The family of errors. Whoever raises one knows whether trying again makes sense; the engine never reads status codes.

EcluseError                  carries a stable `code` and a message that says what to do
 ├─ SetUpError               the program cannot start: the message is shown to the operator, exit code 2
 ├─ InvalidInput             the caller sent something wrong: 4xx, exit code 2
 ├─ Conflict                 what is there already does not allow it: 409, exit code 2
 ├─ NotFound                 no such run, flow or record: 404, exit code 2
 ├─ ForbiddenTransition      a status move that the flow's table does not list; nothing was written
 ├─ NonRetriableError        ends a run at once, as failed
 └─ VendorError              how a call to somebody else's system ended
     ├─ PermanentError       the vendor said no: trying again makes no sense
     └─ TransientError       may work later; says when, and whether the vendor may have acted
         └─ NotSentError     the request never left us: nothing can have happened over there
"""

from __future__ import annotations

from typing import Self


class EcluseError(Exception):
    code = "ERROR"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return self.message


class SetUpError(EcluseError):
    code = "SET_UP"


class InvalidInput(EcluseError):
    code = "INVALID_INPUT"


class Conflict(EcluseError):
    code = "CONFLICT"


class NotFound(EcluseError):
    code = "NOT_FOUND"


class ForbiddenTransition(EcluseError):
    code = "FORBIDDEN_TRANSITION"

    def __init__(self, subject: str, from_status: str, to_status: str) -> None:
        super().__init__(f"{subject} cannot go from {from_status} to {to_status}")
        self.args = (subject, from_status, to_status)  # what pickle passes back: a workflow stores its steps' errors
        self.from_status = from_status
        self.to_status = to_status


class NonRetriableError(EcluseError):
    code = "NON_RETRIABLE"


class VendorError(EcluseError):
    """`ambiguous` means that the call, if it was a write, may have been applied all the same. `status` is what an HTTP
    answer said, for people to read: the class has decided what it means."""

    code = "VENDOR_ERROR"
    ambiguous = True
    status: int | None = None

    def explained(self, message: str, *, code: str | None = None) -> Self:
        """The same in better words."""
        self.message, self.args = message, (message,)
        self.code = code or self.code
        return self


class PermanentError(VendorError):
    code = "VENDOR_REFUSED"

    def __init__(self, message: str, *, code: str | None = None, ambiguous: bool = False) -> None:
        super().__init__(message, code=code)
        self.ambiguous = ambiguous


class TransientError(VendorError):
    """`retry_after` is the vendor's own word in seconds."""

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
    code = "VENDOR_UNREACHABLE"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code, ambiguous=False)
