"""What all lists have in common: pages by cursor and by offset, filters, tenants and scopes."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import psycopg
import pytest

from tests.api.narrow import narrow
from tests.support.api_server import add_tenant, new_key

ADD_FICHE = """
INSERT INTO fiche_cache (tenant_id, fiche_id, groupe, sales_date, created_at, updated_at)
VALUES (%s, %s, %s, %s, ecluse_now(), ecluse_now())
"""
HOLD = """
INSERT INTO leases (tenant_id, key, fence, owner, ttl, acquired_at, expires_at)
VALUES ('default', %s, 1, 'a test', '2 hours', ecluse_now(), ecluse_now() + interval '2 hours')
"""
# Several of one day, several without any; the group alternates.
DAYS = [None, "2026-03-02", "2026-03-01", "2026-03-02", None, "2026-03-03", "2026-03-02", None, "2026-03-01"]
SORTED = ["5", "6", "3", "1", "8", "2", "7", "4", "0"]
KEYS = sorted(["a", "a'b", 'a"b', "a\\b", "a%b", "b", "b\n", "\N{SNOWMAN}"])


@pytest.fixture(scope="module")
def ask(shared_dsn):
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        yield lambda sql, *parameters: connection.execute(sql, parameters)


@pytest.fixture(scope="module")
def lists(shared_dsn, ask):
    """Nine fiches and eight leases of `default`, one fiche of `acme`."""
    add_tenant(shared_dsn, "acme")
    for number, day in enumerate(DAYS):
        ask(ADD_FICHE, "default", str(number), "AB"[number % 2], day)
    ask(ADD_FICHE, "acme", "99", "A", "2026-03-01")
    for key in KEYS:
        ask(HOLD, key)


def page(client, path, cursor=None, **query):
    given = query | ({} if cursor is None else {"cursor": cursor})
    return client.get(f"{path}?" + "&".join(f"{name}={quote(str(value))}" for name, value in given.items()))


def walked(client, path, name, **query):
    """The pages of a list, from the first to the last."""
    cursor, found = None, []
    while True:
        answer = page(client, path, cursor, **query)
        assert answer.status == 200, answer.json
        found.append(answer.json[name])
        cursor = answer.json["next_cursor"]
        if cursor is None:
            return found


def ids(pages):
    return [row["fiche_id"] for rows in pages for row in rows]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9, 50])
def test_a_cursor_walks_the_whole_list_in_its_order_and_ends(shared_api, lists, limit):
    pages = walked(shared_api, "/api/fiches", "fiches", limit=limit)
    assert ids(pages) == SORTED, "those of a day by id; those without a day last"
    assert [len(rows) for rows in pages[:-1]] == [limit] * (len(pages) - 1)
    assert 1 <= len(pages[-1]) <= limit, "no empty page at the end"


def test_a_list_in_the_order_of_a_text_is_walked_whatever_the_text(shared_api, lists, ask):
    found = [row["key"] for rows in walked(shared_api, "/api/leases", "leases", limit=1) for row in rows]
    assert found == [row["key"] for row in shared_api.get("/api/leases").json["leases"]]
    assert sorted(found) == KEYS


def test_pages_by_offset_have_the_same_order(shared_api, lists):
    assert ids([page(shared_api, "/api/fiches", limit=2, offset=4).json["fiches"]]) == SORTED[4:6]
    beyond = page(shared_api, "/api/fiches", offset=9).json
    assert (beyond["fiches"], beyond["next_cursor"], beyond["offset"]) == ([], None, 9)


def test_rows_that_are_added_in_front_move_no_page(shared_api, shared_dsn, ask):
    add_tenant(shared_dsn, "growing")
    client = shared_api.with_key(new_key(shared_dsn, tenant="growing"))
    for number, day in enumerate(["2026-03-04", "2026-03-03", "2026-03-02", None]):
        ask(ADD_FICHE, "growing", str(number), None, day)
    first = page(client, "/api/fiches", limit=2).json
    ask(ADD_FICHE, "growing", "in front", None, "2026-03-05")
    ask(ADD_FICHE, "growing", "behind", None, "2026-03-01")
    ask(ADD_FICHE, "growing", "last", None, None)
    assert ids([first["fiches"]]) == ["0", "1"]
    second = page(client, "/api/fiches", first["next_cursor"], limit=3).json
    assert ids([second["fiches"]]) == ["2", "behind", "last"]
    ask(ADD_FICHE, "growing", "in front of those without a day", None, None)
    third = page(client, "/api/fiches", second["next_cursor"], limit=3).json
    assert (ids([third["fiches"]]), third["next_cursor"]) == (["3"], None)


def test_a_row_that_is_deleted_leaves_its_cursor_valid(shared_api, shared_dsn, ask):
    add_tenant(shared_dsn, "shrinking")
    client = shared_api.with_key(new_key(shared_dsn, tenant="shrinking"))
    for number in range(4):
        ask(ADD_FICHE, "shrinking", str(number), None, "2026-03-04")
    first = page(client, "/api/fiches", limit=2).json
    ask("DELETE FROM fiche_cache WHERE tenant_id = 'shrinking' AND fiche_id IN ('2', '1')")
    assert ids([page(client, "/api/fiches", first["next_cursor"]).json["fiches"]]) == ["0"]


def test_filters_hold_on_every_page(shared_api, lists):
    of_b = [one for one in SORTED if int(one) % 2]
    assert ids(walked(shared_api, "/api/fiches", "fiches", limit=1, groupe="B")) == of_b
    assert ids(walked(shared_api, "/api/fiches", "fiches", limit=2, sales_from="2026-03-02")) == ["5", "6", "3", "1"]


def cursor_of(*values):
    return base64.urlsafe_b64encode(json.dumps(list(values)).encode()).decode().rstrip("=")


FOREIGN = {
    "no base64": "?",
    "no text": base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    "no JSON": base64.urlsafe_b64encode(b"fiches").decode(),
    "a number": base64.urlsafe_b64encode(b"7").decode(),
    "an object": base64.urlsafe_b64encode(b'{"FicheRow": 1}').decode(),
    "nothing": cursor_of(),
    "another list": cursor_of("LeaseRow", "2026-03-02", 1),
    "a column too few": cursor_of("FicheRow", "2026-03-02"),
    "a column too many": cursor_of("FicheRow", "2026-03-02", 1, 1),
    "no day": cursor_of("FicheRow", "Monday", 1),
    "a number for a day": cursor_of("FicheRow", 7, 1),
    "no id": cursor_of("FicheRow", "2026-03-02", "x"),
    "an id with a quote": cursor_of("FicheRow", "2026-03-02", "1' OR true --"),
    "an id out of range": cursor_of("FicheRow", "2026-03-02", 10**30),
    "a list for an id": cursor_of("FicheRow", "2026-03-02", [1]),
    "an object for a day": cursor_of("FicheRow", {}, 1),
    "a NUL byte": cursor_of("FicheRow", "2026-03-02\x00", 1),
    "a lone surrogate": cursor_of("FicheRow", "\ud800", 1),
    "too long": cursor_of("FicheRow", "x" * 400, 1),
    "empty": "",
}


@pytest.mark.req("G-34")
@pytest.mark.parametrize("cursor", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_cursor_of_this_list_is_refused(shared_api, lists, cursor):
    answer = page(shared_api, "/api/fiches", cursor)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert "cursor" in answer.json["error"]["message"]


def test_a_cursor_that_another_list_gave_is_refused(shared_api, lists):
    cursor = page(shared_api, "/api/leases", limit=1).json["next_cursor"]
    assert page(shared_api, "/api/leases", cursor).status == 200
    answer = page(shared_api, "/api/fiches", cursor)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")


@pytest.mark.req("G-32", "ENG-102")
def test_a_cursor_of_another_tenant_shows_only_ones_own(shared_api, shared_dsn, lists):
    acme = shared_api.with_key(new_key(shared_dsn, tenant="acme"))
    cursor = page(shared_api, "/api/fiches", limit=1).json["next_cursor"]
    assert ids([page(acme, "/api/fiches", cursor).json["fiches"]]) == ["99"]
    assert page(acme, "/api/leases").json["leases"] == []


@pytest.mark.req("G-33", "TRX-21")
def test_a_narrow_scope_walks_its_own_rows_with_any_cursor(shared_api, shared_dsn, lists):
    group = narrow(shared_api, shared_dsn, "GROUP", ["B"])
    of_b = [one for one in SORTED if int(one) % 2]
    assert ids(walked(group, "/api/fiches", "fiches", limit=1)) == of_b
    everybodys = page(shared_api, "/api/fiches", limit=2).json["next_cursor"]
    assert ids([page(group, "/api/fiches", everybodys).json["fiches"]]) == [one for one in of_b if one != "5"]
    assert ids(walked(narrow(shared_api, shared_dsn, "GROUP", []), "/api/fiches", "fiches")) == []
    refused = group.get("/api/leases")
    assert (refused.status, refused.code) == (403, "SCOPE"), "leases belong to the tenant as a whole"


@pytest.mark.parametrize("path", ["/api/fiches", "/api/leases", "/api/notifications/deliveries"])
@pytest.mark.parametrize("query", ["kursor=x", "tenant_id=acme", "order=id", "limit=1&next_cursor=x"])
def test_a_parameter_that_a_list_does_not_have_is_refused(shared_api, lists, path, query):
    answer = shared_api.get(f"{path}?{query}")
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert "there is no such query parameter" in answer.json["error"]["message"]
