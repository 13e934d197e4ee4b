"""Pages of projects (connected shops) and of pricing rules, and helpers that other pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from ecluse.access.door import caller_of, needs
from ecluse.access.listing import read_page
from ecluse.access.wire import reads_of
from ecluse.base.money import decimal_text
from ecluse.base.text import count_of
from ecluse.db.connect import Connection
from ecluse.db.query import Row
from ecluse.flows.connections.project_surface import PROJECTS, READ
from ecluse.flows.pricing.surface import RULES
from ecluse.web import render
from ecluse.web.actions import Button, buttons
from ecluse.web.authentication import Page

MOST = 200  # projects or rules on a page

routes = APIRouter(route_class=Page, include_in_schema=False)
HOME, OF_PROJECTS, OF_RULES = "/ui/pricing", "/ui/pricing/projects", "/ui/pricing/rules"


class Column(NamedTuple):
    """A column of a table: the name of its value in the rows, and its heading; `figure`: aligned to the right."""

    name: str
    label: str
    figure: bool = False


@routes.get(OF_PROJECTS, openapi_extra=needs(READ))
async def show_projects(request: Request) -> Response:
    columns = (
        Column("name", "Project"),
        Column("connector", "Connector"),
        Column("base_url", "Shop"),
        Column("currency", "Currency"),
        Column("token_ends", "Token ends with"),
        Column("updated_at", "Changed"),
    )
    rows = (await reads_of(request)(lambda c: read_page(c, caller_of(request), PROJECTS, {}, limit=MOST)))["projects"]
    for row in rows:
        named = {"project_id": row["id"]}
        row["href"] = HOME + render.query({}, project=row["id"])
        row["buttons"] = buttons(request, ("create_rule", {}), back=OF_RULES, project_id=row["id"])
        row["buttons"] += buttons(request, ("change_project", named), ("delete_project", named), back=OF_PROJECTS)
    new = buttons(request, ("create_project", {}), back=OF_PROJECTS)
    return _page(request, "Projects", columns, rows, new, "No projects yet: connect a shop.")


@routes.get(OF_RULES, openapi_extra=needs(READ))
async def show_rules(request: Request) -> Response:
    columns = (
        Column("name", "Rule"),
        Column("project", "Project"),
        Column("selects", "Selects"),
        Column("changes", "Changes"),
        Column("bounds", "New prices"),
        Column("version", "Version", figure=True),
        Column("updated_at", "Changed"),
    )
    caller = caller_of(request)

    async def ask(connection: Connection) -> tuple[dict[str, Row], list[Row]]:
        projects = await read_page(connection, caller, PROJECTS, {}, limit=MOST)
        rules = await read_page(connection, caller, RULES, {}, limit=MOST)
        return {one["id"]: one for one in projects["projects"]}, rules["rules"]

    projects, rows = await reads_of(request)(ask)
    for row in rows:
        named, project = {"rule_id": row["id"]}, projects[row["project_id"]]
        row |= {"project": project["name"], **in_words(row, project["currency"])}
        row["href"] = HOME + render.query({}, rule=row["id"])
        row["buttons"] = buttons(request, ("preview_rule", {}), back=OF_RULES, rule_id=row["id"])
        row["buttons"] += buttons(request, ("change_rule", named), ("delete_rule", named), back=OF_RULES)
    new = buttons(request, ("create_rule", {}), back=OF_RULES)
    return _page(request, "Rules", columns, rows, new, "No rules yet: create one for a project.")


def _page(
    request: Request, title: str, columns: Sequence[Column], rows: Sequence[Row], new: Sequence[Button], empty: str
) -> Response:
    return render.page(request, "pricing_list.html", title=title, columns=columns, rows=rows, new=new, empty=empty)


def money(amount: int | None, currency: str) -> str:
    """Format an amount of minor units with its currency; a dash for None."""
    if amount is None:
        return render.NONE
    sign = "\N{MINUS SIGN}" if amount < 0 else ""
    return f"{sign}{decimal_text(abs(amount), currency)} {currency}"


def in_words(rule: Row, currency: str) -> dict[str, str]:
    """Describe in words what a rule selects, how it changes a price, and the bounds of the new one."""
    chosen, change = rule["selection"], rule["change"]
    parts = [count_of(chosen["products_given"], "product")] if chosen["products_given"] else []
    parts += [f"tags {', '.join(chosen['tags'])}"] if chosen["tags"] else []
    parts += _band("prices", chosen["price_from"], chosen["price_to"], currency)
    match change["kind"]:
        case "amount":
            changes = f"by {money(change['amount'], currency)}"
        case "margin":
            changes = f"to a margin of {change['percent']} %"
        case _:
            changes = f"by {change['percent']} %"
    bounds = _band("", rule["floor"], rule["cap"], currency) + ([f"ending {rule['ending']}"] if rule["ending"] else [])
    return {"selects": ", ".join(parts), "changes": changes, "bounds": ", ".join(bounds) or "any"}


def _band(what: str, low: int | None, high: int | None, currency: str) -> list[str]:
    ends = [f"{word} {money(end, currency)}" for word, end in (("from", low), ("to", high)) if end is not None]
    return [" ".join([what, *ends]).strip()] if ends else []
