"""Endpoints and deliveries over HTTP: what is refused and why, what is never shown again, what is recorded."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
import pytest
from pydantic import SecretStr
from standardwebhooks import Webhook

from ecluse.access.secrets import Secrets
from ecluse.api.addresses import AddressRow
from ecluse.api.deliveries import DELIVERIES, DeliveryInFull
from ecluse.api.endpoints import NewEndpoint
from ecluse.bootstrap import load_flows
from ecluse.engine import ROLES
from ecluse.settings import Settings
from tests.support.api_server import FLOW, SEALING, SECRET_KEY, add_tenant, new_key, serving
from tests.support.databases import everything_stored

PATH = "/api/notifications/endpoints"
WEBHOOK = {"kind": "webhook", "url": "https://93.184.216.34/hook", "events": ["hello/completed", "transcription.*"]}
MAIL = {"kind": "mail", "addresses": ["ops@example.com", "boss@example.com"], "events": ["*"]}
MAILING = Settings(
    ECLUSE_SECRET_KEY=SEALING.ECLUSE_SECRET_KEY,
    SMTP_HOST="mail.example.com",
    SMTP_PASSWORD=SecretStr("hunter2"),
    MAIL_FROM="ecluse@example.com",
    ECLUSE_PUBLIC_URL="https://ecluse.example.com",
)
FAILED = "UPDATE outcomes SET outcome = 'failed', reason = 'a test'"
ENDED = """
UPDATE runs SET status = 'failed', state = 'failed', ended_at = ecluse_now(), end_cause = 'operator', selected = 1,
    successful = 0, failed = 1, ignored = 0
"""


@pytest.fixture(scope="module")
def mailing(shared_dsn):
    with serving(shared_dsn, settings=MAILING) as client:
        yield client.with_key(new_key(shared_dsn))


@pytest.mark.req("AUT-39", "ENG-88", "G-33")
def test_a_webhook_is_made_shown_without_its_secret_changed_and_deleted(api, dsn, one, query, capsys):
    made = api.post(PATH, WEBHOOK | {"description": "ours"})
    assert made.status == 201
    NewEndpoint.model_validate(made.json)
    number, secret = made.json["id"], made.json.pop("secret")
    assert secret.startswith("whsec_")
    shown = api.get(f"{PATH}/{number}")
    assert shown.json == {name: value for name, value in made.json.items() if name != "secret"}
    assert api.get(PATH).json["endpoints"] == [shown.json]
    changed = api.ask("PATCH", f"{PATH}/{number}", {"events": ["*"], "description": None, "is_active": False})
    assert changed.status == 200
    assert (changed.json["events"], changed.json["description"], changed.json["is_active"]) == (["*"], None, False)
    assert changed.json["url"] == "https://93.184.216.34/…"
    assert opened(dsn, f"webhook:{number}:url") == WEBHOOK["url"]
    rotated = api.post(f"{PATH}/{number}/rotate-secret")
    assert rotated.json["secret"] not in ("", secret)
    assert one("SELECT count(*) FROM secrets") == 3
    for value in (secret, rotated.json["secret"]):
        assert value not in everything_stored(dsn) + capsys.readouterr().out
    gone = api.ask("DELETE", f"{PATH}/{number}")
    assert gone.json == {"id": number, "deleted": True}
    assert (api.get(f"{PATH}/{number}").status, one("SELECT count(*) FROM secrets")) == (404, 0)
    actions = query("SELECT action, subject FROM audit_trail ORDER BY id")
    verbs = ("create", "change", "rotate-secret", "delete")
    assert actions == [(f"endpoint.{verb}", f"endpoint:{number}") for verb in verbs]


HOSTILE = [
    "http://127.0.0.1/",
    "http://localhost/admin",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]/",
    "http://10.0.0.1/",
    "http://192.168.1.1/hook",
    "http://[::ffff:10.0.0.1]/",
    "http://2130706433/",
    "http://user:pass@93.184.216.34/",
    "ftp://93.184.216.34/",
    "file:///etc/passwd",
    "gopher://93.184.216.34/",
    "https://93.184.216.34:22/",
    "//93.184.216.34/",
    "http://[fe80::1]/",
    "not a url",
]


@pytest.mark.parametrize("url", HOSTILE)
def test_a_url_that_leads_inside_is_refused_and_nothing_is_stored(shared_api, shared_dsn, url):
    answer = shared_api.post(PATH, WEBHOOK | {"url": url})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert answer.json["error"]["message"].startswith("url: ")
    with psycopg.connect(shared_dsn) as connection:
        found = connection.execute("SELECT count(*) FROM notification_endpoints WHERE url = %s", (url,)).fetchone()
    assert found == (0,)


def test_an_endpoint_cannot_be_moved_to_where_it_could_not_be_made(shared_api):
    number = shared_api.post(PATH, WEBHOOK).json["id"]
    answer = shared_api.ask("PATCH", f"{PATH}/{number}", {"url": "http://127.0.0.1/", "is_active": False})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    shown = shared_api.get(f"{PATH}/{number}").json
    assert (shown["url"], shown["is_active"]) == ("https://93.184.216.34/…", True)
    other = shared_api.ask("PATCH", f"{PATH}/{number}", {"addresses": ["ops@example.com"]})
    assert (other.status, other.code) == (422, "INVALID_INPUT")


@pytest.mark.parametrize(
    "changed",
    [
        {"events": []},
        {"events": ["hel*"]},
        {"events": ["a b"]},
        {"url": ""},
        {"url": "https://93.184.216.34/" + "x" * 2000},
        {"addresses": ["ops@example.com"]},
        {"kind": "pigeon"},
        {"is_active": "yes"},
        {"description": "x" * 501},
    ],
)
def test_what_is_no_endpoint_is_refused(shared_api, changed):
    answer = shared_api.post(PATH, WEBHOOK | changed)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")


@pytest.mark.parametrize(
    "address", ["ops", "Ops <ops@example.com>", "ops@example.com\nBcc: x@example.com", "a@b,c@d.e"]
)
def test_what_is_no_mail_address_is_refused(mailing, address):
    answer = mailing.post(PATH, MAIL | {"addresses": [address]})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")


@pytest.mark.req("G-33")
def test_of_a_url_with_a_token_in_it_the_token_is_not_shown(shared_api):
    made = shared_api.post(PATH, WEBHOOK | {"url": "https://93.184.216.34/hook?token=hunter2hunter2"})
    assert made.status == 201
    for answer in (made, shared_api.get(f"{PATH}/{made.json['id']}"), shared_api.get(PATH)):
        assert b"hunter2" not in answer.body
    number = shared_api.post(f"{PATH}/{made.json['id']}/test").json["deliveries"][0]
    delivery = shared_api.get(f"/api/notifications/deliveries/{number}")
    assert delivery.status == 200
    assert b"hunter2" not in delivery.body


def opened(dsn: str, name: str) -> str:
    """What is sealed under this name."""

    async def read() -> str:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            return await Secrets(base64.b64decode(SECRET_KEY)).get(connection, "default", name)

    return asyncio.run(read())


def test_addresses_are_listed_and_asked_again(mailing, shared_api):
    path = "/api/notifications/addresses"
    assert (shared_api.post(path, {"address": "a@example.com"}).code) == "MAIL_NOT_CONFIGURED"
    mailing.post(PATH, MAIL | {"addresses": ["New@example.com"]})
    rows = [row for row in mailing.get(f"{path}?state=asked").json["addresses"] if row["address"] == "new@example.com"]
    (row,) = [AddressRow.model_validate(one) for one in rows]
    assert (row.state, row.confirmed_at) == ("asked", None)
    again = mailing.post(path, {"address": "NEW@example.com"})
    assert (again.status, again.code) == (409, "ASKED_ALREADY")
    assert mailing.post(path, {"address": "another@example.com"}).json["state"] == "asked"
    assert mailing.post(path, {"address": "no address"}).status == 422


def test_mail_needs_a_server_to_hand_it_to(shared_api, mailing):
    refused = shared_api.post(PATH, MAIL)
    assert (refused.status, refused.code) == (409, "MAIL_NOT_CONFIGURED")
    assert "SMTP_HOST" in refused.json["error"]["message"]
    made = mailing.post(PATH, MAIL)
    assert (made.status, made.json["secret"], made.json["url"]) == (201, None, None)
    assert made.json["addresses"] == MAIL["addresses"]
    assert b"hunter2" not in made.body
    unsigned = mailing.post(f"{PATH}/{made.json['id']}/rotate-secret")
    assert (unsigned.status, unsigned.code) == (409, "NOT_SIGNED")
    begun = mailing.post(f"{PATH}/{made.json['id']}/test").json["deliveries"]
    assert len(begun) == 2


def test_webhooks_need_a_key_to_seal_their_secrets_with(dsn, one):
    with serving(dsn, settings=Settings(ECLUSE_SECRET_KEY=None)) as client:
        answer = client.with_key(new_key(dsn)).post(PATH, WEBHOOK)
    assert (answer.status, answer.code) == (409, "NO_SECRET_KEY")
    assert "ECLUSE_SECRET_KEY" in answer.json["error"]["message"]
    assert one("SELECT count(*) FROM notification_endpoints") == 0


def test_a_test_message_is_a_delivery_that_can_be_looked_at_and_repeated(api, query, one):
    number = api.post(PATH, WEBHOOK).json["id"]
    (first,) = api.post(f"{PATH}/{number}/test").json["deliveries"]
    shown = api.get(f"/api/notifications/deliveries/{first}")
    DeliveryInFull.model_validate(shown.json)
    assert (shown.json["state"], shown.json["event_type"], shown.json["executions"]) == ("pending", "ping", 0)
    assert shown.json["message"]["data"] == {"endpoint_id": number}
    again = api.post(f"/api/notifications/deliveries/{first}/redeliver")
    assert (again.status, again.code) == (409, "STILL_PENDING")
    assert f"delivery {first}: its next attempt is due now" in again.json["error"]["message"]
    query("UPDATE items SET due_at = '2124-03-02T10:00:00Z'")
    later = api.post(f"/api/notifications/deliveries/{first}/redeliver")
    assert "due at 2124-03-02T10:00:00" in later.json["error"]["message"]
    query(FAILED)
    query(ENDED)
    (second,) = api.post(f"/api/notifications/deliveries/{first}/redeliver").json["deliveries"]
    repeated = api.get(f"/api/notifications/deliveries/{second}").json
    assert repeated["message_id"] == shown.json["message_id"]
    assert repeated["message"] == shown.json["message"]
    keys = query("SELECT event_key FROM runs ORDER BY id")
    assert keys[1] == (f"{keys[0][0]}-retry-1",)
    assert one("SELECT subject FROM audit_trail WHERE action = 'delivery.redeliver'") == f"delivery:{first}"
    for state, expected in (("pending", [second]), ("failed", [first]), ("delivered", [])):
        page = api.get(f"/api/notifications/deliveries?state={state}&endpoint_id={number}")
        DELIVERIES.page.model_validate(page.json)
        assert [row["id"] for row in page.json["deliveries"]] == expected
    assert api.get("/api/notifications/deliveries?endpoint_id=999").json["deliveries"] == []
    assert api.get("/api/notifications/deliveries?state=lost").status == 422


@pytest.mark.req("ENG-88")
def test_a_url_that_is_itself_the_secret_is_never_shown_and_sealed(api, dsn, query, capsys):
    url = "https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/xyzzyXYZZYxyzzyXYZZY"
    made = api.post(PATH, WEBHOOK | {"url": url})
    assert (made.status, made.json["url"]) == (201, "https://hooks.slack.com/…")
    number = made.json["id"]
    (delivery,) = api.post(f"{PATH}/{number}/test").json["deliveries"]
    shown = [
        api.get(path).body
        for path in (
            PATH,
            f"{PATH}/{number}",
            "/api/notifications/deliveries",
            f"/api/notifications/deliveries/{delivery}",
            f"/api/runs/{delivery}",
        )
    ]
    shown.append(api.ask("PATCH", f"{PATH}/{number}", {"description": "x"}).body)
    assert "hooks.slack.com" in str(shown[2])
    assert "xyzzy" not in str(shown) + capsys.readouterr().out
    back = api.ask("PATCH", f"{PATH}/{number}", {"url": made.json["url"]})
    assert (back.status, back.code) == (422, "INVALID_INPUT")
    assert query("SELECT url FROM notification_endpoints") == [("https://hooks.slack.com/…",)]
    assert "xyzzy" not in everything_stored(dsn)
    moved = api.ask("PATCH", f"{PATH}/{number}", {"url": f"{url}2"})
    assert (moved.status, opened(dsn, f"webhook:{number}:url")) == (200, f"{url}2")
    api.ask("DELETE", f"{PATH}/{number}")
    assert query("SELECT name FROM secrets WHERE name LIKE 'webhook%%'") == []


def test_a_tenant_has_so_many_endpoints_and_no_more(api, dsn, query):
    query(
        "INSERT INTO notification_endpoints (tenant_id, kind, url, addresses, events, is_active,"
        " created_at, updated_at)"
        " SELECT 'default', 'webhook', 'https://example.com/', '{}', '{*}', true, ecluse_now(), ecluse_now()"
        " FROM generate_series(1, 49)"
    )
    assert api.post(PATH, WEBHOOK).status == 201
    refused = api.post(PATH, WEBHOOK)
    assert (refused.status, refused.code) == (429, "LIMIT_REACHED")
    add_tenant(dsn, "rival")
    assert api.with_key(new_key(dsn, tenant="rival")).post(PATH, WEBHOOK).status == 201


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        server.got = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.req("AUT-127")
def test_a_whole_server_tells_of_a_run_and_tells_it_again_under_the_same_id(dsn, hook):
    settings = SEALING.model_copy(update={"ECLUSE_ALLOWED_NETWORKS": "127.0.0.0/8"})
    with serving(dsn, FLOW, *load_flows(settings), roles=ROLES, settings=settings) as client:
        api = client.with_key(new_key(dsn))
        url = f"http://127.0.0.1:{hook.server_port}/"
        made = api.post(PATH, {"kind": "webhook", "url": url, "events": ["test/completed"]}).json
        run = api.post("/api/runs", {"flow": "test", "input": {"targets": ["a"]}}).json["run_id"]
        (first,) = eventually(lambda: delivered(api))
        assert first["about_run_id"] == run
        api.post(f"/api/notifications/deliveries/{first['id']}/redeliver")
        eventually(lambda: len(delivered(api)) == 2)
    told = [Webhook(made["secret"]).verify(body, headers) for headers, body in hook.got]
    assert [one["data"]["run_id"] for one in told] == [run, run]
    assert len({headers["webhook-id"] for headers, _ in hook.got}) == 1


def delivered(api):
    return api.get("/api/notifications/deliveries?state=delivered").json["deliveries"]


def eventually(true):
    until = time.monotonic() + 30
    while not (found := true()):
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.05)
    return found


def test_nothing_is_sent_by_hand_to_an_endpoint_that_is_switched_off(api, query):
    number = api.post(PATH, WEBHOOK).json["id"]
    (delivery,) = api.post(f"{PATH}/{number}/test").json["deliveries"]
    query(FAILED)
    query(ENDED)
    api.ask("PATCH", f"{PATH}/{number}", {"is_active": False})
    for path in (f"{PATH}/{number}/test", f"/api/notifications/deliveries/{delivery}/redeliver"):
        answer = api.post(path)
        assert (answer.status, answer.code) == (409, "ENDPOINT_OFF")
    api.ask("DELETE", f"{PATH}/{number}")
    assert api.post(f"/api/notifications/deliveries/{delivery}/redeliver").status == 404
    assert api.get(f"/api/notifications/deliveries/{delivery}").json["endpoint_id"] == number


def test_deliveries_are_runs_that_only_show_when_asked_for(api):
    number = api.post(PATH, WEBHOOK).json["id"]
    (delivery,) = api.post(f"{PATH}/{number}/test").json["deliveries"]
    run = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    assert [row["id"] for row in api.get("/api/runs").json["runs"]] == [run]
    assert [row["id"] for row in api.get("/api/runs?flow=notifications").json["runs"]] == [delivery]
    (waiting,) = api.get(f"/api/runs/{delivery}/waiting").json["waiting"]
    assert waiting["stage"] == "webhook"


@pytest.mark.req("ENG-102")
def test_another_tenants_endpoints_and_deliveries_do_not_exist(api, dsn, make_key):
    add_tenant(dsn, "rival")
    rival = api.with_key(make_key("admin", "rival"))
    number = api.post(PATH, WEBHOOK).json["id"]
    (delivery,) = api.post(f"{PATH}/{number}/test").json["deliveries"]
    assert rival.get(PATH).json["endpoints"] == []
    assert rival.get("/api/notifications/deliveries").json["deliveries"] == []
    for method, path in (
        ("GET", f"{PATH}/{number}"),
        ("PATCH", f"{PATH}/{number}"),
        ("DELETE", f"{PATH}/{number}"),
        ("POST", f"{PATH}/{number}/test"),
        ("POST", f"{PATH}/{number}/rotate-secret"),
        ("GET", f"/api/notifications/deliveries/{delivery}"),
        ("POST", f"/api/notifications/deliveries/{delivery}/redeliver"),
    ):
        answer = rival.ask(method, path, {} if method == "PATCH" else None)
        assert (answer.status, answer.code) == (404, "NOT_FOUND"), (method, path)
    assert api.get(f"{PATH}/{number}").status == 200


def test_the_document_says_which_events_there_are(shared_api):
    document = json.dumps(shared_api.with_key(None).get("/openapi.json").json)
    for said in ("{flow}/completed", "transcription.completed", "whsec_"):
        assert said in document
