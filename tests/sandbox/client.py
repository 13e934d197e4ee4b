"""A client that reads each answer to its end, keeps no connection and never tries again by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, TCPConnector
from multidict import CIMultiDictProxy


@dataclass(frozen=True)
class Reply:
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, url: str) -> None:
        self.session = ClientSession(f"{url}/", connector=TCPConnector(force_close=True, limit=0))
        # aiohttp sends GET, PUT and DELETE a second time after a cut connection, and says nothing.
        self.session._retry_connection = False

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, path, **options) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.request("GET", path, **options)

    async def put(self, path: str, **options: Any) -> Reply:
        return await self.request("PUT", path, **options)

    async def post(self, path: str, **options: Any) -> Reply:
        return await self.request("POST", path, **options)

    async def delete(self, path: str, **options: Any) -> Reply:
        return await self.request("DELETE", path, **options)
