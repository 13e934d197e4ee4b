"""Which channels an event goes to, and how it is made to fit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ecluse.realtime.channels import Subject, channel_name, channels_of, fit, subject_of


@pytest.mark.req("ENG-71", "ENG-72", "TRX-85", "AUT-27")
@pytest.mark.parametrize(
    ("payload", "private", "public"),
    [
        ({"fiche_id": "171234"}, ["private-fiche-171234"], ["fiche-171234"]),
        ({"fiche_id": 171234}, ["private-fiche-171234"], ["fiche-171234"]),
        ({"job_id": "automation-run-7"}, ["private-job-automation-run-7"], ["job-automation-run-7"]),
        (
            {"job_id": "j", "fiche_id": "f", "run_id": "9"},
            ["private-job-j", "private-fiche-f", "private-run-9"],
            ["job-j", "fiche-f", "run-9"],
        ),
        ({"status": "completed"}, [], []),
        ({"fiche_id": None, "job_id": "", "run_id": True}, [], []),
        ({"fiche_id": ["1"], "job_id": {"a": 1}}, [], []),
    ],
)
def test_the_channel_follows_from_the_keys_of_the_payload(payload, private, public):
    assert channels_of(payload, private=True) == private
    assert channels_of(payload, private=False) == public


@pytest.mark.req("ENG-71")
@pytest.mark.parametrize("id_", ["a b", "é", "a/b", "x" * 200, "a\n", "*"])
def test_a_name_that_no_channel_can_have_is_dropped_with_a_word(id_):
    with capture_logs() as lines:
        assert channels_of({"fiche_id": id_, "run_id": 1}, private=True) == ["private-run-1"]
    assert [line["log_level"] for line in lines] == ["warning"]


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("subject", [Subject("fiche", "1-2"), Subject("job", "automation-run-7"), Subject("run", "9")])
def test_a_channel_says_what_it_is_about(subject, private):
    assert subject_of(channel_name(subject, private)) == subject


@pytest.mark.parametrize("name", ["", "private-", "fiche", "private-fiche-", "private-user-1", "presence-fiche-1", "*"])
def test_other_channels_are_about_nothing_of_ours(name):
    assert subject_of(name) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=20), inner, max_size=8),
    max_leaves=60,
)
IDS = st.fixed_dictionaries(
    {
        "fiche_id": st.text("0123456789", min_size=1, max_size=20),
        "run_id": st.text("0123456789", min_size=1, max_size=20),
        "status": st.sampled_from(["running", "completed", "failed"]),
        "processed": st.integers(0, 10**6),
        "is_complete": st.booleans(),
    }
)


@pytest.mark.req("ENG-73")
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=40), JSON, max_size=12), IDS, st.integers(200, 3_000))
def test_whatever_it_is_it_fits_and_what_correlates_survives(payload, ids, limit):
    payload |= ids
    whole = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    fitted = fit(payload, limit)
    assert len(fitted) <= limit
    shortened = json.loads(fitted)
    if len(whole) <= limit:
        assert shortened == payload
    else:
        assert shortened.pop("truncated") is True
        assert set(shortened) <= set(payload)
        assert {name: shortened[name] for name in ids} == ids


@pytest.mark.req("ENG-73")
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=400), JSON | st.text(min_size=500, max_size=2_000), max_size=40))
def test_it_fits_even_where_hardly_anything_does(payload):
    assert len(fit(payload, 18)) <= 18


@pytest.mark.req("ENG-73")
def test_long_lists_and_texts_are_cut_before_anything_is_left_out():
    payload = {"fiche_id": "7", "text": "é" * 20_000, "calls": [{"call_id": str(n)} for n in range(2_000)], "failed": 3}
    shortened = json.loads(fit(payload, 9_000))
    assert set(shortened) == {*payload, "truncated"}
    assert shortened["fiche_id"] == "7"
    assert shortened["failed"] == 3
    assert 0 < len(shortened["text"]) < 20_000
    assert 0 < len(shortened["calls"]) < 2_000


def test_values_that_json_does_not_know_become_text_and_those_that_cannot_be_encoded_are_left_out():
    circle: dict[str, object] = {}
    circle["self"] = circle
    payload = {"at": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.50"), "ratio": float("nan")}
    assert json.loads(fit(payload, 9_000)) == {"at": "2026-01-02T00:00:00Z", "price": "1.50", "ratio": None}
    shortened = json.loads(fit({"fiche_id": "7", "circle": circle, "text": "\ud800"}, 9_000))
    assert shortened == {"fiche_id": "7", "truncated": True}
