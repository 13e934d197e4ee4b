"""What a pricing rule does to a catalogue: which variants it selects, the price of each, the reason for each that is
left out, and the plan of them all. And the retries of a change: how often, how long apart, the key of each attempt.
Pure; amounts are whole minor units of the project's currency."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from ecluse.access.wire import Body
from ecluse.base.errors import TransientError, VendorError
from ecluse.base.validation import form
from ecluse.engine import Backoff, RetryPolicy, backoff
from ecluse.vendors.shops import Variant, is_429_error

MOST = 10**11  # minor units; a higher price is an error of the rule
MOST_TIMES = 100  # a new price that is more than so many times the former one is an error of the rule
WHOLE = 10_000  # 100 % in basis points
MOST_PERCENT = 1_000 * 100  # basis points

# `attempts` counts the retries that were scheduled before, as the targets store it: 0 at the first execution.
MAX_RETRIES = 3
RETRY_429 = Backoff(base=16.0, multiplier=2.0, longest=64.0)
RETRY = RetryPolicy(executions=MAX_RETRIES + 1, base=2.0, multiplier=2.0, longest=64.0, jitter=0.2, throttled=RETRY_429)

REASONS = {
    "CURRENCY_MISMATCH": "its price is in another currency than the project's",
    "NO_COST": "the shop does not say what it costs, which a target margin needs",
    "NEGATIVE_PRICE": "its new price would be negative",
    "ABSURD_PRICE": f"its new price would be above {MOST} minor units, or more than {MOST_TIMES} times the former one",
    "FREE": "its new price would be 0, and the rule does not allow that",
    "NO_PRICE_FITS": "no price with the ending of the rule is between its floor and its cap",
    "REVERSED": "floor, cap or ending would move its price in the opposite direction of the change",
    "UNCHANGED": "its new price is the one it has",
}

Amount = Annotated[int, Field(ge=0, le=MOST, examples=[1990], description="In minor units of the currency.")]
PERCENT = form(r"^-?[0-9]{1,4}(\.[0-9]{1,2})?$", "a percentage with at most two decimals, such as -10 or 12.5")
Percent = Annotated[str, Field(pattern=PERCENT, examples=["-10", "12.5"])]
Ending = Annotated[str, Field(pattern=form(r"^[0-9]{1,4}$", "one to four digits, such as 99"), examples=["99"])]
Tag = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^'\"\\\x00-\x1f]+$", examples=["summer"])]
RecordId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$", examples=["3"])]
ProductId = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^\S+$", examples=["gid://shopify/Product/1"])]


class VariantSelection(Body, frozen=True):
    """Which variants a rule is about: those that fulfil every given criterion."""

    products: list[ProductId] = Field(default_factory=list, max_length=1_000, description="Of one of these products.")
    tags: list[Tag] = Field(default_factory=list, max_length=50, description="With one of these tags.")
    price_from: Amount | None = None
    price_to: Amount | None = None

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if not (self.products or self.tags) and self.price_from is None and self.price_to is None:
            raise ValueError("name products, tags or a price band; price_from 0 selects everything")
        if self.price_from is not None and self.price_to is not None and self.price_from > self.price_to:
            raise ValueError("price_from must not be above price_to")
        return self


class PriceChange(Body, frozen=True):
    """How a price changes: by a percentage, by an amount, or to a margin over what the variant costs."""

    kind: Literal["percent", "amount", "margin"]
    percent: Percent | None = Field(None, description="Of the kinds `percent` (of the price) and `margin`.")
    amount: Annotated[int, Field(ge=-MOST, le=MOST)] | None = Field(
        None, examples=[-500], description="Of the kind `amount`: minor units to add."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        needed = "amount" if self.kind == "amount" else "percent"
        if [one for one in ("percent", "amount") if getattr(self, one) is not None] != [needed]:
            raise ValueError(f"a change of kind {self.kind} has {'an' if needed == 'amount' else 'a'} {needed}")
        if self.kind == "percent" and not -WHOLE <= self.points <= MOST_PERCENT:
            raise ValueError("a change is from -100 to 1000 percent")
        if self.kind == "margin" and not 0 <= self.points < WHOLE:
            raise ValueError("a margin is from 0 to below 100 percent of the price")
        return self

    @property
    def points(self) -> int:
        """The percentage in basis points."""
        return int(Decimal(self.percent or 0) * 100)


class Terms(Body, frozen=True):
    """What a rule decides by."""

    selection: VariantSelection
    change: PriceChange
    ending: Ending | None = Field(
        None, description="The last digits of every new price in minor units, such as `99`; the nearest such price."
    )
    floor: Amount | None = Field(None, description="No new price is below it.")
    cap: Amount | None = Field(None, description="No new price is above it.")
    allow_free: bool = Field(False, description="Whether a new price may be 0, as with a change of -100 percent.")

    @model_validator(mode="after")
    def _is_sane(self) -> Self:
        if self.floor is not None and self.cap is not None and self.floor > self.cap:
            raise ValueError("floor must not be above cap")
        if self.change.kind == "percent" and self.change.points == -WHOLE and not self.allow_free:
            raise ValueError("a change of -100 percent makes everything free: set allow_free if that is meant")
        return self


class Planned(NamedTuple):
    """A variant with its new price."""

    variant: Variant
    before: int
    after: int


class Excluded(NamedTuple):
    """A selected variant that keeps its price; `reason` is one of `REASONS`."""

    variant: Variant
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The effect of a rule on a catalogue."""

    targets: Sequence[Planned]
    excluded: Sequence[Excluded]
    hash: str

    @property
    def totals(self) -> dict[str, object]:
        raised = sum(one.after > one.before for one in self.targets)
        return {
            "selected": len(self.targets) + len(self.excluded),
            "changed": len(self.targets),
            "raised": raised,
            "lowered": len(self.targets) - raised,
            "excluded": dict(sorted(Counter(one.reason for one in self.excluded).items())),
            "before": sum(one.before for one in self.targets),
            "after": sum(one.after for one in self.targets),
        }


def selects(selection: VariantSelection, variant: Variant) -> bool:
    """Return True if a rule with this selection is about the variant."""
    if selection.products and variant.product not in selection.products:
        return False
    if selection.tags and not any(tag in variant.tags for tag in selection.tags):
        return False
    low, high = selection.price_from, selection.price_to
    return (low is None or variant.price >= low) and (high is None or variant.price <= high)


def changed(change: PriceChange, variant: Variant) -> int | None:
    """Return the price by the change alone, before ending, floor and cap; None if its cost is unknown. A percentage is
    rounded half up, a margin is never missed by rounding."""
    if change.amount is not None:
        return variant.price + change.amount
    points = change.points
    if change.kind == "percent":
        return (2 * variant.price * (WHOLE + points) + WHOLE) // (2 * WHOLE)
    return None if variant.cost is None else -(-variant.cost * WHOLE // (WHOLE - points))


def fitted(price: int, ending: str | None, low: int, high: int) -> int | None:
    """Return the price nearest to `price` that has the ending and is from `low` to `high`, the higher one of two; None
    if there is none."""
    step, last = (1, 0) if ending is None else (10 ** len(ending), int(ending))
    below = price - (price - last) % step
    nearest = below if price - below < below + step - price else below + step
    nearest = max(nearest, low + (last - low) % step)
    nearest = min(nearest, high - (high - last) % step)
    return nearest if low <= nearest <= high else None


def decide(terms: Terms, currency: str, variant: Variant) -> Planned | Excluded:
    """Return the new price of a selected variant, or the reason why it keeps its price."""
    if variant.currency != currency:
        return Excluded(variant, "CURRENCY_MISMATCH")
    wanted = changed(terms.change, variant)
    if wanted is None:
        return Excluded(variant, "NO_COST")
    if wanted < 0 and terms.floor is None:
        return Excluded(variant, "NEGATIVE_PRICE")
    if wanted > MOST and terms.cap is None:
        return Excluded(variant, "ABSURD_PRICE")
    after = fitted(wanted, terms.ending, terms.floor or 0, MOST if terms.cap is None else terms.cap)
    before = variant.price
    if after is None:
        return Excluded(variant, "NO_PRICE_FITS")
    if after == before:
        return Excluded(variant, "UNCHANGED")
    if after == 0 and not terms.allow_free:
        return Excluded(variant, "FREE")
    if (wanted < before < after) or (wanted > before > after):
        return Excluded(variant, "REVERSED")
    if before and after > MOST_TIMES * before:
        return Excluded(variant, "ABSURD_PRICE")
    return Planned(variant, before, after)


def make_plan(terms: Terms, currency: str, catalogue: Iterable[Variant]) -> Plan:
    """Return the plan of a rule for a catalogue, by the variants' ids. A variant that is listed twice, because the
    catalogue changed while it was read, is planned once."""
    chosen = {one.id: one for one in catalogue if selects(terms.selection, one)}
    decided = [decide(terms, currency, chosen[one]) for one in sorted(chosen)]
    targets = [one for one in decided if isinstance(one, Planned)]
    return Plan(targets, [one for one in decided if isinstance(one, Excluded)], plan_hash(currency, targets))


def plan_hash(currency: str, targets: Iterable[Planned]) -> str:
    """Return the hash of what would be written: the same for the same prices of the same variants, in any order."""
    lines = sorted(f"{one.variant.id}\t{one.before}\t{one.after}" for one in targets)
    return hashlib.sha256("\n".join([currency, *lines]).encode()).hexdigest()


def calculate_delay(attempts: int, chance: random.Random) -> float:
    """Return the seconds before the next retry: 2, 4, 8, each ± 20 %, in whole milliseconds."""
    return backoff(RETRY, attempts + 1, chance)


def handle_429_error(error: VendorError, attempts: int) -> float:
    """Return the seconds before the next retry after a 429: those that the vendor asks for, else 16, 32, 64. Any other
    error is raised."""
    if not is_429_error(error):
        raise error
    asked = error.retry_after if isinstance(error, TransientError) else None
    return backoff(RETRY_429, attempts + 1, random.Random()) if asked is None else asked  # noqa: S311 - has no jitter


def generate_event_key(run: int, target: int, attempts: int, *, round: int = 0) -> str:  # noqa: A002
    """Return the key of the event of one attempt. Rounds after the first are named in it: a manual retry starts with 0
    attempts again, and its events must not be taken for those of the former round."""
    return f"{run}:{target}:apply:{attempts}" + (f":r{round}" if round else "")


def rollback_event_key(run: int, target: int, number: int) -> str:
    """Return the key of the event of the rollback with this number."""
    return f"{run}:{target}:rollback:{number}"
