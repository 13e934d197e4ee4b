"""Client of Recherche d'entreprises, the public search of companies: identity, establishments, directors. No key."""

from __future__ import annotations

from pydantic import Field

from ecluse.vendors.registers import ErrorCode, Facts, Part, Register, Source, organisation, person, refused

STATES = {"A": "active", "C": "closed"}


class Establishment(Part):
    siret: str
    adresse: str | None = None
    code_postal: str | None = None
    libelle_commune: str | None = None
    etat_administratif: str | None = None
    est_siege: bool | None = None
    activite_principale: str | None = None
    date_creation: str | None = None
    nom_commercial: str | None = None
    liste_enseignes: list[str] | None = None

    def fact(self) -> Facts:
        return {
            "siret": self.siret,
            "address": self.adresse,
            "postal_code": self.code_postal,
            "city": self.libelle_commune,
            "state": STATES.get(self.etat_administratif or ""),
            "head_office": bool(self.est_siege),
            "activity_code": self.activite_principale,
            "creation_date": self.date_creation,
            "trade_name": self.nom_commercial or next(iter(self.liste_enseignes or ()), None),
        }


class Director(Part):
    type_dirigeant: str | None = None
    nom: str | None = None
    prenoms: str | None = None
    annee_de_naissance: str | None = None
    date_de_naissance: str | None = None
    nationalite: str | None = None
    qualite: str | None = None
    siren: str | None = None
    denomination: str | None = None

    def fact(self) -> Facts:
        if self.type_dirigeant == "personne morale":
            return organisation(name=self.denomination, siren=self.siren, role=self.qualite)
        return person(
            last_name=self.nom,
            first_names=self.prenoms,
            role=self.qualite,
            born=self.date_de_naissance or self.annee_de_naissance,
            nationality=self.nationalite,
        )


class Result(Part):
    siren: str
    nom_complet: str | None = None
    nom_raison_sociale: str | None = None
    sigle: str | None = None
    siege: Establishment | None = None
    nombre_etablissements: int | None = None
    nombre_etablissements_ouverts: int | None = None
    activite_principale: str | None = None
    categorie_entreprise: str | None = None
    tranche_effectif_salarie: str | None = None
    date_creation: str | None = None
    date_fermeture: str | None = None
    etat_administratif: str | None = None
    nature_juridique: str | None = None
    statut_diffusion: str | None = None
    dirigeants: list[Director] = Field(default_factory=list)
    matching_etablissements: list[Establishment] = Field(default_factory=list)
    tva: list[str] | None = None


class Results(Part):
    results: list[Result]


class RechercheEntreprises(Register):
    """Client of the search of companies, the required register: the identity of a company comes from it."""

    source = Source.SEARCH

    async def facts(self, siren: str) -> Facts:
        # Exactly nine digits are a look-up by number. An unknown number is answered with an empty list.
        found = (await self.ask("GET", "/search", Results, query={"q": siren, "per_page": 1})).results
        if not found:
            raise refused(self.source, ErrorCode.NOT_FOUND, 200)
        one = found[0]
        offices = {place.siret: place for place in one.matching_etablissements}
        if one.siege is not None:
            offices = {one.siege.siret: one.siege, **offices}
        return self.of(
            siren,
            one.siren,
            {
                "legal_name": (one.nom_raison_sociale or one.nom_complet or "").strip(),
                "acronym": one.sigle,
                "state": STATES.get(one.etat_administratif or ""),
                "creation_date": one.date_creation,
                "closing_date": one.date_fermeture,
                "activity_code": one.activite_principale,
                "legal_form_code": one.nature_juridique,
                "category": one.categorie_entreprise,
                "headcount_range": one.tranche_effectif_salarie,
                "vat_numbers": one.tva,
                "head_office": one.siege.fact() if one.siege is not None else None,
                "establishments_count": one.nombre_etablissements,
                "open_establishments_count": one.nombre_etablissements_ouverts,
                "establishments": [place.fact() for place in offices.values()],
                "diffusion": one.statut_diffusion,
                "directors": [director.fact() for director in one.dirigeants],
            },
        )
