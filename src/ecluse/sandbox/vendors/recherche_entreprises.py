"""Recherche d'entreprises: ``GET /search?q=`` with a SIREN or a SIRET. No key. ``sandbox/companies.py`` says which
numbers give which answers; a number that is unknown is answered with an empty list."""

from __future__ import annotations

from ecluse.sandbox.companies import SimulatedCompany, company
from ecluse.sandbox.vendor import Answer, Call, json_answer

PAGE = b"<!DOCTYPE html><html><body><h1>Maintenance en cours</h1></body></html>"
ANOTHER = "552100554"


class RechercheEntreprises:
    """The simulated search."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        return call.query.get("q", "")[:9] or None

    def error(self, status: int, code: str, message: str) -> Answer:  # noqa: ARG002 - its errors have no codes
        return json_answer({"erreur": message}, status)

    def handle(self, call: Call) -> Answer:
        if (call.method, call.path) != ("GET", "/search"):
            return self.error(404, "not_found", f"{call.path} n'existe pas")
        asked = call.query.get("q", "")
        if len(asked) < 3:
            return self.error(
                400,
                "bad_request",
                "3 caractères minimum pour les termes de la requête (ou utilisez au moins un filtre)",
            )
        if asked.startswith("95"):
            return Answer(200, PAGE, {"Content-Type": "text/html; charset=utf-8"})
        found = company(ANOTHER if asked.startswith("94") else asked[:9], self._seed)
        results = [shown(found)] if found is not None else []
        total = len(results)
        return json_answer({"results": results, "total_results": total, "page": 1, "per_page": 1, "total_pages": total})


def shown(one: SimulatedCompany) -> dict[str, object]:
    """Return a company as the search shows it."""
    town, postal_code = one.town
    last, first, born = one.director
    office = {
        "siret": one.siret,
        "adresse": f"{1 + one.pick('number', 90)} RUE DE LA RÉPUBLIQUE {postal_code} {town}",
        "code_postal": postal_code,
        "libelle_commune": town,
        "etat_administratif": one.state,
        "est_siege": True,
        "activite_principale": one.activity,
        "date_creation": one.created,
        "nom_commercial": None,
        "liste_enseignes": None,
    }
    return {
        "siren": one.siren,
        "nom_complet": one.name,
        "nom_raison_sociale": None if one.kind == "96" else one.name,
        "sigle": None,
        "nombre_etablissements": 1,
        "nombre_etablissements_ouverts": int(one.state == "A"),
        "siege": office,
        "activite_principale": one.activity,
        "categorie_entreprise": "PME",
        "tranche_effectif_salarie": "11",
        "date_creation": one.created,
        "date_fermeture": "2025-06-30" if one.state == "C" else None,
        "etat_administratif": one.state,
        "nature_juridique": one.legal_form,
        "statut_diffusion": one.diffusion,
        "dirigeants": [
            {
                "nom": last,
                "prenoms": first,
                "annee_de_naissance": born[:4],
                "date_de_naissance": born,
                "qualite": "Président de SAS",
                "nationalite": "Française",
                "type_dirigeant": "personne physique",
            },
            {
                "siren": "784824153",
                "denomination": "AUDIT ET COMPTES",
                "qualite": "Commissaire aux comptes titulaire",
                "type_dirigeant": "personne morale",
            },
        ],
        "matching_etablissements": [office],
        "complements": {"est_association": False},
        "finances": None,
    }
