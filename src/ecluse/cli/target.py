"""The server and the key that a command uses: from options, from ECLUSE_URL and ECLUSE_KEY, from a profile, or the
server of this host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ecluse.cli import operator_file
from ecluse.cli.arguments import read_text
from ecluse.cli.client import Client, Unreachable
from ecluse.cli.failure import meant, misused

APPEAR_SECONDS = 1.0  # a server started by the same script may not have announced itself yet
START_SECONDS = 30.0
LOOK_SECONDS = 0.1
DEFAULT = "default"


@dataclass(frozen=True)
class Given:
    """Options for connection and output that the user gave, before or after the command's name."""

    url: str | None = None
    key_file: str | None = None
    profile: str | None = None
    tenant: str | None = None
    json: bool = False


def client_for(given: Given, appear_seconds: float = APPEAR_SECONDS) -> Client:
    """Return a client of the server to use: the first that is named by an option, the environment or a profile, else
    the server that runs on this host. Raise Failure if there is no key for it, or no such profile or server.
    `appear_seconds`: how long to wait for a server of this host to appear."""
    key = read_key(given.key_file) if given.key_file is not None else None
    if given.url is None and given.profile is not None:
        known = profile(given.profile)
        return Client(known["url"], key or known["key"], given.tenant)
    key = key or _checked(os.environ.get("ECLUSE_KEY"), "ECLUSE_KEY")
    url = given.url or os.environ.get("ECLUSE_URL")
    if url is not None:
        if key is None:
            raise misused(f"There is no key for {url}: give one with --key-file or ECLUSE_KEY.")
        return Client(checked_url(url), key, given.tenant)
    known = profiles().get(DEFAULT) or local_server(appear_seconds)
    return Client(known["url"], key or known["key"], given.tenant)


def checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise misused(f"{url!r} is not the URL of a server: it must begin with http:// or https://.")
    return url


def read_key(name: str) -> str:
    """Read a key from a file, or from stdin if the name is `-`. Raise Failure if the file is empty or has no key."""
    key = _checked(read_text(name, "--key-file"), "The key file")
    if key is None:
        raise misused(f"The key file {name} is empty.")
    return key


def _checked(text: str | None, where: str) -> str | None:
    key = (text or "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise misused(f"{where} does not hold an API key: a key is one word that begins with ecl_.")
    return key or None


def local_server(appear_seconds: float) -> dict[str, str]:
    """Return URL and key of the server of this host. Wait `appear_seconds` for one to appear, and START_SECONDS for one
    that is starting; raise Unreachable if none is ready by then."""
    folder, began = operator_file.data_dir(), time.monotonic()
    while True:
        found = _look(folder)
        ready = [one for one in found["servers"] if one["url"]]
        if ready and found["key"]:
            return {"url": ready[0]["url"], "key": found["key"]}
        patience = START_SECONDS if found["servers"] else appear_seconds
        if time.monotonic() - began > patience:
            break
        time.sleep(LOOK_SECONDS)
    if found["servers"]:
        raise Unreachable(f"The server of {folder} is still starting after {START_SECONDS:g} s: read its log.")
    known = f" or --profile ({', '.join(sorted(profiles()))})" if profiles() else ""
    raise Unreachable(
        f"No server is running on this host (looked in {folder}): start one with `ecluse serve`, "
        f"or name one with --url and --key-file{known}."
    )


def _look(folder: Path) -> dict[str, Any]:
    try:
        return operator_file.read(folder)
    except PermissionError as error:
        raise misused(
            f"{folder / operator_file.NAME} belongs to another user: run the command as the user of the server, "
            "or name a key with --key-file."
        ) from error


def profiles_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "ecluse" / "profiles.json"


def profiles() -> dict[str, dict[str, str]]:
    try:
        found: dict[str, dict[str, str]] = json.loads(profiles_file().read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise misused(f"{profiles_file()} is not valid JSON: correct or remove it.") from error
    return found


def profile(name: str) -> dict[str, str]:
    known = profiles()
    if name not in known:
        raise misused(f"There is no profile {name!r}.{meant(name, known)} Make one: `ecluse login --profile {name}`.")
    return known[name]


def save_profiles(known: Mapping[str, Mapping[str, str]]) -> None:
    file = profiles_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    operator_file.write_private(file, known)
