"""Names that are computed: the same decision gives the same name, another decision another one."""

from __future__ import annotations

import os
import re
import socket
import uuid
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.ids import cuid, item_event_id, replica_id, retry_id, uuid7, workflow_id
from ecluse.engine.model.item import Item

TEXT = st.text(min_size=1, max_size=8)


@pytest.mark.req("ENG-22")
@pytest.mark.parametrize(
    ("round_", "expected"),
    [(0, "pricing-7-apply-SKU-1"), (1, "pricing-7-apply-SKU-1-retry-1"), (12, "pricing-7-apply-SKU-1-retry-12")],
)
def test_a_re_dispatch_has_the_original_id_plus_its_round(round_: int, expected: str) -> None:
    assert item_event_id("pricing", 7, "apply", "SKU-1", round_) == expected
    item = Item(
        1,
        7,
        "acme",
        "pricing",
        "apply",
        "SKU-1",
        "SKU-1",
        payload=None,
        round=round_,
        executions=0,
        crashes=0,
        event_key="k",
    )
    assert item.event_id == expected


@pytest.mark.req("ENG-22")
@given(TEXT, st.integers(0, 50), st.integers(0, 50))
def test_two_rounds_have_one_id_only_if_they_are_the_same_round(event_id: str, one: int, other: int) -> None:
    assert (retry_id(event_id, one) == retry_id(event_id, other)) == (one == other)


@given(TEXT.filter(lambda text: "/" not in text), TEXT)
def test_a_workflow_is_named_by_tenant_and_event_key(tenant: str, key: str) -> None:
    assert workflow_id(tenant, key).split("/", 1) == [tenant, key]


def test_a_replica_names_its_host_and_process_and_no_start_twice() -> None:
    names = [replica_id() for _ in range(50)]
    assert all(name.startswith(f"{socket.gethostname()}-{os.getpid()}-") for name in names)
    assert all(one != other for one, other in pairwise(sorted(names)))


@pytest.mark.req("G-81")
def test_a_drawn_name_is_a_uuid_in_the_order_of_time() -> None:
    drawn = [uuid7(1_772_445_600_000 + n // 10) for n in range(1_000)]
    assert {(one.version, one.variant) for one in drawn} == {(7, uuid.RFC_4122)}
    assert len(set(drawn)) == 1_000
    assert [one.int >> 80 for one in drawn] == [1_772_445_600_000 + n // 10 for n in range(1_000)]


@pytest.mark.req("JOB-01", "G-81")
def test_a_cuid_has_its_form_and_sorts_by_time() -> None:
    made = [cuid(at) for at in (1_700_000_000_000, 1_800_000_000_000, 1_800_000_000_001)]
    assert made == sorted(made)
    assert all(re.fullmatch("c[0-9a-z]{24}", one) for one in made)
    assert cuid(0) != cuid(0)
