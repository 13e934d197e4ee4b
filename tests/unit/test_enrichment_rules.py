"""The decisions of company enrichment: numbers, states, evaluation, errors, cache, merge and masking."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from ecluse.base.errors import ForbiddenTransition, InvalidInput
from ecluse.flows.enrichment import card, rules
from ecluse.flows.enrichment.rules import Known, Limits
from ecluse.flows.enrichment.states import (
    REQUIRED,
    Fetched,
    Status,
    Trigger,
    check_move,
    complete,
    enrichment_error,
    evaluate,
    may_move,
)
from ecluse.vendors.registers import Source

NOW = datetime(2026, 3, 31, 23, 30, tzinfo=UTC)
LIMITS = Limits()
LISTED = {
    ("PENDING", "RUNNING"),
    ("RUNNING", "SUCCESS"),
    ("RUNNING", "PARTIAL"),
    ("RUNNING", "FAILED"),
    ("SUCCESS", "STALE"),
    ("PARTIAL", "STALE"),
    ("STALE", "RUNNING"),
    ("FAILED", "RUNNING"),
    ("PARTIAL", "RUNNING"),
}


@pytest.mark.req("ENR-30", "ENR-31", "ENR-32", "ENR-33", "ENR-34", "ENR-40", "G-57")
@pytest.mark.parametrize(("before", "after"), list(product(Status, Status)))
@pytest.mark.parametrize("trigger", [None, *Trigger])
def test_every_pair_of_states(before: Status, after: Status, trigger: Trigger | None) -> None:
    by_hand = trigger is Trigger.MANUAL and (before, after) == ("SUCCESS", "RUNNING")
    assert may_move(before, after, trigger) is ((before, after) in LISTED or by_hand)


def test_a_refused_transition_is_named() -> None:
    with pytest.raises(ForbiddenTransition, match="company 552049447 cannot go from SUCCESS to RUNNING"):
        check_move("552049447", Status.SUCCESS, Status.RUNNING, Trigger.OPENED)


@pytest.mark.req("ENR-35", "ENR-36", "ENR-37", "ENR-38", "ENR-39", "ENR-17", "ENR-18", "ENR-42", "ENR-43", "ENR-44")
@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("failing", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("asked", [list(Source), [Source.SEARCH], [Source.SEARCH, Source.RCS]])
def test_every_combination_has_one_result(asked: list[Source], failing: tuple[bool, ...], core: bool) -> None:
    wrong = dict(zip(Source, failing, strict=True))
    fetched = [Fetched(one, "TIMEOUT" if wrong[one] else None, 503 if wrong[one] else 200) for one in asked]
    result = evaluate(fetched, core_identity=core)
    required = sum(wrong[one] for one in asked if one in REQUIRED)
    optional = sum(wrong[one] for one in asked if one is not Source.SEARCH)
    fits = {
        "SUCCESS": core and not required and not optional,
        "PARTIAL": core and not required and optional > 0,
        "FAILED": required > 0 or not core,
    }
    assert [status for status, true in fits.items() if true] == [result.status]
    assert result.required_sources_failed_count == required
    assert result.optional_sources_failed_count == optional
    assert result.sources_failed_count == required + optional
    assert result.sources_success_count + result.sources_failed_count == len(asked)
    assert bool(result.enrichment_error) is (result.status != "SUCCESS")


@pytest.mark.req("ENR-60")
def test_an_unknown_number_fails_although_the_others_answer_and_the_name_is_known() -> None:
    fetched = [Fetched(Source.SEARCH, "NOT_FOUND", 200), Fetched(Source.INPI), Fetched(Source.RCS)]
    assert evaluate(fetched, core_identity=True).status == "FAILED"


@pytest.mark.req("ENR-72", "ENR-73", "G-64")
def test_the_error_text() -> None:
    failed = [Fetched(Source.INPI, "TIMEOUT", 503), Fetched(Source.RCS, "RATE_LIMIT", 429)]
    assert enrichment_error(failed, core_identity=True) == "INPI_RNE:503:TIMEOUT|API_ENTREPRISE_RCS:429:RATE_LIMIT"
    assert enrichment_error([Fetched(Source.INPI, "TIMEOUT")], core_identity=True) == "INPI_RNE:-:TIMEOUT"
    nameless = "API_RECHERCHE_ENTREPRISES:200:CORE_IDENTITY_MISSING"
    assert enrichment_error([], core_identity=False) == nameless
    assert enrichment_error(failed[:1], core_identity=False) == f"{nameless}|INPI_RNE:503:TIMEOUT"
    long = enrichment_error([Fetched(Source.INPI, "X" * 600)] * 4, core_identity=True)
    assert long is not None
    assert len(long) == 3 * (len("INPI_RNE:-:") + 600) + 2


@pytest.mark.req("ENR-71")
def test_the_internal_error() -> None:
    assert Fetched(Source.INPI, "TIMEOUT", None, "request timed out").as_error() == {
        "error_code": "TIMEOUT",
        "source_api": "INPI_RNE",
        "http_status": None,
        "message": "request timed out",
        "retryable": True,
    }
    assert Fetched(Source.INPI).as_error() is None


def test_a_source_that_was_not_reached_has_failed() -> None:
    found = complete([Source.SEARCH, Source.RCS], [Fetched(Source.SEARCH)])
    assert [(one.source, one.error_code) for one in found] == [(Source.SEARCH, None), (Source.RCS, "UNKNOWN")]


@pytest.mark.req("ENR-11", "G-67")
@pytest.mark.parametrize(
    ("siren", "siret", "expected"),
    [
        ("552049447", None, ("552049447", None)),
        (" 552 049\u00a0447 ", None, ("552049447", None)),
        (None, "552 049 447 00014", ("552049447", "55204944700014")),
        ("552049447", "55204944700014", ("552049447", "55204944700014")),
        (None, "35600000000048", ("356000000", "35600000000048")),  # La Poste: by the common check digit
        (None, "35600000049837", ("356000000", "35600000049837")),  # La Poste: by the sum of its digits
    ],
)
def test_valid_numbers(siren: str | None, siret: str | None, expected: tuple[str, str | None]) -> None:
    assert rules.identifiers(siren, siret) == expected


@pytest.mark.req("ENR-11", "G-67")
@pytest.mark.parametrize(
    ("siren", "siret"),
    [
        (None, None),
        ("552049448", None),
        ("55204944", None),
        ("5520494470", None),
        ("55204944A", None),
        ("552.049.447", None),
        ("", None),
        ("٥٥٢٠٤٩٤٤٧", None),
        (None, "55204944700015"),
        (None, "552049447000140"),
        (None, "35600000049838"),
        ("552100554", "55204944700014"),
    ],
)
def test_invalid_numbers(siren: str | None, siret: str | None) -> None:
    with pytest.raises(InvalidInput, match="company_sire"):
        rules.identifiers(siren, siret)


@pytest.mark.req("ENR-46", "ENR-47", "G-60")
def test_exactly_thirty_days_are_stale() -> None:
    moment = timedelta(microseconds=1)
    assert rules.is_fresh(Known(Status.SUCCESS, NOW - timedelta(days=30) + moment), LIMITS, NOW)
    assert not rules.is_fresh(Known(Status.SUCCESS, NOW - timedelta(days=30)), LIMITS, NOW)
    assert not rules.is_fresh(Known(Status.PENDING, None), LIMITS, NOW)


FRESH, OLD = NOW - timedelta(days=3), NOW - timedelta(days=40)
JUST, LONG_AGO = NOW - timedelta(minutes=14), NOW - timedelta(minutes=15)


@pytest.mark.req("ENR-10", "ENR-53", "G-66")
@pytest.mark.parametrize(
    ("known", "automatic", "manual"),
    [
        (Known(Status.PENDING, None), "start", "start"),
        (Known(Status.PENDING, None, open_job=True), "attach", "attach"),
        (Known(Status.RUNNING, None, open_job=True), "attach", "attach"),
        (Known(Status.RUNNING, FRESH, open_job=True), "attach", "attach"),
        (Known(Status.SUCCESS, FRESH, FRESH), "cached", "start"),
        (Known(Status.PARTIAL, FRESH, FRESH), "cached", "start"),
        (Known(Status.SUCCESS, OLD, OLD), "start", "start"),
        (Known(Status.STALE, OLD, OLD), "start", "start"),
        (Known(Status.FAILED, None, JUST), "cached", "start"),
        (Known(Status.FAILED, None, LONG_AGO), "start", "start"),
        (Known(Status.FAILED, OLD, JUST), "cached", "start"),
        (Known(Status.FAILED, FRESH, LONG_AGO), "cached", "start"),  # a failed refresh does not spoil fresh data
    ],
)
def test_what_a_trigger_leads_to(known: Known, automatic: str, manual: str) -> None:
    found = {trigger: rules.decide(known, trigger, LIMITS, NOW) for trigger in Trigger}
    assert found == {Trigger.CREATED: automatic, Trigger.OPENED: automatic, Trigger.MANUAL: manual}


@pytest.mark.req("ENR-79", "G-66", "G-78")
@pytest.mark.parametrize(
    ("known", "due"),
    [
        (Known(Status.PENDING, None), True),
        (Known(Status.PENDING, None, open_job=True), False),
        (Known(Status.STALE, OLD), True),
        (Known(Status.SUCCESS, OLD), True),
        (Known(Status.SUCCESS, FRESH), False),
        (Known(Status.PARTIAL, FRESH, NOW - timedelta(hours=24), relaunchable=True), True),
        (Known(Status.PARTIAL, FRESH, NOW - timedelta(hours=23), relaunchable=True), False),
        (Known(Status.PARTIAL, FRESH, NOW - timedelta(hours=24)), False),
        (Known(Status.FAILED, None, LONG_AGO), False),
    ],
)
def test_what_the_sweep_relaunches(known: Known, due: bool) -> None:
    assert rules.is_due(known, LIMITS, NOW) is due


@pytest.mark.req("ENR-51", "ENR-80", "G-58")
def test_names() -> None:
    assert rules.lock_key("552049447") == "company_enrichment:552049447"
    assert rules.job_key("552049447", Trigger.CREATED, NOW) == "552049447:REQUEST_CREATED:2026-03-31"


SEARCH = {"legal_name": "SNCF", "legal_form_code": "5500", "directors": [{"type": "person", "role": "a"}]}
INPI = {"legal_name": "SNCF SA", "legal_form_code": "5710", "capital_amount": 5.0}
RCS = {"capital_amount": 6.0, "court": "LYON", "directors": [{"type": "person", "role": "b"}]}


def merged(**facts: dict[str, Any]) -> dict[str, Any]:
    return card.merge({}, {Source[name]: value for name, value in facts.items()}, NOW)


@pytest.mark.req("ENR-75", "G-68", "G-59")
def test_each_field_has_the_first_source_of_its_order() -> None:
    stored = merged(SEARCH=SEARCH, INPI=INPI, RCS=RCS)
    found = {name: (one["value"], one["source"]) for name, one in card.card(stored).items()}
    assert found["legal_name"] == ("SNCF", "API_RECHERCHE_ENTREPRISES")
    assert found["legal_form_code"] == ("5710", "INPI_RNE")
    assert found["capital_amount"] == (5.0, "INPI_RNE")
    assert found["court"] == ("LYON", "API_ENTREPRISE_RCS")
    assert found["directors"] == ([{"type": "person", "role": "b"}], "API_ENTREPRISE_RCS")
    without = card.card(stored, [Source.SEARCH, Source.INPI])
    assert "court" not in without
    assert without["directors"]["source"] == "API_RECHERCHE_ENTREPRISES"


def test_a_legal_name_has_an_end() -> None:
    assert card.legal_name(merged(SEARCH={"legal_name": "S" * 501})) == "S" * 499 + "…"
    assert card.legal_name(merged(SEARCH={"legal_name": "S" * 500})) == "S" * 500


@pytest.mark.req("G-68")
def test_a_source_that_fails_erases_nothing() -> None:
    later = NOW + timedelta(days=31)
    stored = card.merge(merged(SEARCH=SEARCH, INPI=INPI), {Source.SEARCH: {"legal_name": "SNCF VOYAGEURS"}}, later)
    found = card.card(stored)
    assert found["legal_name"] == {"value": "SNCF VOYAGEURS", "source": Source.SEARCH, "at": later.isoformat()}
    assert found["capital_amount"]["at"] == NOW.isoformat()
    assert "directors" not in found


@pytest.mark.parametrize(("diffusion", "hidden"), [("O", False), ("P", True), ("N", True)])
@pytest.mark.parametrize("says", ["SEARCH", "INPI"])
def test_directors_are_masked_unless_diffusion_is_open(diffusion: str, hidden: bool, says: str) -> None:
    person = {"type": "person", "last_name": "DUPRÉ", "first_names": "LÉA", "role": "Gérante", "born": "1980-02"}
    firm = {"type": "organisation", "name": "AUDIT", "siren": "784824153", "role": "Auditor"}
    facts = {name: {"legal_name": "X", "directors": [person, firm]} for name in ("SEARCH", "INPI", "RCS")}
    facts[says]["diffusion"] = diffusion
    stored = merged(**facts)
    assert ("DUPRÉ" in str(stored)) is not hidden
    shown = card.card(stored)["directors"]["value"]
    assert shown == [{"type": "person", "role": "Gérante", "masked": True} if hidden else person, firm]
