"""API Entreprise: the trade register, ``GET /v3/infogreffe/rcs/unites_legales/{siren}/extrait_kbis`` with
``recipient``, ``context`` and ``object``, all required (422). Every token is accepted but ``expired`` (401) and
``no-right`` (403). ``sandbox/companies.py`` says which numbers give which answers."""

from __future__ import annotations

import re

from ecluse.sandbox.companies import SimulatedCompany, company, is_siren
from ecluse.sandbox.vendor import Answer, Call, json_answer

ROUTE = re.compile(r"/v3/infogreffe/rcs/unites_legales/([^/]+)/extrait_kbis")
REQUIRED = {"recipient": "00203", "context": "00201", "object": "00202"}
UNKNOWN = ("91", "96")
CODES = {"rate_limited": "00429", "concurrency": "00015", "not_found": "02003", "unauthorized": "00101"}


class ApiEntreprise:
    """The simulated trade register."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        found = ROUTE.fullmatch(call.path)
        return found[1] if found else None

    def error(self, status: int, code: str, message: str) -> Answer:
        one: dict[str, object] = {
            "code": CODES.get(code, code),
            "title": message,
            "detail": message,
            "source": None,
            "meta": {},
        }
        return json_answer({"errors": [one]}, status)

    def handle(self, call: Call) -> Answer:
        route = ROUTE.fullmatch(call.path)
        if call.method != "GET" or route is None:
            return self.error(404, "02003", "Route inconnue")
        match call.headers.get("Authorization", "").removeprefix("Bearer "):
            case "":
                return self.error(401, "00101", "Votre jeton n'est pas valide")
            case "expired":
                return self.error(401, "00103", "Votre jeton est expiré")
            case "no-right":
                return self.error(403, "00100", "Votre jeton n'a pas les droits")
        if not is_siren(route[1]):
            return self.error(422, "00301", "Le numéro de siren n'est pas correctement formatté")
        for name, code in REQUIRED.items():
            if not call.query.get(name):
                return self.error(422, code, f"Le paramètre {name} est obligatoire")
        found = company(route[1], self._seed)
        if found is None or found.kind in UNKNOWN:
            return self.error(404, "02003", "Le siren indiqué n'existe pas ou n'est pas connu")
        return json_answer({"data": shown(found), "links": {}, "meta": {}})


def shown(one: SimulatedCompany) -> dict[str, object]:
    """Return a company as the trade register shows it."""
    last, first, born = one.director
    return {
        "siren": one.siren,
        "date_radiation": "2025-06-30" if one.state == "C" else None,
        "date_extrait": "2026-11-01",
        "date_immatriculation": one.created,
        "mandataires_sociaux": [
            {
                "numero_identification": None,
                "type": "personne_physique",
                "fonction": "PRESIDENT",
                "nom": last,
                "prenom": first,
                "date_naissance": born,
            }
        ],
        "observations": [
            {"numero": "12197", "libelle": "LA SOCIETE NE CONSERVE AUCUNE ACTIVITE", "date": "2020-02-23"}
        ],
        "nom_commercial": None,
        "etablissement_principal": {"activite": None, "code_ape": one.activity.replace(".", "")},
        "capital": {"montant": one.capital, "devise": "Euros", "code_devise": "EUR"},
        "greffe": {"valeur": one.town[0], "code": "6901"},
        "personne_physique": {},
        "personne_morale": {
            "forme_juridique": {"valeur": "SOCIETE PAR ACTIONS SIMPLIFIEE", "code": one.legal_form},
            "denomination": one.name or None,
            "date_cloture_exercice_comptable": "12-31",
            "date_fin_de_vie": "2098-12-31",
        },
    }
