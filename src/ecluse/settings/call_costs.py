"""The knobs of the cost of paid calls: prices by vendor and model, and what is reserved in budgets. All amounts are in
one currency."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least


def priced(value: str, parts: int) -> dict[str, tuple[Decimal, ...]]:
    """Parse a list `model=price,…` and return the prices by model. Each price has `parts` numbers, separated by
    slashes. Raise ValueError if an entry has another form or a negative number."""
    found: dict[str, tuple[Decimal, ...]] = {}
    for one in filter(None, (part.strip() for part in value.split(","))):
        model, _, price = one.rpartition("=")
        try:
            numbers = tuple(Decimal(number) for number in price.split("/"))
        except InvalidOperation:
            numbers = ()
        usable = all(number.is_finite() and number >= 0 for number in numbers)
        if not model.strip() or len(numbers) != parts or not usable:
            raise ValueError(f"{one!r} is not model={'/'.join(['price'] * parts)}, with prices of at least 0")
        found[model.strip()] = numbers
    return found


def _list_of(parts: int) -> AfterValidator:
    def check(value: str) -> str:
        priced(value, parts)
        return value

    return AfterValidator(check)


class PriceKnobs(BaseSettings):
    """The knobs of the cost of paid calls."""

    LLM_PRICES: Annotated[str, _list_of(2)] = Field(
        "",
        description="Prices of a million tokens of input and output by model: `gpt-4.1=2/8,gpt-4.1-mini=0.4/1.6`. "
        "The cost of audits with a model without a price is null, and budgets count it as 0.",
    )
    LLM_PRICE_INPUT_PER_MILLION: Annotated[Decimal, at_least(0)] | None = Field(
        None, description="Price of a million tokens of input of models that `LLM_PRICES` does not list."
    )
    LLM_PRICE_OUTPUT_PER_MILLION: Annotated[Decimal, at_least(0)] | None = Field(
        None, description="Price of a million tokens of output of models that `LLM_PRICES` does not list."
    )
    LLM_RESERVED_OUTPUT_TOKENS: Annotated[int, at_least(1)] = Field(
        4_000,
        description="Tokens of output that are reserved in budgets for an audit; one that has more is charged what it "
        "has cost. Minimum 1.",
    )
    ELEVENLABS_PRICES: Annotated[str, _list_of(1)] = Field(
        "", description="Prices of a minute of audio by model: `scribe_v1=0.0067`. Budgets count other models as 0."
    )
    ELEVENLABS_DEFAULT_MINUTES: Annotated[float, at_least(0.1)] = Field(
        10, description="Length that is reserved in budgets for a recording of unknown length. Minimum 0.1."
    )

    @property
    def llm_prices(self) -> dict[str, tuple[Decimal, ...]]:
        """Prices of a million tokens of input and of output, by model."""
        return priced(self.LLM_PRICES, 2)

    @property
    def speech_prices(self) -> dict[str, Decimal]:
        """Prices of a minute of audio, by model."""
        return {model: price for model, (price,) in priced(self.ELEVENLABS_PRICES, 1).items()}
