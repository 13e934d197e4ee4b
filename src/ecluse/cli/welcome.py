"""Start-up messages of a server (version, URL, how to create a key), and the key that the command line on its host
uses."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import structlog

from ecluse.access import audit_trail, keys, tenants
from ecluse.base.version import version
from ecluse.cli import operator_file
from ecluse.db.connect import open_blocking_session, open_session

log = structlog.get_logger(__name__)

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here, only replaced in URLs
LOCAL = "local"  # name of the key of the host's operator
USABLE = (
    "SELECT FROM api_keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ecluse_now())"
    f" AND name <> '{LOCAL}' LIMIT 1"
)
VALID = (
    "SELECT FROM api_keys WHERE hash = %s AND revoked_at IS NULL AND role = 'admin' AND tenant_id = %s"
    " AND (expires_at IS NULL OR expires_at > ecluse_now())"
)
CREATE_KEY = "ecluse keys create laptop --role operator"


def name_program() -> None:
    log.info("ecluse: starting", version=version())


def say_where(listener: socket.socket, dsn: str, public_url: str | None) -> None:
    """Log the URL to open and, if there is no usable API key, how to create one. For servers with the role api."""
    log.info("server: open the pages in a browser", url=public_url or url_of(*listener.getsockname()[:2]))
    with open_blocking_session(dsn) as connection:
        if connection.execute(USABLE).fetchone() is None:
            log.info("server: no API key exists, create one and log in with it", command=CREATE_KEY)


def let_operator_in(folder: Path, listener: socket.socket, dsn: str) -> None:
    """Write this server's URL and the operator's key into operator.json, for the command line on this host. A new key
    is created if the stored one is not valid in this database; all servers of the directory use the same key."""
    with operator_file.changing(folder) as content:
        with open_blocking_session(dsn) as connection:
            key = content["key"]
            valid = key and connection.execute(VALID, (keys.digest(key), tenants.DEFAULT)).fetchone() is not None
        if not valid:
            content["key"] = asyncio.run(_new_key(dsn))
            log.info(
                "server: created a key for the operator of this host", name=LOCAL, file=str(folder / operator_file.NAME)
            )
        url = url_of(*listener.getsockname()[:2])
        for server in content["servers"]:
            if server["pid"] == os.getpid():
                server["url"] = url
        if not valid:  # the other servers use another database, where the key is not known
            content["servers"] = [one for one in content["servers"] if one["url"] in (None, url)]


async def _new_key(dsn: str) -> str:
    async with await open_session(dsn) as connection, connection.transaction():
        key_id, key = await keys.create(connection, tenants.DEFAULT, "admin", LOCAL)
        about = (tenants.DEFAULT, "server", "key.create", f"key:{key_id}", LOCAL)
        await audit_trail.record_all(connection, [audit_trail.Entry(*about)])
    return key


def url_of(host: str, port: int) -> str:
    host = ANYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
