"""The guard of URLs that users entered: the table of hostile ones, redirects, what is sent, what messages contain."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from ecluse.base.errors import NotSentError, PermanentError, SetUpError, TransientError, VendorError
from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.guarded import GuardedHttp
from tests.support.raw_server import NOW, RawServer, Script, answers, raw_server, response

LOOPBACK = "127.0.0.1/32"
PATIENCE = 30.0

HOSTILE = [
    "http://127.0.0.1/",
    "http://127.8.9.10/",
    "http://127.1/",
    "http://2130706433/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://0x7f.0.0.1/",
    "http://0x7f000001/",
    "http://①②⑦.0.0.1/",
    "http://0.0.0.0/",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://admin.localhost/",
    "http://ⓁⓄⒸⒶⓁⒽⓄⓈⓉ/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::a00:1]/",
    "http://[64:ff9b:1::808:808]/",
    "http://[2001:0:7f00:1::1]/",
    "http://[2002:a00:1::]/",
    "http://[2001:10::1]/",
    "http://[::ffff:10.0.0.1]/",
    "http://[2002:7f00:1::]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[::ffff:0:5db8:d70e]/",
    "http://[2001:20::1]/",
    "http://[2001:2f:ffff::1]/",
    "http://[fd00::1]/",
    "http://[fe80::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[ff02::1]/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://198.18.0.1/",
    "http://example.com:22/",
    "http://example.com:8080/",
    "http://example.com:0/",
    "http://example.com:99999/",
    "http://example.com:http/",
    "http://trusted.example@127.0.0.1/",
    "http://trusted.example:80@127.0.0.1/",
    "http://example.com\\@127.0.0.1/",
    "http://127.0.0.1#@example.com/",
    "http://user:hunter2@example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "javascript:alert(1)",
    "//example.com/",
    "example.com",
    "",
    " ",
    "http://",
    "http:///etc/passwd",
    "http://[::1",
    "http://exa mple.com/",
    "http://exa\tmple.com/",
    "http://example.com/\r\nHost: other",
    "http://example.com/\x00",
    "http://%31%32%37.0.0.1/",
    "http://\ud800.example/",
    "https://example.com/\ud800",
    f"http://{'a' * 300}.example/",
    f"https://example.com/{'a' * 9_000}",
]
# As written they are names; only looking them up shows the address.
SHOWN_BY_LOOKING_UP = {"http://0x7f.0.0.1/", "http://0x7f000001/"}


@pytest.fixture
async def guarded() -> AsyncIterator[GuardedHttp]:
    guarded = GuardedHttp([LOOPBACK], deadline=PATIENCE)
    yield guarded
    await guarded.close()


async def error_of(guarded: GuardedHttp, url: str, *, post: bool = False, deadline: float | None = None) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await (guarded.post(url, b"{}", {}, deadline=deadline) if post else guarded.get(url, largest=1_000))
    return caught.value


@pytest.mark.parametrize("url", HOSTILE, ids=[ascii(url)[1:40] for url in HOSTILE])
async def test_a_hostile_url_is_refused_for_good(url: str) -> None:
    strict = GuardedHttp(deadline=PATIENCE)
    error = await error_of(strict, url, post=True)
    await strict.close()
    assert (type(error), error.code, error.ambiguous) == (PermanentError, "FORBIDDEN_URL", False)
    assert error.message.startswith("POST ")
    assert error.message.encode()
    assert "hunter2" not in error.message
    assert (strict.refuse_reason(url) is None) == (url in SHOWN_BY_LOOKING_UP)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook?token=1",
        "http://example.com",
        "https://example.com:443/é?q=é#x",
        "https://éxample.fr/",
        "http://93.184.215.14/",
        "http://notlocalhost/",
    ],
)
def test_an_ordinary_url_is_accepted_as_written(url: str) -> None:
    assert GuardedHttp().refuse_reason(url) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://10.0.0.1/", "it leads to an address that must not be called from here: 10.0.0.0/8 is Private-Use"),
        ("http://10.0.0.1/", "ECLUSE_ALLOWED_NETWORKS"),
        ("http://example.com:8080/", "port 8080 must not be called, only 80 and 443"),
        ("ftp://example.com/", "it must begin with https:// or http://"),
        ("http://a:b@example.com/", "it must not hold a user name or a password"),
    ],
)
def test_the_reason_says_what_to_do(url: str, said: str) -> None:
    assert said in (GuardedHttp().refuse_reason(url) or "")


def test_an_allowed_network_has_any_port_and_nothing_else_has() -> None:
    guarded = GuardedHttp(["10.1.0.0/16"])
    assert guarded.refuse_reason("http://10.1.2.3:8080/") is None
    assert guarded.refuse_reason("http://10.1.2.3/") is None
    assert guarded.refuse_reason("http://10.2.0.1/") is not None
    assert guarded.refuse_reason("http://10.2.0.1:8080/") is not None
    assert guarded.refuse_reason("http://93.184.215.14:8080/") is not None
    assert guarded.refuse_reason("http://localhost:8080/") is not None


@pytest.mark.parametrize("network", ["10.0.0.1/8", "everything", "64:ff9b::/96"])
def test_a_network_that_makes_no_sense_stops_the_start(network: str) -> None:
    with pytest.raises(SetUpError, match="ECLUSE_ALLOWED_NETWORKS"):
        GuardedHttp([network])


def redirects_to(location: str) -> Script:
    return answers(response(b"", status=302, headers={"Location": location, "Connection": "close"}))


@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/", "http://127.0.0.2:8080/", "http://0x7f.0.0.2/", "file:///etc/passwd", "http://[::1]/"],
)
async def test_a_redirect_is_judged_like_any_url(guarded: GuardedHttp, location: str) -> None:
    async with raw_server(redirects_to(location)) as server:
        error = await error_of(guarded, f"http://127.0.0.1:{server.port}/a?sig=hush")
    assert (type(error), error.code) == (PermanentError, "FORBIDDEN_URL")
    assert error.message.startswith(f"GET http://127.0.0.1:{server.port}, redirected to ")
    assert "hush" not in error.message
    assert len(server.requests) == 1


async def test_a_redirect_within_what_is_allowed_is_followed_and_not_for_ever(guarded: GuardedHttp) -> None:
    async with (
        raw_server(answers(response(b"here"))) as end,
        raw_server(redirects_to(f"http://127.0.0.1:{end.port}/x")) as start,
    ):
        reply = await guarded.get(f"http://127.0.0.1:{start.port}/", largest=100)
    assert (reply.status, reply.body, reply.refusal(NOW)) == (200, b"here", None)
    async with raw_server(redirects_to("/again")) as circle:
        reply = await guarded.get(f"http://127.0.0.1:{circle.port}/", largest=100)
    refusal = reply.refusal(NOW)
    assert refusal is not None
    assert (reply.status, refusal.code, len(circle.requests)) == (302, "VENDOR_REDIRECT", 6)


async def test_a_post_is_sent_once_as_it_is_and_follows_no_redirect(guarded: GuardedHttp) -> None:
    bodies: list[bytes] = []

    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        bodies.append(await reader.readexactly(9))
        writer.write(response(b"gone", status=307, headers={"Location": "/elsewhere"}))
        await writer.drain()

    async with raw_server(script) as server:
        headers = {"Content-Type": "application/json", "webhook-id": "msg_1"}
        reply = await guarded.post(f"http://127.0.0.1:{server.port}/hook", b'{"a":"b"}', headers)
    assert (reply.status, reply.body, bodies) == (307, b"gone", [b'{"a":"b"}'])
    [head] = server.requests
    assert head.startswith("POST /hook HTTP/1.1\r\n")
    assert "webhook-id: msg_1" in head


async def test_what_a_status_means_is_said_as_for_any_vendor(guarded: GuardedHttp) -> None:
    throttled = response(b"slow down", status=429, headers={"Retry-After": "7"})
    async with raw_server(answers(throttled)) as server:
        reply = await guarded.post(f"http://127.0.0.1:{server.port}/hook/secret-path?s=hush", b"", {})
    refusal = reply.refusal(NOW)
    assert isinstance(refusal, TransientError)
    assert (refusal.code, refusal.retry_after, refusal.ambiguous, refusal.status) == ("THROTTLED", 7.0, False, 429)
    assert refusal.message == f"POST http://127.0.0.1:{server.port}: 429 slow down"


async def test_no_answer_is_ambiguous_and_no_connection_is_not(guarded: GuardedHttp) -> None:
    async def silence(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        await server.over.wait()

    async def cut(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)

    async with raw_server(silence) as server:
        timeout = await error_of(guarded, f"http://127.0.0.1:{server.port}/p?s=hush", post=True, deadline=1)
    async with raw_server(cut) as server:
        lost = await error_of(guarded, f"http://127.0.0.1:{server.port}/p?s=hush", post=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    unsent = await error_of(guarded, f"http://127.0.0.1:{port}/p?s=hush", post=True)
    assert (timeout.code, timeout.ambiguous) == ("TIMEOUT", True)
    assert (lost.code, lost.ambiguous) == ("VENDOR_DISCONNECTED", True)
    assert (type(unsent), unsent.ambiguous) == (NotSentError, False)
    assert not any("hush" in repr(error) or "/p" in str(error) for error in (timeout, lost, unsent))


async def test_an_answer_has_a_largest_size(guarded: GuardedHttp) -> None:
    async with raw_server(answers(response(b"x" * 1_001), response(b"x" * 1_001))) as server:
        error = await error_of(guarded, f"http://127.0.0.1:{server.port}/")
        assert (type(error), error.code) == (PermanentError, "ANSWER_TOO_LARGE")
    async with raw_server(answers(response(b"x" * 100_000))) as server:
        reply = await guarded.post(f"http://127.0.0.1:{server.port}/", b"", {})
        assert (reply.status, len(reply.body)) == (200, 65_536)


async def test_neither_cookies_nor_proxies_come_between(guarded: GuardedHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    good = response(b"", headers={"Set-Cookie": "session=1; Path=/"})
    async with raw_server(answers(good, good)) as server:
        for _ in range(2):
            assert (await guarded.get(f"http://127.0.0.1:{server.port}/", largest=10)).status == 200
    assert len(server.requests) == 2
    assert "cookie" not in server.requests[1].lower()


def test_the_log_contains_no_urls(sandbox: SandboxProcess) -> None:
    program = f"""
import asyncio
from ecluse.base.logging import configure
from ecluse.vendors.guarded import GuardedHttp
configure("DEBUG")
async def main():
    guarded = GuardedHttp(["{LOOPBACK}"])
    print((await guarded.get("{sandbox.url}/audio/recordings/1-1.mp3?Expires=1&code=hush", largest=1000)).status)
    await guarded.close()
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "403\n"
    assert "hush" not in ran.stderr
