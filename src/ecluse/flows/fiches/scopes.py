"""Which fiches a caller sees: all of the tenant, those of its groups, or those attributed to its CRM user.

A caller with a narrow scope gets the same refusal for a fiche outside its scope and for one that does not exist. A
caller with scope ALL may ask for a fiche that is not in the cache: it can be fetched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fastapi import Request
from starlette.convertors import register_url_convertor

from ecluse.access import listing
from ecluse.access.door import caller_of
from ecluse.access.envelope import Refused
from ecluse.access.keys import Caller
from ecluse.access.wire import TextConvertor, reads_of
from ecluse.base.errors import NotFound
from ecluse.base.text import first_few, storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column
from ecluse.flows.fiches import cache
from ecluse.flows.fiches.ids import is_fiche_id
from ecluse.flows.fiches.queries import EVERYTHING, Visible

R = TypeVar("R")


def visible(caller: Caller) -> Visible:
    match caller.scope:
        case "ALL":
            return EVERYTHING
        case "GROUP":
            condition = f"coalesce(({cache.GROUPE}) = ANY(%(scope_groupes)s::text[]), false)"
            return Visible(condition, {"scope_groupes": list(caller.groupes)})
        case _:  # an unknown scope sees no more than SELF
            condition = f"coalesce(({cache.ATTRIBUTION}) = %(scope_user)s::text, false)"
            return Visible(condition, {"scope_user": caller.crm_user_id})


def visible_rows(caller: Caller) -> listing.Visible:
    """Return the condition on rows with a `fiche_cache_id`: a caller sees those of the fiches that it sees."""
    if caller.scope == "ALL":
        return listing.every_row(caller)
    condition, parameters = visible(caller)
    ids = f"SELECT f.id FROM {cache.FROM} WHERE f.tenant_id = %(tenant)s AND {condition}"  # noqa: S608 - our own words
    return listing.Visible(f"t.fiche_cache_id IN ({ids})", parameters)


async def check_visible(connection: Connection, caller: Caller, fiche_ids: Sequence[str]) -> list[str]:
    """Return the ids that this caller may not see, in the order given."""
    if caller.scope == "ALL":
        return []
    condition, parameters = visible(caller)
    seen = await fetch_column(
        connection,
        f"SELECT f.fiche_id FROM {cache.FROM}"  # noqa: S608 - made of our own words
        f" WHERE f.tenant_id = %(tenant)s AND f.fiche_id = ANY(%(fiches)s) AND {condition}",
        {"tenant": caller.tenant, "fiches": list(fiche_ids), **parameters},
    )
    return [fiche_id for fiche_id in fiche_ids if fiche_id not in seen]


async def require_visible(connection: Connection, caller: Caller, fiche_ids: Sequence[str]) -> None:
    refused = await check_visible(connection, caller, fiche_ids)
    if refused:
        outside = f"which does not include fiche {first_few(refused)}, as far as is known here."
        raise Refused(403, "SCOPE", f"This key is limited to {_limits(caller)}, {outside}")


def _limits(caller: Caller) -> str:
    if caller.scope == "GROUP":
        return f"the groupes {', '.join(caller.groupes)}" if caller.groupes else "groupes, of which it has none"
    return (
        f"what is attributed to the CRM user {caller.crm_user_id}"
        if caller.crm_user_id
        else "the fiches of no CRM user"
    )


async def read_fiche(request: Request, fiche_id: str, read: Callable[[Connection, str, str], Awaitable[R]]) -> R:
    """Run a read of the fiche in the path, `read(connection, tenant, fiche id)`, if the caller may see this fiche."""
    caller, wanted = caller_of(request), fiche_in_path(fiche_id)

    async def ask(connection: Connection) -> R:
        await require_visible(connection, caller, [wanted])
        return await read(connection, caller.tenant, wanted)

    return await reads_of(request)(ask)


register_url_convertor("fiche", TextConvertor())


def fiche_in_path(text: str) -> str:
    """Return `text` if it is a valid fiche id; otherwise raise NotFound, as for a fiche that does not exist."""
    if is_fiche_id(text):
        return text
    raise NotFound(f"there is no fiche {storable(text, 50)}")
