"""The knobs of pricing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least


class PricingKnobs(BaseSettings):
    """The knobs of pricing."""

    PRICING_REQUESTS_PER_SECOND: Annotated[float, at_least(0.01)] = Field(
        2, le=10_000, description="Calls a second to one shop, over all replicas. Minimum 0.01."
    )
    PRICING_BURST: Annotated[int, at_least(1)] = Field(
        40, le=10_000, description="Calls that may start at once at a shop that was not called for a while. Minimum 1."
    )
    PRICING_CALL_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        30,
        le=600,
        description="Time limit of a call to a shop. If a call that sets a price is cut off, the price is read back "
        "after twice that time. Minimum 0.1.",
    )
    PRICING_TARGET_TIMEOUT_SECONDS: Annotated[float, at_least(1)] = Field(
        900,
        description="Whole time of a target, from its first execution on: after that it is not retried, and has "
        "failed. Minimum 1.",
    )
    PRICING_RECONCILE_AFTER_SECONDS: Annotated[float, at_least(1)] = Field(
        60,
        le=240,
        description="When the first reconciliation of a rule run is due, after its end; the others are due after an "
        "hour, and daily for 30 days. Minimum 1.",
    )
