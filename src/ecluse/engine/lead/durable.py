"""The only adapter to DBOS: every call of it, and all code that depends on its version, is in this file. (A few
statements elsewhere read its table of workflows.)

One workflow function leads every run; its argument is the run's id, the facts are in our tables. The application
version is pinned (the default is a hash of the source, so that any edit would strand the workflows in flight) and
patching is on. Launched inside the running loop, DBOS runs started, dequeued and recovered workflows all on that loop.
Of its queues only the internal one is used, for workflows that are recovered or handed over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
import structlog
from dbos import DBOS, DBOSConfig, SetWorkflowID
from dbos._core import WorkflowHandleAsyncTask
from dbos._error import DBOSException, DBOSUnexpectedStepError
from dbos._utils import INTERNAL_QUEUE_NAME
from sqlalchemy import exc

from ecluse.base.ids import workflow_id
from ecluse.base.tasks import stopped
from ecluse.db.connect import Connection, has_input, open_blocking_session
from ecluse.db.outage import is_unavailable, one_line
from ecluse.db.pools import share
from ecluse.db.query import fetch_column
from ecluse.db.shares import Shares
from ecluse.engine.model.flow import Run

log = structlog.get_logger(__name__)

APPLICATION = "ecluse"
VERSION = "1"
WORKFLOW = "ecluse.run"
# How long `stop` waits for the workflows of runs that have just ended to record their result.
RECORD_SECONDS = 0.1
GIVE_BACK_SECONDS = 2.0
IDLE_SECONDS = 10.0

DATABASE_ERRORS = (psycopg.Error, exc.SQLAlchemyError)  # `is_database_outage` tells an outage from other errors

R = TypeVar("R")
Lead = Callable[[int], Awaitable[None]]


class NotHere(Exception):
    """Raised if this process cannot lead a run because the run's flow is not loaded here; another replica may have
    it."""


def is_database_outage(error: BaseException) -> bool:
    """Return True if the error means that the database is unavailable, whether the driver, DBOS or SQLAlchemy raised
    it."""
    if isinstance(error, exc.DBAPIError):
        return error.orig is not None and is_unavailable(error.orig)
    return isinstance(error, exc.TimeoutError) or is_unavailable(error)


def is_dbos_or_outage(error: Exception) -> bool:
    """Return True if the error is a signal of DBOS itself, or a database outage inside DBOS; any other error is the
    story's."""
    return isinstance(error, DBOSException) or (isinstance(error, exc.SQLAlchemyError) and is_database_outage(error))


@contextmanager
def _as_driver_error() -> Iterator[None]:
    """Convert an outage that SQLAlchemy reports into the driver's error, so that callers handle one kind of error.
    Other errors pass unchanged."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        if not is_database_outage(error):
            raise
        raise psycopg.OperationalError(one_line(error)) from error


_lead: Lead | None = None
_dsn = ""
_steps = Shares("steps", 1, patience=None)
_leading: dict[str, asyncio.Task[Any]] = {}
_started: set[str] = set()  # workflows started by this process and not over; their tasks may be about to run


@DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)
async def _workflow(run_id: int) -> None:
    """Lead the run; the body of every workflow. DBOS records its return or its error as the workflow's end; a cancelled
    workflow stays pending. So it raises CancelledError if the database is unavailable, if this version cannot lead the
    run (which is handed over first), or if this replica is stopping."""
    task, name = asyncio.current_task(), DBOS.workflow_id
    if _lead is None or task is None or name is None:  # this replica is stopping: the workflow stays pending
        raise asyncio.CancelledError
    _leading[name] = task
    try:
        await _lead(run_id)
    except (NotHere, DBOSUnexpectedStepError) as error:
        # Another version of this program knows the run's flow, or has led it further than this version's story goes.
        log.error("workflows: this version cannot lead it, handing it over", workflow=name, error=str(error))
        await asyncio.sleep(GIVE_BACK_SECONDS)
        with suppress(psycopg.Error):  # then it stays with this replica, which tries again when it is resumed
            await asyncio.to_thread(_give_back, name)
        raise asyncio.CancelledError from error
    except DATABASE_ERRORS as error:
        if not is_database_outage(error):
            raise
        # A database outage is not the story's fault. Only a cancelled workflow stays pending, to be resumed; any other
        # error would be recorded as the workflow's end as soon as the database is back.
        log.warning("workflows: interrupted, database unavailable, to be resumed", workflow=name, error=one_line(error))
        raise asyncio.CancelledError from error
    finally:
        if _leading.get(name) is task:
            del _leading[name]


def migrate(dsn: str) -> None:
    """Create or upgrade the tables of DBOS, in their own schema."""
    DBOS.migrate(dsn)


def launch(dsn: str, executor_id: str, lead: Lead, connections: int) -> None:
    """Start DBOS in the running event loop, as the executor `executor_id` (this replica's id), with a pool of
    `connections` connections. `lead` is called with the run's id for every workflow that is started or recovered
    here."""
    global _lead, _dsn, _steps
    _lead, _dsn, _steps = lead, dsn, Shares("steps", share(connections), patience=None)
    config: DBOSConfig = {
        "name": APPLICATION,
        "system_database_url": dsn,
        "db_engine_kwargs": {
            "creator": lambda: _connection(dsn),
            "pool_pre_ping": False,  # it would add a statement to each statement
            "pool_events": [(_replace_closed, "checkout")],
        },
        "application_version": VERSION,
        "enable_patching": True,
        "executor_id": executor_id,
        "sys_db_pool_size": connections,
        # As for our own sessions: a replica frozen inside a step delays failover of its runs by at most this long.
        "sys_db_idle_transaction_timeout_sec": IDLE_SECONDS,
        "log_level": "WARNING",
        "run_migrations": False,
        "scheduler_polling_interval_sec": 3600.0,
    }
    DBOS(config=config)
    DBOS.launch()


def _connection(dsn: str) -> psycopg.Connection[Any]:
    """Open a connection for DBOS's SQLAlchemy engine, which begins transactions itself. JIT is off: compiling costs
    more than any statement of DBOS."""
    connection = psycopg.connect(dsn, autocommit=True)
    connection.execute("SET jit = off")
    connection.autocommit = False
    return connection


def _replace_closed(connection: psycopg.Connection[Any], *_: object) -> None:
    """Have SQLAlchemy replace all connections of its pool if the server has closed this one."""
    if has_input(connection):
        raise exc.InvalidatePoolError


async def stop() -> None:
    """Cancel the workflows led here, after up to RECORD_SECONDS for those that are ending, and stop DBOS. A cancelled
    workflow stays pending, so that another replica continues it."""
    global _lead
    dbos_log = logging.getLogger("dbos")
    level = dbos_log.level
    dbos_log.setLevel(logging.ERROR)  # it warns about cancelled tasks, which are intended here
    _lead = None
    tasks = list(_leading.values())
    if tasks:
        await asyncio.wait(tasks, timeout=RECORD_SECONDS)
    await stopped(tasks)
    await asyncio.to_thread(DBOS.destroy)
    # DBOS put its own thread pool into the loop and has shut it down: give the loop a fresh one.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="ecluse-"))
    dbos_log.setLevel(level)


async def start(run: Run) -> None:
    """Start the workflow that leads the run, on this replica. If the workflow exists already, it is not started
    again."""
    name = workflow_id(run.tenant_id, run.event_key)
    with _as_driver_error(), SetWorkflowID(name):
        handle = await DBOS.start_workflow_async(_workflow, run.id)
    if isinstance(handle, WorkflowHandleAsyncTask):
        _started.add(name)
        handle.task.add_done_callback(lambda _: _started.discard(name))


def led() -> Counter[str]:
    """Return the number of runs that this replica leads, by tenant."""
    return Counter(map(_tenant_of, _leading.keys() | _started))


def _tenant_of(workflow: str) -> str:
    return workflow.partition("/")[0]


async def step(name: str, function: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run `function` as a step of the current workflow and store its result; a replay returns the stored result without
    running it again. The steps of a tenant that are under way at once are limited to its share of the connections."""
    async with _steps.held(_tenant_of(DBOS.workflow_id or "")):
        return await DBOS.run_step_async({"name": name}, function)


async def patched(name: str) -> bool:
    """Return whether the run takes the change called `name`: True if the run reaches this line for the first time, or
    took the change before (a replay); False if it had passed this line when the change was deployed."""
    return await DBOS.patch_async(name)


async def receive(topic: str, seconds: float) -> None:
    """Wait for a message to this workflow on the topic, for at most `seconds`. The wait is durable: the wake-up instant
    is stored, so that a replica that takes over waits only for the remaining time."""
    await DBOS.recv_async(topic, timeout_seconds=seconds)


WAKE = "SELECT dbos.send_message(destination_id => %s, message => 'null'::json, topic => %s)"


async def wake(connection: Connection, workflow: str, topic: str) -> None:
    """Send the message that ends the wait of the workflow on this topic. If the workflow does not exist, that is only
    logged: a gate also polls."""
    try:
        async with connection.transaction():  # the caller's transaction survives an error
            await connection.execute(WAKE, (workflow, topic))
    except psycopg.errors.ForeignKeyViolation:
        log.warning("workflows: the one to wake does not exist, its gate will poll", workflow=workflow)


PENDING = "SELECT workflow_uuid FROM dbos.workflow_status WHERE status = 'PENDING' AND executor_id = %s"


async def interrupted(connection: Connection, executor_id: str) -> set[str]:
    """Return the ids of the workflows that are pending on this replica according to DBOS, but that no task of this
    process runs."""
    return set(await fetch_column(connection, PENDING, (executor_id,))) - _leading.keys()


async def resume(workflows: Collection[str]) -> None:
    """Have DBOS replay and continue these pending workflows, which no task of this process may be running. Raise
    psycopg.OperationalError if the database is unavailable."""
    with _as_driver_error():
        await DBOS.resume_workflows_async(list(workflows))


# The statement that DBOS uses for a dead executor's workflows: a replica that stops need not be declared dead first.
HAND_OVER = f"""
UPDATE dbos.workflow_status SET status = 'ENQUEUED', owner_xid = NULL, started_at_epoch_ms = NULL,
    updated_at = extract(epoch FROM clock_timestamp()) * 1000,
    queue_name = coalesce(queue_name, '{INTERNAL_QUEUE_NAME}')
WHERE status = 'PENDING' AND executor_id = %s
"""  # noqa: S608 - a constant of DBOS


def _give_back(workflow: str) -> None:
    with open_blocking_session(_dsn) as connection:
        connection.execute(HAND_OVER + " AND workflow_uuid = %s", (DBOS.executor_id, workflow))


STRANDED = """
SELECT DISTINCT w.executor_id FROM dbos.workflow_status w
WHERE w.status = 'PENDING' AND NOT EXISTS (SELECT 1 FROM replicas r WHERE r.id = w.executor_id AND r.state = 'live')
"""


def recover(executor_ids: Sequence[str]) -> None:
    """Put the pending workflows of these dead executors back into the queue. Blocks: for the reaper's thread."""
    DBOS._recover_pending_workflows(list(executor_ids))  # noqa: SLF001 - the call its own coordinator makes
