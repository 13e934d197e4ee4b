"""Client of INPI's RNE, the national register of companies: legal details and directors, after a log-in.

The token of a log-in has no known end and cannot be refreshed: a 401 or 403 is followed by one new log-in and one
repetition, which are part of the same call. Calls that fail together share one log-in.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from ecluse.base.errors import VendorError
from ecluse.base.masking import HIDDEN
from ecluse.vendors.http import VendorHttp
from ecluse.vendors.registers import ErrorCode, Facts, Part, Register, Source, joined, organisation, person

ROLES = {
    "30": "Gérant",
    "40": "Liquidateur",
    "41": "Associé unique",
    "51": "Président du conseil d'administration",
    "53": "Directeur général",
    "60": "Président-directeur général",
    "65": "Administrateur",
    "70": "Directeur général délégué",
    "71": "Commissaire aux comptes titulaire",
    "72": "Commissaire aux comptes suppléant",
    "73": "Président de SAS",
}
DENIED = frozenset({ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN})


class CamelCase(Part):
    model_config = ConfigDict(alias_generator=to_camel)


class LogIn(CamelCase):
    token: str


class Person(CamelCase):
    nom: str | None = None
    prenoms: list[str] = Field(default_factory=list)
    date_de_naissance: str | None = None
    nationalite: str | None = None

    def fact(self, role: str | None) -> Facts:
        # Year and month only: the day of birth is personal data and is not kept.
        born = (self.date_de_naissance or "")[:7] or None
        names = joined(*self.prenoms)
        return person(last_name=self.nom, first_names=names, role=role, born=born, nationality=self.nationalite)


class Individual(CamelCase):
    description_personne: Person = Field(default_factory=Person)


class Firm(CamelCase):
    siren: str | None = None
    denomination: str | None = None
    forme_juridique: str | None = None
    nom_commercial: str | None = None
    code_ape: str | None = None
    date_immat: str | None = None


class Power(CamelCase):
    role_entreprise: str | None = None
    individu: Individual | None = None
    entreprise: Firm | None = None

    def fact(self) -> Facts:
        role = ROLES.get(self.role_entreprise or "", self.role_entreprise)
        if self.individu is not None:
            return self.individu.description_personne.fact(role)
        firm = self.entreprise or Firm()
        return organisation(name=firm.denomination, siren=firm.siren, role=role)


class Description(CamelCase):
    montant_capital: float | None = None
    capital_variable: bool | None = None
    devise_capital: str | None = None
    date_cloture_exercice_social: str | None = None
    duree: int | None = None


class Identity(CamelCase):
    entreprise: Firm = Field(default_factory=Firm)
    description: Description = Field(default_factory=Description)
    entrepreneur: Individual | None = None


class Composition(CamelCase):
    pouvoirs: list[Power] = Field(default_factory=list)


class Ending(CamelCase):
    date_radiation: str | None = None


class Subject(CamelCase):
    """A legal person, a natural person or a farm: the same parts, as far as each has them."""

    identite: Identity = Field(default_factory=Identity)
    composition: Composition = Field(default_factory=Composition)
    detail_cessation_entreprise: Ending = Field(default_factory=Ending)


class Creation(CamelCase):
    date_creation: str | None = None
    forme_juridique: str | None = None


class Content(CamelCase):
    nature_creation: Creation = Field(default_factory=Creation)
    personne_morale: Subject | None = None
    personne_physique: Subject | None = None
    exploitation: Subject | None = None


class Formality(CamelCase):
    company_name: str | None = None
    forme_juridique: str | None = None
    diffusion_insee: str | None = Field(None, alias="diffusionINSEE")
    code_ape_insee: str | None = Field(None, alias="codeAPE")
    content: Content = Field(default_factory=Content)


class Company(CamelCase):
    siren: str
    formality: Formality = Field(default_factory=Formality)


class InpiRne(Register):
    """Client of INPI's register. One client per process, so that all calls share its log-in."""

    source = Source.INPI
    knobs = "INPI_USERNAME and INPI_PASSWORD"

    def __init__(self, http: VendorHttp, username: str, password: str, **given: Any) -> None:
        super().__init__(http, **given)
        self._credentials = {"username": username, "password": password}
        self._token = ""
        self._log_ins = 0
        self._turn = asyncio.Lock()
        http.hide(password)

    async def facts(self, siren: str) -> Facts:
        log_in = await self._logged_in(after=0)
        try:
            company = await self._company(siren)
        except VendorError as error:
            if error.code not in DENIED:
                raise
            await self._logged_in(after=log_in)
            company = await self._company(siren)
        formality, content = company.formality, company.formality.content
        subject = content.personne_morale or content.personne_physique or content.exploitation or Subject()
        firm, details = subject.identite.entreprise, subject.identite.description
        entrepreneur = subject.identite.entrepreneur
        directors = [power.fact() for power in subject.composition.pouvoirs]
        if entrepreneur is not None:
            directors.insert(0, entrepreneur.description_personne.fact("Entrepreneur individuel"))
        return self.of(
            siren,
            company.siren,
            {
                "legal_name": (firm.denomination or formality.company_name or "").strip(),
                "trade_name": firm.nom_commercial,
                "creation_date": content.nature_creation.date_creation,
                "activity_code": firm.code_ape or formality.code_ape_insee,
                "legal_form_code": firm.forme_juridique or formality.forme_juridique,
                "registration_date": firm.date_immat,
                "deregistration_date": subject.detail_cessation_entreprise.date_radiation,
                "capital_amount": details.montant_capital,
                "capital_currency": details.devise_capital,
                "capital_variable": details.capital_variable,
                "fiscal_year_end": year_end(details.date_cloture_exercice_social),
                "duration_years": details.duree,
                "diffusion": formality.diffusion_insee,
                "directors": directors,
            },
        )

    async def _company(self, siren: str) -> Company:
        headers = {"Authorization": f"Bearer {self._token}"}
        return await self.ask("GET", f"/api/companies/{siren}", Company, headers=headers)

    async def _logged_in(self, *, after: int) -> int:
        """Log in, unless there was a log-in since the one with the number `after` (0: before the first); return the
        number of the last one. One log-in at a time: other calls wait for it and use its token."""
        async with self._turn:
            if self._log_ins == after:
                token = (await self.ask("POST", "/api/sso/login", LogIn, json=self._credentials)).token
                # INPI may give the same token again, which the client hides in every answer.
                self._token = self._token if token == HIDDEN else token
                self._log_ins += 1
                self.http.hide(token)
            return self._log_ins


def year_end(text: str | None) -> str | None:
    """Return the end of the fiscal year as month and day: INPI writes 3112 for 12-31. Any other text is returned
    unchanged."""
    return f"{text[2:]}-{text[:2]}" if text and len(text) == 4 and text.isdigit() else text
