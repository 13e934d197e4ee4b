"""Signatures of the Pusher protocol: of requests to its HTTP API, and of a socket's subscription to a channel. The same
code signs and verifies."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CLOCKS_APART_SECONDS = 600


def signed(secret: str, text: str) -> str:
    """Return the HMAC-SHA256 of a text, in hexadecimal."""
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def channel_auth(key: str, secret: str, socket_id: str, channel: str, api_key: int | None = None) -> str:
    """Return the signature that lets this socket subscribe to this channel. `api_key`: the id of the API key that it is
    issued to, which is signed and sent along, so that the server that has the socket knows it."""
    if api_key is None:
        return f"{key}:{signed(secret, f'{socket_id}:{channel}')}"
    return f"{key}:{signed(secret, f'{socket_id}:{channel}:{api_key}')}:{api_key}"


class Grant(NamedTuple):
    """The right of a socket to a channel. `api_key`: the id of the API key it was issued to; None: it was signed by the
    holder of the app's secret."""

    api_key: int | None


def granted(key: str, secret: str, socket_id: str, channel: str, auth: str) -> Grant | None:
    """Return the grant that `auth` proves; None if it is not a valid signature for this socket and channel."""
    last = auth.rpartition(":")[2] if auth.count(":") == 2 else ""
    api_key = int(last) if re.fullmatch(r"[1-9]\d{0,17}", last, re.ASCII) else None
    wanted = channel_auth(key, secret, socket_id, channel, api_key)
    return Grant(api_key) if hmac.compare_digest(wanted.encode(), auth.encode()) else None


def body_md5(body: bytes) -> str:
    """Return the MD5 of a request's body, which the request's signature covers."""
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _to_sign(method: str, path: str, query: Iterable[tuple[str, str]]) -> str:
    """Return the text that the signature of a request covers."""
    pairs = sorted((name.lower(), value) for name, value in query if name != "auth_signature")
    return "\n".join([method, path, "&".join(f"{name}={value}" for name, value in pairs)])


def signed_query(key: str, secret: str, method: str, path: str, body: bytes, now: float) -> dict[str, str]:
    """Return the query parameters that sign a request; `now` is the instant, in seconds since the epoch."""
    query = {"auth_key": key, "auth_timestamp": f"{now:.0f}", "auth_version": "1.0", "body_md5": body_md5(body)}
    return {**query, "auth_signature": signed(secret, _to_sign(method, path, query.items()))}


def wrong_with(
    key: str, secret: str, method: str, path: str, query: Iterable[tuple[str, str]], body: bytes, now: float
) -> str | None:
    """Return the reason why the signature of a request is invalid; None if it is valid. `now` is the server's clock, in
    seconds since the epoch."""
    pairs = list(query)
    given: Mapping[str, str] = dict(pairs)
    if len(given) != len(pairs):
        return "a parameter occurs twice in the query"
    if given.get("auth_key") != key or given.get("auth_version") != "1.0":
        return "auth_key or auth_version is wrong"
    timestamp = given.get("auth_timestamp", "")
    if not (timestamp.isascii() and timestamp.isdecimal()) or abs(int(timestamp[:15]) - now) > CLOCKS_APART_SECONDS:
        return f"auth_timestamp is not within {CLOCKS_APART_SECONDS} s of this server's clock"
    if (body or "body_md5" in given) and not hmac.compare_digest(
        given.get("body_md5", "").encode(), body_md5(body).encode()
    ):
        return "body_md5 is not that of the body"
    expected = signed(secret, _to_sign(method, path, pairs))
    if not hmac.compare_digest(given.get("auth_signature", "").encode(), expected.encode()):
        return "auth_signature is wrong"
    return None
