"""Connections of a tenant over HTTP: tested before they are stored, changed and deleted; keys that are never answered;
what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import psycopg
import pytest

from ecluse.engine import ROLES
from ecluse.flows.connections.lanes import BASES
from ecluse.settings import Settings
from tests.support.api_server import Client, add_tenant, new_key, serving
from tests.support.pages import Reader
from tests.support.session import Session
from tests.support.vendor_clients import PLACES

MODEL = {"llm": {"model": "gpt-4.1"}}
KEY = "a-key-that-is-long-enough-3f9a"
PATH = "/api/connections"
TENANTS = count()


@pytest.fixture(scope="module")
def open_api(shared_dsn: str) -> Iterator[Client]:
    with serving(
        shared_dsn,
        ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8",
        CRM_BASE_URL="https://crm.example",
        CRM_API_KEY="of-the-server",
    ) as client:
        yield client


@pytest.fixture
def tenant(shared_dsn: str) -> str:
    name = f"tenant-{next(TENANTS)}"
    add_tenant(shared_dsn, name)
    return name


@pytest.fixture
def client(open_api: Client, shared_dsn: str, tenant: str) -> Client:
    """With an operator's key of a tenant of its own."""
    return open_api.with_key(new_key(shared_dsn, tenant=tenant))


@pytest.fixture
def ask(shared_dsn: str) -> Iterator[Any]:
    session = Session(shared_dsn)
    yield session.ask
    session.close()


def new(sandbox: Any, kind: str = "crm", **given: Any) -> dict[str, Any]:
    url = sandbox.url + PLACES[kind]  # type: ignore[index]
    return {"kind": kind, "base_url": url, "api_key": KEY, **MODEL.get(kind, {}), **given}  # type: ignore[index]


def stored(ask: Any, tenant: str) -> list[Any]:
    """What the database has of a tenant's connections, keys included."""
    rows = ask("SELECT kind FROM connections WHERE tenant_id = %s ORDER BY 1", tenant)
    return [*rows, *ask("SELECT name FROM secrets WHERE tenant_id = %s ORDER BY 1", tenant)]


def everything(ask: Any) -> dict[str, Any]:
    """What the tables have that a request may write to."""
    tables = ("connections", "secrets", "lanes", "audit_trail")
    return {name: ask(f"SELECT to_jsonb(t)::text FROM {name} t ORDER BY 1") for name in tables}  # noqa: S608 - ours


@pytest.mark.parametrize("kind", PLACES)
def test_a_connection_is_tested_by_a_call_with_its_key_and_stored(client, sandbox, ask, tenant, kind):
    given = new(sandbox, kind, max_in_flight=3, per_minute=90.5)
    made = client.post(PATH, given)
    assert made.status == 201, made.json
    [call] = sandbox.ledger(kind="call")
    assert call["path"].startswith(PLACES[kind])
    row = made.json
    assert (row["kind"], row["base_url"], row["api_key_ends"]) == (kind, given["base_url"], "3f9a")
    assert (row["max_in_flight"], row["per_minute"], row["created_by"]) == (3, 90.5, "a test")
    assert client.get(f"{PATH}/{kind}").json == row
    listed = client.get(PATH).json
    assert (listed["connections"], listed["environment"]) == ([row], [])
    assert KEY not in str([row, listed])
    assert stored(ask, tenant) == [(kind,), (f"connection:{kind}",)]
    # Its lanes are there before the first items: long transactions that dispatch do not wait for each other.
    lanes = ask("SELECT name, max_in_flight FROM lanes WHERE tenant_id = %s", tenant)
    assert set(lanes) == {(f"{base}/{tenant}", 3) for base in BASES[kind]}
    assert ask("SELECT action, subject FROM audit_trail WHERE tenant_id = %s", tenant) == [
        ("connection.create", f"connection:{kind}")
    ]


def test_the_tenant_of_the_environment_has_connections_of_its_own(dsn, sandbox):
    """The declared lanes belong to `default`, too: a connection changes neither their caps nor retires them."""
    declared = "SELECT name, max_in_flight, per_second, retired_at FROM lanes WHERE name = base ORDER BY name"
    with serving(dsn, roles=ROLES, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8") as server, closing(Session(dsn)) as session:
        before = session.ask(declared)
        assert {name for name, *_ in before} >= {base for bases in BASES.values() for base in bases}
        client = server.with_key(new_key(dsn))
        for kind, bases in BASES.items():
            made = client.post(PATH, new(sandbox, kind, max_in_flight=3))
            assert made.status == 201, made.json
            assert client.ask("PATCH", f"{PATH}/{kind}", {"max_in_flight": 4}).status == 200
            own = "SELECT name, max_in_flight, retired_at IS NULL FROM lanes WHERE base = ANY(%s) AND name <> base"
            assert sorted(session.ask(own, list(bases))) == sorted((f"{base}/default", 4, True) for base in bases)
            assert client.ask("DELETE", f"{PATH}/{kind}").status == 200
            assert sorted(session.ask(own, list(bases))) == sorted((f"{base}/default", 4, False) for base in bases)
        assert session.ask(declared) == before


REFUSED_KEYS = {"crm": "forbidden", "speech": "invalid", "llm": "invalid"}


@pytest.mark.parametrize("kind", PLACES)
def test_a_key_that_the_vendor_refuses_is_not_stored(client, sandbox, ask, tenant, kind):
    before = everything(ask)
    answer = client.post(PATH, new(sandbox, kind, api_key=REFUSED_KEYS[kind]))
    assert (answer.status, answer.code) == (422, "CONNECTION_REFUSED")
    assert f"the api_key of the connection {kind}" in answer.json["error"]["message"]
    assert everything(ask) == before
    assert client.post(PATH, new(sandbox, kind)).status == 201
    before = everything(ask)
    changed = client.ask("PATCH", f"{PATH}/{kind}", {"api_key": REFUSED_KEYS[kind], "max_in_flight": 9})
    assert (changed.status, changed.code) == (422, "CONNECTION_REFUSED")
    private = client.ask("PATCH", f"{PATH}/{kind}", {"base_url": "http://10.0.0.1/", "api_key": KEY})
    assert (private.status, private.code) == (422, "INVALID_INPUT")
    assert everything(ask) == before


def test_a_key_for_speech_to_text_alone_is_accepted(client, sandbox):
    """It may not read the account that the test asks for, but the provider knows it."""
    assert client.post(PATH, new(sandbox, "speech", api_key="speech-only")).status == 201


@pytest.mark.parametrize(
    ("given", "status", "code", "says"),
    [
        ({"base_url": "http://10.0.0.1/crm"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "http://169.254.169.254/"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "http://[::1]/crm"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "ftp://example.com/"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "https://user:pw@example.com/"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "https://example.com/?key=1"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "not a url"}, 422, "INVALID_INPUT", "base_url"),
        ({"base_url": "http://127.0.0.1:9/crm"}, 422, "CONNECTION_REFUSED", "not sent"),
        ({"kind": "shop"}, 422, "INVALID_INPUT", "kind"),
        ({"max_in_flight": 0}, 422, "INVALID_INPUT", "max_in_flight"),
        ({"per_minute": 0}, 422, "INVALID_INPUT", "per_minute"),
        ({"per_minute": -1}, 422, "INVALID_INPUT", "per_minute"),
        ({"api_key": ""}, 422, "INVALID_INPUT", "api_key"),
        *(
            ({"api_key": key}, 422, "INVALID_INPUT", "api_key: an API key is printable ASCII")
            for key in (f"{KEY}\n", f"{KEY}\r\nX-Other: 1", f" {KEY}", f"{KEY}\x7f", "clé-d-api")
        ),
        ({"model": "gpt-4.1"}, 422, "INVALID_INPUT", "model"),
        ({"kind": "llm"}, 422, "INVALID_INPUT", "model: give the model"),
        ({"secret": "x"}, 422, "INVALID_INPUT", "secret"),
    ],
)
def test_bad_input_stores_nothing(client, sandbox, ask, tenant, given, status, code, says):
    before = everything(ask)
    answer = client.post(PATH, {**new(sandbox), **given})
    assert (answer.status, answer.code) == (status, code)
    assert says in answer.json["error"]["message"]
    assert KEY not in answer.body.decode()
    assert everything(ask) == before
    assert sandbox.ledger(kind="call") == []


def test_there_is_one_connection_of_a_kind(client, sandbox):
    assert client.post(PATH, new(sandbox)).status == 201
    answer = client.post(PATH, new(sandbox))
    assert (answer.status, answer.code) == (409, "CONNECTION_EXISTS")


def test_a_change_is_tested_if_it_changes_the_key_and_a_key_goes_to_no_other_url(client, sandbox, ask, tenant):
    client.post(PATH, new(sandbox, "llm"))
    sandbox.reset()
    change = lambda body: client.ask("PATCH", f"{PATH}/llm", body)  # noqa: E731
    capped = change({"max_in_flight": 2, "model": "gpt-4.1-mini"})
    assert (capped.status, capped.json["max_in_flight"], capped.json["model"]) == (200, 2, "gpt-4.1-mini")
    assert "model: give the model" in change({"model": None}).json["error"]["message"]
    assert sandbox.ledger(kind="call") == []
    elsewhere = change({"base_url": f"{sandbox.url}/elsewhere"})
    assert (elsewhere.status, elsewhere.code) == (422, "INVALID_INPUT")
    assert "api_key: give it again" in elsewhere.json["error"]["message"]
    assert sandbox.ledger(kind="call") == []
    refused = change({"api_key": "invalid"})
    assert (refused.status, refused.code) == (422, "CONNECTION_REFUSED")
    before = ask("SELECT ciphertext FROM secrets WHERE tenant_id = %s", tenant)
    renewed = change({"api_key": "another-key-that-is-long-77aa"})
    assert (renewed.status, renewed.json["api_key_ends"], renewed.json["max_in_flight"]) == (200, "77aa", 2)
    assert ask("SELECT ciphertext FROM secrets WHERE tenant_id = %s", tenant) != before
    assert renewed.json["updated_at"] > capped.json["updated_at"]


def test_caps_of_an_operator_that_stay_in_force_are_shown_with_the_connection(client, sandbox, ask, tenant):
    assert client.post(PATH, new(sandbox, max_in_flight=9)).json["overrides"] == []
    lane, sales = f"crm/{tenant}", f"crm-sales/{tenant}"
    assert client.ask("PATCH", f"/api/lanes/{lane}", {"max_in_flight": 2}).status == 200
    assert client.ask("PATCH", f"/api/lanes/{sales}", {"max_in_flight": 3, "per_second": 0.5}).status == 200
    changed = client.ask("PATCH", f"{PATH}/crm", {"max_in_flight": 20}).json
    assert changed["overrides"] == [
        f"lane {lane}: 2 in flight, set by an operator, until `ecluse lanes cap {lane} --max-in-flight null`",
        (
            f"lane {sales}: 3 in flight and 30 per minute, set by an operator, until `ecluse lanes cap {sales}"
            " --max-in-flight null --per-second null`"
        ),
    ]
    in_force = "SELECT max_in_flight FROM lanes WHERE name = %s"
    assert (changed["max_in_flight"], ask(in_force, lane)) == (20, [(2,)])
    assert client.get(f"{PATH}/crm").json == changed
    assert client.get(PATH).json["connections"] == [changed]
    page = Reader(client, client.key).shown("/ui/connections")
    assert "20 in flight instead of them, lane" in page
    assert f"instead of them, lane {lane}: 2 in flight, set by an operator, until `ecluse lanes cap {lane}" in page
    client.ask("PATCH", f"/api/lanes/{lane}", {"max_in_flight": None})  # as the command says
    client.ask("PATCH", f"/api/lanes/{sales}", {"max_in_flight": None, "per_second": None})
    assert client.get(f"{PATH}/crm").json["overrides"] == []
    assert ask(in_force, lane) == [(20,)]


def test_at_most_ten_lanes_with_caps_of_an_operator_are_shown_and_the_others_counted(client, sandbox, ask, tenant):
    client.post(PATH, new(sandbox))
    ask(
        "INSERT INTO lanes (name, tenant_id, set_max_in_flight) SELECT 'crm/' || %s || '/schedule-' || n, %s, 1"
        " FROM generate_series(1, 12) n",
        tenant,
        tenant,
    )
    *shown, last = client.get(f"{PATH}/crm").json["overrides"]
    assert [one.partition(":")[0] for one in shown] == [f"lane crm/{tenant}/schedule-{n}" for n in range(1, 11)]
    assert last == "2 further lanes with caps set by an operator: see `ecluse lanes list`"


def test_a_stored_connection_can_be_tested_and_deleted(client, sandbox, ask, tenant):
    for path in (f"{PATH}/crm", f"{PATH}/shop"):
        assert (
            client.get(path).code == client.ask("DELETE", path).code == client.post(f"{path}/test").code == "NOT_FOUND"
        )
    client.post(PATH, new(sandbox))
    assert client.post(f"{PATH}/crm/test").json == {"kind": "crm", "works": True}
    sandbox.set_faults([{"vendor": "crm", "kind": "unauthorized"}])
    refused = client.post(f"{PATH}/crm/test")
    assert (refused.code, "stored" in refused.json["error"]["message"]) == ("CONNECTION_REFUSED", False)
    assert client.ask("DELETE", f"{PATH}/crm").json == {"kind": "crm", "deleted": True}
    assert stored(ask, tenant) == []


def test_a_language_model_without_a_model_is_not_said_to_work(client, sandbox, ask, tenant):
    """A connection of an earlier version: audits would fail once their transcripts are paid for."""
    client.post(PATH, new(sandbox, "llm"))
    ask("UPDATE connections SET model = NULL WHERE tenant_id = %s", tenant)
    refused = client.post(f"{PATH}/llm/test")
    assert (refused.status, refused.code) == (422, "CONNECTION_REFUSED")
    assert "set the model of the connection llm" in refused.json["error"]["message"]
    assert client.ask("PATCH", f"{PATH}/llm", {"model": "gpt-4.1"}).status == 200
    assert client.post(f"{PATH}/llm/test").json == {"kind": "llm", "works": True}


def test_a_tenant_finds_nothing_of_another_s(client, open_api, shared_dsn, sandbox, ask, tenant):
    client.post(PATH, new(sandbox))
    add_tenant(shared_dsn, "rival")
    rival = open_api.with_key(new_key(shared_dsn, tenant="rival"))
    assert rival.get(PATH).json["connections"] == []
    sandbox.reset()
    before = everything(ask)
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/test")):
        body = {"max_in_flight": 1} if method == "PATCH" else None
        refused = rival.ask(method, f"{PATH}/crm{path}", body)
        assert (refused.status, refused.code) == (404, "NOT_FOUND")
    acting = rival.get(f"{PATH}/crm", headers={"Ecluse-Tenant": tenant})
    assert acting.status == 403
    assert tenant not in acting.json["error"]["message"].replace("Ecluse-Tenant", "")
    for body in ({"max_in_flight": 1}, {"reason": "x"}):
        action = "" if "max_in_flight" in body else "/pause"
        lane = rival.ask("POST" if action else "PATCH", f"/api/lanes/crm/{tenant}{action}", body)
        assert (lane.status, lane.code) == (404, "NOT_FOUND")
    assert everything(ask) == before
    assert sandbox.ledger(kind="call") == []
    viewer = open_api.with_key(new_key(shared_dsn, "viewer", tenant))
    assert viewer.get(f"{PATH}/crm").status == 200
    assert viewer.post(PATH, new(sandbox, "llm")).code == "FORBIDDEN"
    assert stored(ask, tenant) == [("crm",), ("connection:crm",)]


def test_the_environment_is_named_to_the_tenant_default_only(open_api, shared_dsn, client):
    default = open_api.with_key(new_key(shared_dsn))
    assert default.get(PATH).json["environment"] == ["crm"]
    assert client.get(PATH).json["environment"] == []
    assert "of-the-server" not in default.get(PATH).body.decode()


def test_no_transaction_is_open_while_the_vendor_is_called(client, sandbox, ask):
    sandbox.set_faults([{"vendor": "crm", "kind": "latency", "seconds": 1.0}])
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.post(PATH, new(sandbox))))
    asking.start()
    until = time.monotonic() + 30
    while not sandbox.ledger(kind="call") and time.monotonic() < until:
        time.sleep(0.01)
    busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL"
    assert ask(f"{busy} AND pid <> pg_backend_pid()") == [(0,)]
    asking.join()
    assert [one.status for one in answers] == [201]


def test_without_a_key_to_seal_with_there_are_no_connections(dsn, sandbox):
    with serving(dsn, settings=Settings(ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8")) as client:
        answer = client.with_key(new_key(dsn)).post(PATH, new(sandbox))
    assert (answer.status, answer.code) == (409, "NO_SECRET_KEY")
    assert sandbox.ledger(kind="call") == []
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT 1 FROM connections").fetchall() == []
