"""Secrets at rest: AES-GCM, bound to tenant and name, so that a ciphertext moved to another row cannot be decrypted.

The key comes from the environment or a file, never from the database. Each row stores the id of the key it is encrypted
with: a process without that key refuses to start instead of failing at the first use.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ecluse.base.errors import NotFound, SetUpError
from ecluse.db.connect import Connection
from ecluse.db.query import fetch_column, fetch_row, fetch_rows

KEY_BYTES = 32
NONCE_BYTES = 12
MAKE_ONE = (
    "Create one with `openssl rand -base64 32`, set it as ECLUSE_SECRET_KEY, and keep it apart from the database."
)

GET = "SELECT key_id, nonce, ciphertext FROM secrets WHERE tenant_id = %s AND name = %s"
GET_ALL = "SELECT name, key_id, nonce, ciphertext FROM secrets WHERE tenant_id = %s AND name = ANY(%s)"
PUT = """
INSERT INTO secrets (tenant_id, name, key_id, nonce, ciphertext, updated_at) VALUES (%s, %s, %s, %s, %s, ecluse_now())
ON CONFLICT (tenant_id, name) DO UPDATE SET key_id = excluded.key_id, nonce = excluded.nonce,
    ciphertext = excluded.ciphertext, updated_at = excluded.updated_at
"""


class Secrets:
    """Stores secrets of tenants encrypted. `key` encrypts and decrypts; `old` only decrypts, while the key is being
    replaced."""

    def __init__(self, key: bytes, old: bytes | None = None) -> None:
        self._ciphers = {_id_of(one): AESGCM(one) for one in (key, old) if one is not None}
        self.key_ids = tuple(self._ciphers)  # the current one first
        self.key_id = self.key_ids[0]

    @property
    def has_old(self) -> bool:
        return len(self.key_ids) > 1

    async def put(self, connection: Connection, tenant: str, name: str, value: str) -> None:
        await connection.execute(PUT, (tenant, name, *self.sealed(tenant, name, value)))

    async def get(self, connection: Connection, tenant: str, name: str) -> str:
        """Return the value of a secret; raise NotFound if the tenant has no such secret."""
        row = await fetch_row(connection, GET, (tenant, name))
        if row is None:
            raise NotFound(f"Tenant {tenant} has no secret {name!r}.")
        return self.opened(tenant, name, *row)

    async def get_all(self, connection: Connection, tenant: str, names: Sequence[str]) -> dict[str, str]:
        """Return the values of the tenant's secrets with these names, by name. Names without a secret are left out."""
        rows = await fetch_rows(connection, GET_ALL, (tenant, list(names)))
        return {name: self.opened(tenant, name, *sealed) for name, *sealed in rows}

    def sealed(self, tenant: str, name: str, value: str) -> tuple[str, bytes, bytes]:
        """Encrypt a value for this tenant and name; return the id of the key, the nonce and the ciphertext."""
        nonce = os.urandom(NONCE_BYTES)
        return self.key_id, nonce, self._ciphers[self.key_id].encrypt(nonce, value.encode(), _bound_to(tenant, name))

    def opened(self, tenant: str, name: str, key_id: str, nonce: bytes, ciphertext: bytes) -> str:
        """Decrypt a value. Raise SetUpError if this process lacks its key, or if it was encrypted for another tenant or
        name."""
        check_fits(self, [key_id])
        try:
            return self._ciphers[key_id].decrypt(nonce, ciphertext, _bound_to(tenant, name)).decode()
        except InvalidTag as error:
            raise SetUpError(
                f"Secret {name!r} of tenant {tenant} cannot be decrypted: it was altered, or copied from another name "
                "or tenant. Store it again."
            ) from error


async def delete(connection: Connection, tenant: str, name: str) -> bool:
    cursor = await connection.execute("DELETE FROM secrets WHERE tenant_id = %s AND name = %s", (tenant, name))
    return bool(cursor.rowcount)


async def names(connection: Connection, tenant: str) -> list[str]:
    return await fetch_column(connection, "SELECT name FROM secrets WHERE tenant_id = %s ORDER BY name", (tenant,))


def check_fits(secrets: Secrets | None, stored: Iterable[str]) -> None:
    """Raise SetUpError if this process lacks a key that stored secrets are encrypted with. `stored`: the ids of those
    keys; `secrets` None: this process has no key."""
    if secrets is None and (others := sorted(stored)):
        raise SetUpError(
            f"The stored secrets are encrypted with key {', '.join(others)}, but this server has no key: set "
            "ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE to that key."
        )
    if secrets is not None and (others := sorted(set(stored) - set(secrets.key_ids))):
        here = f"this server has key {secrets.key_id}" + (
            f" and old key {secrets.key_ids[1]}" if secrets.has_old else ""
        )
        raise SetUpError(
            f"Stored secrets are encrypted with key {', '.join(others)}, but {here}. Nothing was changed. Set "
            "ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE to the key they are encrypted with; while the key is being "
            "replaced, set ECLUSE_SECRET_KEY_OLD or ECLUSE_SECRET_KEY_OLD_FILE to it."
        )


def read_key(text: str, source: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SetUpError(f"{source} is not {KEY_BYTES} bytes in base64. {MAKE_ONE}")
    return key


def key_file(path: Path) -> bytes:
    try:
        return read_key(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SetUpError(f"The secret key cannot be read from {path}: {error}. {MAKE_ONE}") from error


def made_once(path: Path) -> bytes:
    """Return the key in this file; if the file is missing, create it with a new key. Replicas that start together get
    the same key: the file appears complete or not at all. Raise SetUpError if it cannot be created or read."""
    if not path.exists():
        try:
            _make(path)
        except OSError as error:
            raise SetUpError(f"A secret key cannot be created at {path}: {error.strerror}. {MAKE_ONE}") from error
    return key_file(path)


def _make(path: Path) -> None:
    handle, new = tempfile.mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(base64.b64encode(os.urandom(KEY_BYTES)).decode() + "\n")
        file.flush()
        os.fsync(handle)  # before the key is used: secrets encrypted with a lost key would be lost, too
    with suppress(FileExistsError):
        os.link(new, path)
    Path(new).unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _id_of(key: bytes) -> str:
    return hashlib.sha256(b"ecluse key id" + key).hexdigest()[:16]


def _bound_to(tenant: str, name: str) -> bytes:
    return json.dumps([tenant, name]).encode()
