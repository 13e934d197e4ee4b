"""The composition root: opens the database, secrets and realtime, and builds the engine with its flows, from the
settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import structlog

from ecluse.base.clock import Clock
from ecluse.base.data_dir import default_data_dir
from ecluse.base.trace_files import TraceFiles, TraceFolder
from ecluse.bootstrap.box import (
    Lacking,
    automation_config,
    automation_plans,
    enrichment_config,
    lacking,
    load_flows,
    load_packages,
    shops,
    transcription_config,
    vendor_setup,
    vendors,
)
from ecluse.bootstrap.keeping import keep_days, retention_rules
from ecluse.db import embedded
from ecluse.db.connect import check, normalise
from ecluse.db.pools import DELIVERING
from ecluse.engine import ROLES, EmitLive, FiringLimits, Flow, PublishedEvent, Role, Sink
from ecluse.notify.rules import FLOW_NAME as NOTIFICATIONS
from ecluse.retention.sweep import job as retention_job
from ecluse.settings import Settings

if TYPE_CHECKING:
    from ecluse.access.limits import Allowed
    from ecluse.access.secrets import Secrets
    from ecluse.engine.kit import Kit
    from ecluse.flows.jobs.sweeps import Leasing
    from ecluse.notify.work import Setup
    from ecluse.realtime.limits import Limits
    from ecluse.realtime.room import LostRights, Realtime

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Database:
    """An opened database: its address and, if it is embedded, its server."""

    dsn: str
    server: embedded.Embedded | None  # the embedded server, if this process started or joined it

    def release(self) -> None:
        """End this process's use of the embedded server, if it uses one."""
        if self.server is not None:
            self.server.release()


def open_database(settings: Settings) -> Database:
    """Open the database in DATABASE_URL or, if that is unset, the embedded one, which is started if needed. Blocking.
    Raise SetUpError if it is unavailable or unsuitable."""
    if settings.DATABASE_URL:
        dsn = normalise(settings.DATABASE_URL)
        check(dsn)
        return Database(dsn, None)
    server = embedded.start(settings.ECLUSE_DATA_DIR or default_data_dir())
    return Database(normalise(server.dsn()), server)


def without_database(settings: Settings) -> Path | None:
    """Return the data directory if the embedded database is to be used and has not been made yet, else None."""
    folder = settings.ECLUSE_DATA_DIR or default_data_dir()
    return None if settings.DATABASE_URL or embedded.pgdata_of(folder).exists() else folder


def trace_folders(settings: Settings) -> dict[str, TraceFolder]:
    """Return the folders of the debug logs of runs, by flow; they need not exist."""
    data = settings.ECLUSE_DATA_DIR or default_data_dir()
    return {
        "transcription": TraceFolder(data / "logs", "transcription", ".log"),
        "automation": TraceFolder(data / "automation-debug-logs", "automation", ".txt"),
    }


def trace_files(settings: Settings, clock: Clock) -> list[TraceFiles]:
    """Return trace listeners for the flows whose debug logs are switched on."""
    folders = trace_folders(settings)
    found = [TraceFiles(folders["transcription"], clock.now)] if settings.TRANSCRIPTION_DEBUG_LOG_TO_FILE else []
    if settings.AUTOMATION_DEBUG_LOG_TO_FILE:
        found.append(TraceFiles(folders["automation"], clock.now))
    return found


def open_secrets(settings: Settings, database: Database) -> Secrets | None:
    """Load the secret key; for the embedded database, create one in the data directory if none is given. Return None if
    there is no key. Raise SetUpError if a key is invalid or its file cannot be read, and if stored secrets cannot be
    decrypted with the loaded keys."""
    from ecluse.access.secrets import check_fits, made_once  # only servers need ciphers

    if _key_of(settings, "ECLUSE_SECRET_KEY") is None and database.server is not None:
        made_once(database.server.data_dir / "secret.key")
    secrets = load_secrets(settings, database)
    with psycopg.connect(database.dsn) as connection:
        stored = connection.execute("SELECT DISTINCT key_id FROM secrets").fetchall()
    check_fits(secrets, [row[0] for row in stored])
    return secrets


def load_secrets(settings: Settings, database: Database) -> Secrets | None:
    """Load the secret key and, while it is being replaced, the old one; None if there is no key. No key is created, and
    stored secrets are not checked. Raise SetUpError if a key is invalid or its file cannot be read."""
    from ecluse.access.secrets import Secrets, key_file

    key = _key_of(settings, "ECLUSE_SECRET_KEY")
    if key is None and database.server is not None and (own := database.server.data_dir / "secret.key").exists():
        key = key_file(own)
    return None if key is None else Secrets(key, _key_of(settings, "ECLUSE_SECRET_KEY_OLD"))


def _key_of(settings: Settings, knob: str) -> bytes | None:
    from ecluse.access.secrets import key_file, read_key

    given, path = getattr(settings, knob), getattr(settings, f"{knob}_FILE")
    if given is not None:
        return read_key(given.get_secret_value(), knob)
    return None if path is None else key_file(path)


def allowed(settings: Settings) -> Allowed:
    """Return the limits per key and tenant."""
    from ecluse.access.limits import KNOB, Allowed  # only servers have callers

    return Allowed(**{one.name: getattr(settings, KNOB + one.name.upper()) for one in fields(Allowed)})


def open_realtime(settings: Settings, secrets: Secrets | None, limits: Limits, lost_rights: LostRights) -> Realtime:
    """Build realtime from the settings. If only some of the knobs of hosted Pusher are set, it is left out, with a
    warning."""
    from ecluse.realtime.room import HostedApp, Realtime

    given = (settings.PUSHER_APP_ID, settings.PUSHER_KEY, settings.PUSHER_SECRET)
    place = settings.PUSHER_CLUSTER or settings.PUSHER_HOST
    hosted = None
    if all(given) and place and settings.PUSHER_APP_ID and settings.PUSHER_KEY and settings.PUSHER_SECRET:
        secret = settings.PUSHER_SECRET.get_secret_value()
        where = (settings.PUSHER_CLUSTER, settings.PUSHER_HOST)
        hosted = HostedApp(settings.PUSHER_APP_ID, settings.PUSHER_KEY, secret, *where)
    elif any(given) or place:
        log.warning(
            "realtime: hosted Pusher is not used, some knobs are unset: set PUSHER_APP_ID, PUSHER_KEY, PUSHER_SECRET, "
            "and PUSHER_CLUSTER or PUSHER_HOST"
        )
    return Realtime(
        secrets,
        private=settings.PUSHER_USE_PRIVATE_CHANNELS,
        largest=settings.PUSHER_MAX_PAYLOAD_BYTES,
        dry_run=settings.PUSHER_DRY_RUN,
        hosted=hosted,
        limits=limits,
        lost_rights=lost_rights,
    )


# The pages about records other than runs that events are about, for mails; `{kind}:{id}` is the aggregate of an event.
PAGES_OF_EVENTS = {
    "rule_run": "/ui/pricing/runs/{}",
    "pricing_project": "/ui/pricing?project={}",
    "job": "/ui/jobs/{}",
    "company": "/ui/requests?siren={}",
}


def notify_setup(settings: Settings, dsn: str, secrets: Secrets | None) -> Setup:
    """Return the settings of the notifications flow; without SMTP_HOST and MAIL_FROM it sends no mail."""
    from ecluse.notify.work import Setup, Smtp  # only servers send notifications

    smtp = None
    if settings.SMTP_HOST and settings.MAIL_FROM:
        smtp = Smtp(
            settings.SMTP_HOST,
            settings.SMTP_PORT,
            settings.MAIL_FROM,
            username=settings.SMTP_USERNAME,
            password=settings.SMTP_PASSWORD.get_secret_value() if settings.SMTP_PASSWORD else None,
            # With a password TLS is required: an attacker on the way could hide the server's offer to encrypt.
            starttls={"auto": True if settings.SMTP_USERNAME else None, "always": True, "never": False}[
                settings.SMTP_STARTTLS
            ],
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
        pages=PAGES_OF_EVENTS,
        mails_per_day=settings.ECLUSE_MAILS_PER_DAY,
        connections=min(DELIVERING, settings.ECLUSE_DB_POOL),
    )


def job_leasing(settings: Settings) -> Leasing:
    """Return for how long an agent holds a job and a job waits for an agent, with the long polls of this process."""
    from ecluse.access.polls import Polls
    from ecluse.flows.jobs.sweeps import Leasing

    lease, pending = settings.ECLUSE_JOB_LEASE_SECONDS, settings.ECLUSE_JOB_PENDING_SECONDS
    return Leasing(timedelta(seconds=lease), timedelta(seconds=pending), Polls())


def bootstrap(
    settings: Settings,
    dsn: str,
    flows: Sequence[Flow],
    roles: frozenset[Role] = ROLES,
    *,
    secrets: Secrets | None = None,
    live: EmitLive = lambda _: None,
    sinks: Sequence[Sink] = (),
    leasing: Leasing | None = None,
) -> Kit:
    """Build the engine with these flows, ready to be started. `dsn` is the address of a migrated database; `live` takes
    ephemeral events, `sinks` take published ones besides notifications; `leasing` has the long polls of agents."""
    from ecluse.access import maintenance
    from ecluse.access.agents import CHANNEL as JOBS_CHANNEL
    from ecluse.engine.kit import Kit
    from ecluse.flows.enrichment.relaunch import relaunch
    from ecluse.flows.enrichment.rules import FLOW as ENRICHMENT
    from ecluse.flows.jobs.sweeps import periodic
    from ecluse.notify.dispatch import dispatch
    from ecluse.notify.flow import working

    def able(flow: Flow) -> Flow:
        """Return the flow with the resources that were not available when it was loaded: secrets and the database."""
        if flow.name == NOTIFICATIONS:
            return working(notify_setup(settings, dsn, secrets))
        if flow.name == "automation":
            return replace(flow, vendors=vendors(settings, secrets), plans=automation_plans(settings, secrets))
        if flow.name in ("transcription", "audit"):
            return replace(flow, vendors=vendors(settings, secrets))
        if flow.name == "pricing":
            return replace(flow, vendors=shops(settings, secrets))
        return flow

    async def relaunching(events: Sequence[PublishedEvent]) -> None:
        if (enriching := kit.by_name.get(ENRICHMENT)) is not None:
            await relaunch(kit.pool, enriching, enrichment_config(settings), events)

    by_name, rules = {flow.name: flow for flow in flows}, retention_rules(settings, flows)
    leasing = leasing or job_leasing(settings)
    kit = Kit(
        dsn=dsn,
        flows=[able(flow) for flow in flows],
        sinks=[lambda events: dispatch(kit.pool, events), relaunching, *sinks],
        live=live,
        roles=roles,
        hands=settings.ECLUSE_HANDS,
        tenant_share=settings.ECLUSE_TENANT_SLOTS_SHARE,
        chunk=settings.AUTOMATION_SEND_EVENT_CHUNK_SIZE,
        beat=settings.ECLUSE_HEARTBEAT_SECONDS,
        dead_after=settings.ECLUSE_DEAD_AFTER_SECONDS,
        db_pool=settings.ECLUSE_DB_POOL,
        trace_rows=settings.WORKFLOW_LOG_DB_ENABLED,
        due=FiringLimits(
            look_back=timedelta(minutes=settings.AUTOMATION_SCHEDULER_WINDOW_MINUTES),
            catch_up_within=timedelta(hours=settings.ECLUSE_CATCH_UP_HOURS),
        ),
        jobs=[
            retention_job(by_name, rules),
            maintenance.job(by_name, rules, trace_folders(settings), secrets),
            *periodic(leasing),
        ],
        hears={JOBS_CHANNEL: leasing.polls.wake},
    )
    return kit
