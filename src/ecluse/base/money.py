"""Amounts of money as whole numbers of minor units (cents), and as the decimal texts that vendors use."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

# ISO 4217: currencies whose minor unit is not a hundredth.
WHOLE = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"
THOUSANDTHS = "BHD IQD JOD KWD LYD OMR TND"
DIGITS = dict.fromkeys(WHOLE.split(), 0) | dict.fromkeys(THOUSANDTHS.split(), 3)


def digits(currency: str) -> int:
    """Return the number of decimals of a currency."""
    return DIGITS.get(currency, 2)


def minor_units(amount: str, currency: str) -> int:
    """Return a decimal text as minor units. Raise ValueError if it is not a number, or finer than the currency."""
    try:
        scaled = Decimal(amount).scaleb(digits(currency))
    except InvalidOperation as error:
        raise ValueError(f"{amount!r} is not an amount of money") from error
    if not scaled.is_finite() or scaled != scaled.to_integral_value():
        raise ValueError(f"{amount!r} is not an amount in {currency}")
    return int(scaled)


def decimal_text(amount: int, currency: str) -> str:
    """Return minor units as a decimal text with all decimals of the currency, such as `19.90`."""
    return f"{Decimal(amount).scaleb(-digits(currency)):.{digits(currency)}f}"
