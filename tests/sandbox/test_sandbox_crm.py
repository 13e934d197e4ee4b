"""The simulated CRM and its recordings: which ids give what, as its docstring promises."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ecluse.sandbox.vendors import crm
from ecluse.testing.sandbox import SandboxProcess
from tests.sandbox.client import Client, Reply

KEY = {"Authorization": "Bearer any"}


async def fiche(http: Client, fiche_id: int) -> dict[str, Any]:
    reply = await http.get(f"crm/fiches/{fiche_id}", headers=KEY)
    assert reply.status == 200
    value: dict[str, Any] = reply.json()
    return value


async def sales(http: Client, day: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await http.get(f"crm/sales?date={day}", headers=KEY)).json()["fiches"]
    return rows


@pytest.mark.req("G-90")
@pytest.mark.parametrize(
    ("fiche_id", "count"),
    [
        *((1000, 1), (1007, 8), (8999, 8), (12_345, 2)),
        *((9000, 5), (9099, 5), (9100, 0), (9199, 0), (9250, 3), (9400, 12)),
        *((19_999_999, 8), (20_000_000, 5), (20_000_001, 5), (29_999_999, 5), (30_000_000, 1)),
    ],
)
async def test_a_fiche_has_the_recordings_of_its_class(http: Client, fiche_id: int, count: int) -> None:
    found = await fiche(http, fiche_id)
    assert (found["success"], len(found["recordings"])) == (True, count)
    assert found["information"]["groupe"] == crm.GROUPES[fiche_id % 4]
    assert found["information"]["attribution_user_id"] == 100 + fiche_id % 20
    calls = [recording["call_id"] for recording in found["recordings"]]
    assert calls == [f"{fiche_id}-{k}" for k in range(1, count + 1)]
    assert all(set(one) == {"call_id", "recording_url", "start_time", "duration_s"} for one in found["recordings"])


async def test_a_fiche_is_always_the_same_and_another_at_another_seed(http: Client, other_seed: SandboxProcess) -> None:
    again = Client(other_seed.url)
    async with again.session:
        elsewhere = await fiche(again, 1001)
    first = await fiche(http, 1001)
    assert first == await fiche(http, 1001)
    assert first["recordings"] != elsewhere["recordings"]


@pytest.mark.parametrize(("fiche_id", "blank"), [(9200, ""), (9201, None)])
async def test_one_recording_may_lack_its_url(http: Client, fiche_id: int, blank: str | None) -> None:
    urls = [recording["recording_url"] for recording in (await fiche(http, fiche_id))["recordings"]]
    assert urls[1] == blank
    assert urls[0]
    assert urls[2]


@pytest.mark.req("G-90")
@pytest.mark.parametrize(
    ("fiche_id", "status"),
    [("9300", 404), ("9301", 200), ("9399", 200), ("9600", 404), ("999", 404), ("01001", 404), ("x", 404)],
)
async def test_an_unknown_fiche_is_said_to_be_not_found(http: Client, fiche_id: str, status: int) -> None:
    reply = await http.get(f"crm/fiches/{fiche_id}", headers=KEY)
    assert reply.status == status
    assert reply.json().items() >= {"success": False, "message": "NOT_FOUND"}.items()


@pytest.mark.req("G-90")
async def test_a_day_has_its_sales(http: Client) -> None:
    rows = await sales(http, "05/03/2026")
    assert rows == await sales(http, "05/03/2026") != await sales(http, "06/03/2026")
    assert 20 <= len(rows) <= 40
    ids = [int(row["id"]) for row in rows]
    assert len(set(ids)) == len(ids)
    assert [ids[5] // 100, ids[11] // 100, ids[17] // 100] == [91, 92, 93]
    assert sum("groupe" not in row for row in rows) == len(rows) // 7
    assert all(row["groupe"] == crm.GROUPES[int(row["id"]) % 4] for row in rows if "groupe" in row)


async def test_on_the_thirteenth_a_row_has_no_id(http: Client) -> None:
    assert [row for row in await sales(http, "13/03/2026") if "id" not in row] == [
        {"nom": "sans fiche", "statut": "vendu"}
    ]


@pytest.mark.parametrize("day", ["", "2026-03-05", "31/02/2026"])
async def test_a_day_that_is_none_is_refused(http: Client, day: str) -> None:
    assert (await http.get(f"crm/sales?date={day}", headers=KEY)).status == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic x"}, 401),
        ({"Authorization": "Bearer forbidden"}, 403),
    ],
)
async def test_who_may_read(http: Client, headers: dict[str, str], status: int) -> None:
    for path in ("crm/fiches/1001", "crm/sales?date=05/03/2026"):
        assert (await http.get(path, headers=headers)).status == status


async def test_a_refusal_from_around_the_crm_is_in_its_words(http: Client, sandbox: SandboxProcess) -> None:
    sandbox.set_faults([{"kind": "server_error", "ids": ["05/03/2026"]}, {"kind": "not_found", "ids": ["1001"]}])

    async def said(path: str) -> tuple[int, str]:
        reply: Reply = await http.get(path, headers=KEY)
        return reply.status, reply.json()["message"]

    assert await said("crm/sales?date=05/03/2026") == (503, "SERVER_ERROR")
    assert await said("crm/fiches/1001") == (404, "NOT_FOUND")
    assert (await http.get("crm/fiches/1002", headers=KEY)).status == 200


async def test_a_recording_is_served_to_any_client_with_the_signature(http: Client, sandbox: SandboxProcess) -> None:
    url = (await fiche(http, 1001))["recordings"][1]["recording_url"]
    assert re.fullmatch(rf"{sandbox.url}/audio/recordings/1001-2\.mp3\?Expires=\d+&Signature=[0-9a-f]+", url)
    path = url.removeprefix(f"{sandbox.url}/")
    recording = await http.get(path)
    assert (recording.status, recording.headers["Content-Type"], len(recording.body)) == (200, "audio/mpeg", 20_000)
    assert (await http.get(path)).body == recording.body
    assert (await http.get(path.partition("?")[0])).status == 403
    assert (await http.get(path.replace("1001-2", "1001-1"))).status == 403
    assert (await http.get("audio/elsewhere")).status == 404
    assert sandbox.ledger(vendor="audio")[0]["ref"] == "1001-2"
