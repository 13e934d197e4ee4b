"""The card of a company: what each register says of it, merged field by field with the source and the date of each
value. Pure.

The facts of each register are stored apart. A register that answers replaces its own facts; one that fails changes
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from ecluse.base.text import LONGEST_KEY, storable
from ecluse.vendors.registers import Facts, Source

IDENTITY = (Source.SEARCH, Source.INPI, Source.RCS)
LEGAL = (Source.INPI, Source.RCS, Source.SEARCH)
IDENTITY_FIELDS = """
legal_name acronym trade_name state creation_date closing_date activity_code category headcount_range vat_numbers
diffusion head_office establishments_count open_establishments_count establishments
"""
LEGAL_FIELDS = """
legal_form_code legal_form registration_date deregistration_date end_date capital_amount capital_currency
capital_variable fiscal_year_end duration_years court observations directors
"""
FIELDS: Mapping[str, tuple[Source, ...]] = {
    **dict.fromkeys(IDENTITY_FIELDS.split(), IDENTITY),
    **dict.fromkeys(LEGAL_FIELDS.split(), LEGAL),
}
OPEN_DIFFUSION = "O"
PUBLIC = (Source.SEARCH, Source.INPI)  # every tenant may see their facts
Stored = Mapping[str, Mapping[str, Any]]  # source → {"at": …, "facts": …}


def merge(stored: Stored, fetched: Mapping[Source, Facts], at: datetime) -> dict[str, dict[str, Any]]:
    """Return the stored facts, replaced by those of the registers that have answered. If one register says that the
    company is not open to diffusion, the directors of all are masked."""
    new = {str(source): {"at": at.isoformat(), "facts": facts} for source, facts in fetched.items()}
    merged = {**{source: dict(one) for source, one in stored.items()}, **new}
    closed = any(one["facts"].get("diffusion", OPEN_DIFFUSION) != OPEN_DIFFUSION for one in merged.values())
    return {source: {**one, "facts": masked(one["facts"])} if closed else one for source, one in merged.items()}


def masked(facts: Facts) -> Facts:
    """Return the facts of a company that is not open to diffusion: of directors who are persons only the role stays."""
    if "directors" not in facts:
        return facts
    return {**facts, "directors": [_masked(one) for one in facts["directors"]]}


def _masked(director: Facts) -> Facts:
    if director["type"] != "person":
        return director
    return {"type": "person", "role": director["role"], "masked": True}


def card(stored: Stored, allowed: Collection[Source] = tuple(Source)) -> dict[str, dict[str, Any]]:
    """Return the fields of a company, each with value, source and date: from the first register in the field's order
    that has a value and that the reader may see (`allowed`)."""
    found = {}
    for field, order in FIELDS.items():
        for source in order:
            one = stored.get(source)
            if one is not None and source in allowed and field in one["facts"]:
                found[field] = {"value": one["facts"][field], "source": str(source), "at": one["at"]}
                break
    return found


def legal_name(stored: Stored, allowed: Collection[Source] = tuple(Source)) -> str | None:
    """Return the legal name from the registers in `allowed`, cut to LONGEST_KEY; None if none has it (no core
    identity)."""
    named = card(stored, allowed).get("legal_name")
    return storable(str(named["value"]), LONGEST_KEY) if named else None
