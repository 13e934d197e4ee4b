"""The composition root: settings in, a database that answers and an engine with its flows out."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg

from ecluse.base.errors import SetUpError
from ecluse.db import embedded
from ecluse.db.connect import check, normalise
from ecluse.engine import ROLES, Flow, Role, Rules
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.settings import Settings

if TYPE_CHECKING:
    from ecluse.access.secrets import Secrets
    from ecluse.engine import Kit
    from ecluse.notify.work import Setup


IN_THE_BOX = ("ecluse.notify.flow:FLOW",)


@dataclass(frozen=True)
class Database:
    dsn: str
    server: embedded.Embedded | None  # ours, if we started or joined it

    def release(self) -> None:
        if self.server is not None:
            self.server.release()


def open_database(settings: Settings) -> Database:
    """The one in DATABASE_URL, or the embedded one. Blocking."""
    if settings.DATABASE_URL:
        dsn = normalise(settings.DATABASE_URL)
        check(dsn)
        return Database(dsn, None)
    server = embedded.start(settings.ECLUSE_DATA_DIR or embedded.default_data_dir())
    return Database(normalise(server.dsn()), server)


def load_flows(settings: Settings, extra: Sequence[str] = ()) -> list[Flow]:
    names = [name.strip() for name in settings.ECLUSE_FLOWS.split(",") if name.strip()]
    flows = {name: _load_flow(name) for name in (*IN_THE_BOX, *names, *extra)}
    known = Counter(flow.name for flow in flows.values())
    if twice := sorted(name for name, count in known.items() if count > 1):
        raise SetUpError(f"Two flows are called {', '.join(twice)}: load only one of them ({', '.join(flows)}).")
    return list(flows.values())


def _load_flow(name: str) -> Flow:
    module, _, attribute = name.partition(":")
    try:
        flow = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise SetUpError(
            f"Cannot load flow {name!r}: {error}. Give it as package:NAME, importable from here."
        ) from error
    if not isinstance(flow, Flow):
        raise SetUpError(f"{name!r} is not a Flow but a {type(flow).__name__}.")
    return flow


def open_secrets(settings: Settings, database: Database) -> Secrets | None:
    """Refuses a key that does not fit what is stored. None: there is no key, and nothing that would need one."""
    from ecluse.access.secrets import Secrets, check_fits, key_file, made_once, read_key  # only servers need ciphers

    secrets = None
    if settings.ECLUSE_SECRET_KEY is not None:
        secrets = Secrets(read_key(settings.ECLUSE_SECRET_KEY.get_secret_value(), "ECLUSE_SECRET_KEY"))
    elif settings.ECLUSE_SECRET_KEY_FILE is not None:
        secrets = Secrets(key_file(settings.ECLUSE_SECRET_KEY_FILE))
    elif database.server is not None:
        secrets = Secrets(made_once(database.server.data_dir / "secret.key"))
    with psycopg.connect(database.dsn) as connection:
        stored = connection.execute("SELECT DISTINCT key_id FROM secrets").fetchall()
    check_fits(secrets, [row[0] for row in stored])
    return secrets


def notify_setup(settings: Settings, dsn: str, secrets: Secrets | None) -> Setup:
    from ecluse.notify.work import Setup, Smtp  # only servers tell anybody

    smtp = None
    if settings.SMTP_HOST and settings.MAIL_FROM:
        smtp = Smtp(
            settings.SMTP_HOST,
            settings.SMTP_PORT,
            settings.MAIL_FROM,
            username=settings.SMTP_USERNAME,
            password=settings.SMTP_PASSWORD.get_secret_value() if settings.SMTP_PASSWORD else None,
            starttls={"auto": None, "always": True, "never": False}[settings.SMTP_STARTTLS],
            tls=settings.SMTP_TLS,
            timeout=settings.SMTP_TIMEOUT_SECONDS,
        )
    return Setup(
        dsn,
        read_secret=secrets.get if secrets else None,
        allowed_networks=tuple(settings.allowed_networks),
        webhook_timeout=settings.ECLUSE_WEBHOOK_TIMEOUT_SECONDS,
        smtp=smtp,
        public_url=settings.ECLUSE_PUBLIC_URL,
    )


def bootstrap(
    settings: Settings,
    dsn: str,
    flows: Sequence[Flow],
    roles: frozenset[Role] = ROLES,
    secrets: Secrets | None = None,
) -> Kit:
    from ecluse.engine import Kit  # here, because commands that start no engine should not wait for it
    from ecluse.notify.dispatch import dispatch
    from ecluse.notify.flow import working

    setup = notify_setup(settings, dsn, secrets)
    kit = Kit(
        dsn=dsn,
        flows=[working(setup) if flow.name == NOTIFICATIONS else flow for flow in flows],
        sinks=[lambda events: dispatch(kit.pool, events)],
        roles=roles,
        hands=settings.ECLUSE_HANDS,
        chunk=settings.AUTOMATION_SEND_EVENT_CHUNK_SIZE,
        beat=settings.ECLUSE_HEARTBEAT_SECONDS,
        dead_after=settings.ECLUSE_DEAD_AFTER_SECONDS,
        trace_rows=settings.WORKFLOW_LOG_DB_ENABLED,
        due=Rules(
            look_back=timedelta(minutes=settings.AUTOMATION_SCHEDULER_WINDOW_MINUTES),
            catch_up_within=timedelta(hours=settings.ECLUSE_CATCH_UP_HOURS),
        ),
    )
    return kit
