"""Download of recordings that are then uploaded to the provider (STT_UPLOAD=file), if the provider cannot reach the
store of the recordings.

A recording goes through a temporary file (in TMPDIR): several at once may not fit into memory. Its URL comes from
the CRM, so it is requested through the guard. Error messages leave out the response body: file stores tend to repeat
the signature of a URL there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from urllib.parse import unquote, urlsplit

from ecluse.vendors.guarded import GuardedHttp
from ecluse.vendors.http import FilePart, refusal

Audio = FilePart

LARGEST = 200_000_000  # bytes


class AudioSource:
    """Downloader of recordings. A file of more than `largest` bytes is refused; `deadline`, in seconds, is by default
    that of the HTTP client; `now` is the clock for Retry-After dates."""

    def __init__(
        self,
        guarded: GuardedHttp,
        *,
        largest: int = LARGEST,
        deadline: float | None = None,
        now: Callable[[], datetime],
    ) -> None:
        self._guarded = guarded
        self._largest = largest
        self._deadline = deadline
        self._now = now

    async def download(self, url: str) -> Audio:
        """Download the recording at this URL into a file without a name, which the caller closes. Raise a
        `VendorError` if it cannot be downloaded."""
        with ExitStack() as unless_done:
            content = unless_done.enter_context(TemporaryFile())
            reply = await self._guarded.get(url, largest=self._largest, deadline=self._deadline, into=content)
            if not 200 <= reply.status < 300:
                raise refusal(reply.subject, reply.status, reply.headers, b"", self._now())
            content_type = reply.headers.get("content-type", "").partition(";")[0].strip()
            content.seek(0)
            unless_done.pop_all()
        return Audio(file_name(url), content_type or "application/octet-stream", content)


def file_name(url: str) -> str:
    """Return a name for the file at this URL: the last part of its path, without unsafe characters and cut to its last
    100; `recording` if nothing is left."""
    name = PurePosixPath(unquote(urlsplit(url).path, errors="replace")).name
    plain = "".join(character for character in name if character.isalnum() or character in "._-")
    return plain[-100:] or "recording"
