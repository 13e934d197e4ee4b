"""The PostgreSQL server that all candidates share: the given one, or an embedded one that the benchmark starts."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server(dsn: str | None, server_log: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Yield the DSN and the server log (None: statements cannot be counted)."""
    dsn = dsn or os.environ.get("DATABASE_URL")
    if dsn:
        yield dsn, server_log
        return
    from ecluse.db.embedded import start

    base = Path(tempfile.mkdtemp(prefix="ecluse-bench-"))
    # if root starts the server, it runs as another user, who must be able to pass through
    base.chmod(0o711)
    try:
        handle = start(base / "data")
        try:
            yield handle.dsn("postgres"), handle.log_file
        finally:
            handle.release()
    finally:
        shutil.rmtree(base, ignore_errors=True)
