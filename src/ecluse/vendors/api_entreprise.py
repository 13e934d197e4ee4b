"""Client of API Entreprise: the extract of the trade register (RCS). Open to administrations and their software
publishers only; each call declares the recipient, the context and the object of the request."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field

from ecluse.vendors.http import VendorHttp
from ecluse.vendors.registers import Facts, Part, Register, Source, organisation, person

LONGEST_OBJECT = 49  # characters


class Purpose(NamedTuple):
    """The declaration that each call carries: the SIRET of the administration, the context and the object of the
    request."""

    recipient: str
    context: str
    object: str


class Mandate(Part):
    type: str | None = None
    numero_identification: str | None = None
    fonction: str | None = None
    nom: str | None = None
    prenom: str | None = None
    date_naissance: str | None = None
    raison_sociale: str | None = None

    def fact(self) -> Facts:
        if self.type == "personne_morale":
            return organisation(name=self.raison_sociale, siren=self.numero_identification, role=self.fonction)
        return person(last_name=self.nom, first_names=self.prenom, role=self.fonction, born=self.date_naissance)


class Observation(Part):
    numero: str | None = None
    libelle: str | None = None
    date: str | None = None


class Capital(Part):
    montant: float | None = None
    code_devise: str | None = None


class Court(Part):
    valeur: str | None = None


class LegalForm(Part):
    valeur: str | None = None
    code: str | None = None


class LegalPerson(Part):
    forme_juridique: LegalForm = Field(default_factory=LegalForm)
    denomination: str | None = None
    date_cloture_exercice_comptable: str | None = None
    date_fin_de_vie: str | None = None


class Place(Part):
    code_ape: str | None = None


class Extract(Part):
    siren: str
    date_radiation: str | None = None
    date_immatriculation: str | None = None
    mandataires_sociaux: list[Mandate] = Field(default_factory=list)
    observations: list[Observation] = Field(default_factory=list)
    nom_commercial: str | None = None
    etablissement_principal: Place | None = None
    capital: Capital | None = None
    greffe: Court | None = None
    personne_morale: LegalPerson | None = None


class Answer(Part):
    data: Extract


class ApiEntreprise(Register):
    """Client of the register of the commercial courts (RCS)."""

    source = Source.RCS
    knobs = "API_ENTREPRISE_TOKEN"

    def __init__(self, http: VendorHttp, token: str, purpose: Purpose, **given: Any) -> None:
        super().__init__(http, **given)
        self._token = token
        self._purpose = purpose
        self._given = given
        http.hide(token)

    def on_behalf_of(self, recipient: str) -> ApiEntreprise:
        """Return a client for another recipient (a SIRET) that shares the HTTP client and the token."""
        return ApiEntreprise(self.http, self._token, self._purpose._replace(recipient=recipient), **self._given)

    async def facts(self, siren: str) -> Facts:
        path = f"/v3/infogreffe/rcs/unites_legales/{siren}/extrait_kbis"
        query = {**self._purpose._asdict(), "object": self._purpose.object[:LONGEST_OBJECT]}
        one = (
            await self.ask("GET", path, Answer, query=query, headers={"Authorization": f"Bearer {self._token}"})
        ).data
        firm, capital = one.personne_morale or LegalPerson(), one.capital or Capital()
        return self.of(
            siren,
            one.siren,
            {
                "legal_name": (firm.denomination or "").strip(),
                "trade_name": one.nom_commercial,
                "activity_code": one.etablissement_principal.code_ape if one.etablissement_principal else None,
                "legal_form_code": firm.forme_juridique.code,
                "legal_form": firm.forme_juridique.valeur,
                "registration_date": one.date_immatriculation,
                "deregistration_date": one.date_radiation,
                "end_date": firm.date_fin_de_vie,
                "capital_amount": capital.montant,
                "capital_currency": capital.code_devise,
                "fiscal_year_end": firm.date_cloture_exercice_comptable,
                "court": one.greffe.valeur if one.greffe else None,
                "observations": [seen.model_dump(exclude_none=True) for seen in one.observations],
                "directors": [mandate.fact() for mandate in one.mandataires_sociaux],
            },
        )
