"""What the faults are tried on. A subject says how a flow is run and what must have happened at its vendor in the end;
every fault case takes any subject, so that a new flow comes with one more entry of SUBJECTS and no new case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Entry = Mapping[str, Any]  # of the sandbox's ledger


def _nothing(_: str) -> frozenset[str]:
    return frozenset()


def _all_successful(targets: int) -> dict[str, object]:
    return {"status": "completed", "selected": targets, "successful": targets, "failed": 0, "ignored": 0}


@dataclass(frozen=True)
class Subject:
    name: str
    flow: str  # as --flow takes it
    given: Callable[[Sequence[str]], dict[str, Any]]  # a run's input, for these targets
    target: Callable[[int], str]  # the name of the n-th
    environment: Callable[[str], dict[str, str]] = lambda _: {}  # from the sandbox's address
    targets: int = 40
    vendor: str = ""  # its name in the ledger
    wanted: Callable[[str], frozenset[str]] = _nothing  # names of the effects that one target is to have at the vendor
    effect: Callable[[Entry], str] = lambda entry: str(entry["ref"])  # which of those names an effect's entry bears
    expected: Callable[[int], dict[str, object]] = _all_successful  # the run's row after a run without any fault


def _article_effect(entry: Entry) -> str:
    if entry["method"] == "POST":
        return f"twin of {entry['value']['name'].removesuffix(' twin')}"
    return f"price of {entry['ref']}"


def _price_list(url: str) -> dict[str, str]:
    return {"PRICE_LIST_URL": f"{url}/price-list"}


def _articles(skus: Sequence[str]) -> dict[str, Any]:
    return {"skus": list(skus), "raise_percent": "10", "twins": True}


HELLO = Subject(
    name="hello",
    flow="hello_flow:FLOW",
    given=_articles,
    target=lambda n: f"SKU-{n:05d}",
    environment=_price_list,
    vendor="price_list",
    wanted=lambda sku: frozenset({f"price of {sku}", f"twin of {sku}"}),
    effect=_article_effect,
)

SUBJECTS = (HELLO,)

# The same work without the effect protocol: what the checks must find.
NAIVE = Subject(
    name="naive",
    flow="tests.faults.naive_flow:FLOW",
    given=lambda skus: {"skus": list(skus)},
    target=HELLO.target,
    environment=_price_list,
    vendor="price_list",
    wanted=HELLO.wanted,
    effect=_article_effect,
)

# One flow before and after a change of its code. It calls nobody.
OLD = Subject(
    name="changing",
    flow="tests.faults.old_flow:FLOW",
    given=lambda keys: {"keys": list(keys), "flaky": list(keys[::5])},
    target=lambda n: f"t{n:05d}",
)
STEADY_OLD = replace(OLD, given=lambda keys: {"keys": list(keys)})
NEW_FLOW = "tests.faults.new_flow:FLOW"

POISONED = "t00007"
POISON = Subject(
    name="poison",
    flow="tests.faults.poison_flow:FLOW",
    given=lambda keys: {"keys": list(keys), "poisoned": [POISONED]},
    target=lambda n: f"t{n:05d}",
    expected=lambda n: {"status": "partial", "selected": n, "successful": n - 1, "failed": 1, "ignored": 0},
)
