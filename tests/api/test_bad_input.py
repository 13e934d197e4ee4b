"""Whatever is sent, the answer is a clear refusal in the one shape of errors, and never a 500."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time

import psycopg
import pytest
from structlog.testing import capture_logs
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ecluse.access.door import Guarded
from tests.support.api_server import new_key
from tests.support.loop_probe import probing
from tests.support.metrics import scrape
from tests.support.waits import wait_for

START = {"flow": "test"}
DEEP = (100, 200, 300, 900)
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
BEGINNING = "/api/fiches?q=a%00b"  # the beginning of an id, which no id has


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"", 422, "INVALID_INPUT"),
        (b"nonsense", 400, "NOT_JSON"),
        (b'{"flow": "test"} trailing', 400, "NOT_JSON"),
        (b'{"flow": "test", "flow": "test"}', 400, "NOT_JSON"),
        (b"\xff\xfe{}", 400, "NOT_JSON"),
        (b'\xef\xbb\xbf{"flow": "test"}', 400, "NOT_JSON"),
        (json.dumps(START).encode("utf-16"), 400, "NOT_JSON"),
        (b'{"flow": "test", "input": {"payload": NaN}}', 400, "NOT_JSON"),
        (b'{"flow": "test", "input": {"payload": 1e400}}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": {"payload": ' + b"9" * 5_000 + b"}}", 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "NOT_JSON"),
        *(
            (b'{"flow": "test", "input": {"payload": ' + b"[" * n + b"]" * n + b"}}", 422, "INVALID_INPUT")
            for n in DEEP
        ),
        (b"[]", 422, "INVALID_INPUT"),
        (b"null", 422, "INVALID_INPUT"),
        (b"{}", 422, "INVALID_INPUT"),
        (b'{"flow": 7}', 422, "INVALID_INPUT"),
        (b'{"flow": "nobody"}', 422, "INVALID_INPUT"),
        (b'{"flow": "te\\u0000st"}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "key": "\\u0000"}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "key": "\\ud800"}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "key": ""}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": {"targets": ["a\\u0000"]}}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": {"payload": {"\\udfff": 1}}}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": {"targets": "a"}}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "input": [1]}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "tenant_id": "rival"}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "status": "completed"}', 422, "INVALID_INPUT"),
        (b'{"flow": "test", "key": "' + b"k" * 401 + b'"}', 422, "INVALID_INPUT"),
        (b'{"flow": "' + b"x" * 1_000_000 + b'"}', 413, "BODY_TOO_LARGE"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
@pytest.mark.req("G-34")
def test_a_body_that_cannot_be_used_is_refused(shared_api, raw, status, code):
    answer = shared_api.post("/api/runs", raw=raw)
    assert (answer.status, answer.code) == (status, code)


def test_what_is_stored_is_shown_however_deeply_it_is_nested(shared_api, shared_dsn):
    run_id = shared_api.post("/api/runs", {"flow": "test", "key": "deep"}).json["run_id"]
    deep = f'{{"payload": {"[" * 300}{"]" * 300}}}'
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        connection.execute("UPDATE runs SET input = %s::jsonb WHERE id = %s", (deep, run_id))
    answer = shared_api.get(f"/api/runs/{run_id}")
    assert (answer.status, answer.json["input"]) == (200, json.loads(deep))
    assert "T" in answer.json["created_at"]


def test_of_many_mistakes_some_are_named(shared_api):
    answer = shared_api.post("/api/runs", {"flow": "test"} | {f"x{n}": n for n in range(1000)})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert len(answer.json["error"]["details"]) == 20


@pytest.mark.parametrize(
    ("given", "where", "said"),
    [
        (
            {"notify_emails": ["me"]},
            "body.notify_emails.0",
            "not a mail address; it must look like someone@example.com",
        ),
        ({"schedule_type": "DAILY"}, "body", "schedule_type DAILY needs time_of_day"),
        ({"max_retries": 11}, "body.max_retries", "This should be less than or equal to 10"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_is_said_and_nothing_before_it(shared_api, given, where, said):
    schedule = {"name": "x", "schedule_type": "MANUAL", "fiche_selection": {"mode": "manual"}, **given}
    answer = shared_api.post("/api/automation/schedules", schedule)
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert answer.json["error"]["details"] == [{"where": where, "problem": said}]
    assert answer.json["error"]["message"] == f"{where}: {said}"


@pytest.mark.parametrize(
    ("path", "given", "where", "said"),
    [
        ("trigger", {"scheduleId": "x"}, "body.scheduleId", "This should match"),
        ("trigger", {"schedule_id": "x"}, "body.schedule_id", "This should match"),
        ("trigger", {"scheduleId": "1", "overrideFicheSelection": {"ficheIds": [7]}},
         "body.overrideFicheSelection.ficheIds", "must be a list of fiche ids"),
        ("trigger", {"scheduleId": "1", "override_fiche_selection": {"maxFiches": 0}},
         "body.override_fiche_selection.maxFiches", "This should be"),
        ("trigger", {"scheduleId": "1", "overrideFicheSelection": {"onlyUnaudited": None}},
         "body.overrideFicheSelection", "null says nothing about onlyUnaudited"),
        ("schedules", {"name": "x", "scheduleType": "DAILY", "ficheSelection": {"mode": "manual"}},
         "body", "scheduleType DAILY needs timeOfDay"),
        ("schedules", {"name": "x", "schedule_type": "DAILY", "fiche_selection": {"mode": "manual"}},
         "body", "schedule_type DAILY needs time_of_day"),
        ("schedules", {"name": "x", "scheduleType": "MANUAL"}, "body.ficheSelection", "select fiches by"),
    ],
)  # fmt: skip
def test_a_field_is_named_as_it_was_sent(shared_api, path, given, where, said):
    (detail,) = shared_api.post(f"/api/automation/{path}", given).json["error"]["details"]
    assert detail["where"] == where
    assert detail["problem"].startswith(said)


def test_a_field_is_named_as_it_was_sent_also_where_the_database_had_to_be_asked(shared_api):
    known = {"name": "named as sent", "scheduleType": "MANUAL", "ficheSelection": {"mode": "manual"}}
    refused = shared_api.post("/api/automation/schedules", {**known, "webhookUrl": "http://127.0.0.1/"})
    assert refused.json["error"]["message"].startswith("webhookUrl: ")
    refused = shared_api.post("/api/automation/schedules", {**known, "specificAuditConfigs": ["987654321"]})
    assert refused.json["error"]["message"].startswith("specificAuditConfigs: there is no audit config")


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_of_another_kind_is_refused(shared_api, kind):
    answer = shared_api.post("/api/runs", raw=b'{"flow": "test"}', headers={"Content-Type": kind})
    assert (answer.status, answer.code) == (415, "UNSUPPORTED_MEDIA_TYPE")


def test_a_large_body_of_unknown_length_is_refused_while_it_comes(shared_api):
    chunks = (b" " * 100_000 for _ in range(50))
    began = time.monotonic()
    answer = shared_api.post("/api/runs", raw=chunks)
    assert (answer.status, answer.code) == (413, "BODY_TOO_LARGE")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "run_id",
    ["0", "-1", "007", "1_0", "1.0", "1e400", "NaN", str(2**63), str(2**64), "9" * 500, "x", "%00", "%27", "1%20", "٣"],
)
@pytest.mark.parametrize("path", ["", "/items", "/log", "/waiting", "/outcomes.csv"])
@pytest.mark.req("ENG-103")
def test_an_id_that_cannot_be_one_is_not_found(shared_api, run_id, path):
    answer = shared_api.get(f"/api/runs/{run_id if run_id.isascii() else '%D9%A3'}{path}")
    assert (answer.status, answer.code) == (404, "NOT_FOUND")


def test_the_largest_id_there_can_be_is_not_found_either(shared_api):
    answer = shared_api.get(f"/api/runs/{2**63 - 1}")
    assert (answer.status, answer.code) == (404, "NOT_FOUND")
    ending = shared_api.post(f"/api/runs/{2**63}/end", {"reason": "x"})
    assert (ending.status, ending.code) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    "query",
    [
        *(f"limit={value}" for value in ("0", "-1", "201", "abc", "1e9", "1_0", "05", "1.0", "", "9" * 30, "%00")),
        *(f"offset={value}" for value in ("-1", "1000001", "x", str(2**63))),
        "flow=%00",
        "state=" + "x" * 201,
    ],
)
@pytest.mark.req("ENG-104", "G-34")
def test_a_page_or_filter_that_cannot_be_used_is_refused(shared_api, query):
    answer = shared_api.get(f"/api/runs?{query}")
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert query.split("=")[0] in answer.json["error"]["details"][0]["where"]


@pytest.mark.req("G-34")
def test_a_query_parameter_that_nobody_reads_is_refused_and_the_right_one_named(shared_api):
    answer = shared_api.get("/api/runs?status=failed&limit=1&nonsense=1&nonsense=2")
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    known = "there is no such query parameter here (known: cursor, flow, limit, offset, schedule_id, "
    known += "since, state, target, until)"
    assert answer.json["error"]["details"] == [
        {"where": "query.status", "problem": f"{known}; did you mean state?"},
        {"where": "query.nonsense", "problem": known},
    ]
    assert shared_api.with_key(None).get("/api/runs?status=failed").status == 401, "strangers learn nothing"


def test_every_route_of_the_api_refuses_what_it_does_not_know(shared_api, shared_dsn):
    admin, refused, let = shared_api.with_key(new_key(shared_dsn, "admin")), set(), set()
    for route in shared_api.app.routes:
        path = getattr(route, "path", "")
        if path.startswith("/api/") and not path.startswith("/api/agent/"):  # which are for agents alone
            for method in route.methods - {"HEAD"}:
                answer = admin.ask(method, f"{re.sub(r'{[^}]*}', '1', path)}?nobody_reads_this=1")
                told = answer.status == 422 and "query.nobody_reads_this" in answer.json["error"]["message"]
                (refused if told else let).add(f"{method} {path}")
    assert let == set()
    assert "GET /api/events" in refused
    assert len(refused) > 40


@pytest.mark.parametrize("reason", [None, "", "   ", 7, "x" * 2001, "\x00"])
def test_a_run_is_not_ended_without_a_reason_that_can_be_kept(shared_api, reason):
    run_id = shared_api.post("/api/runs", {"flow": "test", "key": "reasons"}).json["run_id"]
    answer = shared_api.post(f"/api/runs/{run_id}/end", {"reason": reason})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert shared_api.get(f"/api/runs/{run_id}").json["state"] == "queued"


@pytest.mark.req("G-34")
def test_texts_come_back_as_they_were_sent(shared_api):
    texts = ["\u202egnp.exe", "e\u0301", "\u00e9", "\U0001f600", "a\u200bb", "\x1b[31m", "a\r\nb", "\\u0000", "'; --"]
    run_id = shared_api.post("/api/runs", {"flow": "test", "input": {"targets": texts}}).json["run_id"]
    assert shared_api.get(f"/api/runs/{run_id}").json["input"]["targets"] == texts


@pytest.mark.req("ENG-86", "G-34")
def test_a_request_id_is_taken_over_or_made_and_stands_on_every_answer(shared_api):
    replica = shared_api.app.state.kit.replica
    for path in ("/api/me", "/healthz", "/openapi.json", "/nowhere", "/api/runs/0"):
        for client in (shared_api, shared_api.with_key(None)):
            taken = client.get(path, headers={"X-Request-Id": "Root=1-67891233:abc/def+="})
            assert taken.headers["X-Request-Id"] == "Root=1-67891233:abc/def+="
            assert taken.headers["X-Replica"] == replica
    for unfit in ("", "a b", "x" * 129, "\u00e9", '"quoted"', "<script>"):
        made = shared_api.get("/api/me", headers={"X-Request-Id": unfit}).headers["X-Request-Id"]
        assert made != unfit
        assert len(made) == 32


def test_what_is_not_http_leaves_the_server_unharmed(shared_api):
    connection = http.client.HTTPConnection("127.0.0.1", shared_api.port, timeout=10)
    connection.connect()
    connection.sock.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    connection.sock.recv(1000)
    connection.close()
    assert shared_api.get("/api/me").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/transcriptions/7/recordings/%00",
        "/api/lanes/%00",
        "/api/targets/a%00b",
        "/api/tenants/%00/disable",
        "/apps/%00/channels",
        "/ui/runs/%00",
        "/static/%00/x",
        "/%00",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_nul_byte_in_a_path_names_nothing(shared_api, method, path):
    answer = shared_api.ask(method, path)
    assert (answer.status, answer.code) == (404, "NOT_FOUND")


def test_a_nul_byte_in_any_parameter_of_any_route_is_the_callers_mistake(shared_api, shared_dsn):
    """In turn in each parameter of the path, and in each of the query that takes text."""
    admin, asked, unexpected = shared_api.with_key(new_key(shared_dsn, "admin")), 0, []
    for route in (one for one in shared_api.app.routes if isinstance(one, Guarded)):
        (method,) = route.methods
        names = PARAMETER.findall(route.path)
        paths = [PARAMETER.sub(lambda at, nul=nul: "%00" if at[1] == nul else "1", route.path) for nul in names]
        if method == "GET":
            plain = PARAMETER.sub("1", route.path)
            paths += [f"{plain}?{one.alias}=a%00b" for one in route.dependant.query_params]
        for path in paths:
            answer = admin.ask(method, path, None if method == "GET" else {})
            asked += 1
            if not 400 <= answer.status < 500 and path != BEGINNING:
                unexpected.append((method, path, answer.status))
    assert unexpected == []
    assert asked > 300


def test_a_nul_byte_in_the_address_of_a_socket_is_refused(shared_api):
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{shared_api.port}/app/%00?protocol=7")
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("charset", ["utf-7", "unicode_escape", "undefined", "utf-8"])
@pytest.mark.parametrize("path", ["/ui/login", "/ui/confirm"])
def test_a_form_that_is_not_urlencoded_is_refused(shared_api, path, charset):
    parts = f'--x\r\nContent-Disposition: form-data; name="key"; charset={charset}\r\n\r\n+2AA-\\ud800\r\n--x--\r\n'
    sent = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
    answer = shared_api.ask("POST", path, raw=parts.encode(), headers=sent)
    assert answer.status == 415
    assert b"application/x-www-form-urlencoded" in answer.body


def test_a_client_that_hangs_up_is_no_error(api):
    head = b"POST /ui/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    gone = ("ecluse_http_requests_total", ("POST", "/ui/login", "499"))
    with capture_logs() as logs:
        with socket.create_connection(("127.0.0.1", api.port)) as one:
            one.sendall(head + b"Content-Length: 100\r\n\r\nkey=ecl_")
        wait_for(lambda: scrape(api).get(gone[0], {}).get(gone[1]))
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []


ROWS = """
INSERT INTO outcomes (run_id, target, reason) SELECT 1, n::text, repeat('x', 10) FROM generate_series(1, 150000) n
"""
ENTRIES = """
INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)
SELECT 'default', now(), 'cli:ann', 'x.y', 'n:' || n, repeat('x', 1000) FROM generate_series(1, 30000) n
"""


@pytest.mark.parametrize("path", ["/api/audit-trail/export", "/api/runs/1/outcomes.csv"])
def test_a_client_that_hangs_up_during_an_export_breaks_no_connection(api, dsn, query, caplog, path):
    api.post("/api/runs", {"flow": "test"})
    query(ROWS)
    query(ENTRIES)
    head = f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {new_key(dsn, 'admin')}\r\n\r\n"
    for pages in range(12):  # it hangs up at different places: while a page is sent, and while the next one is read
        with socket.create_connection(("127.0.0.1", api.port)) as one:
            one.sendall(head.encode())
            left = 1_000 + pages * 120_000
            while left > 0 and (got := one.recv(min(left, 65_536))):
                left -= len(got)
    active = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
    wait_for(lambda: query(active) == [(1,)])
    assert api.get("/api/me").status == 200
    assert [line.getMessage() for line in caplog.records if line.name.startswith("psycopg")] == []


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/api/x", 404), ("PUT", "/api/runs?limit=1", 405)])
def test_an_unknown_route_is_named(shared_api, method, path, status):
    answer = shared_api.ask(method, path)
    assert answer.status == status
    assert answer.json["error"]["message"] == f"There is no route {method} {path.partition('?')[0]}."


@pytest.mark.alone
def test_thousands_of_unknown_query_parameters_do_not_hold_the_loop(shared_api):
    query = "&".join(f"name{n}=1" for n in range(5_000))
    with probing(shared_api) as held:
        answer = shared_api.get(f"/api/runs?{query}")
    assert (answer.status, len(answer.json["error"]["details"])) == (422, 20)
    print(f"the loop was held for {held.longest * 1000:.0f} ms")
    assert held.longest < 0.035
