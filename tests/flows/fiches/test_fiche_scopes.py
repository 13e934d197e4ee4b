"""Whose fiches a caller sees, as a table: what is known of a fiche, who asks, seen or not."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime

import pytest

from ecluse.access.envelope import Refused
from ecluse.flows.fiches.cache import cache_sales
from ecluse.flows.fiches.scopes import check_visible, require_visible
from tests.support.fiche_rows import caller, details, save

DAY, NOW = date(2026, 3, 2), datetime(2026, 3, 3, tzinfo=UTC)
LEGACY = {"information": {"groupe": "A", "attribution_user_id": 7}}
CALLERS = {
    "all": caller(),
    "group A": caller("GROUP", groupes=["A"]),
    "groups B and C": caller("GROUP", groupes=["B", "C"]),
    "no group": caller("GROUP"),
    "user 7": caller("SELF", user="7"),
    "user 8, group A": caller("SELF", user="8", groupes=["A"]),
    "no user": caller("SELF"),
    "unknown scope": caller("REGION", groupes=["A"]),
}
# fiche: what the sales list says of its group (None: not listed), what the details say, who besides ALL sees it
FICHES = {
    "1": (None, details(groupe="A", user="7"), {"group A", "user 7"}),
    "2": ("B", details(groupe="A", user="8"), {"group A", "user 8, group A"}),
    "3": ("A", details(groupe="B", user=None), {"groups B and C"}),
    "4": ("A", details(groupe=None, user="7"), {"user 7"}),
    "5": ("A", None, {"group A"}),
    "6": (None, None, set()),
    "7": ("a", None, set()),
    "8": ("", details(groupe="", user=""), set()),
    "9": ("C", "legacy", {"group A", "user 7"}),
}


@pytest.fixture
async def fiches(connection, query):
    listed = [
        {"id": fiche, "groupe": groupe, "data": {}} for fiche, (groupe, _, _) in FICHES.items() if groupe is not None
    ]
    await cache_sales(connection, "default", {DAY: listed}, NOW)
    await save(connection, *((fiche, answer) for fiche, (_, answer, _) in FICHES.items() if isinstance(answer, dict)))
    query("UPDATE fiche_cache SET raw_data = %s WHERE fiche_id = '9'", json.dumps(LEGACY))


@pytest.mark.req("TRX-21", "G-33")
@pytest.mark.parametrize("who", CALLERS)
async def test_a_caller_sees_what_its_scope_says(connection, fiches, who):
    seen = {fiche for fiche, (_, _, by) in FICHES.items() if who == "all" or who in by}
    hidden = await check_visible(connection, CALLERS[who], list(FICHES))
    assert hidden == [fiche for fiche in FICHES if fiche not in seen]


@pytest.mark.req("TRX-21", "G-32", "G-81")
async def test_the_same_fiche_of_another_tenant_lends_no_visibility(connection, fiches, query):
    query("INSERT INTO tenants (id, name, created_at) VALUES ('acme', 'Acme', ecluse_now())")
    await save(connection, ("1", details(groupe="Z", user="99")), tenant="acme")
    for who in (caller("GROUP", "acme", ["A"]), caller("SELF", "acme", user="7")):
        assert await check_visible(connection, who, ["1", "2"]) == ["1", "2"]
    assert await check_visible(connection, caller("GROUP", "acme", ["Z"]), ["1", "2"]) == ["2"]
    assert await check_visible(connection, caller("GROUP", groupes=["Z"]), ["1"]) == ["1"]


@pytest.mark.req("TRX-21", "TRX-20")
async def test_who_is_refused_does_not_learn_whether_a_fiche_exists(connection, fiches):
    who = caller("GROUP", groupes=["A"])
    messages = []
    for fiche in ("3", "4711"):
        with pytest.raises(Refused) as refused:
            await require_visible(connection, who, ["1", fiche])
        assert (refused.value.status, refused.value.code) == (403, "SCOPE")
        messages.append(refused.value.message.replace(fiche, "…"))
    assert messages[0] == messages[1]
    outside = "a fiche that was not fetched yet counts as outside of it"
    assert messages[0] == f"This key may not read fiche …: its scope is GROUP, with the groupes A; {outside}."
    await require_visible(connection, who, ["1", "2", "5"])
    await require_visible(connection, caller(), ["4711"])


async def test_of_many_that_are_refused_a_few_are_named(connection):
    with pytest.raises(Refused, match=r"fiche 1, 2, 3, 4, 5, …: its scope is SELF, with the crm_user_id 7; "):
        await require_visible(connection, caller("SELF", user="7"), [str(n) for n in range(1, 100)])
