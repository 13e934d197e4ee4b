"""Amounts as minor units, and as the decimal texts of vendors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecluse.base.money import decimal_text, minor_units


@pytest.mark.parametrize(
    ("text", "currency", "amount"),
    [("19.90", "EUR", 1990), ("19.9", "EUR", 1990), ("20", "EUR", 2000), ("1500", "JPY", 1500), ("1.234", "KWD", 1234)],
)
def test_a_decimal_text_is_read_in_minor_units(text, currency, amount):
    assert minor_units(text, currency) == amount


@pytest.mark.parametrize(
    ("text", "currency"), [("1.999", "EUR"), ("1.5", "JPY"), ("NaN", "EUR"), ("", "EUR"), ("x", "EUR")]
)
def test_what_is_no_amount_of_the_currency_is_refused(text, currency):
    with pytest.raises(ValueError, match="amount"):
        minor_units(text, currency)


@given(st.integers(-(10**15), 10**15), st.sampled_from(["EUR", "JPY", "KWD"]))
def test_an_amount_survives_the_way_to_the_vendor_and_back(amount, currency):
    assert minor_units(decimal_text(amount, currency), currency) == amount
