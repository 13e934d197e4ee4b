"""The configuration of nginx in docs/reverse-proxy.md, in front of two real replicas."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.sync.client import connect

from tests.support.api_server import SECRET_KEY, Answer, new_key
from tests.support.command_line import ROOT, Server, free_port
from tests.support.waits import wait_for

PAGE = ROOT / "docs" / "reverse-proxy.md"
AROUND = """
daemon off;
error_log stderr warn;
pid {folder}/nginx.pid;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/ecluse.conf;
}}
"""
PROXY = "127.0.0.1"
UNTRUSTING = ssl._create_unverified_context()  # noqa: S323 - a certificate of the test's own


def certificate(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "ecluse.crt").write_bytes(made.public_bytes(pem))
    (folder / "ecluse.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


class Proxied:
    def __init__(self, port: int, replicas: list[Server], key: str) -> None:
        self.port, self.replicas, self.key = port, replicas, key

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        with self.asked(method, path, body, **headers) as answer:
            return Answer(answer.status, answer.headers, answer.read())

    @contextlib.contextmanager
    def asked(
        self, method: str, path: str, body: str | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPSConnection(PROXY, self.port, timeout=20, context=UNTRUSTING)
        given = {"Authorization": f"Bearer {self.key}"} | {one.replace("_", "-"): text for one, text in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, given)
            with connection.getresponse() as answer:
                yield answer


@pytest.fixture(scope="module")
def dsn(databases) -> Iterator[str]:
    with databases.one() as dsn:
        yield dsn


@contextlib.contextmanager
def nginx(folder: Path, upstreams: list[int]) -> Iterator[int]:
    """Run nginx as the page configures it, in front of these ports; yield its port."""
    assert shutil.which("nginx"), "this is tested with Debian's nginx, which is not installed: run `make proxy` as root"
    port = free_port()
    (written,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    replaced = {"listen 443": f"listen {PROXY}:{port}", "/etc/ssl": str(folder)}
    replaced |= {f"127.0.0.1:808{n}": f"127.0.0.1:{one}" for n, one in enumerate(upstreams, 1)}
    for shown, here in replaced.items():
        assert written.count(shown) in (1, 2)
        written = written.replace(shown, here)
    certificate(folder)
    (folder / "ecluse.conf").write_text(written)
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder))
    folder.chmod(0o755)
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        wait_for(lambda: _listens(port) or running.poll() is not None)
        assert running.poll() is None
        try:
            yield port
        finally:
            running.terminate()


@pytest.fixture
def proxied(dsn, fork_server, tmp_path) -> Iterator[Proxied]:
    knobs = {"DATABASE_URL": dsn, "ECLUSE_SECRET_KEY": SECRET_KEY, "FORWARDED_ALLOW_IPS": PROXY}
    replicas = [Server(fork_server, "--role", "api", **knobs) for _ in range(2)]
    for replica in replicas:
        replica.wait_until_ready()
    with nginx(tmp_path, [one.port for one in replicas]) as port:
        yield Proxied(port, replicas, new_key(dsn))
    for replica in replicas:
        replica.end(signal.SIGKILL)


@contextlib.contextmanager
def answering(status: int, path: str = "/") -> Iterator[int]:
    """Run an upstream that answers requests for paths below `path` with this status, others with 200; yield its
    port."""

    class Always(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path.startswith(path) else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((PROXY, 0), Always) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((PROXY, port)) == 0


def test_the_documented_proxy(proxied):
    """One test, one proxy: starting the three processes takes most of its time."""
    addresses = {f"127.0.0.1:{one.port}" for one in proxied.replicas}

    # Metrics name the lanes of tenants, and ask for no key.
    assert [proxied.ask("GET", path).status for path in ("/metrics", "/metrics?x=1", "/%6detrics")] == [404] * 3

    # Requests go to both, with their ids.
    answers = [proxied.ask("GET", "/api/me", X_Request_Id=f"mine-{n}") for n in range(6)]
    assert {one.status for one in answers} == {200}
    assert [one.headers["X-Request-Id"] for one in answers] == [f"mine-{n}" for n in range(6)]
    assert {one.headers["X-LB-Upstream-Addr"] for one in answers} == addresses
    assert len({one.headers["X-Replica"] for one in answers}) == 2
    assert re.fullmatch("[0-9a-f]{32}", proxied.ask("GET", "/api/me").headers["X-Request-Id"])
    assert answers[0].headers["Server"].startswith("nginx")

    # The cookie of a visitor by https is Secure.
    form = {"Content_Type": "application/x-www-form-urlencoded", "Origin": f"https://{PROXY}:{proxied.port}"}
    entered = proxied.ask("POST", "/ui/login", f"key={proxied.key}", **form)
    assert entered.status == 303
    assert "; Secure" in entered.headers["Set-Cookie"]
    assert proxied.ask("POST", "/ui/login", "key=x", **form | {"Origin": "https://elsewhere"}).status == 403

    # A stream comes unbuffered, and a socket is upgraded.
    began = time.monotonic()
    with proxied.asked("GET", "/api/events") as stream:
        assert (stream.status, stream.headers["Content-Type"].partition(";")[0]) == (200, "text/event-stream")
        assert stream.readline() == b"retry: 1000\n"
    assert time.monotonic() - began < 5
    app = proxied.ask("GET", "/api/realtime").json["key"]
    with connect(f"wss://{PROXY}:{proxied.port}/app/{app}?protocol=7", ssl=UNTRUSTING) as one:
        assert "connection_established" in one.recv(10)

    # One replica is killed: every request is answered by the other.
    gone, stays = proxied.replicas
    gone.end(signal.SIGKILL)
    answers = [proxied.ask("GET", "/api/me") for _ in range(6)]
    assert {one.status for one in answers} == {200}
    assert all(one.headers["X-LB-Upstream-Addr"].endswith(f"127.0.0.1:{stays.port}") for one in answers)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_answer_that_says_overloaded_is_asked_of_the_other_replica(tmp_path, status):
    with (
        answering(status) as ailing,
        answering(200) as well,
        nginx(tmp_path, [ailing, well]) as port,
    ):
        proxied = Proxied(port, [], "")
        answers = [proxied.ask("GET", "/api/me") for _ in range(4)]
        assert {one.status for one in answers} == {200}
        asked = {one.headers["X-LB-Upstream-Addr"] for one in answers}
        assert f"{PROXY}:{ailing}, {PROXY}:{well}" in asked
        # A change may have been made: it is the caller who repeats it.
        assert {proxied.ask("POST", "/api/runs", "{}").status for _ in range(4)} == {200, status}


def test_reads_that_both_replicas_refuse_as_too_slow_do_not_keep_other_requests_out(tmp_path):
    with (
        answering(503, "/slow") as one,
        answering(503, "/slow") as other,
        nginx(tmp_path, [one, other]) as port,
    ):
        proxied = Proxied(port, [], "")
        for _ in range(5):
            assert proxied.ask("GET", "/slow").status == 503
            assert {proxied.ask("GET", "/api/me").status for _ in range(4)} == {200}


@pytest.mark.parametrize(
    ("method", "repeated"), [("GET", True), ("PUT", True), ("DELETE", True), ("POST", False), ("PATCH", False)]
)
def test_only_requests_that_may_be_repeated_are_asked_of_the_other_replica(tmp_path, method, repeated):
    with (
        answering(503) as ailing,
        answering(200) as well,
        nginx(tmp_path, [ailing, well]) as port,
    ):
        answers = {Proxied(port, [], "").ask(method, "/api/runs", "{}").status for _ in range(4)}
    assert answers == ({200} if repeated else {200, 503})
