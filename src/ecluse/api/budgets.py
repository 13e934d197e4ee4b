"""Routes of budgets and of the cost of paid calls. Amounts are decimals as text, in the currency of the configured
prices."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.listing import Filters, Listing, Where
from ecluse.access.surface import Act, Look, Noun, Surface
from ecluse.access.wire import Body, Deleted, IdFilter, Shape
from ecluse.api.shapes import Id
from ecluse.base.errors import InvalidInput, NotFound
from ecluse.db.query import Row, fetch_one
from ecluse.engine import Budget, delete_budget, set_budget
from ecluse.engine.effects.budgets import RUN_IS_OVER
from ecluse.engine.model.budget import amount

surface = Surface("budgets")
BudgetNumber = Annotated[int, Noun("budget")]
READ, WRITE = "budgets.read", "budgets.write"
Amount = Annotated[Decimal, Field(strict=False, ge=0, max_digits=20, decimal_places=9, examples=["25.00"])]
IdInBody = Annotated[str | None, Field(pattern=r"^[1-9][0-9]{0,17}$", examples=["7"])]
Money = Annotated[str, Field(examples=["12.5"])]


class NewBudget(Body):
    """The budget of a run or a schedule, if one is named; otherwise of the tenant."""

    amount: Amount
    period: Literal["day", "month"] | None = Field(
        None, description="Day or month in UTC. Not for the budget of a run, which covers all its calls."
    )
    schedule_id: IdInBody = None
    run_id: IdInBody = None


class BudgetRow(Shape):
    id: Id
    scope: Literal["tenant", "schedule", "run"]
    schedule_id: Id | None
    run_id: Id | None
    period: Literal["day", "month", "all"]
    amount: Money
    spent: Money = Field(
        description="Spent in this period. Calls that may have been made count with the amount reserved for them."
    )
    unknown: Money = Field(description="Of `spent`: reserved for calls that may have been made, whose cost is unknown.")
    reserved: Money = Field(description="Reserved for calls in flight.")
    available: Money
    used_up: bool = Field(
        description="A call did not fit into the last tenth of it: calls wait, and starts are refused."
    )
    run_ended: bool = Field(
        description="The budget of a run that has ended, with the runs that it started: it holds nothing any more."
    )
    renews_at: datetime | None = Field(description="When the next period begins; null: the budget of a run.")
    created_at: datetime
    updated_at: datetime


class ChangedBudget(BudgetRow):
    warnings: list[str] = Field(description="What the budget does not cover: models without a price.")


class BudgetFilters(Filters):
    scope: Literal["tenant", "schedule", "run"] | None = None
    schedule_id: IdFilter = None
    run_id: IdFilter = None


class SpendRow(Shape):
    id: str
    day: date
    schedule_id: Id | None = Field(description="null: calls of runs without a schedule.")
    vendor: str = Field(examples=["llm"])
    model: str = Field(examples=["gpt-4.1"])
    calls: int
    cost: Money
    reserved: Money = Field(description="Reserved for calls in flight.")
    unknown: Money = Field(description="Of calls that may have been made: the amount reserved for them.")
    unpriced: int = Field(description="Calls of a model without a price: they count as 0.")


class SpendFilters(Filters):
    schedule_id: IdFilter = None
    since: Annotated[date | None, Where("t.day >= %(since)s")] = None
    until: Annotated[date | None, Where("t.day < %(until)s")] = None


def _readable(row: Row) -> Row:
    return {name: amount(value) if isinstance(value, Decimal) else value for name, value in row.items()}


def _budget_shown(row: Row) -> Row:
    return {**_readable(row), "used_up": row["used_up"] and not row["run_ended"]}


SOURCE = f"""(
SELECT b.*, b.run_id IS NOT NULL AND {RUN_IS_OVER.format(root="b.run_id")} AS run_ended FROM budget_list b)"""  # noqa: S608 - our own names
BUDGETS = Listing("budgets", BudgetRow, SOURCE, READ, filters=BudgetFilters, order=("id",), shown=_budget_shown)
SPEND = Listing("spend", SpendRow, "spend_list", READ, filters=SpendFilters, order=("-day", "id"), shown=_readable)
ONE = f"SELECT {', '.join(BudgetRow.model_fields)} FROM {SOURCE} b WHERE tenant_id = %s AND id = %s"  # noqa: S608

surface.listing(
    "/api/budgets",
    BUDGETS,
    list_budgets="List the budgets, with the amount spent of each in the current period.",
    command=Command(
        "budgets list",
        columns=(
            "id",
            "scope",
            "schedule_id",
            "run_id",
            "period",
            "amount",
            "spent",
            "unknown",
            "reserved",
            "available",
            "run_ended",
        ),
        empty="no budgets: paid calls are not limited (`ecluse budgets set AMOUNT --period day`)",
    ),
)
surface.listing(
    "/api/spend",
    SPEND,
    list_spend="List the cost of paid calls by day (UTC), schedule, vendor and model, the latest day first.",
    command=Command(
        "budgets spend",
        columns=("day", "schedule_id", "vendor", "model", "calls", "cost", "reserved", "unknown", "unpriced"),
        empty="no paid calls yet",
    ),
)


@surface.read("/api/budgets/{budget_id}", needs=READ, answer=BudgetRow, command=Command("budgets show"))
async def show_budget(look: Look, budget_id: BudgetNumber) -> Row:
    """Show one budget, with the amount spent of it in the current period."""
    row: Row | None = await fetch_one(look.connection, dict, ONE, (look.tenant, budget_id))
    if row is None:
        raise NotFound(f"There is no budget {budget_id}.")
    return _budget_shown(row)


@surface.operation(
    "POST",
    "/api/budgets",
    needs=WRITE,
    answer=ChangedBudget,
    action="budget.set",
    subject="budget:{id}",
    refuses=("BUDGET_BELOW_SPENT", "ALREADY_ENDED"),
    command=Command("budgets set", arguments=("amount",), example="ecluse budgets set 25 --period day --schedule-id 3"),
)
async def put_budget(act: Act, body: NewBudget) -> Row:
    """Set the budget of the tenant, of a schedule or of a run: create it, or change its amount. Calls that wait for a
    budget are tried again at once."""
    number = await set_budget(act.connection, _budget(act.tenant, body))
    return {**await show_budget(act, number), "warnings": list(act.state.unpriced)}


@surface.operation(
    "DELETE",
    "/api/budgets/{budget_id}",
    needs=WRITE,
    answer=Deleted,
    action="budget.delete",
    subject="budget:{budget_id}",
    command=Command("budgets delete", preview="show_budget"),
)
async def remove_budget(act: Act, budget_id: BudgetNumber) -> Row:
    """Delete a budget: it no longer limits paid calls, and those that wait for it continue."""
    await delete_budget(act.connection, act.tenant, budget_id)
    return {"id": str(budget_id), "deleted": True}


def _budget(tenant: str, body: NewBudget) -> Budget:
    if body.run_id is not None:
        if body.schedule_id is not None or body.period is not None:
            raise InvalidInput("run_id: the budget of a run has neither a schedule nor a period")
        return Budget(tenant, "run", int(body.run_id), "all", body.amount)
    if body.period is None:
        raise InvalidInput("period: give day or month, for the budget of a tenant or a schedule")
    if body.schedule_id is not None:
        return Budget(tenant, "schedule", int(body.schedule_id), body.period, body.amount)
    return Budget(tenant, "tenant", 0, body.period, body.amount)
