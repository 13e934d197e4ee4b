"""Look-up of the flow of a run or a schedule: it must be loaded in this server and, if it has an area of permissions of
its own, the caller needs the permission of that area, too."""

from __future__ import annotations

from ecluse.access.envelope import Refused
from ecluse.access.keys import Caller
from ecluse.access.permissions import PERMISSIONS
from ecluse.access.surface import Look
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.engine import Flow, Run, load_run


def loaded(look: Look, name: str, what: str) -> Flow:
    """Return the flow of a stored record; raise Refused if this server has not loaded it. `what` names the record in
    the message."""
    if name not in look.kit.by_name:
        raise Refused(409, "FLOW_NOT_LOADED", f"{what} belongs to flow {name!r}, which this server has not loaded.")
    return look.kit.by_name[name]


def named(look: Look, name: str) -> Flow:
    """Return the flow that a caller names; raise InvalidInput if this server has not loaded it."""
    known = look.kit.by_name
    if name not in known:
        raise InvalidInput(f"There is no flow {name!r} (known: {', '.join(sorted(known)) or 'none'}).")
    return known[name]


def permit(caller: Caller, flow: str, verb: str) -> None:
    """Raise Refused if the flow has its own area of permissions and the caller lacks `{flow}.{verb}`."""
    if (wanted := f"{flow}.{verb}") in PERMISSIONS and not caller.may(wanted):
        raise Refused(403, "FORBIDDEN", f"This needs the permission {wanted}, which a {caller.role} does not have.")


def hidden(caller: Caller) -> list[str]:
    """Return the areas of permissions that the caller may not read: flows of these names are hidden from it."""
    reads = {one for one in PERMISSIONS if one.endswith(".read")}
    return sorted(one.removesuffix(".read") for one in reads if not caller.may(one))


async def run_of(look: Look, run_id: int, verb: str) -> tuple[Flow, Run]:
    """Return a run and its flow. Raise NotFound if the tenant has no such run, Refused if the caller lacks the
    permission for its flow or this server has not loaded the flow."""
    run = await load_run(look.connection, run_id)
    if run.tenant_id != look.tenant:
        raise NotFound(f"There is no run {run_id}.")
    permit(look.caller, run.flow, verb)
    return loaded(look, run.flow, f"Run {run_id}"), run
