"""What the faults are tried on. A subject says how a flow is run and what must have happened at its vendor in the end;
every fault case takes any subject, so that a new flow comes with one more entry of SUBJECTS and no new case."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ecluse.base.crash import POINTS, POINTS_OF_AUTOMATION, after_step
from ecluse.db.connect import Connection
from ecluse.engine import Run, Start, fire_by_hand, start_run
from ecluse.flows.audits import configs
from ecluse.flows.automation import schedules
from ecluse.flows.automation.plan import Plan
from ecluse.vendors.guarded import GuardedHttp
from tests.faults import companies, prices

Entry = Mapping[str, Any]  # of the sandbox's ledger


def _nothing(_: str) -> frozenset[str]:
    return frozenset()


def _all_successful(targets: int) -> dict[str, object]:
    return {"status": "completed", "selected": targets, "successful": targets, "failed": 0, "ignored": 0}


async def _as_the_command_does(connection: Connection, start: Start, _: str) -> Run:
    return (await start_run(connection, start)).run


@dataclass(frozen=True)
class Subject:
    name: str
    flow: str  # as --flow takes it; one in the box goes by its name
    given: Callable[[Sequence[str]], dict[str, Any]]  # a run's input, for these targets
    target: Callable[[int], str]  # the name of the n-th
    environment: Callable[[str], dict[str, str]] = lambda _: {}  # from the sandbox's address
    start: Callable[[Connection, Start, str], Awaitable[Run]] = _as_the_command_does  # with the sandbox's address
    targets: int = 40
    points: Sequence[str] = POINTS  # at which a replica can be killed
    vendor: str | None = None  # its name in the ledger; "": all of them
    # A payment may be made twice, if that it may have been is on record; a call that only reads, at any time.
    kind: Literal["effect", "paid", "call"] = "effect"
    apart: bool = False  # each target is a run of its own
    shared_calls: bool = False  # a call over several records has the key of one of them
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


RECORDINGS = 8  # that a fiche of the sandbox may have, by its number


async def _trigger(connection: Connection, start: Start, _: str) -> Run:
    """A schedule over these fiches, one audit of each, and a run of it."""
    if not await (await connection.execute("SELECT 1 FROM audit_configs")).fetchone():
        steps = [{"name": "Consent", "criteria": "Is the customer told that the call is recorded?"}]
        await configs.create(connection, start.tenant_id, {"name": "One", "steps": steps, "run_automatically": True})
    selection = {"mode": "manual", "fiche_ids": start.input["fiche_ids"]} if start.input else {}
    plan = {"name": start.event_key, "schedule_type": "MANUAL", "fiche_selection": selection}
    schedule = await schedules.create(
        connection, start.flow, start.tenant_id, Plan.model_validate(plan), secrets=None, guard=GuardedHttp(())
    )

    def named(given: Start) -> Start:
        return replace(given, event_key=start.event_key)

    return (await fire_by_hand(connection, start.tenant_id, schedule["id"], start.flow, input={}, start=named)).run


def _calls_and_audits(fiche: str) -> frozenset[str]:
    calls = {f"transcript of {fiche}-{n}" for n in range(1, int(fiche) % RECORDINGS + 2)}
    return frozenset({*calls, f"audit of {fiche}"})


def _bought(entry: Entry) -> str:
    if entry["vendor"] == "elevenlabs":
        return f"transcript of {entry['ref']}"
    return f"audit of {entry['ref'].split('-')[3]}"  # automation-RUN-audit-FICHE-CONFIG


def _all_vendors(url: str) -> dict[str, str]:
    seconds = {
        f"AUTOMATION_{gate}_POLL_INTERVAL_SECONDS": "0.5" for gate in ("FICHE_DETAILS", "TRANSCRIPTION", "AUDIT")
    }
    return {
        **seconds,
        "CRM_BASE_URL": f"{url}/crm",
        "CRM_API_KEY": "key",
        "ELEVENLABS_BASE_URL": f"{url}/elevenlabs",
        "ELEVENLABS_API_KEY": "key",
        "LLM_BASE_URL": f"{url}/llm/v1",
        "LLM_API_KEY": "key",
        "LLM_MODEL": "sandbox",
        "AUTOMATION_SEND_EVENT_CHUNK_SIZE": "4",
        "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": "60000",
        "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": "60",
        "TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS": "0.2",
        "LLM_CONCURRENCY": "40",
    }


STEPS = (
    "load-schedule",
    "select-fiches",
    "fan-out-fetch",
    "filter-fiches",
    "open-transcribe",
    "dispatch-transcriptions",
    "settle-transcriptions",
    "resolve-audit-configs",
    "fan-out-audit",
    "finalize",
)
# What it never comes to: its runs select in a step of their own, and write nothing at vendors.
ELSEWHERE = ("after select", "after intent", "before send", "after send")
AUTOMATION = Subject(
    name="automation",
    flow="automation",
    given=lambda fiches: {"fiche_ids": list(fiches)},
    target=lambda n: str(10_000 + n),
    environment=_all_vendors,
    start=_trigger,
    targets=12,
    points=(*(one for one in POINTS if one not in ELSEWHERE), *POINTS_OF_AUTOMATION, *map(after_step, STEPS)),
    vendor="",
    kind="paid",
    wanted=_calls_and_audits,
    effect=_bought,
)

# Several prices in one call: what a fault may leave half applied.
BATCH = Subject(
    name="batch",
    flow="tests.faults.batch_flow:FLOW",
    given=lambda skus: {"skus": list(skus)},
    target=HELLO.target,
    environment=_price_list,
    vendor="price_list",
    points=("after claim", "after intent", "before send", "after send", "in commit"),
    wanted=lambda sku: frozenset({f"price of {sku}"}),
    effect=_article_effect,
)


def _shop(_: str) -> dict[str, str]:
    return {
        "ECLUSE_SECRET_KEY": b64encode(bytes(range(32))).decode(),  # that of SECRETS
        "ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8",
        "PRICING_REQUESTS_PER_SECOND": "10000",
        "PRICING_BURST": "1000",
        "PRICING_CALL_TIMEOUT_SECONDS": "1.5",
    }


# The apply of a rule run: ten variants of a product in one call, with the price of the preview as the expected one.
PRICING = Subject(
    name="pricing",
    flow="pricing",
    given=lambda variants: {"variants": list(variants)},
    target=prices.variant,
    environment=_shop,
    start=prices.apply,
    vendor="shopify",
    points=BATCH.points,
    shared_calls=True,
    wanted=lambda variant: frozenset({f"price of {variant}"}),
    effect=lambda entry: f"price of {entry['ref']}",
)

# Three registers are read one after another; a job is a run without a workflow.
ENRICHMENT = Subject(
    name="enrichment",
    flow="enrichment",
    given=lambda sirens: {"company": sirens[0]},
    target=companies.siren,
    environment=companies.registers,
    start=companies.ask,
    targets=30,
    points=("after claim", "before commit", "in commit", "after commit", "in finalize"),
    vendor="",
    kind="call",
    apart=True,
    wanted=companies.calls,
    effect=lambda entry: "log-in" if entry["ref"] == "login" else f"{entry['vendor']} of {entry['ref']}",
)

SUBJECTS = (HELLO, AUTOMATION, BATCH, PRICING, ENRICHMENT)

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

# One flow before and after a change of its code. It calls no vendor.
OLD = Subject(
    name="changing",
    flow="tests.faults.old_flow:FLOW",
    given=lambda keys: {"keys": list(keys), "flaky": list(keys[::5])},
    target=lambda n: f"t{n:05d}",
)
STEADY_OLD = replace(OLD, given=lambda keys: {"keys": list(keys)})
NEW_FLOW = "tests.faults.new_flow:FLOW"


def poison(*keys: str, seconds: float = 0.05) -> Subject:
    """A run in which these kill their workers, and the others take so long."""
    return Subject(
        name="poison",
        flow="tests.faults.poison_flow:FLOW",
        given=lambda names: {"keys": list(names), "poisoned": list(keys), "seconds": seconds},
        target=lambda n: f"t{n:05d}",
        expected=lambda n: {
            "status": "partial",
            "selected": n,
            "successful": n - len(keys),
            "failed": len(keys),
            "ignored": 0,
        },
    )
