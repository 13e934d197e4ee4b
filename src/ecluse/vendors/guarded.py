"""HTTP client for URLs supplied by users: recordings to download, webhooks to deliver; and the same guard for clients
of vendors whose URL a tenant has given.

Guards against SSRF: users must not reach addresses that only this machine can reach. A host name is resolved once,
every address it resolves to is checked, and the connection goes to a checked address; each redirect is checked again.
Private networks can be allowed, and within those any port. A URL may have secrets in its path and query: messages name
only its origin.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from ssrfguard import (
    DEFAULT_DENIED,
    AddressTable,
    Block,
    BlockedAddressError,
    BlockedURLError,
    Policy,
    Reach,
    SSRFGuardError,
    resolve,
)
from ssrfguard.httpx import AsyncClient

from ecluse.base.errors import PermanentError, SetUpError, TransientError, VendorError
from ecluse.base.text import storable
from ecluse.vendors.http import LARGEST_REFUSAL, no_answer, refusal

PORTS = frozenset({80, 443})
ANY_PORT = frozenset(range(1, 65_536))
REDIRECTS = 5
WRITTEN_AT_ONCE = 1_000_000  # bytes of a body that goes to a file
HINT = "the operator of this server may allow its network in ECLUSE_ALLOWED_NETWORKS"
# Besides those of the library, which lets ORCHIDv2 pass and does not know IPv4-translated addresses.
ALSO_DENIED = (
    Block(ip_network("::ffff:0:0:0/96"), "IPv4-translated (SIIT)", "RFC 8215", Reach.DENIED),
    Block(ip_network("2001:20::/28"), "ORCHIDv2", "RFC 7343", Reach.DENIED),
)
DENIED = AddressTable(
    (*(one for one in DEFAULT_DENIED.blocks if one.network not in {own.network for own in ALSO_DENIED}), *ALSO_DENIED)
)
ELSEWHERE = AddressTable(
    tuple(
        Block(ip_network(everything), "reached at ports 80 and 443 only", "no allowed network", Reach.DENIED)
        for everything in ("0.0.0.0/0", "::/0")
    )
)


class ForbiddenUrl(Exception):
    """A URL that is refused; the text is the reason, for the user who entered the URL."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Any answer, including refusals. `subject` names the request in messages. The body of a refusal, or of an answer
    to a POST, is only read in part."""

    subject: str
    status: int
    headers: Mapping[str, str]  # names are case-insensitive
    body: bytes

    def refusal(self, now: datetime) -> VendorError | None:
        """Return the error for the status of the answer; None for success. `now` is used if Retry-After is a date and
        the answer has no Date header."""
        if 200 <= self.status < 300:
            return None
        return refusal(self.subject, self.status, self.headers, self.body, now)


@cache  # the check of 65,535 ports takes milliseconds, and a server has many clients
def _policies(networks: tuple[IPv4Network | IPv6Network, ...]) -> tuple[Policy, Policy]:
    """Return two policies: one for all networks, at ports 80 and 443, and one for the allowed networks, at any port."""
    return (
        Policy(allowed_networks=networks, allowed_ports=PORTS, denied_networks=DENIED),
        Policy(allowed_networks=networks, allowed_ports=ANY_PORT, denied_networks=ELSEWHERE),
    )


class GuardedHttp:
    """Guarded HTTP client. May be created outside an event loop; bound to the loop of its first call. Each call is one
    request (and its redirects), without retry. `allowed_networks` are private networks that may be reached; deadlines
    are in seconds, for a whole call and for connecting."""

    def __init__(
        self,
        allowed_networks: Sequence[str] = (),
        *,
        deadline: float = 30.0,
        connect_deadline: float = 5.0,
        connections: int = 100,
    ) -> None:
        try:
            networks = tuple(ip_network(network) for network in allowed_networks)
            self._public, self._own = _policies(networks)
        except ValueError as exc:
            raise SetUpError(f"ECLUSE_ALLOWED_NETWORKS: {exc}") from exc
        self._deadline = deadline
        self._connect_deadline = connect_deadline
        self._connections = connections
        self._lookups: ThreadPoolExecutor | None = None
        self._clients: dict[bool, AsyncClient] = {}

    def refuse_reason(self, url: str) -> str | None:
        """Return the reason why this URL is refused, for the user who entered it; None if the URL itself is acceptable.
        Host names are not resolved here but at every request."""
        try:
            self._judge(url)
        except ForbiddenUrl as exc:
            return str(exc)
        return None

    def resolver(self, url: str) -> AbstractResolver:
        """Return a resolver for a client of this base URL. Raise `PermanentError` FORBIDDEN_URL if the URL itself is
        refused; the resolver raises it if the host name resolves to an address that must not be reached."""
        try:
            policy = self._judge(url)
        except ForbiddenUrl as exc:
            raise PermanentError(storable(f"{origin(url)}: {exc}"), code="FORBIDDEN_URL") from exc
        return GuardedResolver(url, policy, self._look_up)

    async def get(
        self, url: str, *, largest: int, deadline: float | None = None, into: IO[bytes] | None = None
    ) -> Reply:
        """Send a GET, follow at most REDIRECTS redirects, and return the answer, whatever its status. Raise a
        `VendorError` if there is none, FORBIDDEN_URL if the URL is refused, ANSWER_TOO_LARGE if a success has more than
        `largest` bytes. The body of a success is written to `into` if given, and is not in the reply."""
        return await self._request("GET", url, largest, REDIRECTS, deadline, into)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, deadline: float | None = None) -> Reply:
        """Send a POST and return the answer, whatever its status; raise a `VendorError` if there is none. Redirects are
        not followed: the user who entered the URL decides where it goes."""
        return await self._request("POST", url, LARGEST_REFUSAL, 0, deadline, None, content=body, headers=headers)

    async def close(self) -> None:
        """Close all connections for good; the client must not be used afterwards."""
        for client in self._clients.values():
            await client.aclose()
        if self._lookups is not None:
            self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _request(
        self,
        method: str,
        url: str,
        largest: int,
        redirects: int,
        deadline: float | None,
        into: IO[bytes] | None,
        **what: Any,
    ) -> Reply:
        """Send one request, follow at most `redirects` redirects, and return the answer, limited to `largest` bytes."""
        deadline = self._deadline if deadline is None else deadline
        subject, sent = f"{method} {origin(url)}", False

        async def trace(event: str, _: object) -> None:
            nonlocal sent
            sent = sent or event == "http11.send_request_headers.started"

        try:
            async with asyncio.timeout(deadline):
                client = self._client(self._judge(url))
                request = client.build_request(method, url, extensions={"trace": trace}, **what)
                while True:
                    response = await client.send(request, stream=True)
                    try:
                        if response.next_request is None or not redirects:
                            return await read(subject, response, largest, into, cut=method == "POST")
                    finally:
                        await response.aclose()
                    redirects -= 1
                    request = response.next_request
                    subject = f"{method} {origin(url)}, redirected to {origin(str(request.url))}"
                    client = self._client(self._judge(str(request.url)))
        except (ForbiddenUrl, SSRFGuardError) as exc:
            why = reason(exc) if isinstance(exc, SSRFGuardError) else str(exc)
            raise PermanentError(storable(f"{subject}: {why}"), code="FORBIDDEN_URL") from exc
        except (httpx.HTTPError, TimeoutError) as exc:
            raise failure(subject, exc, sent, deadline) from exc

    def _judge(self, url: str) -> Policy:
        """Check a URL without resolving its host name, and return the policy for its port; raise ForbiddenUrl if the
        URL is refused."""
        try:
            httpx.URL(url)
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https"):
                raise ForbiddenUrl("it must begin with https:// or http://")
            if parts.username is not None:
                raise ForbiddenUrl("it must not hold a user name or a password")
            policy = self._public if parts.port in (None, *PORTS) else self._own
            if policy is self._own and not policy.allowed_networks:
                raise ForbiddenUrl(f"port {parts.port} must not be called, only 80 and 443; {HINT}")
            policy.check_url(url)
            if f".{parts.hostname}".rstrip(".").endswith(".localhost"):
                policy.check_address("127.0.0.1")
        except SSRFGuardError as exc:
            raise ForbiddenUrl(storable(reason(exc))) from exc
        except (httpx.InvalidURL, ValueError) as exc:  # their texts quote the URL
            raise ForbiddenUrl("this cannot be read as a URL") from exc
        return policy

    def _client(self, policy: Policy) -> AsyncClient:
        """Return the client with this policy, created at its first use."""
        any_port = policy is self._own
        client = self._clients.get(any_port)
        if client is None:
            client = self._clients[any_port] = AsyncClient(
                policy=policy,
                resolver=self._look_up,
                verify=ssl.create_default_context(),
                trust_env=False,
                # No cookies: one user's receiver must not get those of another user.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                headers={"User-Agent": "ecluse", "Accept-Encoding": "identity"},
                limits=httpx.Limits(max_connections=self._connections),
                timeout=httpx.Timeout(None, connect=self._connect_deadline),
            )
        return client

    def _look_up(self, *asked: Any) -> Any:
        """Resolve a host name in a thread, which cannot be cancelled, and wait for it only up to the connect deadline:
        a name server that does not answer must not delay the call or its end."""
        if self._lookups is None:
            self._lookups = ThreadPoolExecutor(self._connections, "guarded-lookup")
        try:
            return self._lookups.submit(socket.getaddrinfo, *asked).result(self._connect_deadline)
        except TimeoutError as exc:
            raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer") from exc


class GuardedResolver(AbstractResolver):
    """Resolver of one origin: it checks every address that the host name resolves to, as `GuardedHttp` does. (aiohttp
    asks it for names only: an address in the URL was checked with the URL.)"""

    def __init__(self, url: str, policy: Policy, look_up: Callable[..., Any]) -> None:
        self._origin = origin(url)
        self._target = policy.check_url(url)
        self._ask = partial(resolve, self._target, policy=policy, resolver=look_up)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if host.rstrip(".") != self._target.host.rstrip("."):  # a client of one base URL, without redirects
            raise PermanentError(f"{self._origin}: it leads to another host", code="FORBIDDEN_URL")
        try:
            found = await asyncio.to_thread(self._ask)
        except SSRFGuardError as exc:
            raise PermanentError(storable(f"{self._origin}: {reason(exc)}"), code="FORBIDDEN_URL") from exc
        return [
            ResolveResult(
                hostname=host, host=str(one.ip), port=port, family=one.family, proto=0, flags=socket.AI_NUMERICHOST
            )
            for one in found
            if family in (socket.AF_UNSPEC, one.family)
        ]

    async def close(self) -> None:
        """Do nothing: the resolver holds no connection."""


async def read(
    subject: str, response: httpx.Response, largest: int, into: IO[bytes] | None = None, *, cut: bool
) -> Reply:
    """Read the body of a response, at most `largest` bytes, and return the reply. A larger body raises
    ANSWER_TOO_LARGE; with `cut`, or if the status is not 2xx, it is cut off at LARGEST_REFUSAL at the latest. The body
    of a success is written to `into` if given and not `cut`."""
    cut = cut or not response.is_success
    largest = min(largest, LARGEST_REFUSAL) if cut else largest
    body, written = bytearray(), 0
    async for chunk in response.aiter_raw():
        body += chunk
        if written + len(body) > largest:
            break
        if into is not None and not cut and len(body) >= WRITTEN_AT_ONCE:
            written += await asyncio.to_thread(into.write, body)
            body = bytearray()
    if written + len(body) > largest and not cut:
        raise PermanentError(f"{subject}: the answer is larger than {largest} bytes", code="ANSWER_TOO_LARGE")
    if into is not None and not cut:
        await asyncio.to_thread(into.write, body)
        body = bytearray()
    return Reply(subject, response.status_code, response.headers, bytes(body[:largest]))


def origin(url: str) -> str:
    """Return the part of a URL that may appear in messages: scheme, host and port."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "a URL that cannot be read"
    return f"{parts.scheme}://{parts.hostname}{port}"


def reason(exc: SSRFGuardError) -> str:
    """Return the reason of the guard's refusal, as a message for the user."""
    address = exc if isinstance(exc, BlockedAddressError) else exc.__cause__
    if isinstance(address, BlockedAddressError):
        return f"it leads to an address that must not be called from here: {address.reason}; {HINT}"
    # The rest of ssrfguard's sentence explains its rules to programmers.
    return exc.reason.partition(";")[0].partition(", which")[0] if isinstance(exc, BlockedURLError) else str(exc)


def failure(subject: str, exc: httpx.HTTPError | TimeoutError, sent: bool, deadline: float) -> TransientError:
    """Return the error for a call without an answer. `sent`: the request may have reached the server; `deadline`: the
    deadline of the call, in seconds."""
    timed_out = isinstance(exc, TimeoutError | httpx.TimeoutException)
    what = type(exc).__name__
    if not sent:
        what = "time-out" if timed_out else innermost(exc).strerror or "no connection"
    return no_answer(subject, what, sent=sent, deadline=deadline if timed_out else None)


def innermost(exc: BaseException) -> OSError:
    """Return the operating system's error at the root of `exc`, or an empty one: its text contains no URL."""
    while (cause := exc.__cause__ or exc.__context__) is not None:
        exc = cause
    return exc if isinstance(exc, OSError) else OSError()
