"""docs/requirements.md is what the tests cite: unique ids, and references that lead somewhere."""

import re
from collections import Counter

from tools.coverage_of_requirements import ROOT, citations, requirement_ids

DOCUMENT = (ROOT / "docs" / "requirements.md").read_text()


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
