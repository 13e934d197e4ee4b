"""Records of one kind in the API: their routes share a path, permissions, a name in the audit trail, the words of their
commands and, mostly, the shape of their answers.

    RULE = Resource(surface, "/api/pricing/rules/{rule_id}", "pricing", "pricing_rule", "pricing rules", RuleRow)

    @RULE.creates(refuses=["NAME_TAKEN"], arguments=("project_id", "name"))
    async def create_rule(act: Act, body: NewRule) -> Row: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ecluse.access.commands import Command
from ecluse.access.listing import Listing
from ecluse.access.surface import F, Function, Surface
from ecluse.access.wire import Deleted, Shape


@dataclass(frozen=True)
class Resource:
    """The declarations of routes. Operations name what differs from the others: `answer`, `status`, `before` and
    `refuses`, the error codes of their own, of `Surface.operation`, and fields of `Command`."""

    surface: Surface
    one: str  # the path of a record; it ends with the parameter that names it
    area: str  # of its permissions
    kind: str  # in the audit trail
    words: str  # that its commands begin with
    answer: type[Shape]  # a record

    @property
    def all(self) -> str:
        """The path of the list."""
        return self.one.rpartition("/")[0]

    def lists(
        self,
        listing: Listing,
        *,
        columns: tuple[str, ...],
        check: Function | None = None,
        empty: str = "",
        **named: str,
    ) -> None:
        """Add the route of the list; `named` is its name and its description."""
        command = Command(f"{self.words} list", columns=columns, empty=empty)
        self.surface.listing(self.all, listing, check=check, command=command, **named)

    def shows(self, *, answer: type[BaseModel] | None = None, narrowed: bool = False) -> Callable[[F], F]:
        """Declare the read of a record."""
        command, needs = Command(f"{self.words} show"), f"{self.area}.read"
        return self.surface.read(
            self.one, needs=needs, answer=answer or self.answer, narrowed=narrowed, command=command
        )

    def creates(self, *, verb: str = "create", named: str = "id", **given: Any) -> Callable[[F], F]:
        """Declare the operation that creates a record; the audit trail names it by the field `named` of the answer."""
        return self._writes("POST", self.all, verb, named=named, status=201, **given)

    def changes(self, *, action: str = "change", **given: Any) -> Callable[[F], F]:
        """Declare the operation that changes fields of a record; `action`: its verb in the audit trail."""
        return self._writes("PATCH", self.one, action, command=f"{self.words} update", **given)

    def deletes(self, *, answer: type[BaseModel] = Deleted, **given: Any) -> Callable[[F], F]:
        """Declare the operation that deletes a record."""
        return self._writes("DELETE", self.one, "delete", answer=answer, **given)

    def does(self, verb: str, **given: Any) -> Callable[[F], F]:
        """Declare another operation on a record: the verb ends its path and its command."""
        return self._writes("POST", f"{self.one}/{verb}", verb, **given)

    def _writes(
        self,
        method: str,
        path: str,
        verb: str,
        *,
        refuses: Sequence[str] = (),
        answer: type[BaseModel] | None = None,
        status: int = 200,
        before: Function | None = None,
        command: str = "",
        named: str = "",
        **fields: Any,
    ) -> Callable[[F], F]:
        named = named or self.one.rpartition("{")[2].removesuffix("}")
        return self.surface.operation(
            method,
            path,
            needs=f"{self.area}.write",
            answer=answer or self.answer,
            status=status,
            before=before,
            action=f"{self.kind}.{verb}",
            subject=f"{self.kind}:{{{named}}}",
            refuses=refuses,
            command=Command(command or f"{self.words} {verb}", **fields),
        )
