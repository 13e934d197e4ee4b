"""Connections to vendors from the command line, at a real server: made, shown, tested, changed and deleted; keys that
the vendor refuses are not stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.api_server import SECRET_KEY
from tests.support.command_line import Server
from tests.support.vendor_clients import PLACES

KEY = "a-key-that-is-long-enough-3f9a"
STORED = "SELECT (SELECT count(*) FROM connections), (SELECT count(*) FROM secrets WHERE name LIKE 'connection:%%')"
SEALED = "SELECT ciphertext FROM secrets WHERE name = 'connection:crm'"


@pytest.fixture
def api(serve) -> Server:
    server: Server = serve("--role", "api", ECLUSE_SECRET_KEY=SECRET_KEY, ECLUSE_ALLOWED_NETWORKS="127.0.0.0/8")
    server.wait_until_ready()
    return server


@pytest.fixture
def key_file(tmp_path) -> Callable[[str], tuple[str, str]]:
    """The option that names a file with this key."""

    def write(key: str) -> tuple[str, str]:
        file = tmp_path / "key"
        file.write_text(f"{key}\n")
        return "--api-key-file", str(file)

    return write


def test_a_connection_is_made_shown_tested_changed_and_deleted(api, sandbox, one, key_file):
    at_crm = ("--base-url", f"{sandbox.url}/crm")
    made = api.done("connections", "create", "crm", *at_crm, *key_file(KEY), "--max-in-flight", "3")
    assert (made["kind"], made["max_in_flight"], made["api_key_ends"]) == ("crm", 3, "3f9a")
    assert [call["path"].startswith("/crm") for call in sandbox.ledger(kind="call")] == [True]
    listed, shown = api.ecluse("connections", "list"), api.ecluse("connections", "show", "crm")
    assert (f"{sandbox.url}/crm" in listed.out, "3f9a" in shown.out) == (True, True)
    assert KEY not in listed.out + shown.out
    assert api.done("connections", "test", "crm") == {"kind": "crm", "works": True}
    before = one(SEALED)
    changed = api.done("connections", "update", "crm", *key_file("another-key-that-is-long-77aa"))
    assert (changed["api_key_ends"], changed["max_in_flight"], one(SEALED) != before) == ("77aa", 3, True)
    assert api.done("connections", "update", "crm", "--max-in-flight", "null")["max_in_flight"] is None
    assert api.done("connections", "delete", "crm", "--yes") == {"kind": "crm", "deleted": True}
    assert api.ecluse("connections", "show", "crm").code == 2
    assert one(STORED) == (0, 0)


def test_an_empty_key_file_is_named_before_anything_is_sent(api, sandbox, one, key_file):
    refused = api.ecluse("connections", "create", "crm", "--base-url", f"{sandbox.url}/crm", *key_file(" "))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"ecluse: --api-key-file: {key_file(' ')[1]} is empty: it must contain the secret.\n"
    assert one(STORED) == (0, 0)


@pytest.mark.parametrize(("kind", "key"), [("crm", "forbidden"), ("speech", "invalid"), ("llm", "invalid")])
def test_a_key_that_the_vendor_refuses_is_exit_code_2_and_nothing_is_stored(api, sandbox, one, key_file, kind, key):
    model = ("--model", "gpt-4.1") if kind == "llm" else ()
    given = ("connections", "create", kind, "--base-url", sandbox.url + PLACES[kind], *model)
    refused = api.ecluse(*given, *key_file(key))
    assert (refused.code, refused.out) == (2, "")
    assert "CONNECTION_REFUSED" in refused.err
    assert f"the api key (--api-key-file) of the connection {kind}" in refused.err
    assert one(STORED) == (0, 0)
    api.done(*given, *key_file(KEY))
    refused = api.ecluse("connections", "update", kind, "--max-in-flight", "9", *key_file(key))
    assert (refused.code, refused.out) == (2, "")
    assert api.done("connections", "show", kind)["max_in_flight"] is None
    assert one(STORED) == (1, 1)
    sandbox.set_faults([{"kind": "unauthorized"}])
    stored = api.ecluse("connections", "test", kind)
    assert (stored.code, "CONNECTION_REFUSED" in stored.err) == (2, True)
