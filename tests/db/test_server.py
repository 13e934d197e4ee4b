"""Which servers are refused, and in which words; poolers are real ones (Debian's PgBouncer)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ecluse.base.errors import SetUpError
from ecluse.db.connect import check, normalise, open_session
from ecluse.db.postgres_user import account_for
from ecluse.db.server import is_shared, too_old
from tests.support.engine_flows import flow, run_to_end, stage

Pooler = Callable[..., str]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (140_000, None),
        (150_018, None),
        (180_001, None),
        (190_000, None),
        (139_999, "PostgreSQL 13,"),
        (130_023, "PostgreSQL 13,"),
        (100_000, "PostgreSQL 10,"),
        (90_624, "PostgreSQL 9.6,"),
    ],
)
def test_a_version_before_14_is_refused_in_one_sentence(version, said):
    why = too_old(version)
    if said is None:
        assert why is None
    else:
        assert said in why
        assert "needs 14 or newer" in why
        assert "\n" not in why


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [
        ([1, 1, 1], [2, 2, 2], False),
        ([1, 1, 1], [1, 1, 1], True),  # one backend serves both
        ([1, 2, 1], [3, 4, 3], True),  # several, in turn
        ([1, 1, 1], [2, 3, 2], True),
    ],
)
def test_two_clients_that_have_a_backend_each_share_none(ours, theirs, shared):
    assert is_shared(ours, theirs) is shared


@pytest.fixture
def pooler(dsn) -> Iterator[Pooler]:
    """Start PgBouncer in front of the test's database, in this mode and with these settings; returns the address."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "poolers are tested with Debian's pgbouncer, which is not installed: run `make pooler` as root"
    with contextlib.ExitStack() as stack:
        yield lambda mode, **settings: stack.enter_context(_pgbouncer(program, dsn, mode, settings))


@contextlib.contextmanager
def _pgbouncer(program: str, dsn: str, mode: str, settings: dict[str, object]) -> Iterator[str]:
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    folder = Path(tempfile.mkdtemp(prefix="ecl-"))
    account = account_for(folder / "pg")  # PgBouncer, too, refuses to run as root
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    lines = {"pool_mode": mode, "listen_addr": "127.0.0.1", "listen_port": port, "auth_type": "trust"}
    lines |= {"auth_file": folder / "users", "unix_socket_dir": "", **settings}
    (folder / "users").write_text(f'"{parts["user"]}" "{parts.get("password", "")}"\n')
    (folder / "ini").write_text(
        f"[databases]\n* = host={parts['host']} port={parts['port']}\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    for path in (folder, *folder.iterdir()):
        os.chown(path, account.uid, account.gid)
    other = {"user": account.uid, "group": account.gid, "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen([program, "-q", folder / "ini"], stderr=subprocess.DEVNULL, **other)
    try:
        until = time.monotonic() + 20
        while not _listens(port):
            assert process.poll() is None, "pgbouncer did not start"
            assert time.monotonic() < until, "pgbouncer does not listen"
            time.sleep(0.02)
        yield normalise(make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable"))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"ignore_startup_parameters": "options"}, {"server_round_robin": 1, "min_pool_size": 3}],
    ids=["as packaged", "options ignored", "several servers in turn"],
)
def test_a_pooler_that_lends_sessions_by_the_transaction_is_refused_quickly(pooler, mode, settings):
    address = pooler(mode, **settings)
    if settings.get("min_pool_size"):
        _warmed_up(address)
    began = time.monotonic()
    with pytest.raises(SetUpError, match="connect directly to PostgreSQL, or through the pooler in session mode") as e:
        check(address)
    assert time.monotonic() - began < 10
    assert "transaction mode" in e.value.message
    assert "\n" not in e.value.message


def _warmed_up(address: str) -> None:
    """With three servers at hand."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(psycopg.connect(address))
            with contextlib.suppress(psycopg.Error):  # of mode "statement", which knows no transactions
                connection.execute("SELECT 1")


def test_a_pooler_that_refuses_the_options_of_the_address_is_named(pooler):
    address = make_conninfo(pooler("session"), options="-c work_mem=5MB")
    with pytest.raises(SetUpError, match="leave out `options`, and connect directly") as refused:
        check(address)
    assert "\n" not in refused.value.message


def test_a_pooler_with_too_few_connections_is_named(pooler):
    with pytest.raises(SetUpError, match="gave no second connection within 5 s: raise its pool size"):
        check(pooler("session", default_pool_size=1))


@pytest.mark.parametrize("settings", [{}, {"ignore_startup_parameters": "options"}], ids=["as packaged", "ignoring"])
async def test_in_session_mode_our_limits_are_in_force_and_runs_are_led(pooler, start_kit, settings):
    address = pooler("session", default_pool_size=50, **settings)
    check(address)
    async with await open_session(address) as connection:
        assert await (await connection.execute("SHOW jit")).fetchone() == ("off",)
    one = flow(stage())
    kit = await start_kit(one, dsn=address)
    assert (await run_to_end(kit, one, ["a", "b"]))["successful"] == 2


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("verify",), ("doctor",)], ids=lambda one: one[0])
def test_every_command_says_so_in_one_line(pooler, bare, command):
    answer = bare(*command, DATABASE_URL=pooler("transaction"))
    said = answer.out if command == ("doctor",) else answer.err
    (line,) = [line for line in said.splitlines() if "transaction mode" in line]
    assert "connect directly" in line
    assert "Traceback" not in answer.err
