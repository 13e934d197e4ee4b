"""One spelling of the address for all libraries, limits that are really in force, and connections that come back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import psycopg
import pytest
import sqlalchemy
from dbos import DBOS
from psycopg.conninfo import conninfo_to_dict
from structlog.testing import capture_logs

from ecluse.base.errors import SetUpError
from ecluse.db import connect
from ecluse.db.connect import (
    LIBPQ,
    NOTHING_MORE,
    check,
    normalise,
    open_blocking_session,
    open_session,
    pool,
    together,
)
from ecluse.db.listen import listen
from ecluse.db.outage import is_unavailable

WHAT_TO_DO = "postgresql://user:password@host:5432/database"


def parts(address: str) -> dict[str, str]:
    """What libpq reads in it, without the limits that we add."""
    return {name: value for name, value in conninfo_to_dict(address).items() if name not in LIBPQ}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("postgresql://u:p@h:5/d", {"user": "u", "password": "p", "host": "h", "port": "5", "dbname": "d"}),
        ("postgres://u@h/d", {"user": "u", "host": "h", "dbname": "d"}),
        ("host=h port=5 user=u dbname=d", {"user": "u", "host": "h", "port": "5", "dbname": "d"}),
        ("host=/run/pg dbname=d", {"host": "/run/pg", "dbname": "d"}),
        ("postgresql://u@%2Frun%2Fpg/d", {"user": "u", "host": "/run/pg", "dbname": "d"}),
        ("postgresql:///d?host=/run/pg", {"host": "/run/pg", "dbname": "d"}),
        ("postgresql://u@[::1]:5/d", {"user": "u", "host": "::1", "port": "5", "dbname": "d"}),
        ("postgresql://a:1,b:2/d", {"host": "a,b", "port": "1,2", "dbname": "d"}),
        ("host=a,b port=5 dbname=d", {"host": "a,b", "port": "5,5", "dbname": "d"}),
        ("postgresql://h/d?sslmode=require", {"host": "h", "dbname": "d", "sslmode": "require"}),
    ],
)
def test_every_way_to_write_an_address_becomes_one_url_that_means_the_same(given, meant):
    url = normalise(given)
    assert url.startswith("postgresql://")
    assert parts(url) == meant
    assert normalise(url) == url


@pytest.mark.parametrize("secret", ["p@ss:w/rd?#&=%", "ü ß'\"\\", "%41", "a+b c"])
def test_special_characters_survive_for_libpq_and_for_sqlalchemy(secret):
    keywords = psycopg.conninfo.make_conninfo(host="/run/a b", user=secret, password=secret, dbname=secret)
    url = normalise(keywords)
    expected = {"host": "/run/a b", "user": secret, "password": secret, "dbname": secret}
    assert parts(url) == expected
    engine = sqlalchemy.create_engine(url)
    _, arguments = engine.dialect.create_connect_args(engine.url)
    assert {name: arguments[name] for name in expected} == expected


def test_our_limits_are_added_and_those_in_the_address_win():
    assert conninfo_to_dict(normalise("postgresql://h/d")).items() >= LIBPQ.items()
    own = normalise("postgresql://h/d?connect_timeout=9&keepalives_idle=60&application_name=mine")
    changed = {"connect_timeout": "9", "keepalives_idle": "60", "application_name": "mine"}
    assert conninfo_to_dict(own).items() >= (LIBPQ | changed).items()


@pytest.mark.parametrize(
    "nonsense",
    [
        "nonsense",
        "mysql://u:secret@h/d",
        "postgresql+psycopg://u:secret@h/d",
        "postgresql://u:secret%zz@h/d",
        "postgresql://u:secret@[::1]x/d",
        "postgresql://h/d?no_such_option=1",
        "host=h dbname='d",
        "postgresql://",
        "postgresql://u:secret@h",
    ],
)
def test_an_invalid_address_is_refused_in_one_line_that_says_what_to_do_and_has_no_password(nonsense):
    with pytest.raises(SetUpError) as refused:
        normalise(nonsense)
    message = refused.value.message
    assert message.startswith("DATABASE_URL ")
    assert WHAT_TO_DO in message
    assert "\n" not in message
    assert "secret" not in message


@pytest.mark.req("G-02")
@pytest.mark.parametrize("spelling", ["url", "keywords", "two hosts"])
def test_the_same_address_works_for_psycopg_sqlalchemy_and_the_orchestration(empty_dsn, spelling):
    if spelling != "url":
        given = parts(empty_dsn)
        given["host"] = ",".join([given["host"]] * (2 if spelling == "two hosts" else 1))
        empty_dsn = normalise(psycopg.conninfo.make_conninfo("", **given))
    with psycopg.connect(empty_dsn) as connection:
        name = connection.info.dbname
    engine = sqlalchemy.create_engine(empty_dsn)
    with engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text("SELECT current_database()")) == name
        assert connection.scalar(sqlalchemy.text("SHOW application_name")) == "ecluse"
    engine.dispose()
    DBOS.migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM dbos.workflow_status").fetchone() == (0,)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"host": "127.0.0.1", "port": "closed"}, "Connection refused"),
        ({"host": "/nowhere"}, "No such file"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"dbname": "no_such_database"}, "no_such_database"),
        ({"user": "unknown_user"}, "unknown_user"),
        ({"connect_timeout": "soon"}, "connect_timeout"),
        ({"options": "-c no_such_setting=1"}, "no_such_setting"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_database_that_does_not_answer_is_reported_quickly_with_what_to_do(server, wrong, said):
    if wrong.get("port") == "closed":
        wrong = wrong | {"port": str(closed_port())}
    began = time.monotonic()
    with pytest.raises(SetUpError) as refused:
        check(normalise(psycopg.conninfo.make_conninfo("", **(parts(server.dsn()) | wrong))))
    assert time.monotonic() - began < 6
    assert said in refused.value.message
    assert "DATABASE_URL" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_server_that_never_answers_is_given_up():
    """The port is open, and the server sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        with pytest.raises(SetUpError, match="timeout"):
            check(normalise(f"host=127.0.0.1 port={deaf.getsockname()[1]} dbname=d connect_timeout=2"))
        assert time.monotonic() - began < 6


def test_a_database_that_answers_passes(server):
    check(normalise(server.dsn()))


@contextlib.asynccontextmanager
async def opened(dsn: str, size: int = 3, settings=NOTHING_MORE, **options):
    connections = pool(dsn, size=size, settings=settings, **options)
    await connections.open(wait=True)
    try:
        yield connections
    finally:
        await connections.close()


async def shown(connection, *names: str) -> list[str]:
    return [(await (await connection.execute(f"SHOW {name}")).fetchone())[0] for name in names]


async def test_the_limits_of_sockets_and_sessions_are_in_force_on_pooled_connections(dsn):
    async with opened(dsn, settings={"enable_seqscan": "off"}) as connections, connections.connection() as connection:
        assert connection.autocommit
        assert await shown(
            connection,
            "idle_in_transaction_session_timeout",
            "lock_timeout",
            "statement_timeout",
            "client_connection_check_interval",
            "timezone",
            "enable_seqscan",
            "application_name",
            "synchronous_commit",
            "transaction_isolation",
            "jit",
        ) == ["10s", "3s", "1min", "5s", "UTC", "off", "ecluse", "on", "read committed", "off"]
        assert (
            connection.info.get_parameters().items()
            >= {
                "connect_timeout": "5",
                "tcp_user_timeout": "5000",
                "keepalives_idle": "5",
                "keepalives_interval": "2",
                "keepalives_count": "3",
            }.items()
        )


async def test_options_in_the_address_win_over_ours_and_leave_the_others_in_force(dsn):
    own = normalise(psycopg.conninfo.make_conninfo(dsn, options="-c lock_timeout=7s -c work_mem=5MB"))
    async with opened(own) as connections, connections.connection() as connection:
        settings = await shown(connection, "lock_timeout", "work_mem", "statement_timeout")
    assert settings == ["7s", "5MB", "1min"]


async def test_sessions_outside_the_pools_have_the_same_limits(dsn):
    async with await open_session(dsn, {"enable_seqscan": "off"}) as connection:
        settings = await shown(connection, "jit", "timezone", "statement_timeout", "enable_seqscan")
    assert settings == ["off", "UTC", "1min", "off"]
    with open_blocking_session(dsn) as connection:
        assert connection.autocommit
        assert connection.execute("SELECT current_setting('jit'), current_setting('lock_timeout')").fetchall() == [
            ("off", "3s")
        ]


async def test_a_scan_that_is_switched_off_does_not_make_each_call_of_the_clock_a_compilation(dsn):
    """Before PostgreSQL 18, and with JIT as packages have it, 20 calls took more than two seconds."""
    async with await open_session(dsn, {"enable_seqscan": "off"}) as connection:
        began = time.monotonic()
        await connection.execute("SELECT ecluse_now() FROM generate_series(1, 20)")
        assert time.monotonic() - began < 1


async def test_the_pool_heals_after_its_connections_were_killed(dsn, query):
    async with opened(dsn) as connections:

        async def backend(pause: float = 0.0) -> int:
            async with connections.connection(timeout=10) as connection:
                row = await (await connection.execute("SELECT pg_backend_pid(), pg_sleep(%s)", (pause,))).fetchone()
                return int(row[0])

        before = set(await asyncio.gather(*(backend(0.1) for _ in range(3))))
        gone = "SELECT count(*) FROM unnest(%s::int[]) pid WHERE pg_terminate_backend(pid, 30000)"
        assert query(gone, [*before]) == [(3,)]
        after = set(await asyncio.gather(*(backend() for _ in range(12))))
    assert after
    assert not after & before


@pytest.mark.parametrize(("recent", "doubted", "asked"), [(60, False, "SELECT 42"), (60, True, ""), (0, False, "")])
async def test_only_a_connection_that_was_idle_for_a_while_or_is_in_doubt_is_asked_whether_it_lives(
    dsn, query, recent, doubted, asked
):
    async with opened(dsn, size=1, recent_seconds=recent) as connections:
        async with connections.connection() as connection:
            await connection.execute("SELECT 42")
        if doubted:
            connect.doubt_all()
        async with connections.connection() as connection:
            last = "SELECT query FROM pg_stat_activity WHERE pid = %s"
            assert query(last, connection.info.backend_pid) == [(asked,)]


class Heard:
    """What each channel has heard so far."""

    def __init__(self, *channels: str) -> None:
        self.payloads: dict[str, list[str]] = {channel: [] for channel in channels}

    def listeners(self):
        return {channel: payloads.append for channel, payloads in self.payloads.items()}

    async def until(self, expected: dict[str, list[str]]) -> None:
        try:
            async with asyncio.timeout(8):
                while self.payloads != expected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            assert self.payloads == expected


@contextlib.asynccontextmanager
async def listening_to(dsn: str, heard: Heard, **options):
    task = asyncio.create_task(listen(dsn, heard.listeners(), **options))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_listener_calls_all_callbacks_after_each_connect_and_listens_again_when_it_was_killed(dsn, query):
    heard = Heard("first", "Second Channel")
    async with listening_to(dsn, heard):
        await heard.until({"first": [""], "Second Channel": [""]})
        query("SELECT pg_notify('first', 'one')")
        await heard.until({"first": ["", "one"], "Second Channel": [""]})
        for times in (1, 2):
            ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            assert query(f"{ours} AND pid <> pg_backend_pid() AND backend_type = 'client backend'") == [(True,)]
            empty = [""] * times
            await heard.until({"first": ["", "one", *empty], "Second Channel": ["", *empty]})
        query("SELECT pg_notify('Second Channel', 'two'), pg_notify('unheard', 'x')")
        await heard.until({"first": ["", "one", "", ""], "Second Channel": ["", "", "", "two"]})


async def test_a_listener_goes_on_trying_while_the_database_is_away(dsn):
    heard = Heard("first")
    away = psycopg.conninfo.make_conninfo(dsn, host="127.0.0.1", port=closed_port())
    with capture_logs() as lines:
        async with listening_to(away, heard):
            await asyncio.sleep(1.5)
    assert heard.payloads == {"first": []}
    assert [line["log_level"] for line in lines] == ["warning", "warning"]


async def test_no_notification_is_lost_while_the_listener_probes_its_connection(dsn):
    heard = Heard("first")
    async with listening_to(dsn, heard, probe_every=0.001):
        await heard.until({"first": [""]})
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            for number in range(300):
                await connection.execute("SELECT pg_notify('first', %s)", (str(number),))
        await heard.until({"first": ["", *map(str, range(300))]})


async def test_the_locks_of_a_session_that_idles_in_a_transaction_are_released(dsn):
    """In a pipeline, where the server does not call the session idle; before PostgreSQL 17 there is none."""
    idle = {"idle_in_transaction_session_timeout": "1s"}
    async with pool(dsn, size=2, settings=idle, transaction_seconds=1) as own, own.connection() as other:
        await other.execute("CREATE TABLE locked AS SELECT 1 AS id")
        skipping = "SELECT id FROM locked FOR UPDATE SKIP LOCKED"

        async def sleep_on_it() -> None:
            async with own.connection() as sleeper, together(sleeper):
                cursor = await sleeper.execute("SELECT id FROM locked FOR UPDATE")
                assert await cursor.fetchall() == [(1,)]
                assert await (await other.execute(skipping)).fetchall() == []
                async with asyncio.timeout(10):
                    while not await (await other.execute(skipping)).fetchall():
                        await asyncio.sleep(0.05)
                await (await sleeper.execute("SELECT 1")).fetchall()

        with pytest.raises(psycopg.Error) as caught:
            await sleep_on_it()
        assert is_unavailable(caught.value)
        async with own.connection() as fresh:
            assert await (await fresh.execute("SELECT 1")).fetchone() == (1,)


async def test_what_was_refused_earlier_in_a_pipeline_is_no_sign_that_the_database_is_away(dsn):
    async def go_on(connection) -> None:
        async with together(connection):
            with contextlib.suppress(psycopg.errors.DivisionByZero):
                await (await connection.execute("SELECT 1 / 0")).fetchall()
            await (await connection.execute("SELECT 1")).fetchall()

    async with pool(dsn, size=1) as own, own.connection() as connection:
        with pytest.raises((psycopg.errors.PipelineAborted, psycopg.errors.InFailedSqlTransaction)) as caught:
            await go_on(connection)
        assert not is_unavailable(caught.value)
