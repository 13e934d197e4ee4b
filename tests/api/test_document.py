"""The OpenAPI document: names, codes and descriptions that client generators and people can rely on."""

from __future__ import annotations

import gzip
import json
import re
import socket

import pytest

from ecluse.access.error_codes import REFUSALS
from ecluse.app import create_app
from ecluse.bootstrap import Database
from tests.support.api_server import FLOW, SEALING
from tests.support.loop_probe import probing


@pytest.fixture(scope="module")
def document(shared_dsn):
    return create_app(SEALING, Database(shared_dsn, None), [FLOW], frozenset({"api"})).openapi()


@pytest.fixture(scope="module")
def operations(document):
    return [(method, path, one) for path, methods in document["paths"].items() for method, one in methods.items()]


def test_operations_have_the_names_of_functions_and_no_two_the_same(operations):
    names = [one["operationId"] for _, _, one in operations]
    assert [name for name in names if not re.fullmatch("[a-z]+(_[a-z]+)*", name)] == []
    assert len(names) == len(set(names)) > 50


def test_schemas_have_readable_names_and_no_two_the_same_title(document):
    schemas = document["components"]["schemas"]
    assert [name for name in schemas if not re.fullmatch("([A-Z][a-z]+)+", name)] == []
    titles = [one.get("title", name) for name, one in schemas.items()]
    assert len(titles) == len(set(titles))


def test_every_error_of_every_operation_has_its_codes_from_the_table(operations):
    guarded = [one for one in operations if "x-permission" in one[2]]
    assert [path for _, path, one in operations if "x-permission" not in one] == ["/api/agent/enrol"]  # by a token
    for method, path, one in guarded:
        errors = {int(status): answer for status, answer in one["responses"].items() if status[0] in "45"}
        assert {401, 403, 404, 422, 500, 503} <= set(errors), f"{method} {path}"
        assert ({400, 413, 415} <= set(errors)) == ("requestBody" in one), f"{method} {path}"
        for status, answer in errors.items():
            assert {REFUSALS[code].status for code in answer["x-codes"]} == {status}
            assert set(answer["content"]) == {"application/json", "application/problem+json"}


def test_an_operation_declares_the_codes_of_its_own(document):
    ended = document["paths"]["/api/runs/{run_id}/end"]["post"]["responses"]["409"]
    assert ended["x-codes"] == ["IN_PROGRESS", "ALREADY_ENDED", "FLOW_NOT_LOADED"]
    assert "The run had ended already" in ended["description"]


def test_operations_with_an_idempotency_key_take_it_as_a_parameter(operations):
    for method, path, one in operations:
        codes = {code for answer in one["responses"].values() for code in answer.get("x-codes", [])}
        named = [parameter["name"] for parameter in one.get("parameters", [])]
        assert ("Idempotency-Key" in named) == ("IDEMPOTENCY_KEY_REUSED" in codes), f"{method} {path}"
    assert len([one for _, _, one in operations if "Idempotency-Key" in str(one.get("parameters"))]) > 8


def test_ids_and_pages_are_described(operations):
    wanted = {"limit", "offset", "cursor", "order"}
    silent = [
        f"{method} {path}: {parameter['name']}"
        for method, path, one in operations
        for parameter in one.get("parameters", [])
        if (parameter["in"] == "path" or parameter["name"] in wanted) and not parameter.get("description")
    ]
    assert silent == []


@pytest.mark.alone
def test_the_document_is_public_and_sending_it_does_not_hold_the_loop(shared_api, document):
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\n"
    packed = shared_api.with_key(None).get("/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert json.loads(gzip.decompress(packed.body)) == shared_api.with_key(None).get("/openapi.json").json == document
    with (
        probing(shared_api) as held,
        socket.create_connection(("127.0.0.1", shared_api.port), 20) as one,
        socket.create_connection(("127.0.0.1", shared_api.port), 20) as other,
    ):
        for client in (one, other):
            client.sendall((ask + b"\r\n") * 20 + ask + b"Connection: close\r\n\r\n")
        for client in (one, other):
            while client.recv(1_000_000):
                pass
    print(f"the loop was held for {held.longest * 1000:.1f} ms")
    assert held.longest < 0.03
