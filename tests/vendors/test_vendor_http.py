"""What only bytes on a socket can show: every status, answers that never end, connections that die, secrets kept."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
import tracemalloc
from collections.abc import Awaitable
from typing import Any

import pytest
from pydantic import BaseModel

from ecluse.base.errors import NotSentError, PermanentError, TransientError, VendorError
from ecluse.vendors.http import VendorHttp
from tests.support.raw_server import NOW, Answer, RawServer, Script, answers, client_of, raw_server, response

GOOD = response()
AHEAD = "Sun, 01 Mar 2026 12:00:30 GMT"  # half a minute after NOW


async def error_of(call: Awaitable[object]) -> VendorError:
    with pytest.raises(VendorError) as caught:
        await call
    return caught.value


async def error_from(script: Script, method: str = "GET") -> VendorError:
    async with raw_server(script) as server, client_of(server.port) as http:
        error = await error_of(http.call(method, "/x", Answer, json={"a": 1} if method == "PUT" else None))
        assert len(server.requests) == 1
    return error


async def silence(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await server.over.wait()


async def drip(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await server.request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not server.over.is_set():
        writer.write(b"X: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "family", "code", "ambiguous"),
    [
        (301, PermanentError, "VENDOR_REDIRECT", True),
        (304, PermanentError, "VENDOR_REDIRECT", True),
        (400, PermanentError, "VENDOR_REFUSED", False),
        (401, PermanentError, "UNAUTHORIZED", False),
        (402, PermanentError, "VENDOR_REFUSED", False),
        (403, PermanentError, "FORBIDDEN", False),
        (404, PermanentError, "NOT_FOUND", False),
        (408, TransientError, "VENDOR_ERROR_408", True),
        (409, PermanentError, "CONFLICT", False),
        (412, PermanentError, "PRECONDITION_FAILED", True),
        (422, PermanentError, "VENDOR_REFUSED", False),
        (425, TransientError, "VENDOR_ERROR_425", True),
        (429, TransientError, "THROTTLED", False),
        (500, TransientError, "VENDOR_ERROR_500", True),
        (503, TransientError, "VENDOR_ERROR_503", True),
        (529, TransientError, "VENDOR_ERROR_529", True),
    ],
)
async def test_each_status_has_its_error(status: int, family: type[VendorError], code: str, ambiguous: bool) -> None:
    error = await error_from(answers(response(b"" if status == 304 else b"because", status=status)))
    assert (type(error), error.code, error.ambiguous) == (family, code, ambiguous)
    assert error.message == f"raw GET /x: {status} {'' if status == 304 else 'because'}"


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
async def test_any_success_is_an_answer(method: str) -> None:
    async with raw_server(answers(response(status=201))) as server, client_of(server.port) as http:
        assert await http.call(method, "/x", Answer) == Answer(ok=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the answer: Invalid JSON"),
        (b'{"ok":tr', "the answer: Invalid JSON"),
        (b'{"ok":"yes"}', "ok: This should be true or false"),
        (b'{"ko":true}', "ok: Field required"),
        (b"[]", "the answer: This should be an object"),
        (b'{"ok":true,"x":"\xff"}', "the answer: Invalid JSON"),
        (rb'{"ok":true,"x":"a\ud800b"}', "the answer: Invalid JSON"),
        (rb'{"ok":true,"x":[{"\udc00":1}]}', "the answer: Invalid JSON"),
    ],
)
async def test_an_answer_of_another_shape_is_a_bad_answer(body: bytes, said: str) -> None:
    error = await error_from(answers(response(body)))
    assert isinstance(error, TransientError)
    assert (error.code, error.ambiguous) == ("BAD_ANSWER", True)
    assert error.message.startswith(f"raw GET /x: {said}")


async def test_fields_that_a_vendor_adds_do_no_harm() -> None:
    script = answers(response(b'{"ok":true,"new":{"deep":[1]}}'))
    async with raw_server(script) as server, client_of(server.port) as http:
        assert await http.call("GET", "/x", Answer) == Answer(ok=True)


class Texts(BaseModel):
    x: Any


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (rb"\u0000", "\ufffd"),
        (rb"a\u0000\u0000b", "a\ufffd\ufffdb"),
        (rb"\\\u0000", "\\\ufffd"),
        (rb"\\u0000", "\\u0000"),  # a backslash, and five letters
        (rb"\\\\u0000\u0000", "\\\\u0000\ufffd"),
        (rb"\u00000", "\ufffd0"),
    ],
)
async def test_of_a_nul_byte_in_an_answer_a_mark_is_left(sent: bytes, text: str) -> None:
    script = answers(response(b'{"x":[{"' + sent + b'":"' + sent + b'"}]}'))
    async with raw_server(script) as server, client_of(server.port) as http:
        assert await http.call("GET", "/x", Texts) == Texts(x=[{text: text}])


async def test_an_excerpt_is_short_and_storable() -> None:
    error = await error_from(answers(response(b"a\x00\xff\xed\xa0\x80" + "é".encode() * 50_000, status=500)))
    said = error.message.removeprefix("raw GET /x: 500 ")
    assert len(said) == 300
    assert "\x00" not in said
    assert said.encode()


@pytest.mark.req("ENG-42")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": AHEAD}, 30),
        ({"Retry-After": AHEAD, "Date": "Sun, 01 Mar 2026 12:00:25 GMT"}, 5),
        ({"Retry-After": AHEAD, "Date": "Sun, 01 Mar 2026 12:00:25 -0000"}, 5),
        ({"Retry-After": AHEAD, "Date": "Sun, 01 Mar 2026 13:00:00 GMT"}, 0),
        ({"Retry-After": AHEAD, "Date": "today"}, 30),
        ({"Retry-After": AHEAD, "Date": f"Sun, 01 Mar 2026 12:00:25 +{'9' * 17}"}, 30),
        ({"Retry-After": "later"}, None),
        ({}, None),
    ],
)
async def test_retry_after_goes_by_the_vendors_clock(
    status: int, headers: dict[str, str], seconds: float | None
) -> None:
    error = await error_from(answers(response(b"", status=status, headers=headers)))
    assert isinstance(error, TransientError)
    assert error.retry_after == seconds


@pytest.mark.parametrize("tail", [b"cut", b"x" * 200_000], ids=["cut", "large"])
async def test_a_refusal_stands_whatever_becomes_of_its_text(tail: bytes) -> None:
    error = await error_from(answers(response(tail, status=429, headers={"Content-Length": "300000"})))
    assert error.code == "THROTTLED"


async def test_a_refusal_stands_when_its_text_hangs() -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(response(b"slow d", status=404, headers={"Content-Length": "1000"}))
        await server.over.wait()

    error = await error_from(script)
    assert (error.code, error.message) == ("NOT_FOUND", "raw GET /x: 404 slow d")


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_headers_that_drip_do_not_outlive_the_deadline(method: str) -> None:
    started = time.monotonic()
    error = await error_from(drip, method)
    assert isinstance(error, TransientError)
    assert (error.code, error.ambiguous) == ("TIMEOUT", True)
    assert 0.3 <= time.monotonic() - started < 0.3 + 0.5


async def test_an_answer_that_is_not_http_is_a_bad_answer() -> None:
    error = await error_from(answers(b"220 mail.example ESMTP\r\n\r\n"))
    assert isinstance(error, TransientError)
    assert (error.code, error.ambiguous) == ("BAD_ANSWER", True)


async def test_a_body_that_does_not_decompress_is_transient() -> None:
    error = await error_from(answers(response(b"not gzip at all", headers={"Content-Encoding": "gzip"})))
    assert isinstance(error, TransientError)
    assert error.ambiguous


async def test_a_gzip_bomb_is_stopped_at_the_cap() -> None:
    bomb = gzip.compress(b" " * 64_000_000, 1)
    script = answers(response(bomb, headers={"Content-Encoding": "gzip"}))
    async with raw_server(script) as server, client_of(server.port, largest_body=1_000_000, deadline=5) as http:
        tracemalloc.start()
        try:
            error = await error_of(http.call("GET", "/x", Answer))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert isinstance(error, PermanentError)
    assert error.code == "ANSWER_TOO_LARGE"
    assert peak < 16_000_000


@pytest.mark.parametrize(("spaces", "fits"), [(989, True), (990, False)])
async def test_the_cap_is_exact(spaces: int, fits: bool) -> None:
    script = answers(response(b'{"ok":true}' + b" " * spaces))
    async with raw_server(script) as server, client_of(server.port, largest_body=1_000) as http:
        if fits:
            assert await http.call("GET", "/x", Answer)
        else:
            assert (await error_of(http.call("GET", "/x", Answer))).code == "ANSWER_TOO_LARGE"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_a_kept_connection_that_dies_under_a_request_is_not_used_again(method: str) -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(GOOD)
        await server.request(reader)  # and hangs up instead of answering, as a server does that tidies up idle ones

    async with raw_server(script) as server, client_of(server.port) as http:
        assert await http.call("GET", "/first", Answer)
        error = await error_of(http.call(method, "/second", Answer))
        assert isinstance(error, TransientError)
        assert (type(error), error.code, error.ambiguous) == (TransientError, "VENDOR_DISCONNECTED", True)
        assert [head.split()[1] for head in server.requests] == ["/first", "/second"]
        assert server.connections == 1


async def test_a_connection_closed_while_idle_is_replaced_unseen() -> None:
    async with raw_server(answers(GOOD)) as server, client_of(server.port) as http:
        for _ in range(3):
            assert await http.call("GET", "/x", Answer)
            await asyncio.sleep(0.02)  # the server's goodbye has to arrive: that is the case here
        assert (len(server.requests), server.connections) == (3, 3)


async def test_calls_one_after_another_share_a_connection() -> None:
    async with raw_server(answers(*[GOOD] * 5)) as server, client_of(server.port) as http:
        for _ in range(5):
            await http.call("GET", "/x", Answer)
        assert (len(server.requests), server.connections) == (5, 1)


async def test_a_refused_connection_is_not_sent() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        async with client_of(taken.getsockname()[1]) as http:
            error = await error_of(http.call("PUT", "/x", Answer, json={"a": 1}))
    assert (type(error), error.code) == (NotSentError, "VENDOR_UNREACHABLE")
    assert "onnect" in error.message


async def test_a_name_that_does_not_resolve_is_not_sent() -> None:
    http = VendorHttp("raw", "http://nothing.invalid", now=lambda: NOW)
    error = await error_of(http.call("GET", "/x", Answer, deadline=2))
    await http.close()
    assert (type(error), error.code) == (NotSentError, "VENDOR_UNREACHABLE")


async def test_connecting_has_a_deadline_of_its_own() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):  # what comes after them is left without an answer by the kernel
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        started = time.monotonic()
        async with client_of(full.getsockname()[1], connect_deadline=0.1, deadline=10) as http:
            error = await error_of(http.call("GET", "/x", Answer))
    assert (type(error), error.message) == (NotSentError, "raw GET /x: not sent: time-out")
    assert time.monotonic() - started < 0.1 + 0.5


async def test_a_tls_handshake_that_hangs_is_not_sent() -> None:
    async with raw_server(silence) as server, client_of(server.port, "https", connect_deadline=0.1) as http:
        assert type(await error_of(http.call("GET", "/x", Answer))) is NotSentError


async def test_a_tls_handshake_that_fails_is_not_sent() -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with raw_server(script) as server, client_of(server.port, "https") as http:
        assert type(await error_of(http.call("GET", "/x", Answer))) is NotSentError


async def test_a_call_that_never_got_a_connection_is_not_sent() -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        await server.over.wait()

    async with raw_server(script) as server, client_of(server.port, connections=1) as http:
        first = asyncio.create_task(error_of(http.call("GET", "/first", Answer, deadline=0.6)))
        await asyncio.sleep(0)
        second = await error_of(http.call("GET", "/second", Answer, deadline=0.1))
        assert type(second) is NotSentError
        assert (await first).code == "TIMEOUT"
        assert len(server.requests) == 1


async def test_a_cancelled_call_gives_its_connection_back() -> None:
    async def script(server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "/hang" in await server.request(reader):
            await server.over.wait()
        writer.write(GOOD)

    async with raw_server(script) as server, client_of(server.port, connections=1, deadline=5) as http:
        hanging = asyncio.create_task(http.call("GET", "/hang", Answer))
        while not server.requests:
            await asyncio.sleep(0.005)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await http.call("GET", "/x", Answer) == Answer(ok=True)


async def test_what_goes_out_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    script = answers(*[response(headers={"Set-Cookie": "a=b"})] * 2)
    async with raw_server(script) as server, client_of(server.port, headers={"X-Key": "k"}) as http:
        await http.call("GET", "/x", Answer, query={"q": "é&", "n": 1})
        await http.call("DELETE", "/x", Answer, headers={"X-Own": "o"})
    first, second = server.requests
    assert first.startswith("GET /x?q=%C3%A9%26&n=1 HTTP/1.1\r\n")
    assert "X-Key: k\r\n" in first
    assert "X-Key: k\r\n" in second
    assert "X-Own: o\r\n" in second
    assert "cookie" not in second.lower()


@pytest.mark.parametrize("script", [answers(response(b"no", status=401)), answers(b""), drip, answers(response(b"?"))])
async def test_messages_contain_no_secret(script: Script) -> None:
    async with raw_server(script) as server, client_of(server.port, headers={"Authorization": "s3cret"}) as http:
        sent = await error_of(http.call("GET", "/x", Answer, query={"key": "s3cret"}))
    async with client_of(server.port, headers={"Authorization": "s3cret"}) as http:  # no server listens there any more
        not_sent = await error_of(http.call("GET", "/x", Answer, query={"key": "s3cret"}))
    for error in (sent, not_sent):
        assert error.message.startswith("raw GET /x: ")
        assert "s3cret" not in error.message


async def test_closing_is_for_good_and_needs_no_call_before() -> None:
    async with raw_server(answers(GOOD)) as server, client_of(server.port) as http:
        await http.call("GET", "/x", Answer)
        await http.close()
        with pytest.raises(RuntimeError, match="closed"):
            await http.call("GET", "/x", Answer)
    await VendorHttp("raw", "http://127.0.0.1:1", now=lambda: NOW).close()
