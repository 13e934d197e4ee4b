"""Options and arguments that several commands share, so that each has the same name, limits and help everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

RunId = Annotated[int, typer.Argument(help="Id of the run.")]
ScheduleId = Annotated[int, typer.Argument(help="Id of the schedule.")]
FicheId = Annotated[str, typer.Argument(help="Id of the fiche in the CRM.")]
Tenant = Annotated[str, typer.Option(help="Id of the tenant.")]
TenantFilter = Annotated[
    str | None, typer.Option("--tenant", help="List only entries of this tenant. Default: all tenants.")
]
Limit = Annotated[int, typer.Option(min=1, max=200, help="Number of rows to list at most.")]
Offset = Annotated[int, typer.Option(min=0, help="Number of rows to skip.")]
Tail = Annotated[int | None, typer.Option(min=1, max=10_000, help="Show only this many lines, the last ones.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
JsonLine = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation (for scripts).")]
FlowName = Annotated[str, typer.Argument(help="Name of a loaded flow, or package:NAME.")]
Flows = Annotated[list[str] | None, typer.Option("--flow", help="Load this flow too, as package:NAME. Repeatable.")]
FlowOfRun = Annotated[
    str | None, typer.Option("--flow", help="Load the flow as package:NAME if ECLUSE_FLOWS does not.")
]
