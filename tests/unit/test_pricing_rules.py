"""Which variants a rule selects, the price of each, the reason for each that is left out, and the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ecluse.flows.pricing.rules import (
    MOST,
    REASONS,
    Excluded,
    Planned,
    PriceChange,
    Terms,
    VariantSelection,
    decide,
    fitted,
    make_plan,
    selects,
)
from ecluse.vendors.shops import Variant

ONE = Variant("v1", "p1", "sku", "Shirt", 2_000, "EUR", ("summer", "cotton"), 900)


def terms(change: dict[str, Any] | None = None, **more: Any) -> Terms:
    given = {"selection": {"price_from": 0}, "change": change or {"kind": "percent", "percent": "-10"}}
    return Terms.model_validate({**given, **more})


def percent(text: str) -> dict[str, Any]:
    return {"kind": "percent", "percent": text}


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        ({"products": ["p1", "p9"]}, True),
        ({"products": ["p2"]}, False),
        ({"tags": ["winter", "cotton"]}, True),
        ({"tags": ["winter"]}, False),
        ({"price_from": 2_000, "price_to": 2_000}, True),
        ({"price_from": 2_001}, False),
        ({"price_to": 1_999}, False),
        ({"products": ["p1"], "tags": ["winter"]}, False),
        ({"products": ["p1"], "tags": ["summer"], "price_to": 5_000}, True),
    ],
)
def test_a_selection_is_by_product_tag_and_price_band(selection, selected):
    assert selects(VariantSelection.model_validate(selection), ONE) is selected


@pytest.mark.parametrize(
    ("change", "more", "after"),
    [
        (percent("-10"), {}, 1_800),
        (percent("12.5"), {}, 2_250),
        (percent("-0.03"), {}, 1_999),  # 1999.4
        (percent("-33.33"), {}, 1_333),  # 1333.4
        (percent("0.02"), {}, "UNCHANGED"),  # 2000.4
        ({"kind": "amount", "amount": -501}, {}, 1_499),
        ({"kind": "margin", "percent": "50"}, {}, 1_800),
        ({"kind": "margin", "percent": "33.33"}, {}, 1_350),  # 1349.93, rounded up: the margin is reached
        (percent("-10"), {"ending": "99"}, 1_799),
        (percent("-10.2"), {"ending": "9"}, 1_799),
        (percent("-12"), {"ending": "50"}, 1_750),
        (percent("0"), {"ending": "99"}, 1_999),
        (percent("-10"), {"floor": 1_950}, 1_950),
        (percent("10"), {"cap": 2_100}, 2_100),
        (percent("10"), {"cap": 2_100, "ending": "99"}, 2_099),
        (percent("-10"), {"floor": 1_850, "ending": "99"}, 1_899),
        (percent("-100"), {"allow_free": True}, 0),
        (percent("-100"), {"allow_free": True, "floor": 100}, 100),
        ({"kind": "amount", "amount": -2_001}, {"floor": 100}, 100),
        ({"kind": "amount", "amount": -2_001}, {}, "NEGATIVE_PRICE"),
        ({"kind": "amount", "amount": -2_000}, {}, "FREE"),
        ({"kind": "amount", "amount": MOST}, {}, "ABSURD_PRICE"),
        ({"kind": "amount", "amount": 250_000}, {}, "ABSURD_PRICE"),
        (percent("0"), {}, "UNCHANGED"),
        (percent("-10"), {"floor": 2_100}, "REVERSED"),
        (percent("10"), {"cap": 1_900}, "REVERSED"),
        (percent("-1"), {"ending": "0999"}, 999),
        (percent("-10"), {"floor": 1_800, "cap": 1_850, "ending": "99"}, "NO_PRICE_FITS"),
    ],
)
def test_the_price_of_a_variant_or_the_reason_why_it_keeps_its_own(change, more, after):
    found = decide(terms(change, **more), "EUR", ONE)
    assert (found.after if isinstance(found, Planned) else found.reason) == after


def test_another_currency_and_an_unknown_cost_are_reasons():
    assert decide(terms(), "USD", ONE) == Excluded(ONE, "CURRENCY_MISMATCH")
    unknown = replace(ONE, cost=None)
    assert decide(terms({"kind": "margin", "percent": "40"}), "EUR", unknown) == Excluded(unknown, "NO_COST")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"change": percent("-100")}, "allow_free"),
        ({"change": percent("-100.01"), "allow_free": True}, "-100 to 1000"),
        ({"change": percent("1000.01")}, "-100 to 1000"),
        ({"change": {"kind": "margin", "percent": "100"}}, "below 100"),
        ({"change": {"kind": "margin", "percent": "-1"}}, "below 100"),
        ({"change": {"kind": "amount", "percent": "1"}}, "an amount"),
        ({"change": {"kind": "percent", "amount": 1}}, "a percent"),
        ({"change": {"kind": "percent", "percent": "1", "amount": 1}}, "a percent"),
        ({"change": percent("1e3")}, "pattern"),
        ({"floor": -1}, "greater than or equal"),
        ({"floor": 2, "cap": 1}, "floor"),
        ({"cap": 1.5}, "integer"),
        ({"ending": "9.9"}, "pattern"),
        ({"selection": {}}, "name products"),
        ({"selection": {"price_from": 2, "price_to": 1}}, "price_from"),
        ({"selection": {"tags": ["x' OR tag:y"]}}, "pattern"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(given, says):
    with pytest.raises(ValidationError, match=says):
        terms(**{"change": percent("-10"), **given})


amounts = st.integers(0, 10**7)
variants = st.builds(
    Variant,
    id=st.text("abc", min_size=1, max_size=3),
    product=st.sampled_from(["p1", "p2"]),
    sku=st.just(""),
    title=st.just(""),
    price=amounts,
    currency=st.sampled_from(["EUR", "EUR", "USD"]),
    tags=st.just(()),
    cost=st.none() | amounts,
)
changes = st.one_of(
    st.integers(-10_000, 100_000).map(lambda n: percent(f"{'-' if n < 0 else ''}{abs(n) // 100}.{abs(n) % 100:02d}")),
    st.integers(-(10**7), 10**7).map(lambda n: {"kind": "amount", "amount": n}),
    st.integers(0, 9_999).map(lambda n: {"kind": "margin", "percent": f"{n // 100}.{n % 100:02d}"}),
)
bounds = st.none() | amounts


@st.composite
def any_terms(draw: st.DrawFn) -> Terms:
    floor, cap = draw(bounds), draw(bounds)
    if floor is not None and cap is not None:
        floor, cap = sorted((floor, cap))
    free, change = draw(st.booleans()), draw(changes)
    if change.get("percent") == "-100.00" and change["kind"] == "percent":
        free = True
    ending = draw(st.none() | st.text("0123456789", min_size=1, max_size=3))
    return terms(change, floor=floor, cap=cap, allow_free=free, ending=ending)


@given(any_terms(), st.lists(variants, max_size=20))
def test_every_planned_price_keeps_every_promise_of_its_rule(rule, catalogue):
    plan = make_plan(rule, "EUR", catalogue)
    for one in plan.targets:
        assert one.variant.currency == "EUR"
        assert one.after != one.before == one.variant.price
        assert (rule.floor or 0) <= one.after <= (MOST if rule.cap is None else rule.cap)
        assert one.after or rule.allow_free
        assert rule.ending is None or f"{one.after:04d}".endswith(rule.ending)
    assert all(one.reason in REASONS for one in plan.excluded)
    ids = [one.variant.id for one in (*plan.targets, *plan.excluded)]
    assert sorted(ids) == sorted({one.id for one in catalogue})
    totals = plan.totals
    assert totals["selected"] == len(ids) == totals["changed"] + sum(totals["excluded"].values())
    assert totals["changed"] == totals["raised"] + totals["lowered"]
    assert totals["after"] - totals["before"] == sum(one.after - one.before for one in plan.targets)


@given(any_terms(), st.lists(variants, max_size=10, unique_by=lambda one: one.id), st.randoms())
def test_the_plan_and_its_hash_depend_on_the_prices_and_not_on_the_order(rule, catalogue, chance):
    plan = make_plan(rule, "EUR", catalogue)
    shuffled = list(catalogue)
    chance.shuffle(shuffled)
    assert make_plan(rule, "EUR", shuffled) == plan
    if plan.targets:
        moved = replace(plan.targets[0].variant, price=plan.targets[0].before + 1)
        drifted = make_plan(rule, "EUR", [moved if one.id == moved.id else one for one in catalogue])
        assert drifted.hash != plan.hash


@given(st.integers(-100, 10**6), st.none() | st.text("0123456789", min_size=1, max_size=3), amounts, amounts)
def test_no_price_with_the_ending_within_the_bounds_is_nearer(price, ending, one, other):
    low, high = sorted((one, other))
    found = fitted(price, ending, low, high)
    step, last = (1, 0) if ending is None else (10 ** len(ending), int(ending))
    first = low + (last - low) % step
    if first > high:
        assert found is None
        return
    assert found is not None
    assert low <= found <= high
    assert (found - last) % step == 0
    for neighbour in (found - step, found + step):
        assert not low <= neighbour <= high or abs(neighbour - price) >= abs(found - price)


def test_the_plan_of_ten_thousand_variants_is_made_within_a_second():
    catalogue = [replace(ONE, id=f"v{n}", price=500 + n) for n in range(10_000)]
    began = time.process_time()
    plan = make_plan(terms(ending="99", floor=100), "EUR", catalogue)
    assert time.process_time() - began < 1
    assert len(plan.targets) + len(plan.excluded) == 10_000


def test_a_percentage_is_read_in_basis_points():
    assert [PriceChange(kind="percent", percent=one).points for one in ("-10", "0.5", "-0.05", "12.34")] == [
        -1_000,
        50,
        -5,
        1_234,
    ]
