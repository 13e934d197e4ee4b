"""Where a quote stands, whatever its blanks, capitals and quotation marks."""
# ruff: noqa: RUF001 - they are what this is about

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.flows.audits.quotes import Spoken, find, normalized

FIRST = "Bonjour, je m'appelle Zoé.  Il a dit « d’accord » hier –\nenfin, je crois…"
SECOND = "La cotisation est de trente euros. La STRASSE ist groß."
BOTH = [Spoken("a", FIRST), Spoken("b", SECOND)]


@pytest.mark.req("G-91")
@pytest.mark.parametrize(
    ("quote", "call", "begins"),
    [
        ("je m'appelle Zoé", "a", "je m'app"),
        ("JE M’APPELLE ZOÉ", "a", "je m'app"),
        ("Zoe\u0301. Il a", "a", "Zoé."),
        ("Zoé. Il a dit", "a", "Zoé.  Il"),
        ('dit "d\'accord" hier', "a", "dit «"),
        ("« d'accord »", "a", "d’accord"),
        ('"d\'accord"', "a", "d’accord"),
        ("hier - enfin, je crois...", "a", "hier –"),
        ("  trente\neuros ", "b", "trente"),
        ("strasse ist gross", "b", "STRASSE"),
        ("La cotisation", "b", "La cot"),
        ("La", "b", "La cot"),
    ],
)
def test_a_quote_is_found_where_it_stands(quote, call, begins):
    found = find(quote, BOTH)
    assert found is not None
    assert found.call_id == call
    text = {"a": FIRST, "b": SECOND}[call]
    assert text[found.position :].lstrip("« ").startswith(begins)


@pytest.mark.parametrize(
    "quote", ["quarante euros", "je crois que", "Zoé La cotisation", "", "  ", '"', "« »", "trente d'euros", "dit hier"]
)
def test_a_quote_that_is_in_no_recording_is_not_found(quote):
    assert find(quote, BOTH) is None


@given(st.text("aé «»\"'’ \n\u00a0ßE\u0301.", max_size=40), st.integers(0, 40), st.integers(1, 20))
def test_a_passage_is_found_in_capitals_and_with_other_blanks_too(text, start, length):
    passage = text[start : start + length]
    wanted = normalized(passage.strip()).strip('"')
    for quote in (passage, " \n " + passage.upper()):
        found = find(quote, [Spoken("a", text)])
        if normalized(quote.strip()).strip('"') in normalized(text) and wanted:
            assert found is not None
            assert 0 <= found.position < len(text)


@given(st.text(max_size=60))
def test_a_longer_beginning_never_has_a_shorter_plain_form(text):
    lengths = [len(normalized(text[:n])) for n in range(len(text) + 1)]
    assert lengths == sorted(lengths)


def test_a_quote_is_found_anywhere_in_a_very_long_text():
    # The first half shrinks in its normalized form, the second grows: no guess by proportion hits.
    text = "Eh   bien, \n\n  oui.    " * 5_000 + "ici l’on dit « voilà »" + "groß…" * 20_000 + "et c'est la FIN"
    for quote, begins in ((' ICI l\'on dit "voilà"', "ici l’on dit"), ("C’EST la fin", "c'est la FIN")):
        found = find(quote, [Spoken("a", text)])
        assert found is not None
        assert text[found.position :].startswith(begins)
