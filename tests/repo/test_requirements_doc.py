"""docs/requirements.md is what the tests cite: unique ids, references that lead somewhere, the agreed texts."""

import re
from collections import Counter

import pytest

from tools.coverage_of_requirements import ROOT, citations, requirement_ids

DOCUMENT = (ROOT / "docs" / "requirements.md").read_text()
CATALOGUE = ROOT.parent / "shared" / "requirements.md"


def entries(document: str) -> dict[str, str]:
    """Text by id; an entry ends where the next one or a heading begins."""
    parts = re.split(r"^(?=- \*\*[A-Z]+-\d|#)", document, flags=re.MULTILINE)
    return {ids[0]: part.strip() for part in parts if (ids := requirement_ids(part))}


def test_ids_are_unique() -> None:
    repeated = [id_ for id_, count in Counter(requirement_ids(DOCUMENT)).items() if count > 1]
    assert not repeated


def test_references_lead_to_a_requirement() -> None:
    ids = set(requirement_ids(DOCUMENT))
    prefixes = "|".join({id_.split("-")[0] for id_ in ids})
    assert set(re.findall(rf"\b(?:{prefixes})-\d+", DOCUMENT)) == ids


def test_tests_cite_only_ids_that_exist() -> None:
    ids = set(requirement_ids(DOCUMENT))
    assert [cited for cited in citations() if cited.id not in ids] == []


def test_texts_are_those_of_the_catalogue() -> None:
    if not CATALOGUE.exists():
        pytest.skip("the catalogue is not beside this checkout")
    assert entries(DOCUMENT) == entries(CATALOGUE.read_text())
