"""The registers of companies at the sandbox, and numbers that they know."""

from __future__ import annotations

from ecluse.testing.sandbox import SandboxProcess
from ecluse.vendors.api_entreprise import ApiEntreprise, Purpose
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.inpi import InpiRne
from ecluse.vendors.recherche_entreprises import RechercheEntreprises
from ecluse.vendors.registers import Register, Source
from tests.support.raw_server import NOW

PLACES = {
    Source.SEARCH: "/recherche-entreprises",
    Source.INPI: "/inpi",
    Source.RCS: "/api-entreprise",
}
VENDORS = {
    Source.SEARCH: "recherche_entreprises",
    Source.INPI: "inpi",
    Source.RCS: "api_entreprise",
}
PURPOSE = Purpose("13002526500013", "vigilance", "client file")
SNCF, LA_POSTE = "552049447", "356000000"
UNKNOWN, ONLY_SEARCH, OPPOSED, NAMELESS = "900000001", "910000009", "920000007", "930000005"
ANOTHER, HTML, PERSON, CLOSED = "940000003", "950000018", "960000008", "970000006"


def client_at(url: str, deadline: float = 5.0) -> VendorHttp:
    return VendorHttp("register", url, deadline=deadline, now=lambda: NOW)


def made(source: Source, http: VendorHttp, key: str = "a-good-password") -> Register:
    match source:
        case Source.SEARCH:
            return RechercheEntreprises(http)
        case Source.INPI:
            return InpiRne(http, "user@example.org", key)
        case Source.RCS:
            return ApiEntreprise(http, key, PURPOSE)


def at_sandbox(
    source: Source, sandbox: SandboxProcess, key: str = "a-good-password", deadline: float = 5.0
) -> Register:
    return made(source, client_at(sandbox.url + PLACES[source], deadline), key)


def some_sirens(prefix: str, count: int) -> list[str]:
    """Return numbers with a valid check digit that begin with `prefix`."""
    found: list[str] = []
    body = 0
    while len(found) < count:
        digits = f"{prefix}{body:0{8 - len(prefix)}d}"
        total = sum(sum(divmod(int(one) * (2 if place % 2 == 0 else 1), 10)) for place, one in enumerate(digits[::-1]))
        found.append(f"{digits}{-total % 10}")
        body += 1
    return found
