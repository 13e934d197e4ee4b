"""Who sees which page: the same as by the API, but the key comes in a cookie, and who has none is asked for it."""

from __future__ import annotations

import http.client
import re
from datetime import timedelta
from http.cookies import SimpleCookie

import psycopg
import pytest

from ecluse.access.permissions import ROLES
from ecluse.app import create_app
from ecluse.bootstrap import Database
from ecluse.web.authentication import COOKIE, HEADERS
from tests.support.api_server import FLOW, SEALING, new_key
from tests.support.job_world import JobWorld
from tests.support.pages import FORMS, LivePage, Reader, page_routes, text
from tests.support.waits import wait_for

# Without a key: what leads to the log-in, and what every page is made with.
PUBLIC = {
    "/",
    "/ui",
    "/ui/",
    "/ui/login",
    "/ui/logout",
    "/ui/confirm",
    "/ui/static/{version}/{name:path}",
    "/ui/{rest:path}",
}
PUBLIC |= {"/docs", "/docs/errors"}  # as the OpenAPI document
UNKNOWN = ("nobody", "garbage", "expired", "revoked")
SCHEDULE = """
INSERT INTO schedules (tenant_id, flow, name, zone_rules, handled_until, created_at, updated_at)
VALUES ('default', 'test', 'rights', '', ecluse_now(), ecluse_now(), ecluse_now()) RETURNING id
"""
RULE_RUN = """
WITH project AS (
    INSERT INTO pricing_projects (tenant_id, name, connector, base_url, currency, created_by, created_at, updated_by,
                                  updated_at)
    VALUES ('default', 'rights', 'shopify', 'https://shop.example', 'EUR', 'a test', ecluse_now(), 'a test',
            ecluse_now()) RETURNING id)
INSERT INTO rule_runs (tenant_id, project_id, rule, currency, status, actor, correlation_id, source, created_at)
SELECT 'default', id, '{}', 'EUR', 'PREVIEW', 'a test', '', 'a test', ecluse_now() FROM project RETURNING id
"""
REQUEST = """
WITH company AS (
    INSERT INTO companies (siren, enrichment_status, core_identity_present, sources_success_count, legal_name,
                           created_at, updated_at, status_at, job_ended_at)
    VALUES ('552049447', 'SUCCESS', true, 3, 'rights', ecluse_now(), ecluse_now(), ecluse_now(), ecluse_now())
    ON CONFLICT DO NOTHING)
INSERT INTO requests (tenant_id, company_siren, correlation_id, created_by, created_at, updated_at)
VALUES ('default', '552049447', '', 'a test', ecluse_now(), ecluse_now()) RETURNING id
"""


@pytest.fixture(scope="module")
def callers(pages_dsn):
    with psycopg.connect(pages_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO tenants (id, name, created_at) VALUES ('closed', 'closed', ecluse_now())")
        made = {role: new_key(pages_dsn, role) for role in ROLES} | {
            "nobody": None,
            "garbage": "ecl_" + "x" * 43,
            "expired": new_key(pages_dsn, "admin", expires_in=timedelta(microseconds=1)),
            "revoked": new_key(pages_dsn, "admin"),
            "disabled tenant": new_key(pages_dsn, "admin", "closed"),
            "limited scope": new_key(pages_dsn, "admin"),
            "other tenant's admin": new_key(pages_dsn, "admin", "rival"),
        }
        hint = "UPDATE api_keys SET {} WHERE hint = %s"
        connection.execute(hint.format("revoked_at = ecluse_now()"), (made["revoked"][:8],))
        connection.execute(hint.format("scope = 'SELF', crm_user_id = '7'"), (made["limited scope"][:8],))
        connection.execute("UPDATE tenants SET disabled_at = ecluse_now() WHERE id = 'closed'")
    return made


def expected(who, path):
    if who in UNKNOWN:
        return 401 if path.endswith("/live") else 303
    if who in ("disabled tenant", "limited scope"):
        return 403
    return 404 if who == "other tenant's admin" and "{" in path else 200


@pytest.mark.req("G-33", "ENG-106")
def test_every_page_and_every_stream_answers_every_caller_as_its_permission_says(
    reader, callers, fill, ended_run, audited, tmp_path
):
    run_id = ended_run(("t", "successful", None, None))
    ids = {"run_id": str(run_id), "schedule_id": str(fill(SCHEDULE)), "target": "t", "audit_id": str(audited("rights"))}
    ids |= {"rule_run_id": str(fill(RULE_RUN)), "request_id": str(fill(REQUEST))}
    jobs = JobWorld(reader.client.with_key(callers["operator"]), tmp_path)
    ids["job_schedule_id"] = jobs.schedule(jobs.host())
    ids["job_id"] = jobs.run(ids["job_schedule_id"])
    guarded = [
        route
        for route in page_routes(reader.client.app)
        if route.path not in PUBLIC and not route.path.startswith(FORMS)
    ]
    assert {route.path for route in guarded} >= {"/ui/runs", "/ui/runs/{run_id}", "/ui/schedules", "/ui/runs/live"}
    wrong = []
    for route in guarded:
        assert (route.openapi_extra or {})["x-permission"] in ROLES["viewer"], "a page shows, and changes nothing"
        assert route.methods == {"GET"}
        path = re.sub(r"\{(\w+)(?::path)?\}", lambda name: ids[name[1]], route.path)
        for who, key in callers.items():
            opened = LivePage(Reader(reader.client, key), path) if path.endswith("/live") else None
            answer = opened or reader.with_key(key).get(path)
            if answer.status != expected(who, route.path):
                wrong.append((path, who, answer.status))
            if answer.status == 303:
                assert answer.headers["Location"] == f"/ui/login?next={path}"
            if opened:
                opened.close()
    assert wrong == []


def test_a_page_without_a_permission_is_public_by_name_and_a_worker_has_no_pages(reader, pages_dsn):
    undeclared = {route.path for route in page_routes(reader.client.app) if not (route.openapi_extra or {})}
    assert undeclared == PUBLIC
    app = create_app(SEALING, Database(pages_dsn, None), [FLOW], frozenset({"worker"}))
    assert page_routes(app) == []


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/"])
def test_the_short_addresses_of_the_pages_lead_to_the_runs(reader, path):
    answer = reader.get(path)
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/runs")


@pytest.mark.parametrize(
    "path", ["/", "/ui", "/ui/runs", "/ui/login", "/ui/nowhere", "/ui/runs/x", "/ui/runs?offset=x"]
)
def test_every_answer_forbids_what_is_inline_or_from_elsewhere(reader, path):
    answer = reader.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    body = answer.body.decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", body)
    if answer.status != 303:
        assert answer.headers["Cache-Control"] == "no-store"


def cookie_of(answer):
    return SimpleCookie(answer.headers["Set-Cookie"])[COOKIE]


def test_a_key_becomes_a_cookie_that_no_script_reads_and_no_other_site_sends(reader):
    answer = reader.with_key(None).post("/ui/login", f"key=%20{reader.key}%20&next=/ui/runs/7%3Flog%3D20")
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/runs/7?log=20")
    cookie = cookie_of(answer)
    assert (cookie.value, cookie["path"], cookie["httponly"], cookie["samesite"]) == (reader.key, "/ui", True, "strict")
    assert cookie["secure"] == ""
    assert cookie["max-age"] == cookie["expires"] == "", "it is gone with the browser"
    by_tls = reader.with_key(None).post("/ui/login", f"key={reader.key}", X_Forwarded_Proto="https")
    assert cookie_of(by_tls)["secure"] is True


@pytest.mark.parametrize("who", [*UNKNOWN, "disabled tenant", "limited scope"])
def test_a_key_that_is_no_good_gets_the_form_again_and_no_cookie(reader, callers, who):
    answer = reader.with_key(None).post("/ui/login", f"key={callers[who] or ''}&next=/ui/schedules")
    assert answer.status == (401 if who in UNKNOWN else 403)
    assert "Set-Cookie" not in answer.headers
    said = {"disabled tenant": "is disabled", "limited scope": "this key has scope SELF"}.get(who, "not known here")
    assert said in text(answer)
    assert 'name="next" value="/ui/schedules"' in answer.body.decode()
    assert (callers[who] or "ecl_") not in answer.body.decode()


@pytest.mark.parametrize(
    "wanted",
    ["", "https://example.com/", "//example.com", "/api/me", "/ui/login?next=/ui/login", "javascript:alert(1)"],
)
def test_the_log_in_leads_to_a_page_of_ours_or_to_the_runs(reader, wanted):
    answer = reader.with_key(None).post("/ui/login", f"key={reader.key}&next={wanted}")
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/runs")


def test_who_is_logged_in_already_need_not_do_it_again(reader):
    answer = reader.get("/ui/login?next=/ui/schedules")
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/schedules")
    assert reader.with_key(None).get("/ui/login").status == 200


def test_a_form_that_another_site_sends_is_refused(reader):
    for path in ("/ui/login", "/ui/logout"):
        for headers in (
            {"Sec_Fetch_Site": "cross-site"},
            {"Origin": "https://evil.example"},
            {"Origin": "http://["},
            {"Origin": ""},
            {"Sec_Fetch_Site": "same-origin", "Origin": "https://evil.example"},
        ):
            answer = reader.post(path, f"key={reader.key}", **headers)
            assert answer.status == 403
            assert "Set-Cookie" not in answer.headers


def test_logging_out_takes_the_cookie_away(reader):
    answer = reader.post("/ui/logout", Sec_Fetch_Site="same-origin")
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/login")
    assert (cookie_of(answer).value, cookie_of(answer)["max-age"], cookie_of(answer)["path"]) == ("", "0", "/ui")


def test_the_cookie_is_no_key_to_the_api_and_the_header_none_to_the_pages(reader):
    assert reader.get("/api/runs").status == 401
    assert reader.client.with_key(reader.key).get("/ui/runs").status == 303


@pytest.mark.parametrize("lost", ["revoked_at", "expires_at"])
def test_a_key_that_is_revoked_or_expires_is_out_and_its_stream_says_so_and_ends(
    reader, pages_dsn, fill, follow, paced, lost
):
    paced(reader.client, quiet=0.1)
    mine = reader.with_key(new_key(pages_dsn))
    page = follow(mine, "/ui/schedules/live")
    assert page.next() is not None
    fill(f"UPDATE api_keys SET {lost} = ecluse_now() WHERE hint = %s", mine.key[:8])  # noqa: S608
    wait_for(lambda: mine.get("/ui/schedules").status == 303)
    while (said := page.next())[0] != "end":
        last = said
    assert "no longer valid" in last[1]
    assert page.next() is None


def test_the_page_of_a_key_that_is_narrowed_says_so_and_ends(reader, pages_dsn, fill, follow, paced):
    paced(reader.client, quiet=0.1)
    mine = reader.with_key(new_key(pages_dsn))
    page = follow(mine, "/ui/schedules/live")
    assert page.next() is not None
    fill("UPDATE api_keys SET scope = 'SELF', crm_user_id = '7' WHERE hint = %s", mine.key[:8])
    while (said := page.next())[0] != "end":
        last = said
    assert "this key has scope SELF" in last[1]
    assert page.next() is None


def test_log_ins_and_log_outs_are_in_the_audit_trail(reader, pages_dsn, fill):
    mine = reader.with_key(new_key(pages_dsn))
    key_id = reader.client.with_key(mine.key).get("/api/me").json["key_id"]
    reader.with_key(None).post("/ui/login", f"key={mine.key}")
    reader.with_key(None).post("/ui/login", "key=ecl_wrong")
    mine.post("/ui/logout")
    reader.with_key(None).post("/ui/logout")
    done = "SELECT array_agg(action ORDER BY id) FROM audit_trail WHERE actor = %s AND subject = 'address:127.0.0.1'"
    assert fill(done, f"key:{key_id}") == ["page.log-in", "page.log-out"]
    tried = "SELECT sum(times) FROM audit_trail WHERE action = 'credentials.invalid' AND actor = 'address:127.0.0.1'"
    wait_for(lambda: fill(tried))


def test_behind_a_trusted_proxy_the_trail_has_the_address_that_it_names(reader, pages_dsn, fill):
    for address in ("127.0.0.1", "127.0.0.2"):  # the second one is no proxy
        mine = new_key(pages_dsn)
        form, head = f"key={mine}".encode(), {"Content-Type": "application/x-www-form-urlencoded"}
        connection = http.client.HTTPConnection("127.0.0.1", reader.client.port, source_address=(address, 0))
        connection.request("POST", "/ui/login", form, head | {"X-Forwarded-For": "198.51.100.7"})
        assert connection.getresponse().status == 303
        connection.close()
    logged_in = "SELECT array_agg(subject ORDER BY id DESC) FROM audit_trail WHERE action = 'page.log-in'"
    assert fill(logged_in)[:2] == ["address:127.0.0.2", "address:198.51.100.7"]
