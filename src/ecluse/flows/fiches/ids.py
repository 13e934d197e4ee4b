"""The one definition of a fiche id: the text that docs/crm-api.md lets a CRM use, in lists, bodies, paths, queries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from ecluse.base.text import LONGEST_FOREIGN_ID, storable

WHAT = f"a fiche id is text of 1 to {LONGEST_FOREIGN_ID} characters, without blanks around it"
NAMED = 5  # of those refused, in a message
RETRY = "-retry-"  # what `retry_id` puts after an event's name


def is_fiche_id(text: str) -> bool:
    return 1 <= len(text) <= LONGEST_FOREIGN_ID and text == text.strip() and text == storable(text)


def why_not(fiche_ids: Sequence[str]) -> str | None:
    """What is wrong with a list of ids, and with which of them."""
    wrong = [one for one in fiche_ids if not is_fiche_id(one)]
    if not wrong:
        return None
    named = ", ".join(repr(storable(one, 30)) for one in wrong[:NAMED]) + (", …" if len(wrong) > NAMED else "")
    return f"{WHAT}; these are not: {named}"


def _checked(text: str) -> str:
    if not is_fiche_id(text):
        raise ValueError(WHAT)
    return text


FicheId = Annotated[
    str, Field(min_length=1, max_length=LONGEST_FOREIGN_ID, examples=["171234"]), AfterValidator(_checked)
]


def in_names(fiche_id: str) -> str:
    """As a part of computed names (events, locks), where it must not be mistaken for another fiche's: `a:b` of one
    recording, `a-retry-1` of another's second round."""
    if ":" in fiche_id or RETRY in fiche_id:
        return f"~{hashlib.sha256(fiche_id.encode()).hexdigest()[:32]}"
    return fiche_id
