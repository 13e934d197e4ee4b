"""A real `ecluse serve` with open sockets and streams: it leaves at once, and says where to go."""

from __future__ import annotations

import signal
from contextlib import ExitStack

from tests.realtime.clients import Stream, closed, hear, raw_socket
from tests.realtime.conftest import app_of
from tests.support.api_server import SECRET_KEY, Client, new_key
from tests.support.metrics import scrape
from tests.support.waits import wait_for


def test_a_server_with_open_sockets_and_streams_stops_about_as_soon_as_one_without(serve, dsn):
    def measured(listeners: int) -> float:
        server = serve("--role", "api", ECLUSE_SECRET_KEY=SECRET_KEY)
        server.wait_until_ready()
        client = Client(server.port, new_key(dsn))
        with ExitStack() as stack:
            sockets = [stack.enter_context(raw_socket(client, app_of(client)["key"])) for _ in range(listeners)]
            streams = [Stream(client) for _ in range(listeners)]
            for socket in sockets:
                assert hear(socket)["event"] == "pusher:connection_established"
            connections = scrape(server)["ecluse_realtime_connections"]
            assert connections == {("websocket",): listeners, ("sse",): listeners}
            code, seconds, said = server.end(signal.SIGTERM)
            assert code == 0, said
            assert "Traceback" not in said
            assert "graceful shutdown exceeded" not in said
            assert {closed(socket) for socket in sockets} == ({4200} if listeners else set())
            for stream in streams:
                wait_for(lambda stream=stream: stream.ended)
                stream.close()
        return seconds

    without, with_many = measured(0), measured(20)
    print(f"stopped in {without:.2f} s without, {with_many:.2f} s with open streams")  # pytest -rP
    assert with_many < without + 3
