"""Every knob of the program, by its exact environment name. `python -m ecluse.settings` prints the reference page.

A value that cannot be read stops the start-up with a message naming the variable; one below its minimum is raised to
it, with a warning. Unknown variables are ignored.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, get_args

import structlog
from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from ecluse.base.errors import SetUpError
from ecluse.base.validation import problem
from ecluse.settings.flows import AutomationKnobs, TranscriptionKnobs, at_least
from ecluse.settings.keeping import KeepKnobs

log = structlog.get_logger(__name__)

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Form = Literal["line", "json"]
SENDER = re.compile(r"([^<>@\x00-\x1f\x7f]+ )?<[!-;=?A-~]+@[!-;=?A-~]+>|[!-;=?A-~]+@[!-;=?A-~]+")


def _networks(value: str) -> str:
    for network in _listed(value):
        ip_network(network)
    return value


def _listed(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _sender(value: str) -> str:
    if not SENDER.fullmatch(value):
        raise ValueError("this is no mail address, such as Ecluse <ecluse@example.com>")
    return value


class Settings(KeepKnobs, TranscriptionKnobs, AutomationKnobs):
    model_config = SettingsConfigDict(case_sensitive=True, extra="ignore", env_ignore_empty=True, allow_inf_nan=False)

    DATABASE_URL: str | None = Field(
        None, description="The PostgreSQL to use. Unset: an embedded one is started in `ECLUSE_DATA_DIR`."
    )
    ECLUSE_DATA_DIR: Path | None = Field(
        None,
        description="Where the embedded PostgreSQL keeps its data. Unset: `/var/lib/ecluse` for root, otherwise "
        "`$XDG_DATA_HOME/ecluse` or `~/.local/share/ecluse`.",
    )
    ECLUSE_DB_POOL: Annotated[int, at_least(3)] = Field(
        10,
        description="Connections at most in each of a process's two large pools; docs/operations.md says what that "
        "comes to, by role. Minimum 3.",
    )
    ECLUSE_FLOWS: str = Field(
        "", description="Flows to load besides those in the box: `package:NAME`, several separated by commas."
    )
    ECLUSE_HOST: str = Field("127.0.0.1", description="Address that the server listens on.")
    ECLUSE_PORT: Annotated[int, at_least(0)] = Field(
        8080, le=65535, description="Port that the server listens on; 0 is any free one."
    )
    ECLUSE_HANDS: Annotated[int, at_least(1)] = Field(
        200, description="Vendor calls in flight at once, per process. Minimum 1."
    )
    ECLUSE_HEARTBEAT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        2.0, description="How often a process says that it is alive. Minimum 0.1."
    )
    ECLUSE_DEAD_AFTER_SECONDS: float = Field(
        6.0,
        allow_inf_nan=False,
        description="Silence after which a process counts as dead and its work is taken over. Minimum: two heartbeats.",
    )
    ECLUSE_LOG_LEVEL: Level = Field("INFO", description="Lines below are dropped.")
    ECLUSE_LOG_FORMAT: Form = Field("line", description="For people, or for log collectors.")
    WORKFLOW_LOG_DB_ENABLED: bool = Field(
        False, description="Store the log lines of every run in the table `workflow_logs` too. 1/true or 0/false."
    )
    ECLUSE_SECRET_KEY: SecretStr | None = Field(
        None,
        description="Key that secrets are sealed with: 32 bytes in base64 (`openssl rand -base64 32`). Unset: "
        "`ECLUSE_SECRET_KEY_FILE`, or with the embedded PostgreSQL a file made in `ECLUSE_DATA_DIR`.",
    )
    ECLUSE_SECRET_KEY_FILE: Path | None = Field(None, description="A file that holds that key instead.")
    PUSHER_APP_ID: str | None = Field(
        None,
        description="Hosted Pusher for the tenant `default`, instead of the server in this program: the app's id. "
        "Id, key, secret and cluster (or host) go together: with some of them only, it stays unused and says so.",
    )
    PUSHER_KEY: str | None = Field(None, description="The hosted app's key.")
    PUSHER_SECRET: SecretStr | None = Field(None, description="The hosted app's secret.")
    PUSHER_CLUSTER: str | None = Field(None, description="The hosted app's cluster, such as `eu`.")
    PUSHER_HOST: str | None = Field(
        None, description="Another server that speaks Pusher's HTTP API: `host`, `host:port` or a URL."
    )
    PUSHER_USE_PRIVATE_CHANNELS: bool = Field(
        True,
        description="Channels are called `private-fiche-…`, and joining one needs a permission. 0/false: `fiche-…`, "
        "open to everybody who knows the app's key.",
    )
    PUSHER_MAX_PAYLOAD_BYTES: Annotated[int, at_least(200)] = Field(
        9000, description="A larger event is shrunk to this, ids and statuses last. Minimum 200."
    )
    PUSHER_DRY_RUN: bool = Field(
        False,
        description="1/true: no event reaches anybody by the Pusher protocol; `GET /api/events` and all else goes on.",
    )
    ECLUSE_CATCH_UP_HOURS: Annotated[float, at_least(0)] = Field(
        24,
        le=366 * 24,
        description="The latest instant that nobody was there for is made up for, if it is not older than this. At "
        "most a year.",
    )
    CRM_BASE_URL: str | None = Field(
        None, description="Where the CRM answers, as docs/crm-api.md says. Unset: whatever needs it fails and says so."
    )
    CRM_API_KEY: SecretStr | None = Field(None, description="Key for it; a schedule may have one of its own.")
    CRM_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        20, description="Fiches that automation runs fetch at once, over all replicas. Minimum 1."
    )
    CRM_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        30, description="How long an answer of the CRM may take. Minimum 0.1."
    )
    ELEVENLABS_API_KEY: SecretStr | None = Field(
        None, description="Key for speech to text. Unset: a run that needs it fails at once and says so."
    )
    ELEVENLABS_BASE_URL: str = Field("https://api.elevenlabs.io", description="Where speech to text answers.")
    ELEVENLABS_MODEL: str = Field("scribe_v1", description="The model that transcribes.")
    ELEVENLABS_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        600, description="How long the transcription of one recording may take. Minimum 0.1."
    )
    LLM_BASE_URL: str = Field(
        "https://api.openai.com/v1", description="Where the language model of audits answers, as OpenAI's API does."
    )
    LLM_API_KEY: SecretStr | None = Field(None, description="Key for it. Unset: audits fail and say so.")
    LLM_MODEL: str | None = Field(None, description="The model that audits, unless its config names another.")
    LLM_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        120, description="How long one answer of the model may take. Minimum 0.1."
    )
    LLM_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        20, description="Audits at the model at once, over all replicas. Minimum 1."
    )
    LLM_RATE_LIMIT_PER_MINUTE: Annotated[float, at_least(0.01)] | None = Field(
        None, description="Calls that start at the model per minute, over all replicas. Unset: no limit. Minimum 0.01."
    )
    LLM_PRICE_INPUT_PER_MILLION: Annotated[Decimal, at_least(0)] | None = Field(
        None, description="What a million tokens of input cost. Unset, this or the next: the cost of audits is null."
    )
    LLM_PRICE_OUTPUT_PER_MILLION: Annotated[Decimal, at_least(0)] | None = Field(
        None, description="What a million tokens of output cost."
    )
    AUDIT_MAX_INPUT_CHARS: Annotated[int, at_least(1_000)] = Field(
        400_000, description="A fiche with a longer transcript fails `TRANSCRIPT_TOO_LONG`. Minimum 1000."
    )
    STT_UPLOAD: Literal["url", "file"] = Field(
        "url", description="Whether the vendor fetches a recording by its URL, or we download it and send it the file."
    )
    ECLUSE_ALLOWED_NETWORKS: Annotated[str, AfterValidator(_networks)] = Field(
        "",
        description="Networks that URLs of users (webhooks, recordings) may reach although they are private: "
        "`10.1.0.0/16`, several separated by commas. Any port goes there; elsewhere only 80 and 443.",
    )
    ECLUSE_PUBLIC_URL: str | None = Field(
        None, description="Where people reach this server, for the links in mails. Unset: no links."
    )
    ECLUSE_WEBHOOK_TIMEOUT_SECONDS: Annotated[float, at_least(1)] = Field(
        15.0, le=60, description="How long the receiver of a webhook may take to answer. Minimum 1, at most 60."
    )
    MAIL_FROM: Annotated[str, AfterValidator(_sender)] | None = Field(
        None, description="Sender of the mails, as `Ecluse <ecluse@example.com>`."
    )
    SMTP_HOST: str | None = Field(None, description="Server that takes our mails. Unset, or no `MAIL_FROM`: no mail.")
    SMTP_PORT: Annotated[int, at_least(1)] = Field(587, le=65535, description="Its port.")
    SMTP_USERNAME: str | None = Field(None, description="To log in with. Unset: no log-in.")
    SMTP_PASSWORD: SecretStr | None = Field(None, description="The password of that user.")
    SMTP_STARTTLS: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Encrypt once connected: where the server offers it (with `SMTP_USERNAME`: always), or not without "
        "it, or never.",
    )
    SMTP_TLS: bool = Field(False, description="Encrypt from the first byte (port 465) instead.")
    SMTP_TIMEOUT_SECONDS: Annotated[float, at_least(1)] = Field(
        30.0, le=40, description="How long the mail server may take for each answer. Minimum 1, at most 40."
    )

    @model_validator(mode="after")
    def _patient_enough(self) -> Settings:
        """Raise ECLUSE_DEAD_AFTER_SECONDS to two heartbeats: with less, live replicas would declare each other dead."""
        minimum = 2 * self.ECLUSE_HEARTBEAT_SECONDS
        if minimum > self.ECLUSE_DEAD_AFTER_SECONDS:
            name = "ECLUSE_DEAD_AFTER_SECONDS"
            log.warning("setting below its minimum, using the minimum", name=name, minimum=minimum)
            self.ECLUSE_DEAD_AFTER_SECONDS = minimum
        return self

    @property
    def allowed_networks(self) -> list[str]:
        return _listed(self.ECLUSE_ALLOWED_NETWORKS)


def log_settings() -> tuple[Level, Form]:
    """Return level and form of the log before the other knobs are read: warnings about those are logged. Values that
    cannot be read are refused later, by `load`."""
    level, form = (os.environ.get(name, "") for name in ("ECLUSE_LOG_LEVEL", "ECLUSE_LOG_FORMAT"))
    return level if level in get_args(Level) else "INFO", form if form in get_args(Form) else "line"  # type: ignore[return-value]


def load() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        wrong = "; ".join(f"{e['loc'][0]}={e['input']!r}: {problem(e)}" for e in error.errors())
        raise SetUpError(f"Cannot start with this environment: {wrong}. See docs/configuration.md.") from error


def reference() -> str:
    """Return the text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Every knob is an environment variable. A value that cannot be read stops the start-up with a message that",
        "names the variable; one below its minimum is raised to it, with a warning; unknown variables are ignored.",
        "",
        "| variable | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, knob in Settings.model_fields.items():
        default = "unset" if knob.default in (None, "") else f"`{knob.default}`"
        lines.append(f"| `{name}` | {default} | {knob.description} |")
    return "\n".join(lines) + "\n"
