"""Secrets are hidden by the name of what holds them and by how they look; what people need to see stays."""

from __future__ import annotations

import time

import pytest

from ecluse.base.masking import masked, masked_value, without_secrets


@pytest.mark.req("ENG-88")
@pytest.mark.parametrize(
    "name",
    ["externalApiKey", "api_key", "x-api-key", "token", "access_token", "webhook_secret", "PASSWORD", "Authorization"],
)
def test_what_is_called_a_secret_is_hidden_at_any_depth(name):
    for value in ("hunter2", 4711, {"nested": "hunter2"}, ["hunter2"]):
        assert "hunter2" not in str(masked_value({"outer": [{name: value}]}))
        assert masked_value({name: value}) == {name: "***"}


@pytest.mark.req("ENG-88", "ENG-36")
def test_a_lock_token_is_shortened_and_harmless_names_are_shown():
    assert masked_value({"lock_token": "0123456789abcdef"}) == {"lock_token": "01234567…"}
    shown = {"event_key": "monday", "key": "SKU-1", "lock_key": "fiche:1", "tokens": 12, "monkeys": "three"}
    shown |= {"keys": ["SKU-1"], "event_keys": ["monday"]}
    assert masked_value(shown) == shown


@pytest.mark.req("ENG-88")
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("key ecl_live_0123456789 refused", "key ecl_*** refused"),
        ("ECL_LIVE_0123456789", "ECL_***"),
        ("sent with bearer abcdef", "sent with bearer ***"),
        ("sent with Basic abcdef", "sent with Basic ***"),
        ("Authorization: Bearer eyJhbGciOi.abc", "Authorization: Bearer ***"),
        ("postgresql://bob:hunter2@db/x", "postgresql://***@db/x"),
        ("postgresql://bob:p@ss:w@db/x", "postgresql://***@db/x"),
        ("host=db password=hunter2 dbname=x", "host=db password=*** dbname=x"),
        ("https://s3/a.mp3?X-Amz-Signature=ab12&part=1", "https://s3/a.mp3?X-Amz-Signature=***&part=1"),
        ("https://x/a?sig=ab&token=cd", "https://x/a?sig=***&token=***"),
        ('{"externalApiKey": "hunter2", "page": 1}', '{"externalApiKey": "***", "page": 1}'),
        ("{'password': 'hunter2'}", "{'password': \"***\"}"),
        ("nothing to hide: https://x/a?page=2", "nothing to hide: https://x/a?page=2"),
        ("Unexpected token: }", "Unexpected token: }"),
        ("Unexpected token: identifier", "Unexpected token: identifier"),
        ("key=SKU-1 monkey=george event_key: monday", "key=SKU-1 monkey=george event_key: monday"),
        ("tokens=12 secretary: margaret", "tokens=12 secretary: margaret"),
        ("externalApiKey=sk_live_1", "externalApiKey=***"),
        ("client_secret=foo access_token=abc, api-key=foo", "client_secret=*** access_token=***, api-key=***"),
        ("X-Api-Key: abcdef123456", "X-Api-Key: ***"),
        ("Authorization: Token abcdef", "Authorization: Token ***"),
        ("authorization=abcdef", "authorization=***"),
        ("token: abcdef", "token: ***"),
        ("invalid API key: abcdef, access token: abcdef", "invalid API key: ***, access token: ***"),
        ("refused; access_token: abcdef", "refused; access_token: ***"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_in_text(text, left):
    assert masked(text) == left


@pytest.mark.req("ENG-88")
@pytest.mark.parametrize("name", ["api_keys", "apiKeys", "tokens", "secrets", "Passwords"])
def test_several_secrets_are_hidden_and_how_many_there_are_is_shown(name):
    assert masked_value({name: ["hunter2"]}) == {name: "***"}
    assert masked_value({name: 12}) == {name: 12}


@pytest.mark.parametrize(
    "text", ["://" + ":" * 60_000, "?" + "a-" * 30_000, "authorization:" + " " * 60_000, "a" * 60_000]
)
def test_a_long_text_made_to_keep_us_busy_does_not(text):
    began = time.monotonic()
    assert len(masked(text)) <= len(text)
    assert time.monotonic() - began < 1


def test_of_an_endless_text_the_beginning_is_kept():
    said = masked("password=hunter2 " + "x" * 1_000_000)
    assert said.startswith("password=*** ")
    assert len(said) < 60_000


def test_of_a_stored_value_only_the_secrets_change():
    deep: dict[str, object] = {"n": 1.5, "list": [None, True, "plain"]}
    for _ in range(12):
        deep = {"in": deep}
    value = {"deep": deep, "password": "hunter2", "keys": {"a_token": 5, "key": "kept"}, "url": "http://a:b@c/"}
    assert without_secrets(value) == {
        **value, "password": "***", "keys": {"a_token": "***", "key": "kept"}, "url": "http://***@c/",
    }  # fmt: skip
    assert without_secrets({"token": None, "tokens": 3, "event_key": "k"}) == {
        "token": None,
        "tokens": 3,
        "event_key": "k",
    }


def test_anything_becomes_what_json_can_hold():
    class Odd:
        def __str__(self) -> str:
            return "odd"

    endless: list[object] = []
    endless.append(endless)
    assert masked_value({"a": float("nan"), "b": Odd(), 3: {1, 2}}) == {"a": "nan", "b": "odd", "3": [1, 2]}
    assert "..." in str(masked_value(endless))
