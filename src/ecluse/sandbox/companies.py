"""The companies of the simulated registers: every SIREN with a valid check digit is one, computed from its number. Its
first two digits decide what the registers answer:

== ==========================================================================================================
90 unknown to all registers
91 unknown to INPI and to the trade register
92 opposed to the diffusion of its data (``P``): the search shows it with directors, which callers must not show
93 without a name, in all registers
94 the search answers with another company
95 the search answers with a page of HTML
96 a natural person
97 closed
== ==========================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

NAMED = {"356000000": "LA POSTE", "552049447": "SOCIETE NATIONALE SNCF", "552100554": "PEUGEOT SA"}
WORDS = ("ATELIERS", "TRANSPORTS", "ÉLECTRICITÉ", "MENUISERIE", "LOGICIELS", "CÉRAMIQUES", "VIGNOBLES", "BOULANGERIE")
TOWNS = (("LYON", "69003"), ("BESANÇON", "25000"), ("SAINT-ÉTIENNE", "42000"), ("NÎMES", "30000"), ("ÉVREUX", "27000"))
NAMES = ("LEFÈVRE", "GARÇON", "DUPRÉ", "BÉRANGER", "CHAUVET", "LEMAÎTRE", "D'HÉROUVILLE")
FIRST_NAMES = ("CAMILLE", "LÉA", "JÉRÔME", "FRANÇOIS", "INÈS", "GAËL", "AGNÈS")


def luhn(digits: str) -> int:
    """Return the Luhn sum of a number: that of its digits, every second one from the right doubled. A number is valid
    if its sum is a multiple of ten."""
    return sum(sum(divmod(int(digit) * (1 + place % 2), 10)) for place, digit in enumerate(reversed(digits)))


def is_siren(text: str) -> bool:
    return len(text) == 9 and text.isascii() and text.isdigit() and luhn(text) % 10 == 0


@dataclass(frozen=True, slots=True)
class SimulatedCompany:
    """A company as the registers know it."""

    siren: str
    seed: int

    def pick(self, what: str, size: int) -> int:
        drawn = blake2b(f"{self.seed}/{self.siren}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) % size

    @property
    def kind(self) -> str:
        return self.siren[:2]

    @property
    def name(self) -> str:
        if self.kind == "93":
            return ""
        town = TOWNS[self.pick("town", len(TOWNS))][0]
        return NAMED.get(self.siren) or f"{WORDS[self.pick('word', len(WORDS))]} DE {town} {self.siren[:3]}"

    @property
    def town(self) -> tuple[str, str]:
        return TOWNS[self.pick("town", len(TOWNS))]

    @property
    def siret(self) -> str:
        """The SIRET of its head office: the first with a valid check digit."""
        return next(f"{self.siren}{n:05d}" for n in range(10, 100) if luhn(f"{self.siren}{n:05d}") % 10 == 0)

    @property
    def state(self) -> str:
        return "C" if self.kind == "97" else "A"

    @property
    def diffusion(self) -> str:
        return "P" if self.kind == "92" else "O"

    @property
    def legal_form(self) -> str:
        return "1000" if self.kind == "96" else "5710"

    @property
    def activity(self) -> str:
        return f"{10 + self.pick('activity', 80)}.{10 + self.pick('class', 80)}Z"

    @property
    def created(self) -> str:
        return f"{1950 + self.pick('year', 70)}-0{1 + self.pick('month', 9)}-15"

    @property
    def capital(self) -> float:
        return float(1_000 * (1 + self.pick("capital", 500)))

    @property
    def director(self) -> tuple[str, str, str]:
        """Last name, first name and month of birth of its director."""
        last, first = NAMES[self.pick("last", len(NAMES))], FIRST_NAMES[self.pick("first", len(FIRST_NAMES))]
        return last, first, f"{1950 + self.pick('born', 45)}-0{1 + self.pick('born in', 9)}"


def company(siren: str, seed: int) -> SimulatedCompany | None:
    """Return the company of this number; None if the number is invalid or begins with 90."""
    return SimulatedCompany(siren, seed) if is_siren(siren) and not siren.startswith("90") else None
