"""The decisions of the effect protocol, as pure functions: what a look says, what a failure means, whether to go on."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.errors import NotSentError, PermanentError, TransientError, VendorError
from ecluse.base.ids import effect_id
from ecluse.engine import AbsoluteWrite, Item, KeyedWrite, Order, WorkContext
from ecluse.engine.effects.perform import Performed, WriteExecutor
from ecluse.engine.effects.protocol import (
    SEND_WITHIN,
    EffectState,
    Intent,
    after_failure,
    again_or_never,
    agrees,
    as_stored_json,
    conclude,
)
from ecluse.engine.model.item import ClaimedItem, ClaimKey
from ecluse.engine.model.retry import GiveUp, Retry

NOW = datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)
QUIET = timedelta(seconds=4)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # JSON text, not bytes: neither NUL nor half a character gets this far
    | st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=6,
)
WAS, WISH, OTHER = {"price": "1.00", "version": 1}, {"price": "2.00"}, {"price": "9.99", "version": 2}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        pytest.param({"price": "2.00", "version": 2}, "applied", id="as wanted"),
        pytest.param({"price": "2.00", "version": 1, "name": "new"}, "applied", id="as wanted, whatever else changed"),
        pytest.param(WAS, "not_applied", id="as before"),
        pytest.param(OTHER, "conflict", id="a third value"),
        pytest.param({"price": "1.00", "version": 3}, "conflict", id="changed and changed back by another client"),
        pytest.param({"price": "1.00"}, "conflict", id="a part of what was before"),
        pytest.param({}, "conflict", id="nothing"),
        pytest.param(None, "conflict", id="no record"),
        pytest.param([WISH], "conflict", id="another shape"),
        pytest.param("2.00", "conflict", id="a bare value"),
    ],
)
def test_what_a_look_after_the_quiet_period_says(found: Any, verdict: str) -> None:
    assert conclude(found, WISH, WAS) == verdict


def test_a_state_that_was_not_there_before_is_no_conflict_when_it_still_is_not() -> None:
    assert conclude(None, WISH, None) == "not_applied"


def test_what_is_wanted_and_was_before_is_applied_not_open_to_doubt() -> None:
    assert conclude(WAS, {"price": "1.00"}, WAS) == "applied"


@given(found=JSON, wanted=JSON, before=JSON)
def test_every_look_has_exactly_one_meaning(found: Any, wanted: Any, before: Any) -> None:
    verdict = conclude(found, wanted, before)
    assert (verdict == "applied") == agrees(found, wanted)
    assert (verdict == "not_applied") == (not agrees(found, wanted) and found == before)


@given(wanted=JSON)
def test_what_was_wanted_agrees_with_itself(wanted: Any) -> None:
    assert agrees(wanted, wanted)


@given(wanted=st.dictionaries(st.text("abc", max_size=2), JSON), more=st.dictionaries(st.text("xyz", min_size=1), JSON))
def test_only_the_wanted_fields_count(wanted: dict[str, Any], more: dict[str, Any]) -> None:
    assert agrees({**more, **wanted}, wanted)
    for name in wanted:
        assert not agrees({**more, **wanted, name: object()}, wanted), f"{name} is wanted and differs"
        assert not agrees({key: value for key, value in wanted.items() if key != name}, wanted), f"{name} is missing"


@pytest.mark.parametrize(
    ("value", "as_stored"),
    [
        (Decimal("12.50"), "12.50"),
        ((1, 2), [1, 2]),
        ({"at": NOW}, {"at": "2001-02-03T04:05:06Z"}),
        ({"n": 1.5, "none": None, "yes": True}, {"n": 1.5, "none": None, "yes": True}),
        ({1: "a"}, {"1": "a"}),
    ],
    ids=["decimal", "tuple", "instant", "plain", "number as a name"],
)
def test_values_are_compared_as_the_database_gives_them_back(value: Any, as_stored: Any) -> None:
    assert as_stored_json(value) == as_stored


@given(JSON)
def test_what_is_plain_stays_as_it_is(value: Any) -> None:
    assert as_stored_json(value) == value
    assert as_stored_json(value) == json.loads(json.dumps(value))


AMBIGUOUS: list[VendorError] = [
    TransientError("500"),
    TransientError("no answer", code="TIMEOUT"),
    PermanentError("412", code="PRECONDITION_FAILED", ambiguous=True),
    VendorError("cause unknown"),
]
FOR_NOW: list[VendorError] = [
    TransientError("429", code="THROTTLED", ambiguous=False, retry_after=3),
    NotSentError("connection refused"),
]


@pytest.mark.parametrize("error", AMBIGUOUS, ids=lambda error: f"{type(error).__name__} {error}")
def test_an_answer_that_is_not_definite_leaves_the_write_unknown(error: VendorError) -> None:
    assert after_failure(error, doubtful=False) == "unknown"


@pytest.mark.parametrize("error", FOR_NOW, ids=str)
def test_a_refusal_for_now_leaves_nothing_behind(error: VendorError) -> None:
    assert after_failure(error, doubtful=False) == "planned"


def test_a_definite_no_is_the_end_of_it() -> None:
    assert after_failure(PermanentError("422"), doubtful=False) == "rejected"


@pytest.mark.parametrize("error", [*AMBIGUOUS, *FOR_NOW, PermanentError("422")], ids=str)
def test_no_answer_to_a_repetition_settles_the_first_send(error: VendorError) -> None:
    assert after_failure(error, doubtful=True) == "unknown"


async def nothing(*_: object) -> None:
    return None


def anything(_: Item) -> Any:
    return "2.00"


KEYED = KeyedWrite(wanted=anything, send=nothing, quiet=QUIET)
ABSOLUTE = AbsoluteWrite(wanted=anything, send=nothing, quiet=QUIET, read=nothing)


@pytest.mark.parametrize("write", [KEYED, ABSOLUTE], ids=["C1", "C2"])
@pytest.mark.parametrize(
    ("policy_says", "waits"),
    [(0, 4), (3.999, 4), (4, 4), (4.001, 4.001), (900, 900)],
    ids=["at once", "just too early", "just then", "just after", "much later"],
)
def test_an_unknown_write_waits_the_longer_of_its_retry_delay_and_the_quiet_period(write, policy_says, waits) -> None:
    verdict = again_or_never(write, Retry(NOW + timedelta(seconds=policy_says)), NOW)
    assert verdict == Retry(NOW + timedelta(seconds=waits))


@pytest.mark.parametrize("permanent", [True, False])
def test_what_can_be_read_back_is_never_given_up_on_while_unknown(permanent: bool) -> None:
    assert again_or_never(ABSOLUTE, GiveUp(permanent=permanent), NOW) == Retry(NOW + QUIET)


@pytest.mark.parametrize("permanent", [True, False])
def test_a_key_that_may_not_be_sent_again_is_given_up_on_for_good(permanent: bool) -> None:
    """Another round would be another key: the vendor might do it a second time."""
    assert again_or_never(KEYED, GiveUp(permanent=permanent), NOW) == GiveUp(permanent=True)


PARTS = ("tenant", "run", "stage", "key", 0)


def test_an_effect_has_the_same_name_wherever_and_whenever_it_is_computed() -> None:
    # The literal is what vendors already know: another one would make every write in flight a second wish.
    assert str(effect_id(*PARTS)) == "f1c441c6-cb21-5eda-914f-3fd5256145de"


def test_each_part_is_part_of_the_name() -> None:
    others = [
        effect_id("other", *PARTS[1:]),
        effect_id("tenant", "other", *PARTS[2:]),
        effect_id("tenant", "run", "other", *PARTS[3:]),
        effect_id("tenant", "run", "stage", "other", 0),
        effect_id("tenant", "run", "stage", "key", 1),
    ]
    assert all(one != other for one, other in combinations([effect_id(*PARTS), *others], 2))


WORD = st.text(max_size=4)


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD, st.integers(0, 9)), min_size=2, max_size=4, unique=True))
def test_parts_do_not_run_into_each_other(several: list[tuple[str, str, str, str, int]]) -> None:
    assert len({effect_id(*parts) for parts in several}) == len(several)


def an_item(executions: int = 0, crashes: int = 0, round_: int = 0, id_: int = 1) -> Item:
    return Item(id_, 7, "tenant", "flow", "stage", "key", "key", None, round_, executions, crashes, "run")


class Desk:
    """Says what the database would, and keeps what it was asked."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.intents: list[Intent] = []
        self._states = iter(states)

    async def intend(self, intent: Intent) -> EffectState:
        self.intents.append(intent)
        known: dict[str, Any] = {"result": None, "error": None, "age": timedelta(0), "quiet_until": NOW}
        known |= {"wanted": intent.wanted, "before": intent.before, "quiet_over": True, "went": True, "sends": 1}
        known |= {"asked_at": asyncio.get_running_loop().time(), "state": "sending", "id": intent.id}
        return EffectState(**{**known, **next(self._states, {})})


async def perform(desk: Desk, write: Any, item: Item | None = None, may_send: bool = True) -> Performed:
    performer = WriteExecutor(desk.intend, lambda _: may_send, lambda: NOW)
    claimed, answers = ClaimedItem(item or an_item(), 3, 1, None), dict[ClaimKey, Performed | None]()
    await performer.perform(write, WorkContext(None, lambda: NOW), [(claimed, None)], answers)
    answer = answers[claimed.claim_key]
    assert answer is not None
    return answer


class Sent:
    def __init__(self) -> None:
        self.orders: list[Order] = []

    async def __call__(self, _: WorkContext, __: Item, order: Order) -> str:
        self.orders.append(order)
        return "done"


@pytest.mark.parametrize(
    ("late", "may_send"), [(0.01, True), (0, False)], ids=["long after its commit", "heart, stop or end forbids it"]
)
@pytest.mark.parametrize(("again", "state"), [(False, "planned"), (True, "unknown")], ids=["first", "again"])
async def test_what_comes_too_late_is_not_sent_and_not_in_doubt(late, may_send, again, state) -> None:
    sent = Sent()
    write = KeyedWrite(wanted=anything, send=sent, quiet=QUIET)
    now = asyncio.get_running_loop().time()
    old = {"asked_at": now - SEND_WITHIN - late if late else now, "sends": 2 if again else 1}
    doubt = [{"went": False, "state": "unknown", "sends": 1}] if again else []
    outcome, effect = await perform(Desk(*doubt, old), write, may_send=may_send)
    assert sent.orders == []
    assert isinstance(outcome, datetime), "no failure: it is tried again"
    assert effect is not None
    assert (effect.state, effect.sends) == (state, 2 if again else 1)


async def test_what_is_in_time_is_sent_under_its_name() -> None:
    sent = Sent()
    fresh = {"asked_at": asyncio.get_running_loop().time() - SEND_WITHIN / 2}
    await perform(Desk(fresh), KeyedWrite(wanted=anything, send=sent, quiet=QUIET))
    assert [order.key for order in sent.orders] == [str(effect_id("tenant", "run", "stage", "key", 0))]


@pytest.mark.parametrize(
    "again",
    [an_item(executions=5), an_item(crashes=3), an_item(id_=99), an_item(executions=2, crashes=1)],
    ids=["another attempt", "after deaths", "another row", "both"],
)
async def test_an_attempt_is_not_part_of_the_name_but_a_round_is(again: Item) -> None:
    desk, names = Desk(), []
    for item in (an_item(), again, again._replace(round=1)):
        await perform(desk, KEYED, item)
        names.append(desk.intents[-1].id)
    first, second, next_round = names
    assert first == second != next_round


@pytest.mark.parametrize(("age", "sends_again"), [(7.9, True), (8.1, False)], ids=["just remembered", "too old"])
async def test_a_key_that_the_vendor_may_have_forgotten_is_not_sent_again(age: float, sends_again: bool) -> None:
    sent = Sent()
    write = KeyedWrite(wanted=anything, send=sent, quiet=QUIET, remembered=timedelta(seconds=10))
    in_doubt = {"went": False, "state": "unknown", "age": timedelta(seconds=age)}
    outcome, effect = await perform(Desk(in_doubt, {"sends": 2}), write)
    assert (len(sent.orders), effect.state if effect else None) == ((1, "applied") if sends_again else (0, "unknown"))
    assert isinstance(outcome, PermanentError) == (not sends_again)
