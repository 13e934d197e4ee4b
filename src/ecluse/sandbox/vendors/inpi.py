"""INPI's RNE: ``POST /api/sso/login`` with a user and a password, and ``GET /api/companies/{siren}`` with the token.

Every log-in succeeds, except with the password ``wrong`` (401) and as user ``no-api``, who may not use the API (403). A
token is valid until the sandbox is reset. ``sandbox/companies.py`` says which numbers give which answers."""

from __future__ import annotations

import json

from ecluse.sandbox.companies import SimulatedCompany, company
from ecluse.sandbox.vendor import Answer, Call, json_answer

UNKNOWN = ("91",)


class Inpi:
    """The simulated register of INPI."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tokens: set[str] = set()

    def ref(self, call: Call) -> str | None:
        return call.path.rpartition("/")[2] or None

    def error(self, status: int, code: str, message: str) -> Answer:
        return json_answer({"code": status, "type": code, "message": message}, status)

    def handle(self, call: Call) -> Answer:
        match call.method, call.path.split("/")[1:]:
            case "POST", ["api", "sso", "login"]:
                return self._log_in(call)
            case "GET", ["api", "companies", siren]:
                return self._company(call, siren)
        return self.error(404, "not_found", f"{call.path} does not exist")

    def _log_in(self, call: Call) -> Answer:
        try:
            given = json.loads(call.body)
            username, password = given["username"], given["password"]
        except (ValueError, KeyError, TypeError):
            return self.error(400, "bad_request", "username and password are required")
        if password == "wrong":  # noqa: S105 - the word that stands for one
            return self.error(401, "unauthorized", "Bad credentials")
        if username == "no-api":
            return self.error(403, "forbidden", "This account has no access to the API")
        token = f"inpi-token-{len(self._tokens) + 1}-{self._seed}"
        self._tokens.add(token)
        return json_answer({"token": token, "user": {"email": username}})

    def _company(self, call: Call, siren: str) -> Answer:
        if call.headers.get("Authorization", "").removeprefix("Bearer ") not in self._tokens:
            return self.error(401, "unauthorized", "Expired or unknown token")
        found = company(siren, self._seed)
        if found is None or found.kind in UNKNOWN:
            return self.error(404, "not_found", f"No company {siren}")
        return json_answer(shown(found))


def shown(one: SimulatedCompany) -> dict[str, object]:
    """Return a company as INPI's register shows it."""
    last, first, born = one.director
    individual = {
        "nom": last,
        "nomUsage": None,
        "prenoms": [first],
        "dateDeNaissance": born,
        "nationalite": "FRANÇAISE",
    }
    power = {"roleEntreprise": "73", "typeDePersonne": "INDIVIDU", "individu": {"descriptionPersonne": individual}}
    subject: dict[str, object] = {
        "identite": {
            "entreprise": {
                "siren": one.siren,
                "denomination": one.name or None,
                "formeJuridique": one.legal_form,
                "nomCommercial": None,
                "codeApe": one.activity.replace(".", ""),
                "dateImmat": one.created,
            },
            "description": {
                "montantCapital": one.capital,
                "capitalVariable": False,
                "deviseCapital": "EUR",
                "dateClotureExerciceSocial": "3112",
                "duree": 99,
            },
        },
        "composition": {"pouvoirs": [power]},
        "detailCessationEntreprise": {"dateRadiation": "2025-06-30" if one.state == "C" else None},
    }
    if one.kind == "96":
        subject = {
            "identite": {"entreprise": {"siren": one.siren}, "entrepreneur": {"descriptionPersonne": individual}}
        }
    return {
        "id": f"rne-{one.siren}",
        "siren": one.siren,
        "updatedAt": "2026-03-01T03:10:00+01:00",
        "formality": {
            "siren": one.siren,
            "companyName": one.name or None,
            "typePersonne": "P" if one.kind == "96" else "M",
            "formeJuridique": one.legal_form,
            "diffusionINSEE": one.diffusion,
            "codeAPE": one.activity.replace(".", ""),
            "content": {
                "natureCreation": {"dateCreation": one.created, "formeJuridique": one.legal_form},
                "personnePhysique" if one.kind == "96" else "personneMorale": subject,
            },
        },
    }
