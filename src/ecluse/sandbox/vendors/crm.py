"""A CRM: ``GET /sales?date=DD/MM/YYYY`` and ``GET /fiches/{id}``, with any key as ``Authorization: Bearer``.

No key is 401, the key ``forbidden`` is 403. Everything is computed from the id, which is a number written as text, or
capitals, ``-`` or ``/``, and such a number (``FR-1000`` is another fiche that looks like 1000):

============== =========================================================================================
1000 to 8999   normal: ``id % 8 + 1`` recordings; so is every id from 10000 to 99999999 but for the next line
9000 to 9099   exactly 5 recordings (and so has every id from 20000000 to 29999999)
9100 to 9199   no recordings
9200 to 9299   3 recordings, the second without a URL: ``""`` for even ids, ``null`` for odd ones
9300 to 9399   unknown: 404 ``{"success": false, "message": "NOT_FOUND"}``; odd ids say the same with 200
9400 to 9499   12 recordings
9500 to 9599   4 untidy recordings: a number as call id (``id * 10 + 1``), a URL that is missing, a start that
               is no time, and one without a call id
any other      unknown, 404
============== =========================================================================================

Recording k (from 1) has the call id ``{id}-{k}`` and a signed URL at the sandbox's own ``/audio``. The groupe is
``GROUPES[id % 4]``, the attribution_user_id the number ``100 + id % 20``. A day's list has 20 to 40 rows, the same
whenever it is asked for: normal fiches but for row 6 (9100 to 9199), row 12 (9200 to 9299) and row 18 (9300 to 9399);
every seventh row lacks its groupe. On the 13th of a month one row more has no id. Before 2001 nothing was sold.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

from ecluse.sandbox.vendor import Answer, Call, json_answer
from ecluse.sandbox.vendors.audio import recording_path

GROUPES = ("Paris", "Lyon", "Marseille", "Lille")
ID = re.compile(r"(?:[A-Z]{1,8}[-/])?([1-9][0-9]{3,7})")
NOT_NORMAL = range(9000, 10_000)
ALIKE = range(20_000_000, 30_000_000)
UNKNOWN = range(9300, 9400)
FIRST_CALL = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)

FIRST_NAMES = ("Camille", "Léa", "Zoé", "Jérôme", "François", "Inès", "Gaël", "Maëlys", "Noël", "Agnès")
NAMES = ("Lefèvre", "Garçon", "Muñoz", "Dupré", "Béranger", "Noël-Dubois", "D'Hérouville", "Chauvet", "Lemaître")
TOWNS = ("Saint-Étienne", "Nîmes", "Besançon", "Le Mans", "Orléans", "Angoulême", "Évreux", "Périgueux")
PRODUCTS = ("Mutuelle santé", "Prévoyance", "Assurance habitation", "Complémentaire senior", "Garantie obsèques")


def pick(*of: object) -> int:
    """Return a number that depends on the arguments only."""
    return int.from_bytes(blake2b("/".join(map(str, of)).encode(), digest_size=8).digest())


class Crm:
    """The simulated CRM."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def ref(self, call: Call) -> str | None:
        match call.path.split("/")[1:]:
            case ["fiches", *rest]:
                return "/".join(rest)
            case ["sales"]:
                return call.query.get("date")
        return None

    def error(self, status: int, code: str, message: str) -> Answer:
        return json_answer({"success": False, "message": code.upper(), "details": message}, status)

    def handle(self, call: Call) -> Answer:
        scheme, _, key = call.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not key:
            return self.error(401, "unauthorized", "give a key as Authorization: Bearer")
        if key == "forbidden":
            return self.error(403, "forbidden", "this key may not read")
        match call.method, call.path.split("/")[1:]:
            case "GET", ["sales"]:
                return self._sales(call.query.get("date", ""))
            case "GET", ["fiches", *rest] if found := ID.fullmatch("/".join(rest)):
                return self._fiche(int(found[1]), call.headers.get("Host", ""))
        return self.error(404, "not_found", f"{call.path} does not exist")

    def _sales(self, text: str) -> Answer:
        """Return the sales list of a day, given as DD/MM/YYYY."""
        try:
            day = datetime.strptime(text, "%d/%m/%Y").date()  # noqa: DTZ007
        except ValueError:
            return self.error(422, "bad_date", "date must be DD/MM/YYYY")
        rows: list[dict[str, object]] = []
        for position in range(1, 21 + pick(self._seed, day) % 21) if day.year > 2000 else ():
            drawn = pick(self._seed, day, position)
            first, size = {6: (9100, 100), 12: (9200, 100), 18: (9300, 100)}.get(position, (1000, 8000))
            fiche_id = first + drawn % size
            row: dict[str, object] = {"id": str(fiche_id), "nom": NAMES[fiche_id % len(NAMES)], "statut": "vendu"}
            if position % 7:
                row["groupe"] = GROUPES[fiche_id % len(GROUPES)]
            if all(row["id"] != other["id"] for other in rows):
                rows.append(row)
        if day.day == 13 and rows:
            rows.append({"nom": "sans fiche", "statut": "vendu"})
        return json_answer({"fiches": rows})

    def _fiche(self, number: int, host: str) -> Answer:
        """Return a fiche, or the answer that there is none; `host` is that of the sandbox, for the URLs of
        recordings."""
        recordings = self._recordings(number, host)
        if recordings is None:
            answer = self.error(404, "not_found", f"there is no fiche {number}")
            return Answer(200, answer.body) if number in UNKNOWN and number % 2 else answer
        information = {
            "groupe": GROUPES[number % len(GROUPES)],
            "attribution_user_id": 100 + number % 20,
            "nom": NAMES[number % len(NAMES)],
            "prenom": FIRST_NAMES[number % len(FIRST_NAMES)],
            "ville": TOWNS[number % len(TOWNS)],
            "produit": PRODUCTS[number % len(PRODUCTS)],
            "montant_mensuel": f"{20 + number % 90}.{number % 100:02d}",
            "commentaire": None if number % 3 else "Rappeler après 18 h, préfère être contacté(e) par téléphone.",
        }
        return json_answer({"success": True, "message": "OK", "information": information, "recordings": recordings})

    def _recordings(self, number: int, host: str) -> list[dict[str, object]] | None:
        """Return the recordings of a fiche, or None if there is no such fiche."""
        if number in ALIKE:
            return [self._recording(number, k, host) for k in range(1, 6)]
        if number not in NOT_NORMAL:
            return [self._recording(number, k, host) for k in range(1, number % 8 + 2)]
        count = {90: 5, 91: 0, 92: 3, 94: 12, 95: 4}.get(number // 100)
        if count is None:
            return None
        recordings = [self._recording(number, k, host) for k in range(1, count + 1)]
        match number // 100:
            case 92:
                recordings[1]["recording_url"] = None if number % 2 else ""
            case 95:
                recordings[0]["call_id"] = number * 10 + 1
                del recordings[1]["recording_url"]
                recordings[2]["start_time"] = "hier matin"
                del recordings[3]["call_id"]
        return recordings

    def _recording(self, number: int, k: int, host: str) -> dict[str, object]:
        """Return recording `k` of a fiche."""
        call_id = f"{number}-{k}"
        start = FIRST_CALL + timedelta(days=number % 300, hours=k, minutes=pick(call_id) % 60)
        return {
            "call_id": call_id,
            "recording_url": f"http://{host}{recording_path(self._seed, call_id)}",
            "start_time": start.isoformat(),
            "duration_s": 30 + pick(call_id) % 600,
        }
