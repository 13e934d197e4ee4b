"""The definition of a valid fiche id: the text that docs/crm-api.md allows, in lists, bodies, paths and queries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from ecluse.base.text import LONGEST_FOREIGN_ID, first_few, storable

WHAT = f"a fiche id is text of 1 to {LONGEST_FOREIGN_ID} characters, without blanks around it"
RETRY = "-retry-"  # the suffix that `retry_id` appends to an event id


def is_fiche_id(text: str) -> bool:
    """Return True if the text is a valid fiche id."""
    return 1 <= len(text) <= LONGEST_FOREIGN_ID and text == text.strip() and text == storable(text)


def why_not(fiche_ids: Sequence[str]) -> str | None:
    """Return the problem with a list of ids, naming the invalid ones; None if all are valid."""
    wrong = [one for one in fiche_ids if not is_fiche_id(one)]
    if not wrong:
        return None
    return f"{WHAT}; these are not: {first_few([repr(storable(one, 30)) for one in wrong])}"


def _checked(text: str) -> str:
    if not is_fiche_id(text):
        raise ValueError(WHAT)
    return text


FicheId = Annotated[
    str, Field(min_length=1, max_length=LONGEST_FOREIGN_ID, examples=["171234"]), AfterValidator(_checked)
]


def in_names(fiche_id: str) -> str:
    """Return the fiche id as a part of computed names (events, locks), hashed if it could be mistaken for another name:
    `a:b` for recording `b` of fiche `a`, `a-retry-1` for the repetition of an event of fiche `a`."""
    if ":" in fiche_id or RETRY in fiche_id:
        return f"~{hashlib.sha256(fiche_id.encode()).hexdigest()[:32]}"
    return fiche_id
