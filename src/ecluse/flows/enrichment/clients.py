"""The clients of the registers, made from the settings once per process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

from ecluse.base.clock import Clock
from ecluse.flows.enrichment.rules import LOCK_TTL, Limits
from ecluse.vendors.api_entreprise import ApiEntreprise, Purpose
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.inpi import InpiRne
from ecluse.vendors.recherche_entreprises import RechercheEntreprises
from ecluse.vendors.registers import ErrorCode, Facts, Register, Source, refused

AGENT = {"User-Agent": "ecluse (company enrichment)"}


@dataclass(frozen=True)
class Config:
    """The settings of company enrichment. An optional source without credentials is off; `recipient` is that of the
    tenant `default`."""

    urls: dict[Source, str]
    per_second: dict[Source, float | None]
    inpi: tuple[str, str] | None = None  # user and password
    token: str | None = None  # of API Entreprise
    context: str = ""
    object: str = ""
    recipient: str | None = None
    deadline: timedelta = timedelta(seconds=5)
    sync_wait: timedelta = timedelta(milliseconds=1200)
    keep: timedelta | None = None  # companies without a request for longer than this are erased
    limits: Limits = field(default_factory=Limits)
    connections: int = 50

    def asked(self, recipient: str | None) -> list[Source]:
        """Return the sources that a job asks, in order. `recipient`: the SIRET of its tenant at API Entreprise."""
        on = {Source.SEARCH: True, Source.INPI: bool(self.inpi), Source.RCS: bool(self.token and recipient)}
        return [source for source in Source if on[source]]


class Registers:
    """The registers, as the `vendors` of the flow."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._open = AsyncExitStack()
        self._clients: dict[Source, Register] = {}

    async def __aenter__(self) -> Self:
        config, wait = self._config, LOCK_TTL.total_seconds()
        self._clients[Source.SEARCH] = RechercheEntreprises(await self._http(Source.SEARCH), longest_wait=wait)
        if config.inpi is not None:
            self._clients[Source.INPI] = InpiRne(await self._http(Source.INPI), *config.inpi, longest_wait=wait)
        if config.token is not None:
            purpose = Purpose("", config.context, config.object)
            http = await self._http(Source.RCS)
            self._clients[Source.RCS] = ApiEntreprise(http, config.token, purpose, longest_wait=wait)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def facts(self, source: Source, siren: str, recipient: str | None) -> Facts:
        """Return what a register says of a company. Raise VendorError, with a canonical code, if it fails."""
        client = self._clients.get(source)
        if client is None:  # the replica that began the job has credentials that this one lacks
            raise refused(source, ErrorCode.UNKNOWN, None)
        if isinstance(client, ApiEntreprise):
            client = client.on_behalf_of(recipient or "")
        return await client.facts(siren)

    async def _http(self, source: Source) -> VendorHttp:
        config = self._config
        http = VendorHttp(
            source.lower(),
            config.urls[source],
            deadline=config.deadline.total_seconds(),
            connections=config.connections,
            headers=AGENT,
            now=self._clock.now,
        )
        return await self._open.enter_async_context(http)
