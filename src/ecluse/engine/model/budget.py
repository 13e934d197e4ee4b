"""The cost of paid calls, and the decision whether the budgets that a call counts against have room for it. Pure
decisions; amounts are decimals, in the currency of the configured prices. Days and months are in UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal, NamedTuple, get_args

Scope = Literal["tenant", "schedule", "run"]  # from the widest
Period = Literal["day", "month", "all"]
SCOPES: Sequence[Scope] = get_args(Scope)

AGAIN = timedelta(seconds=10)  # longest wait until the next try, if calls in flight hold the rest of a budget
UNTIL_RAISED = timedelta(days=366)  # the budget of a run is not renewed
# If a call does not fit into the rest of a budget, and the rest is at most this part of the budget, no other call is
# expected to fit.
REST = Decimal("0.1")


class Charge(NamedTuple):
    """The most that a paid call may cost, with its vendor and model. `most` None: no price is configured."""

    vendor: str
    model: str
    most: Decimal | None


class Settlement(NamedTuple):
    """The end of a reservation. `settled`: the call cost `cost` (None: the reserved amount); `unknown`: the call may
    have been paid for; `released`: it was not made, or not charged."""

    how: Literal["settled", "unknown", "released"]
    cost: Decimal | None = None


class TotalKey(NamedTuple):
    """The key of a sum of costs: of a tenant or a schedule in a day or a month, or of a run. `starts_on` is the first
    day of the period (of a run: the day of its creation); `subject_id` is the schedule or the run, 0 for the tenant."""

    tenant_id: str
    scope: Scope
    subject_id: int
    period: Period
    starts_on: date

    @property
    def renewed_at(self) -> datetime | None:
        """The instant at which the next period begins; None for a run."""
        if self.period == "all":
            return None
        days = 1 if self.period == "day" else 31
        following = self.starts_on + timedelta(days=days)
        return datetime.combine(following if days == 1 else following.replace(day=1), time(), UTC)

    def __str__(self) -> str:
        return budget_name(self.tenant_id, self.scope, self.subject_id, self.period)


Unknown = Mapping[TotalKey, Decimal]  # the cost of calls that may have been made, as far as it is known
EMPTY: Unknown = {}


@dataclass
class Total:
    """A sum of costs: spent by calls that were made, and reserved for calls in flight. `budget` None: there is no
    limit."""

    spent: Decimal
    reserved: Decimal
    budget: Decimal | None


class Refusal(NamedTuple):
    """A budget without room for a call that may cost `most`. `until`: when the call is tried again; `others`: no other
    call is expected to fit either; `used_up`: the amount spent (without reservations) leaves no room for any other call
    that is expected, until the budget is renewed or raised."""

    key: TotalKey
    most: Decimal
    spent: Decimal
    reserved: Decimal
    budget: Decimal
    until: datetime
    others: bool
    used_up: bool

    @property
    def in_flight(self) -> bool:
        """Whether only calls in flight hold the rest of the budget."""
        return self.spent + self.most <= self.budget


class Exceeded(NamedTuple):
    """The budgets without room for a call, first the one that it waits for longest. `unknown`: the part of what is
    spent that is the cost of calls which may have been made, by the key of the total."""

    refused: Sequence[Refusal]
    unknown: Unknown = EMPTY

    @property
    def why(self) -> str:
        """The reason for the call, which names all these budgets."""
        return reason(self.refused, self.unknown)

    @property
    def key(self) -> TotalKey:
        return self.refused[0].key

    @property
    def until(self) -> datetime:
        return self.refused[0].until

    @property
    def others(self) -> bool:
        """Whether other calls that count against the first budget are postponed, too."""
        return self.refused[0].others

    @property
    def why_others(self) -> str:
        """The reason for other calls that count against the first budget: it names the budgets that all of them have in
        common."""
        common = SCOPES[: SCOPES.index(self.key.scope) + 1]
        refused = [one for one in self.refused if one.key.scope in common]
        return reason(refused, self.unknown, "a call of the same stage")


def totals_of(tenant: str, schedule: int | None, run: int, run_day: date, today: date) -> list[TotalKey]:
    """Return the keys of the sums that a call counts in: the sums of its tenant and of its schedule for the day and the
    month, and the sum of its run. `run_day`: the day on which the run was created."""
    month = today.replace(day=1)
    keys = [TotalKey(tenant, "tenant", 0, "day", today), TotalKey(tenant, "tenant", 0, "month", month)]
    if schedule is not None:
        keys += [TotalKey(tenant, "schedule", schedule, "day", today)]
        keys += [TotalKey(tenant, "schedule", schedule, "month", month)]
    return [*keys, TotalKey(tenant, "run", run, "all", run_day)]


def admit(most: Decimal, keys: Sequence[TotalKey], totals: Mapping[TotalKey, Total], now: datetime) -> Exceeded | None:
    """Add `most` to `reserved` of all these totals and return None, if every budget has room for it. Otherwise change
    none, and return the budgets that have none."""
    refused = [over for key in keys if (over := _refusal(most, key, totals[key], now)) is not None]
    if refused:
        refused.sort(key=lambda one: one.until, reverse=True)
        return Exceeded(refused)
    for key in keys:
        totals[key].reserved += most
    return None


def _refusal(most: Decimal, key: TotalKey, total: Total, now: datetime) -> Refusal | None:
    if total.budget is None or total.spent + total.reserved + most <= total.budget:
        return None
    figures = (key, most, total.spent, total.reserved, total.budget)
    if total.spent + most <= total.budget:
        others = total.budget - total.spent - total.reserved <= REST * total.budget
        return Refusal(*figures, now + AGAIN, others, used_up=False)
    used_up = total.budget - total.spent <= REST * total.budget
    return Refusal(*figures, key.renewed_at or now + UNTIL_RAISED, used_up, used_up)


def reason(refused: Sequence[Refusal], unknown: Unknown = EMPTY, refused_call: str = "this call") -> str:
    """Return why a call waits: each budget without room for the call that was refused, and when it continues.
    `unknown`: the part of what is spent that is the cost of calls which may have been made, by the key of the total."""
    first, parts = refused[0], []
    for one in refused:
        left = one.budget - one.spent
        is_so = "is used up" if left <= 0 else f"has {amount(left)} left, too little for {refused_call}"
        said = f"calls in flight held the rest of the {one.key}" if one.in_flight else f"the {one.key} {is_so}"
        spent = spent_of(one.spent, one.budget, unknown.get(one.key, Decimal(0)))
        call = f"; {refused_call} may cost {amount(one.most)}" if one is first else ""
        parts.append(f"{said} ({spent}, {amount(one.reserved)} reserved{call})")
    raised = "when it is raised" if len(refused) == 1 else "when they are raised"
    renewed = first.key.renewed_at
    if first.in_flight:
        when = "when they have cost less"
    elif renewed is None:
        when = raised
    else:
        when = f"at {renewed:%Y-%m-%d %H:%M:%S}Z, or {raised}"
    return f"{'; '.join(parts)}; it continues {when}"


def spent_of(spent: Decimal, limit: Decimal, unknown: Decimal) -> str:
    """Return how much of a budget is spent as messages say it, with the part whose cost is unknown."""
    of_it = f", {amount(unknown)} of it by calls whose cost is unknown" if unknown else ""
    return f"{amount(spent)} of {amount(limit)} spent{of_it}"


def budget_name(tenant: str, scope: Scope, subject_id: int, period: Period) -> str:
    """Return the name of a budget as messages use it, such as "day's budget of tenant acme"."""
    if scope == "run":
        return f"budget of run {subject_id}"
    return f"{period}'s budget of {f'tenant {tenant}' if scope == 'tenant' else f'schedule {subject_id}'}"


def amount(value: Decimal) -> str:
    """Return an amount of money as text for people: at most six decimals, without an exponent or trailing zeros."""
    return f"{round(value, 6).normalize() if value else Decimal(0):f}"
