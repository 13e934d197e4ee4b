"""The first lines of a server's log: the version, the URL to open, and how to create the first API key."""

from __future__ import annotations

import socket

import structlog

from ecluse.base.version import version
from ecluse.db.connect import open_blocking_session

log = structlog.get_logger(__name__)

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here, only replaced in URLs
USABLE = "SELECT FROM api_keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ecluse_now()) LIMIT 1"
CREATE_KEY = "ecluse keys create --name laptop --role operator"


def name_program() -> None:
    log.info("ecluse", version=version())


def say_where(listener: socket.socket, dsn: str, public_url: str | None) -> None:
    """Log the URL to open and, if there is no usable API key, how to create one. For servers with the role api."""
    log.info("open the pages in a browser", url=public_url or url_of(*listener.getsockname()[:2]))
    with open_blocking_session(dsn) as connection:
        if connection.execute(USABLE).fetchone() is None:
            log.info("no API key exists: create one and log in with it", command=CREATE_KEY)


def url_of(host: str, port: int) -> str:
    host = ANYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
