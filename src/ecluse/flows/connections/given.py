"""URLs and keys of vendors that users enter: the checks before they are used, and the part of a key that may be
shown."""

from __future__ import annotations

import re
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr

from ecluse.access.envelope import Refused
from ecluse.access.secrets import Secrets
from ecluse.access.surface import CallerRequest
from ecluse.base.errors import InvalidInput, VendorError

SHORTEST_SHOWN = 20  # characters of a key whose last four may be shown: the remaining ones cannot be guessed

K = TypeVar("K", SecretStr, SecretStr | None)


def sendable(key: K) -> K:
    """Return an API key unchanged; raise ValueError if it cannot be sent in a header."""
    if key is not None and not re.fullmatch("[!-~]([ -~]*[!-~])?", key.get_secret_value()):
        raise ValueError("an API key is printable ASCII, without blanks around it")
    return key


def checked_address(asked: CallerRequest, url: str) -> str:
    """Return the URL without a slash at its end. Raise InvalidInput if the SSRF guard refuses it, or if it has a query
    or a fragment."""
    if (why := asked.state.guard.refuse_reason(url)) is not None:
        raise InvalidInput(f"base_url: {why}")
    if urlsplit(url).query or urlsplit(url).fragment:
        raise InvalidInput("base_url: it must not have a query or a fragment")
    return url.rstrip("/")


def key_ends(key: str) -> str | None:
    """Return the last characters of a key, which may be shown; None if it is too short to show any."""
    return key[-4:] if len(key) >= SHORTEST_SHOWN else None


def sealing(asked: CallerRequest) -> Secrets:
    """Return the store of secrets. Raise Refused (409) if this server has no encryption key."""
    keys: Secrets | None = asked.state.secrets
    if keys is None:
        why = "This server has no encryption key, so API keys and other secrets cannot be stored"
        raise Refused(409, "NO_SECRET_KEY", f"{why}: set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE.")
    return keys


def refused_by_vendor(error: VendorError, *, stored: bool = False) -> Refused:
    """Return the refusal (422) for a connection whose test failed; `stored`: the connection was stored before the
    test."""
    so = "" if stored else ", nothing was stored"
    return Refused(422, "CONNECTION_REFUSED", f"The connection does not work{so}: {error.message}")
