"""The fiches that a caller may see: all of the tenant, those of its groupes, or those attributed to its CRM user.

A caller with a narrow scope gets the same refusal for a fiche outside its scope and for one that does not exist. A
caller with scope ALL may ask for a fiche that is not in the cache: it can be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ecluse.access.envelope import Refused
from ecluse.access.keys import Caller
from ecluse.access.listing import Visible, every_row
from ecluse.access.surface import Look, Noun
from ecluse.base.errors import NotFound
from ecluse.base.text import first_few, storable
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column
from ecluse.flows.fiches.ids import is_fiche_id


def visible(caller: Caller, fiche: str = "f") -> Visible:
    """Return the condition on rows of `fiche_states` that selects the fiches which this caller sees; `fiche` is the
    alias of the row."""
    match caller.scope:
        case "ALL":
            return every_row(caller)
        case "GROUP":
            condition = f"coalesce({fiche}.groupe = ANY(%(scope_groupes)s::text[]), false)"
            return Visible(condition, {"scope_groupes": list(caller.groupes)})
        case _:  # an unknown scope sees no more than SELF
            condition = f"coalesce({fiche}.attribution_user_id = %(scope_user)s::text, false)"
            return Visible(condition, {"scope_user": caller.crm_user_id})


def visible_rows(caller: Caller) -> Visible:
    """Return the condition on rows `t` with a `fiche_cache_id` that selects the rows of fiches which this caller
    sees."""
    if caller.scope == "ALL":
        return every_row(caller)
    condition, parameters = visible(caller)
    ids = f"SELECT f.fiche_cache_id FROM fiche_states f WHERE f.tenant_id = %(tenant)s AND {condition}"  # noqa: S608 - our own words
    return Visible(f"t.fiche_cache_id IN ({ids})", parameters)


async def check_visible(connection: Connection, caller: Caller, fiche_ids: Sequence[str]) -> list[str]:
    """Return the ids among `fiche_ids` that this caller may not see, in the order given."""
    if caller.scope == "ALL":
        return []
    condition, parameters = visible(caller)
    seen = await fetch_column(
        connection,
        f"SELECT f.fiche_id FROM fiche_states f"  # noqa: S608 - made of our own words
        f" WHERE f.tenant_id = %(tenant)s AND f.fiche_id = ANY(%(fiches)s) AND {condition}",
        {"tenant": caller.tenant, "fiches": list(fiche_ids), **parameters},
    )
    return [fiche_id for fiche_id in fiche_ids if fiche_id not in seen]


async def require_visible(connection: Connection, caller: Caller, fiche_ids: Sequence[str]) -> None:
    """Raise Refused (403), naming the fiches, if this caller may not see one of them."""
    refused = await check_visible(connection, caller, fiche_ids)
    if refused:
        outside = "a fiche that was not fetched yet counts as outside of it"
        raise Refused(403, "SCOPE", f"This key may not read fiche {first_few(refused)}: {_limits(caller)}; {outside}.")


def _limits(caller: Caller) -> str:
    """Return the caller's scope in words, with the groupes or the CRM user that it is limited to."""
    if caller.scope == "GROUP":
        groupes = f"with the groupes {', '.join(caller.groupes)}" if caller.groupes else "and it has no groupes"
        return f"its scope is GROUP, {groupes}"
    user = f"with the crm_user_id {caller.crm_user_id}" if caller.crm_user_id else "and it has no crm_user_id"
    return f"its scope is {caller.scope}, {user}"


async def _in_path(look: Look, text: str) -> str:
    if not is_fiche_id(text):  # not found, like a fiche that does not exist
        raise NotFound(f"There is no fiche {storable(text, 50)}.")
    await require_visible(look.connection, look.caller, [text])
    return text


FicheInPath = Annotated[str, Noun("fiche", _in_path)]
