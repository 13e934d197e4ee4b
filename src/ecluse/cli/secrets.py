"""`ecluse secrets rotate`: encrypt all stored secrets with the current key. It runs on the host, because it needs both
keys and the database."""

from __future__ import annotations

import asyncio
import getpass
from collections import Counter

from ecluse import bootstrap, settings
from ecluse.access import audit_trail, sealing
from ecluse.access.refusal_log import SYSTEM
from ecluse.access.secrets import MAKE_ONE, Secrets
from ecluse.base import logging
from ecluse.base.errors import SetUpError
from ecluse.cli import show
from ecluse.cli.failure import OK
from ecluse.db.connect import open_session


def rotate(*, as_json: bool) -> int:
    logging.configure("WARNING", settings.log_settings()[1])
    given = settings.load()
    database = bootstrap.open_database(given)
    try:
        secrets = bootstrap.open_secrets(given, database)
        if secrets is None:
            raise SetUpError(
                f"This server has no encryption key: set ECLUSE_SECRET_KEY or ECLUSE_SECRET_KEY_FILE. {MAKE_ONE}"
            )
        done = asyncio.run(_rotate(database.dsn, secrets))
    finally:
        database.release()
    if as_json:
        show.write_json({"key_id": secrets.key_id, **{name.replace(" ", "_"): n for name, n in done.items()}})
    else:
        counts = ", ".join(f"{name}: {count}" for name, count in done.items()) or "nothing to do"
        so = f"all secrets are encrypted with key {secrets.key_id} ({counts})"
        show.write(f"{so}; an old key is not needed any more")
    return OK


async def _rotate(dsn: str, secrets: Secrets) -> Counter[str]:
    async with await open_session(dsn) as connection:
        done = Counter({"secrets encrypted again": await sealing.rotate(connection, secrets)})
        done |= await sealing.seal_urls(connection, secrets)
        told = ", ".join(f"{name}: {count}" for name, count in done.items())
        about = (SYSTEM, f"cli:{getpass.getuser()}", "secrets.rotate", f"key:{secrets.key_id}", told)
        await audit_trail.record_all(connection, [audit_trail.Entry(*about)])
    return done
