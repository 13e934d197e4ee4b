"""Secrets at rest: sealed for one tenant and name, with a key that is never in the database."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from ecluse.access import secrets
from ecluse.access.secrets import Secrets, made_once
from ecluse.base.errors import NotFound, SetUpError
from ecluse.bootstrap import Database, open_secrets
from ecluse.settings import Settings

CANARY = "sk-live-canary"


def encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.req("ENG-88")
async def test_a_secret_comes_back_and_is_not_readable_where_it_is_stored(connection, query):
    vault = Secrets(os.urandom(32))
    await vault.put(connection, "default", "crm", CANARY)
    assert await vault.get(connection, "default", "crm") == CANARY
    before = query("SELECT nonce, ciphertext FROM secrets")
    await vault.put(connection, "default", "crm", CANARY)
    assert query("SELECT nonce, ciphertext FROM secrets") != before, "the same text is sealed differently each time"
    assert CANARY.encode() not in b"".join(bytes(cell) for row in before for cell in row)
    await vault.put(connection, "default", "crm", "another")
    assert await vault.get(connection, "default", "crm") == "another"
    assert await secrets.names(connection, "default") == ["crm"]
    assert await secrets.delete(connection, "default", "crm") is True
    assert await secrets.delete(connection, "default", "crm") is False
    with pytest.raises(NotFound):
        await vault.get(connection, "default", "crm")


@pytest.mark.parametrize("change", ["tenant_id = 'rival'", "name = 'other'", "ciphertext = ciphertext || '\\x00'"])
async def test_a_ciphertext_that_was_moved_or_changed_opens_nothing(connection, query, change):
    vault = Secrets(os.urandom(32))
    query("INSERT INTO tenants (id, name, created_at) VALUES ('rival', 'rival', ecluse_now())")
    await vault.put(connection, "default", "crm", CANARY)
    query(f"UPDATE secrets SET {change}")  # noqa: S608 - from the table above
    tenant, name = query("SELECT tenant_id, name FROM secrets")[0]
    with pytest.raises(SetUpError, match="Store it again"):
        await vault.get(connection, tenant, name)


async def test_a_program_with_another_key_or_none_refuses_to_start(connection, dsn):
    right, wrong = os.urandom(32), os.urandom(32)
    await Secrets(right).put(connection, "default", "crm", CANARY)
    database = Database(dsn, None)
    assert open_secrets(Settings(ECLUSE_SECRET_KEY=encoded(right)), database) is not None
    with pytest.raises(SetUpError, match="but this server has key") as refused:
        open_secrets(Settings(ECLUSE_SECRET_KEY=encoded(wrong)), database)
    assert encoded(wrong) not in refused.value.message
    with pytest.raises(SetUpError, match="but this server has no key"):
        open_secrets(Settings(), database)


@pytest.mark.parametrize("text", ["", "short", encoded(b"x" * 31), "!" * 44, encoded(b"x" * 64)])
@pytest.mark.req("G-36")
def test_a_key_that_is_none_is_refused_without_being_repeated(dsn, tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    sources = [Settings(ECLUSE_SECRET_KEY_FILE=file)] + ([Settings(ECLUSE_SECRET_KEY=text)] if text else [])
    for settings in sources:
        with pytest.raises(SetUpError, match="32 bytes in base64") as refused:
            open_secrets(settings, Database(dsn, None))
        assert not text or text not in refused.value.message


def test_a_key_file_that_is_not_there_is_named(dsn, tmp_path):
    with pytest.raises(SetUpError, match="nowhere"):
        open_secrets(Settings(ECLUSE_SECRET_KEY_FILE=tmp_path / "nowhere"), Database(dsn, None))


def test_without_a_database_of_somebody_elses_a_key_is_made_once_and_for_the_owner_only():
    folder = Path(tempfile.mkdtemp())
    try:
        with ThreadPoolExecutor(8) as together:
            made = set(together.map(lambda _: made_once(folder / "secret.key"), range(8)))
        assert len(made) == 1
        assert stat.S_IMODE((folder / "secret.key").stat().st_mode) == 0o600
        assert [file.name for file in folder.iterdir()] == ["secret.key"]
    finally:
        shutil.rmtree(folder)


def test_a_place_where_no_key_can_be_made_is_named(tmp_path):
    with pytest.raises(SetUpError, match=r"nowhere/secret\.key"):
        made_once(tmp_path / "nowhere" / "secret.key")
