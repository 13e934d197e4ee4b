"""The fiche ids of a schedule: counted in lists, whole in the schedule itself, and page by page in a list of their
own."""

from __future__ import annotations

import itertools

from tests.support.api_server import add_tenant, new_key

PATH = "/api/automation/schedules"
NAMES = itertools.count()


def made(client, ids):
    body = {"name": f"manual {next(NAMES)}", "fiche_selection": {"mode": "manual", "fiche_ids": ids}}
    answer = client.post(PATH, body)
    assert answer.status == 201
    return answer.json


def listed(client, schedule):
    (row,) = [one for one in client.get(f"{PATH}?limit=200").json["schedules"] if one["id"] == schedule["id"]]
    return row["fiche_selection"]


def test_a_list_of_schedules_counts_the_ids_whatever_their_number(shared_api):
    few, many = made(shared_api, ["7"]), made(shared_api, [f"fiche-{n:05d}" for n in range(50_000)])
    assert (listed(shared_api, few)["fiche_ids_given"], listed(shared_api, many)["fiche_ids_given"]) == (1, 50_000)
    assert "fiche_ids" not in listed(shared_api, many)
    assert len(shared_api.get(f"{PATH}?limit=200").body) < 100_000
    whole = shared_api.get(f"{PATH}/{many['id']}").json["fiche_selection"]
    assert (len(whole["fiche_ids"]), "fiche_ids_given" in whole) == (50_000, False)


def test_a_change_of_the_ids_changes_their_number(shared_api):
    schedule = made(shared_api, ["7"])
    shared_api.ask("PATCH", f"{PATH}/{schedule['id']}", {"fiche_selection": {"fiche_ids": ["8", "9"]}})
    assert listed(shared_api, schedule)["fiche_ids_given"] == 2


def test_the_ids_are_listed_page_by_page_in_the_order_given(shared_api):
    ids = [str(n) for n in reversed(range(450))]
    path, found, cursor = f"{PATH}/{made(shared_api, ids)['id']}/fiche-ids?limit=200", [], ""
    while cursor is not None:
        page = shared_api.get(f"{path}&cursor={cursor}" if cursor else path).json
        found += page["fiche_ids"]
        cursor = page["next_cursor"]
    assert [one["fiche_id"] for one in found] == ids
    assert [one["place"] for one in found] == list(range(1, 451))


def test_the_ids_of_another_tenants_schedule_are_not_found(shared_api, shared_dsn):
    schedule = made(shared_api, ["7"])
    add_tenant(shared_dsn, "rival")
    rival = shared_api.with_key(new_key(shared_dsn, "operator", "rival"))
    assert rival.get(f"{PATH}/{schedule['id']}/fiche-ids").code == "NOT_FOUND"
