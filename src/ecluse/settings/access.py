"""The knobs of keys, secrets and mails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least


class AccessKnobs(BaseSettings):
    """The knobs of API keys, of the replacement of the secret key, and of mails."""

    ECLUSE_SECRET_KEY_OLD: SecretStr | None = Field(
        None,
        description="A second key that stored secrets may have been encrypted with: while the key is being replaced "
        "(`ecluse secrets rotate`), every replica has both.",
    )
    ECLUSE_SECRET_KEY_OLD_FILE: Path | None = Field(
        None, description="File that holds the key of `ECLUSE_SECRET_KEY_OLD`."
    )
    ECLUSE_KEY_LIFETIME_DAYS: Annotated[int, at_least(0)] = Field(
        365,
        le=36_500,
        description="Days after which an API key expires, unless another lifetime is given when it is created. 0: "
        "never.",
    )
    ECLUSE_MAILS_PER_DAY: Annotated[int, at_least(0)] = Field(
        500,
        description="Mails that are sent for one tenant in a day (UTC), requests to confirm an address included; "
        "further mails wait.",
    )
