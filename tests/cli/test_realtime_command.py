"""`ecluse realtime show`."""

from __future__ import annotations

import pytest

from tests.support.api_server import SECRET_KEY


@pytest.mark.req("G-81")
def test_the_command_line_shows_what_to_connect_with(ecluse):
    key = {"ECLUSE_SECRET_KEY": SECRET_KEY}
    shown = ecluse("realtime", "show", "--json", **key).json
    assert set(shown) == {"tenant_id", "app_id", "key"}
    assert shown["tenant_id"] == "default"
    assert shown["app_id"].isdecimal()
    with_secret = dict(line.split() for line in ecluse("realtime", "show", "--secret", **key).out.splitlines())
    assert {name: with_secret[name] for name in shown} == shown
    assert set(with_secret) - set(shown) == {"secret"}
    nobody = ecluse("realtime", "show", "--tenant", "nobody", **key)
    assert (nobody.code, "tenants create" in nobody.err) == (2, True)


def test_the_command_line_says_what_is_missing(ecluse):
    refused = ecluse("realtime", "show")
    assert (refused.code, "ECLUSE_SECRET_KEY" in refused.err) == (2, True)
