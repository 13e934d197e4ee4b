"""Signatures, by the vectors that Pusher published and by what must not pass."""

from __future__ import annotations

import pytest

from ecluse.realtime.pusher_signatures import body_md5, channel_auth, granted, signed_query, wrong_with

KEY, SECRET, NOW = "278d425bdf160c739803", "7ad3773142a6692b25b8", 1353088179.0
BODY = b'{"name":"foo","channels":["project-3"],"data":"{\\"some\\":\\"data\\"}"}'
PATH = "/apps/3/events"


def test_the_published_vectors_come_out():
    assert body_md5(BODY) == "ec365a775a4cd0599faeb73354201b6f"
    query = signed_query(KEY, SECRET, "POST", PATH, BODY, NOW)
    assert query["auth_signature"] == "da454824c97ba181a32ccc17a72625ba02771f50b50e1e7430e47a1f3f457e6c"
    signature = "58df8b0c36d6982b82c3ecf6b4662e34fe8c25bba48f5369f135bf843651c3a4"
    assert channel_auth(KEY, SECRET, "1234.1234", "private-foobar") == f"{KEY}:{signature}"


def judged(changes=None, *, method="POST", path=PATH, body=BODY, now=NOW, twice=()):
    query = signed_query(KEY, SECRET, "POST", PATH, BODY, NOW) | (changes or {})
    pairs = [(name, value) for name, value in query.items() if value is not None]
    return wrong_with(KEY, SECRET, method, path, [*pairs, *twice], body, now)


def test_a_request_that_is_signed_passes_within_ten_minutes():
    assert judged() is None
    assert judged(now=NOW + 599) is None
    assert judged(now=NOW - 599) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"now": NOW + 601},
        {"now": NOW - 601},
        {"method": "GET"},
        {"path": "/apps/4/events"},
        {"body": BODY + b" "},
        {"changes": {"auth_key": "another"}},
        {"changes": {"auth_version": "2.0"}},
        {"changes": {"auth_timestamp": "now"}},
        {"changes": {"auth_timestamp": "9" * 400}},
        {"changes": {"auth_timestamp": None}},
        {"changes": {"body_md5": None}},
        {"changes": {"auth_signature": None}},
        {"changes": {"auth_signature": "é"}},
        {"changes": {"info": "added"}},
        {"twice": [("auth_key", KEY)]},
    ],
    ids=str,
)
def test_anything_else_does_not(wrong):
    assert judged(**wrong)


def test_a_right_to_a_channel_is_for_one_socket_and_one_channel():
    auth = channel_auth(KEY, SECRET, "1.2", "private-fiche-1")
    assert granted(KEY, SECRET, "1.2", "private-fiche-1", auth)
    assert not granted(KEY, SECRET, "1.3", "private-fiche-1", auth)
    assert not granted(KEY, SECRET, "1.2", "private-fiche-2", auth)
    assert not granted(KEY, "another", "1.2", "private-fiche-1", auth)
    assert not granted(KEY, SECRET, "1.2", "private-fiche-1", "é")


def test_a_signature_names_the_api_key_that_it_was_issued_to_and_no_other():
    auth = channel_auth(KEY, SECRET, "1.2", "private-fiche-1", 7)
    assert granted(KEY, SECRET, "1.2", "private-fiche-1", auth) == (7,)
    plain = channel_auth(KEY, SECRET, "1.2", "private-fiche-1")
    assert granted(KEY, SECRET, "1.2", "private-fiche-1", plain) == (None,)
    for forged in (auth.rpartition(":")[0], f"{auth}1", f"{plain}:7", f"{auth.rpartition(':')[0]}:8", f"{auth}:9"):
        assert granted(KEY, SECRET, "1.2", "private-fiche-1", forged) is None, forged
