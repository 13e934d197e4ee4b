"""The knobs of company enrichment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least


class EnrichmentKnobs(BaseSettings):
    """The knobs of company enrichment: the registers, and how long their data are used."""

    RECHERCHE_ENTREPRISES_BASE_URL: str = Field(
        "https://recherche-entreprises.api.gouv.fr",
        description="Base URL of the search of companies (required source).",
    )
    RECHERCHE_ENTREPRISES_PER_SECOND: Annotated[float, at_least(0.01)] = Field(
        7, description="Calls to the search of companies started per second, over all replicas. Minimum 0.01."
    )
    INPI_BASE_URL: str = Field(
        "https://registre-national-entreprises.inpi.fr", description="Base URL of INPI's register (optional source)."
    )
    INPI_USERNAME: str | None = Field(None, description="User at INPI's register. Unset: this source is off.")
    INPI_PASSWORD: SecretStr | None = Field(None, description="Password at INPI's register. Unset: this source is off.")
    API_ENTREPRISE_BASE_URL: str = Field(
        "https://entreprise.api.gouv.fr", description="Base URL of API Entreprise (optional source)."
    )
    API_ENTREPRISE_TOKEN: SecretStr | None = Field(
        None, description="Token of API Entreprise. Unset: this source is off."
    )
    API_ENTREPRISE_RECIPIENT: str | None = Field(
        None,
        pattern=r"^[0-9]{14}$",
        description="SIRET for which the tenant `default` asks API Entreprise; other tenants get theirs by "
        "`ecluse enrichment recipient`. A tenant without one neither asks this source nor sees what it says.",
    )
    API_ENTREPRISE_CONTEXT: str = Field("enrichment", description="Context that each call of API Entreprise declares.")
    API_ENTREPRISE_OBJECT: str = Field(
        "company enrichment", max_length=49, description="Object that each call of API Entreprise declares."
    )
    API_ENTREPRISE_PER_MINUTE: Annotated[float, at_least(0.01)] = Field(
        50, description="Calls to API Entreprise started per minute, over all replicas. Minimum 0.01."
    )
    ENRICHMENT_SOURCE_TIMEOUT_MS: Annotated[int, at_least(100)] = Field(
        5_000, le=60_000, description="Timeout of one call to a register. Minimum 100."
    )
    ENRICHMENT_SYNC_WAIT_MS: Annotated[int, at_least(0)] = Field(
        1_200, le=60_000, description="How long `POST /v1/requests` waits for the end of the job. Minimum 0."
    )
    ENRICHMENT_FRESHNESS_TTL_DAYS: Annotated[float, at_least(0.001)] = Field(
        30, description="Age at which the data of a company are stale, in days. Minimum 0.001."
    )
    ENRICHMENT_FAILED_COOLDOWN_MINUTES: Annotated[float, at_least(0)] = Field(
        15, description="Time after a failed job in which no other one is started automatically. Minimum 0."
    )
    ENRICHMENT_PARTIAL_RETRY_HOURS: Annotated[float, at_least(0)] = Field(
        24,
        description="Time after which a job is repeated if an optional source failed temporarily. Minimum 0.",
    )
