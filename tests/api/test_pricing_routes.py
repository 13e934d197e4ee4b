"""Projects and rules of pricing over HTTP: tested before they are stored, changed and deleted; tokens that are never
answered; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from ecluse.flows.connections.project_surface import PROJECTS, ProjectRow
from ecluse.flows.pricing.surface import RULES, RuleInFull
from tests.support.api_server import Client, add_tenant, new_key, serving
from tests.support.session import Session

TOKEN = "shpat_0123456789abcdef3f9a"  # noqa: S105
PATH, OF_RULES = "/api/pricing/projects", "/api/pricing/rules"
TENANTS = count()
SALE = {
    "name": "Sale",
    "selection": {"products": ["7", "8"], "tags": ["summer"], "price_from": 500},
    "change": {"kind": "percent", "percent": "-15"},
    "ending": "99",
    "floor": 300,
}


@pytest.fixture(scope="module")
def open_api(shared_dsn: str) -> Iterator[Client]:
    with serving(shared_dsn, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8") as client:
        yield client


@pytest.fixture
def tenant(shared_dsn: str) -> str:
    name = f"shops-{next(TENANTS)}"
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


def new(sandbox: Any, **given: Any) -> dict[str, Any]:
    shop = {"name": "Shop", "connector": "shopify", "base_url": f"{sandbox.url}/shopify/unlimited/", "currency": "EUR"}
    return {**shop, "access_token": TOKEN, **given}


def stored(ask: Any, tenant: str) -> list[Any]:
    """What the database has of a tenant's projects and tokens."""
    names = ask("SELECT name FROM pricing_projects WHERE tenant_id = %s AND deleted_at IS NULL ORDER BY 1", tenant)
    return [*names, *ask("SELECT name FROM secrets WHERE tenant_id = %s ORDER BY 1", tenant)]


@pytest.fixture
def project(client: Client, sandbox: Any) -> str:
    made = client.post(PATH, new(sandbox))
    assert made.status == 201, made.json
    return str(made.json["id"])


@pytest.mark.req("G-35")
@pytest.mark.parametrize(("connector", "place"), [("shopify", "/shopify/unlimited"), ("price_list", "/price-list")])
def test_a_shop_is_called_with_its_token_and_stored(client, sandbox, ask, tenant, connector, place):
    made = client.post(PATH, new(sandbox, connector=connector, base_url=f"{sandbox.url}{place}/"))
    assert made.status == 201, made.json
    [call] = sandbox.ledger(kind="call")
    assert call["path"].startswith(place)
    row = ProjectRow.model_validate(made.json)
    assert (row.connector, row.base_url, row.currency) == (connector, f"{sandbox.url}{place}", "EUR")
    assert (row.token_ends, row.tenant_id, row.created_by) == ("3f9a", tenant, "a test")
    assert client.get(f"{PATH}/{row.id}").json == made.json
    listed = client.get(PATH)
    assert PROJECTS.page.model_validate(listed.json).projects == [row]
    assert TOKEN not in str([made.json, listed.json])
    assert stored(ask, tenant) == [("Shop",), (f"pricing-project:{row.id}",)]
    assert ask("SELECT action, subject FROM audit_trail WHERE tenant_id = %s", tenant) == [
        ("pricing_project.create", f"pricing_project:{row.id}")
    ]


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"access_token": "invalid"}, "CONNECTION_REFUSED", "give the project a new one"),
        ({"currency": "USD"}, "INVALID_INPUT", "in EUR, not in USD"),
        ({"currency": "euro"}, "INVALID_INPUT", "currency"),
        ({"connector": "amazon"}, "INVALID_INPUT", "connector"),
        ({"base_url": "http://10.0.0.1/"}, "INVALID_INPUT", "base_url"),
        ({"base_url": "http://169.254.169.254/"}, "INVALID_INPUT", "base_url"),
        ({"base_url": "https://shop.example/?token=1"}, "INVALID_INPUT", "base_url"),
        ({"base_url": "http://127.0.0.1:9"}, "CONNECTION_REFUSED", "not sent"),
        ({"name": " "}, "INVALID_INPUT", "name"),
        ({"access_token": ""}, "INVALID_INPUT", "access_token"),
        ({"access_token": f"{TOKEN}\n"}, "INVALID_INPUT", "access_token: an API key is printable ASCII"),
    ],
)
def test_a_shop_that_does_not_work_is_not_stored(client, sandbox, ask, tenant, given, code, says):
    answer = client.post(PATH, new(sandbox, **given))
    assert (answer.status, answer.code) == (422, code)
    assert says in str(answer.json)
    assert TOKEN not in str(answer.json)
    assert stored(ask, tenant) == []


def test_a_frozen_shop_is_not_stored(client, sandbox, ask, tenant):
    sandbox.set_faults([{"vendor": "shopify", "kind": "refused", "status": 402, "code": "frozen"}])
    answer = client.post(PATH, new(sandbox))
    assert (answer.status, answer.code) == (422, "CONNECTION_REFUSED")
    assert "frozen until its bill is paid" in answer.json["error"]["message"]
    assert stored(ask, tenant) == []


def test_a_project_is_changed_and_a_new_token_is_tested_first(client, sandbox, project, ask, tenant):
    path = f"{PATH}/{project}"
    assert client.ask("PATCH", path, {"name": "Renamed"}).json["name"] == "Renamed"
    other = f"{sandbox.url}/shopify/unlimited-2"
    refused = client.ask("PATCH", path, {"base_url": other})
    assert (refused.status, "access_token" in refused.json["error"]["message"]) == (422, True)
    assert client.ask("PATCH", path, {"access_token": "invalid"}).code == "CONNECTION_REFUSED"
    sandbox.reset()
    changed = client.ask("PATCH", path, {"base_url": other, "access_token": "shpat_another-long-token-77aa"})
    assert (changed.status, changed.json["base_url"], changed.json["token_ends"]) == (200, other, "77aa")
    assert len(sandbox.ledger(kind="call")) == 1
    assert client.post(PATH, new(sandbox, name="Renamed")).code == "NAME_TAKEN"
    assert stored(ask, tenant) == [("Renamed",), (f"pricing-project:{project}",)]


def test_a_deleted_project_takes_its_rules_and_its_token_with_it(client, sandbox, project, ask, tenant):
    rule = client.post(OF_RULES, {**SALE, "project_id": project}).json["id"]
    queued = """
    INSERT INTO rule_runs (tenant_id, project_id, rule, currency, status, plan_hash, totals, actor, correlation_id,
                           source, created_at, queued_at)
    VALUES (%s, %s, '{}', 'EUR', 'QUEUED', '', '{}', '', '', '', ecluse_now(), ecluse_now())
    """
    ask(queued, tenant, project)
    refused = client.ask("DELETE", f"{PATH}/{project}")
    assert (refused.status, refused.code) == (409, "CONFLICT")
    ask("DELETE FROM rule_runs WHERE tenant_id = %s", tenant)
    assert client.ask("DELETE", f"{PATH}/{project}").json == {"id": project, "deleted": True}
    assert stored(ask, tenant) == []
    assert client.get(f"{PATH}/{project}").status == client.get(f"{OF_RULES}/{rule}").status == 404
    assert client.post(PATH, new(sandbox)).status == 201


@pytest.mark.req("G-35")
def test_a_rule_is_created_shown_listed_changed_and_deleted(client, project):
    made = client.post(OF_RULES, {**SALE, "project_id": project})
    assert made.status == 201, made.json
    row = RuleInFull.model_validate(made.json)
    assert (row.project_id, row.version, row.ending, row.floor, row.cap) == (project, 1, "99", 300, None)
    assert row.selection.tags == ["summer"]
    assert client.get(f"{OF_RULES}/{row.id}").json == made.json
    [listed] = RULES.page.model_validate(client.get(f"{OF_RULES}?project_id={project}").json).rules
    counted = {**row.selection.model_dump(exclude={"products"}), "products_given": 2}
    assert listed.model_dump() == row.model_dump() | {"selection": counted}
    assert client.get(f"{OF_RULES}?project_id=999").json["rules"] == []
    path = f"{OF_RULES}/{row.id}"
    for change, version in (
        ({"name": "Big sale"}, 1),
        ({"change": {"kind": "percent", "percent": "-30"}}, 2),
        ({"ending": None, "cap": 9_000}, 3),
        ({"cap": 9_000}, 3),
        ({"selection": SALE["selection"]}, 3),
        ({}, 3),
    ):
        answer = client.ask("PATCH", path, change)
        assert (answer.status, answer.json["version"]) == (200, version), answer.json
    now = client.get(path).json
    assert (now["name"], now["ending"], now["cap"], now["floor"]) == ("Big sale", None, 9_000, 300)
    assert client.post(OF_RULES, {**SALE, "name": "Big sale", "project_id": project}).code == "NAME_TAKEN"
    assert client.ask("DELETE", path).json["deleted"] is True
    assert client.get(path).status == 404


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"change": {"kind": "percent", "percent": "-100"}}, "allow_free"),
        ({"change": {"kind": "percent", "percent": "5000"}}, "1000 percent"),
        ({"change": {"kind": "percent", "percent": "NaN"}}, "a percentage with at most two decimals, such as -10"),
        ({"change": {"kind": "amount", "percent": "1"}}, "an amount"),
        ({"floor": -1}, "floor"),
        ({"floor": 900, "cap": 800}, "floor must not be above cap"),
        ({"selection": {}}, "name products, tags or a price band"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_when_created_and_when_changed(client, project, given, says):
    answer = client.post(OF_RULES, {**SALE, "project_id": project, **given})
    assert (answer.status, answer.code) == (422, "INVALID_INPUT")
    assert says in str(answer.json)
    rule = client.post(OF_RULES, {**SALE, "project_id": project}).json
    changed = client.ask("PATCH", f"{OF_RULES}/{rule['id']}", given)
    assert (changed.status, changed.code) == (422, "INVALID_INPUT")
    assert says in str(changed.json)
    assert client.get(f"{OF_RULES}/{rule['id']}").json == rule


def test_projects_and_rules_of_another_tenant_are_not_found(client, open_api, shared_dsn, project):
    rule = client.post(OF_RULES, {**SALE, "project_id": project}).json["id"]
    add_tenant(shared_dsn, "stranger")
    stranger = open_api.with_key(new_key(shared_dsn, tenant="stranger"))
    for method, path, body in (
        ("GET", f"{PATH}/{project}", None),
        ("PATCH", f"{PATH}/{project}", {"name": "mine"}),
        ("DELETE", f"{PATH}/{project}", None),
        ("GET", f"{OF_RULES}/{rule}", None),
        ("PATCH", f"{OF_RULES}/{rule}", {"name": "mine"}),
        ("DELETE", f"{OF_RULES}/{rule}", None),
        ("POST", OF_RULES, {**SALE, "project_id": project}),
    ):
        assert stranger.ask(method, path, body).status == 404, (method, path)
    assert stranger.get(OF_RULES).json["rules"] == []


def test_a_rule_that_was_stored_with_fewer_fields_keeps_its_version(client, project, ask):
    rule = client.post(OF_RULES, {**SALE, "name": "Older", "project_id": project}).json["id"]
    ask("UPDATE pricing_rules SET change = change - 'amount' WHERE id = %s", rule)
    answer = client.ask("PATCH", f"{OF_RULES}/{rule}", {"name": "Renamed"})
    assert (answer.status, answer.json["version"]) == (200, 1), answer.json
