"""The page of notification endpoints and deliveries: an operator makes an endpoint, tries it, and sees what arrived."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import expect

from ecluse.engine import ROLES
from tests.support.api_server import FLOW, add_tenant, new_key, serving
from tests.support.pages import Reader
from tests.support.waits import PATIENCE
from tests.web.conftest import aside, unreadable

HERE = "/ui/connections/notifications"
FIELDS = {
    "webhook": {"url"},
    "mail": {"addresses"},
    "slack": {"url"},
    "pagerduty": {"url", "routing_key"},
}
PATIENT = PATIENCE * 1000


@pytest.fixture(scope="module")
def receiver():
    """A receiver of webhooks that is gone after its first message; the bodies of all that it got."""
    got: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204 if len(got) == 1 else 410)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook?token=t0p", got
        server.shutdown()


@pytest.fixture(scope="module")
def working(databases):
    """A server that works, and an operator's key."""
    with databases.one() as dsn:
        add_tenant(dsn, "rival")
        with serving(dsn, FLOW, roles=ROLES, ECLUSE_HANDS=5, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8") as client:
            yield Reader(client, aside(new_key, dsn, "operator")), aside(new_key, dsn, "operator", "rival"), dsn


def test_an_endpoint_is_created_tried_and_followed(working, visit, receiver):
    operator, rival, dsn = working
    url, got = receiver
    page = visit(operator.client, reduced_motion="reduce").enter(operator.key, HERE)
    expect(page.get_by_text("No endpoints yet: events of runs are sent nowhere.")).to_be_visible()
    expect(page.get_by_text("No deliveries yet.")).to_be_visible()

    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("Url").fill(url)
    page.get_by_label("Events").fill("test/completed")
    page.get_by_role("button", name="New endpoint").click()
    expect(page.get_by_text("it is not shown again")).to_be_visible()
    assert page.locator("pre").inner_text().startswith("whsec_")
    page.get_by_role("button", name="Continue").click()
    endpoints = page.get_by_role("table", name="Endpoints")
    expect(endpoints).to_contain_text("test/completed")
    assert "t0p" not in page.content()

    # The page follows the delivery by itself, and offers to send the message again.
    page.get_by_role("button", name="Test").click()
    page.get_by_role("button", name="Test").click()
    deliveries = page.get_by_role("table", name="Deliveries")
    expect(deliveries.locator(".badge")).to_have_text("delivered", timeout=PATIENT)
    deliveries.get_by_role("button", name="Deliver again").click()
    page.get_by_role("button", name="Deliver again").click()
    expect(deliveries.locator(".badge").first).to_have_text("failed", timeout=PATIENT)
    expect(deliveries).to_contain_text("410")
    expect(endpoints.locator(".badge")).to_have_text("off", timeout=PATIENT)
    expect(endpoints).to_contain_text("Its receiver answered 410 Gone")
    assert len(got) == 2
    assert got[0] == got[1]
    assert not unreadable(page)

    theirs = operator.with_key(rival)
    assert "No endpoints yet" in aside(theirs.shown, HERE)
    assert "No deliveries yet" in aside(theirs.shown, HERE)
    viewer = operator.with_key(aside(new_key, dsn, "viewer"))
    assert "/ui/do/" not in aside(viewer.get, HERE).body.decode()
    assert "No matching deliveries" in aside(viewer.shown, f"{HERE}?state=pending")
    assert "ping" in aside(viewer.shown, f"{HERE}?endpoint_id=1&state=failed")
    for path in (HERE, f"{HERE}/live"):
        assert aside(viewer.get, f"{path}?endpoint_id=abc").status == 422


@pytest.mark.parametrize("kind", FIELDS)
def test_the_form_of_a_kind_has_the_fields_of_that_kind(working, kind):
    operator, *_ = working
    (address,) = re.findall(
        rf'href="(/ui/do/create_endpoint\?[^"]*kind={kind})"', aside(operator.get, HERE).body.decode()
    )
    body = aside(operator.get, address.replace("&amp;", "&")).body.decode()
    names = set(re.findall(r'id="field-(\w+)" name', body))
    assert names == {"kind", "events", "description", "is_active"} | FIELDS[kind]


def test_an_endpoint_that_this_server_cannot_serve_is_refused_with_the_reason(working):
    operator, *_ = working
    body = aside(operator.get, "/ui/do/create_endpoint?kind=mail").body.decode()
    (token,) = re.findall(r'name="_token" value="([^"]*)"', body)
    answer = aside(
        operator.post, "/ui/do/create_endpoint", f"_token={token}&kind=mail&addresses=a%40example.com&events=*"
    )
    assert answer.status == 409
    assert "SMTP_HOST" in answer.body.decode()
