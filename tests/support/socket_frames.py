"""Handshakes and frames of WebSocket clients, as bytes."""

from __future__ import annotations

TEXT, CLOSE, PING = 0x81, 0x88, 0x89
MASKED, NO_MASK = 0x80, bytes(4)


def upgrade(path: str = "/", headers: str = "") -> bytes:
    """Return the request that opens a socket; each line of `headers` ends with CR LF."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n"
    ).encode()


def frame(kind: int, data: bytes = b"") -> bytes:
    """Return a frame of at most 125 bytes of data."""
    return bytes([kind, MASKED | len(data)]) + NO_MASK + data
