"""The auditor judged: a world in order is clean and was looked at; every planted fault is found, under its own name."""

from __future__ import annotations

from typing import Any

import pytest

from ecluse.verify import audit
from tests.verify import (
    automation_faults,
    ending_faults,
    enrichment_faults,
    faults,
    job_faults,
    outbox_faults,
    pricing_faults,
    retention_faults,
    schedule_faults,
    spend_faults,
    transcription_faults,
)
from tests.verify.plants import Fault
from tests.verify.world import World

ROOMS = (
    faults,
    schedule_faults,
    transcription_faults,
    automation_faults,
    ending_faults,
    enrichment_faults,
    retention_faults,
    spend_faults,
    pricing_faults,
    job_faults,
)
FAULTS = [*outbox_faults.OUTBOX_FAULTS, *(fault for room in ROOMS for fault in room.FAULTS)]
HARMLESS = faults.HARMLESS | outbox_faults.OUTBOX_HARMLESS | schedule_faults.HARMLESS | automation_faults.HARMLESS
HARMLESS |= retention_faults.HARMLESS | ending_faults.HARMLESS | spend_faults.HARMLESS | pricing_faults.HARMLESS
INVARIANTS = {f"I-{n:02d}" for n in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 19, 22, 23, 24)}


def test_a_world_in_order_is_clean_and_every_check_had_something_to_look_at(world: World) -> None:
    report = audit(world.dsn, world.sandbox.url)
    assert (report.violations, report.notes) == ([], [])
    assert set(report.checked) == INVARIANTS | {"runs", "items", "effects", "ledger_effects"}
    assert min(report.checked.values()) > 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.invariant} {fault.name}")
def test_a_planted_fault_is_found_under_its_own_invariant(world: World, fault: Fault) -> None:
    fault.plant(world)
    report = audit(world.dsn, world.sandbox.url)
    assert {violation.invariant for violation in report.violations} == {fault.invariant}, report.text()
    assert fault.says in report.text()
    for violation in report.violations:
        instants = [line[:23] for line in violation.story if not line.startswith("…")]
        assert 0 < len(instants) <= 10
        assert instants == sorted(instants)


@pytest.mark.parametrize("plant", HARMLESS.values(), ids=HARMLESS)
def test_what_is_odd_but_in_order_raises_no_alarm(world: World, plant: Any) -> None:
    plant(world)
    report = audit(world.dsn, world.sandbox.url)
    assert report.violations == [], report.text()


def test_every_invariant_has_its_faults() -> None:
    assert {fault.invariant for fault in FAULTS} == INVARIANTS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
