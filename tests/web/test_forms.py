"""Forms of operations: what they show, what they refuse, and that each does what its operation does, once."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import pytest

from ecluse.web.actions import ACTIONS, DONE, parameters
from ecluse.web.forms import EMPTY
from tests.support.api_server import new_key
from tests.support.pages import text

STEP = {"steps.0.name": "Consent", "steps.0.criteria": "The customer agrees."}
NEW = {"name": "Sales", "description": "As the law asks.", **STEP, "is_active": "true"}
TRAIL = "SELECT string_agg(action || ' ' || subject, ', ' ORDER BY id) FROM audit_trail WHERE subject LIKE %s"
COUNT = "SELECT count(*) FROM audit_configs WHERE name = %s AND deleted_at IS NULL"


@pytest.fixture(scope="module")
def operator(reader, pages_dsn):
    return reader.with_key(new_key(pages_dsn, "operator"))


def hidden(answer) -> dict[str, str]:
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.body.decode()))


def filled(who, path: str, **given: str) -> str:
    """The form as a browser sends it: what it shows, and what is entered."""
    answer = who.get(path)
    assert answer.status == 200, text(answer)
    body = answer.body.decode()
    shown = dict(re.findall(r'<input type="(?:text|number)" id="[^"]+" name="([^"]+)" value="([^"]*)"', body))
    shown |= {name: said.strip() for name, said in re.findall(r'name="([\w.]+)" rows=[^>]*>\n([^<]*)<', body)}
    shown |= dict.fromkeys(re.findall(r'name="([\w.]+)" value="true" checked', body), "true")
    return urlencode({**hidden(answer), **shown, **{name.replace("__", "."): value for name, value in given.items()}})


@pytest.fixture
def config(operator, fill):
    """The id of a new config of this name."""

    def make(name: str) -> int:
        answer = operator.post(
            "/ui/do/create_config", filled(operator, "/ui/do/create_config", **{**NEW, "name": name})
        )
        assert answer.status == 303, text(answer)
        return fill("SELECT id FROM audit_configs WHERE name = %s", name)

    return make


def test_a_form_is_made_from_what_the_operation_declares(operator):
    body = operator.get("/ui/do/create_config?back=/ui/audits").body.decode()
    assert re.search(r'<input type="text" id="field-name" name="name" value=""[^>]*maxlength="200" required', body)
    assert re.search(r'<textarea id="field-description" name="description"', body)
    assert re.search(r'<input type="checkbox" id="field-is_active" name="is_active" value="true" checked', body)
    assert re.search(r'<input type="number" id="field-steps-0-max_score"[^>]*min="1" max="100" placeholder="10"', body)
    assert "Used by every automation schedule with automatic audits." in body
    assert "The audit config is created as version 1." in body
    assert 'name="_back" value="/ui/audits"' in body


def test_what_is_done_is_done_by_the_operation_and_said_once(operator, fill, config):
    answer = operator.post(
        "/ui/do/create_config", filled(operator, "/ui/do/create_config?back=/ui/audits?status=failed", **NEW)
    )
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/audits?status=failed")
    made = fill("SELECT id FROM audit_configs WHERE name = 'Sales'")
    assert fill(TRAIL, f"audit_config:{made}") == f"audit_config.create audit_config:{made}"
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"{DONE}=")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    kept = cookie.partition(";")[0]
    shown = operator.client.get("/ui/audits", headers={"Cookie": f"{operator.headers['Cookie']}; {kept}"})
    assert "The config was created." in text(shown)
    assert f'{DONE}=""' in shown.headers["Set-Cookie"]
    assert "Max-Age=0" in shown.headers["Set-Cookie"]


@pytest.mark.parametrize(
    "kept",
    ["did=nothing", "did=pause_lane&name=%3Cscript%3Ealert(1)%3C/script%3E", "did=end_run&run=//evil", "%00", "x"],
)
def test_a_cookie_that_somebody_else_made_says_nothing_harmful(operator, kept):
    shown = operator.client.get("/ui/audits", headers={"Cookie": f'{operator.headers["Cookie"]}; {DONE}="{kept}"'})
    assert shown.status == 200
    assert "<script>" not in shown.body.decode()
    assert "evil" not in shown.body.decode()


def test_a_double_submit_acts_once_and_both_lead_to_the_same_page(operator, fill):
    form = filled(operator, "/ui/do/create_config", **{**NEW, "name": "Twice"})
    answers = [operator.post("/ui/do/create_config", form) for _ in range(3)]
    assert {(one.status, one.headers["Location"]) for one in answers} == {(303, "/ui/audits")}
    assert fill(COUNT, "Twice") == 1


def test_a_double_submit_of_what_is_gone_then_is_answered_as_the_first(operator, fill, config):
    made = config("Deleted twice")
    form = filled(operator, f"/ui/do/delete_config/{made}")
    assert [operator.post(f"/ui/do/delete_config/{made}", form).status for _ in range(2)] == [303, 303]
    assert fill(TRAIL, f"audit_config:{made}").count("audit_config.delete") == 1


def test_forms_submitted_at_once_act_once(operator, fill):
    form = filled(operator, "/ui/do/create_config", **{**NEW, "name": "At once"})
    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(lambda _: operator.post("/ui/do/create_config", form), range(5)))
    assert {one.status for one in answers} == {303}
    assert fill(COUNT, "At once") == 1


def test_a_form_without_its_token_is_refused(operator, fill):
    answer = operator.post("/ui/do/create_config", urlencode({**NEW, "name": "No token"}))
    assert answer.status == 422
    assert "open it again" in text(answer)
    assert fill(COUNT, "No token") == 0


def test_more_rows_do_not_hide_that_a_record_has_changed(operator, fill, config):
    made = config("Changed below")
    form = filled(operator, f"/ui/do/change_config/{made}", _more="steps")
    fill("UPDATE audit_configs SET description = 'theirs' WHERE id = %s", made)
    again = operator.post(f"/ui/do/change_config/{made}", form)
    assert again.status == 200
    mine = {**hidden(again), **STEP, "name": "Changed below", "description": "mine"}
    assert operator.post(f"/ui/do/change_config/{made}", urlencode(mine)).status == 409
    assert fill("SELECT description FROM audit_configs WHERE id = %s", made) == "theirs"


def test_a_double_submit_of_an_edit_is_no_stale_form(operator, fill, config):
    made = config("Edited twice")
    form = filled(operator, f"/ui/do/change_config/{made}", description="New words.")
    assert [operator.post(f"/ui/do/change_config/{made}", form).status for _ in range(2)] == [303, 303]
    assert fill("SELECT description || version FROM audit_configs WHERE id = %s", made) == "New words.2"
    assert fill(TRAIL, f"audit_config:{made}").count("audit_config.update") == 1


def test_an_input_that_is_refused_is_shown_again_with_the_message_at_its_field(operator, fill):
    wrong = {"name": "Wrong", "steps__0__weight": "-1", "description": "kept <b>words</b>", **STEP}
    answer = operator.post("/ui/do/create_config", filled(operator, "/ui/do/create_config", **wrong))
    assert answer.status == 422
    body = answer.body.decode()
    assert 'name="steps.0.weight" value="-1"' in body
    assert re.search(r'id="field-steps-0-weight-hint" class="hint">\s*<b class="bad">This should be greater', body)
    assert 'name="name" value="Wrong"' in body
    assert "kept &lt;b&gt;words&lt;/b&gt;" in body
    assert fill(COUNT, "Wrong") == 0
    again = {f"steps.{n}.{field}": "Same" for n in (0, 1) for field in ("name", "criteria")}
    answer = operator.post("/ui/do/create_config", urlencode({**hidden(answer), "name": "Wrong", **again}))
    assert answer.status == 422
    assert "each step has a name of its own; twice: Same" in text(answer)


def test_more_rows_are_shown_without_doing_anything(operator, fill):
    form = filled(operator, "/ui/do/create_config", **{**NEW, "name": "Long"}, _more="steps")
    answer = operator.post("/ui/do/create_config", form)
    assert answer.status == 200
    body = answer.body.decode()
    assert body.count("<legend>") == 1 + 4
    assert 'value="Long"' in body
    assert fill(COUNT, "Long") == 0


def test_a_stale_form_is_refused_and_shows_what_is_there_now(operator, fill, config):
    made = config("Stale")
    form = filled(operator, f"/ui/do/change_config/{made}", name="Mine")
    other = filled(operator, f"/ui/do/change_config/{made}", name="Theirs")
    assert operator.post(f"/ui/do/change_config/{made}", other).status == 303
    answer = operator.post(f"/ui/do/change_config/{made}", form)
    assert answer.status == 409
    assert "has changed since this form was shown" in text(answer)
    assert 'name="name" value="Theirs"' in answer.body.decode()
    assert fill("SELECT name FROM audit_configs WHERE id = %s", made) == "Theirs"
    now = {**hidden(answer), "name": "Mine", "description": "", **STEP, "is_active": "true"}
    assert operator.post(f"/ui/do/change_config/{made}", urlencode(now)).status == 303
    assert fill("SELECT name || '|' || description FROM audit_configs WHERE id = %s", made) == "Mine|"


def test_only_what_was_changed_is_sent(operator, fill, config):
    made = config("Untouched")
    form = filled(operator, f"/ui/do/change_config/{made}")
    assert operator.post(f"/ui/do/change_config/{made}", form).status == 303
    assert fill("SELECT version FROM audit_configs WHERE id = %s", made) == 1
    ticked = filled(operator, f"/ui/do/change_config/{made}").replace("is_active=true", "")
    assert operator.post(f"/ui/do/change_config/{made}", ticked).status == 303
    assert fill("SELECT is_active FROM audit_configs WHERE id = %s", made) is False


OTHER_SITES = [
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
    {"Sec_Fetch_Site": "cross-site", "Origin": "http://127.0.0.1"},
    {"Origin": "https://example.com"},
    {"Origin": "null"},
]


@pytest.mark.parametrize("headers", OTHER_SITES)
def test_a_form_from_another_site_is_refused_and_changes_nothing(operator, fill, config, headers):
    made = config(f"Safe {OTHER_SITES.index(headers)}")
    form = filled(operator, f"/ui/do/delete_config/{made}")
    answer = operator.post(f"/ui/do/delete_config/{made}", form, **headers)
    assert answer.status == 403
    assert "another site" in text(answer)
    assert fill("SELECT deleted_at IS NULL FROM audit_configs WHERE id = %s", made)


@pytest.mark.parametrize("headers", [{}, {"Sec_Fetch_Site": "none"}, {"Sec_Fetch_Site": "same-origin"}, {"Origin": ""}])
def test_a_form_of_our_own_is_accepted(operator, fill, config, headers):
    made = config(f"Ours {'-'.join([*headers, *headers.values()])}.")
    given = {name: value or f"http://127.0.0.1:{operator.client.port}" for name, value in headers.items()}
    answer = operator.post(f"/ui/do/delete_config/{made}", filled(operator, f"/ui/do/delete_config/{made}"), **given)
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/audits")
    assert fill(TRAIL, f"audit_config:{made}").endswith(f"audit_config.delete audit_config:{made}")


@pytest.mark.req("G-33")
def test_a_viewer_sees_no_buttons_and_is_refused_when_posting(reader, operator, fill, config):
    made = config("Looked at")
    assert "/ui/do/" in operator.get("/ui/audits").body.decode()
    assert "/ui/do/" not in reader.get("/ui/audits").body.decode()
    form = filled(operator, f"/ui/do/delete_config/{made}")
    for answer in (reader.get(f"/ui/do/delete_config/{made}"), reader.post(f"/ui/do/delete_config/{made}", form)):
        assert answer.status == 403
        assert "needs the permission audits.write" in text(answer)
    assert fill("SELECT deleted_at IS NULL FROM audit_configs WHERE id = %s", made)
    nobody = reader.with_key(None).post(f"/ui/do/delete_config/{made}", form)
    assert (nobody.status, nobody.headers["Location"]) == (303, f"/ui/login?next=/ui/do/delete_config/{made}")


@pytest.mark.req("ENG-106")
def test_a_record_of_another_tenant_has_no_form(reader, pages_dsn, config):
    theirs = reader.with_key(new_key(pages_dsn, "admin", "rival"))
    made = config("Not theirs")
    assert theirs.get(f"/ui/do/change_config/{made}").status == 404
    form = urlencode({"_token": "x", "_back": "/ui/audits"})
    assert theirs.post(f"/ui/do/delete_config/{made}", form).status == 404


@pytest.mark.parametrize("path", ["nothing", "create_config/7", "change_config", "change_config/x", "list_configs"])
def test_what_is_no_form_is_not_found(operator, path):
    assert operator.get(f"/ui/do/{path}").status == 404


@pytest.mark.parametrize("back", ["https://example.com/", "//example.com", "/api/me", "javascript:alert(1)"])
def test_a_form_leads_back_to_a_page_of_ours(operator, back, fill):
    name = f"Back {back}"
    answer = operator.post(
        "/ui/do/create_config", filled(operator, "/ui/do/create_config", **{**NEW, "name": name, "_back": back})
    )
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/audits")


def test_text_that_cannot_be_stored_is_refused(operator):
    answer = operator.post("/ui/do/create_config", "name=a%00b&_token=x")
    assert answer.status == 422
    assert "NUL" in text(answer)


def test_every_action_names_an_operation_that_is_declared(reader):
    declared = reader.client.app.state.operations
    assert set(ACTIONS) <= set(declared)
    for name, action in ACTIONS.items():
        known = set(parameters(declared[name].path))
        known |= {"changed", "APPLIED", "FAILED"} if "rule_run_id" in known else set()  # counts of the rule run
        assert set(re.findall(r"\{(\w+)\}", action.says)) <= known, name


@pytest.fixture
def broken(fill):
    """Something goes wrong inside: a table is not there."""
    fill("ALTER TABLE audit_configs RENAME TO hidden")
    yield
    fill("ALTER TABLE hidden RENAME TO audit_configs")


@pytest.mark.parametrize("sends", [True, False], ids=["form sent", "page shown"])
def test_an_unexpected_error_is_a_page_with_the_request_id_and_no_detail(operator, broken, sends):
    form = urlencode({**NEW, "name": "Lost", "_token": "lost"})
    answer = operator.post("/ui/do/create_config", form) if sends else operator.get("/ui/audits")
    assert (answer.status, answer.headers["Content-Type"]) == (500, "text/html; charset=utf-8")
    reason = f"the server's log has the reason under the request id {answer.headers['X-Request-Id']}."
    assert f"The server failed unexpectedly. Try again; {reason}" in text(answer)
    assert "audit_configs" not in answer.body.decode()
    assert answer.headers["Content-Security-Policy"]


def problems(answer) -> dict[str, str]:
    """The messages at the fields of a form, by the id of the field."""
    return dict(re.findall(r'id="field-([\w-]+)-hint" class="hint">\s*<b class="bad">([^<]*)', answer.body.decode()))


def test_a_field_that_needs_a_value_says_so_when_it_is_left_empty(operator, fill):
    answer = operator.post("/ui/do/create_config", filled(operator, "/ui/do/create_config", steps__0__name="Consent"))
    assert (answer.status, problems(answer)) == (422, dict.fromkeys(["name", "steps-0-criteria"], EMPTY))


@pytest.mark.parametrize("emptied", ["", "  "])
def test_a_value_that_a_record_needs_is_not_taken_away(operator, fill, config, emptied):
    made = config(f"Kept{len(emptied)}")
    path = f"/ui/do/change_config/{made}"
    answer = operator.post(path, filled(operator, path, name=emptied, description=""))
    assert (answer.status, problems(answer)) == (422, {"name": EMPTY})
    assert fill("SELECT version FROM audit_configs WHERE id = %s", made) == 1
    assert operator.post(path, filled(operator, path, description="")).status == 303
    assert fill("SELECT description FROM audit_configs WHERE id = %s", made) == ""


def test_a_form_does_not_speak_of_null(operator, fill):
    plan = {"name": "Nightly", "fiche_selection.mode": "manual", "fiche_selection.fiche_ids": "1"}
    path = "/ui/do/create_automation_schedule"
    assert operator.post(path, filled(operator, path, **plan)).status == 303
    made = fill("SELECT id FROM schedules WHERE name = 'Nightly'")
    path = f"/ui/do/change_automation_schedule/{made}"
    answer = operator.post(path, filled(operator, path, name="", **{"fiche_selection.mode": ""}))
    assert (answer.status, problems(answer)) == (422, problems(answer) | {"name": EMPTY, "fiche_selection-mode": EMPTY})
    assert "null" not in text(answer)
