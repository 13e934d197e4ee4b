"""Every knob of the program, by its exact environment name. `python -m ecluse.settings` prints the reference page.

A value that cannot be parsed stops the start-up with a message naming the variable; one below its minimum is raised to
it, with a warning. Unknown variables are ignored.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, get_args

import structlog
from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from ecluse.base.errors import SetUpError
from ecluse.base.validation import problem
from ecluse.settings.access import AccessKnobs
from ecluse.settings.call_costs import PriceKnobs
from ecluse.settings.edge import EdgeKnobs
from ecluse.settings.enrichment import EnrichmentKnobs
from ecluse.settings.flows import AutomationKnobs, TranscriptionKnobs, at_least
from ecluse.settings.keeping import KeepKnobs
from ecluse.settings.limits import LimitKnobs
from ecluse.settings.pricing import PricingKnobs

log = structlog.get_logger(__name__)

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Form = Literal["line", "json"]
SENDER = re.compile(r"([^<>@\x00-\x1f\x7f]+ )?<[!-;=?A-~]+@[!-;=?A-~]+>|[!-;=?A-~]+@[!-;=?A-~]+")


def _networks(value: str) -> str:
    """Check that the value is a list of networks, separated by commas; return it unchanged."""
    for network in _listed(value):
        ip_network(network)
    return value


def _listed(value: str) -> list[str]:
    """Split a value at its commas, without blanks and empty parts."""
    return [name.strip() for name in value.split(",") if name.strip()]


def _sender(value: str) -> str:
    """Check that the value is a mail address, with or without a name; return it unchanged."""
    if not SENDER.fullmatch(value):
        raise ValueError("not a mail address; it must look like Ecluse <ecluse@example.com>")
    return value


class Settings(
    AccessKnobs,
    EdgeKnobs,
    KeepKnobs,
    LimitKnobs,
    PriceKnobs,
    PricingKnobs,
    EnrichmentKnobs,
    TranscriptionKnobs,
    AutomationKnobs,
):
    """Every knob, read from the environment. Derived values are properties and validators below the fields."""

    model_config = SettingsConfigDict(case_sensitive=True, extra="ignore", env_ignore_empty=True, allow_inf_nan=False)

    DATABASE_URL: str | None = Field(
        None,
        description="URL of the PostgreSQL database. Unset: an embedded PostgreSQL is started in `ECLUSE_DATA_DIR`.",
    )
    ECLUSE_DATA_DIR: Path | None = Field(
        None,
        description="Directory of the embedded PostgreSQL, its key and log files. Unset: `/var/lib/ecluse` for root, "
        "otherwise `$XDG_DATA_HOME/ecluse` or `~/.local/share/ecluse`.",
    )
    ECLUSE_DB_POOL: Annotated[int, at_least(3)] = Field(
        10,
        description="Maximum connections in each of the two large pools of a process; docs/operations.md gives the "
        "total by role. Minimum 3.",
    )
    ECLUSE_FLOWS: str = Field(
        "", description="Flows to load besides the built-in ones: `package:NAME`, separated by commas."
    )
    ECLUSE_HOST: str = Field("127.0.0.1", description="Address that the server listens on.")
    ECLUSE_PORT: Annotated[int, at_least(0)] = Field(
        8080, le=65535, description="Port that the server listens on; 0 picks a free one."
    )
    ECLUSE_HANDS: Annotated[int, at_least(1)] = Field(
        200, description="Worker slots: vendor calls in flight at once, per process. Minimum 1."
    )
    ECLUSE_TENANT_SLOTS_SHARE: Annotated[float, at_least(0.05)] = Field(
        0.75,
        le=1,
        description="Share of the worker slots left by others that one tenant's calls to one vendor may hold, and of "
        "the runs that a worker may lead, so that calls that hang do not delay other tenants. 0.05 to 1; 1: no limit.",
    )
    ECLUSE_HEARTBEAT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        2.0, description="Interval between heartbeats of a process. Minimum 0.1."
    )
    ECLUSE_DEAD_AFTER_SECONDS: float = Field(
        6.0,
        allow_inf_nan=False,
        description="Time without a heartbeat after which a process is declared dead and its work is taken over. "
        "Minimum: two heartbeats.",
    )
    ECLUSE_LOG_LEVEL: Level = Field("INFO", description="Lowest level to log: `DEBUG`, `INFO`, `WARNING` or `ERROR`.")
    ECLUSE_LOG_FORMAT: Form = Field(
        "line", description="Format of the log: `line` for people, `json` for log collectors."
    )
    WORKFLOW_LOG_DB_ENABLED: bool = Field(
        False, description="Store the log lines of every run in the table `workflow_logs` too. 1/true or 0/false."
    )
    ECLUSE_SECRET_KEY: SecretStr | None = Field(
        None,
        description="Key that secrets are encrypted with: 32 bytes in base64 (`openssl rand -base64 32`). Unset: "
        "`ECLUSE_SECRET_KEY_FILE` or, with the embedded PostgreSQL, a file created in `ECLUSE_DATA_DIR`.",
    )
    ECLUSE_SECRET_KEY_FILE: Path | None = Field(None, description="File that holds the key of `ECLUSE_SECRET_KEY`.")
    PUSHER_APP_ID: str | None = Field(
        None,
        description="Id of an app at hosted Pusher, used for the tenant `default` instead of the built-in server. "
        "Needs `PUSHER_KEY`, `PUSHER_SECRET` and `PUSHER_CLUSTER` or `PUSHER_HOST`; if one is unset, a warning is "
        "logged and the hosted app is not used.",
    )
    PUSHER_KEY: str | None = Field(None, description="Key of the hosted Pusher app.")
    PUSHER_SECRET: SecretStr | None = Field(None, description="Secret of the hosted Pusher app.")
    PUSHER_CLUSTER: str | None = Field(None, description="Cluster of the hosted Pusher app, such as `eu`.")
    PUSHER_HOST: str | None = Field(
        None, description="Server with Pusher's HTTP API to use instead of a cluster: `host`, `host:port` or a URL."
    )
    PUSHER_USE_PRIVATE_CHANNELS: bool = Field(
        True,
        description="1/true: channels are named `private-fiche-…` and need a permission to subscribe. 0/false: "
        "channels are named `fiche-…` and are open to all clients with the app's key.",
    )
    PUSHER_MAX_PAYLOAD_BYTES: Annotated[int, at_least(200)] = Field(
        9000, description="Maximum size of an event; larger ones are shortened, ids and statuses last. Minimum 200."
    )
    PUSHER_DRY_RUN: bool = Field(
        False,
        description="1/true: no event is sent by the Pusher protocol; `GET /api/events` and everything else still "
        "works.",
    )
    ECLUSE_CATCH_UP_HOURS: Annotated[float, at_least(0)] = Field(
        24,
        le=366 * 24,
        description="Catch-up policy `latest`: maximum age of the missed slot that is run after downtime. At most a "
        "year.",
    )
    ECLUSE_JOB_LEASE_SECONDS: Annotated[float, at_least(1)] = Field(
        30,
        le=3600,
        description="Time that an agent may execute a job without renewing its lease, which it does three times as "
        "often; after that the attempt counts as failed. Minimum 1, at most 3600.",
    )
    ECLUSE_JOB_PENDING_SECONDS: Annotated[float, at_least(1)] = Field(
        3600, description="Time that a job waits for an agent of its host; after that it fails `NO_AGENT`. Minimum 1."
    )
    CRM_BASE_URL: str | None = Field(
        None,
        description="Base URL of the CRM, whose API is in docs/crm-api.md, for the tenant `default`; other tenants "
        "have connections (docs/connections.md). Unset: runs that need the CRM fail with a reason.",
    )
    CRM_API_KEY: SecretStr | None = Field(
        None, description="API key for the CRM, of the tenant `default`; a schedule may have its own."
    )
    CRM_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        20, description="Fiches that automation runs fetch at once, over all replicas. Minimum 1."
    )
    CRM_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        30, description="Timeout of a call to the CRM. Minimum 0.1."
    )
    ELEVENLABS_API_KEY: SecretStr | None = Field(
        None,
        description="API key for speech to text, of the tenant `default`. Unset: runs that need it fail at once with a "
        "reason.",
    )
    ELEVENLABS_BASE_URL: str = Field("https://api.elevenlabs.io", description="Base URL of speech to text.")
    ELEVENLABS_MODEL: str = Field("scribe_v1", description="Model for transcriptions.")
    ELEVENLABS_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        600, description="Timeout of the transcription of one recording. Minimum 0.1."
    )
    LLM_BASE_URL: str = Field(
        "https://api.openai.com/v1",
        description="Base URL of the language model for audits, compatible with OpenAI's API.",
    )
    LLM_API_KEY: SecretStr | None = Field(
        None, description="API key for the language model, of the tenant `default`. Unset: audits fail with a reason."
    )
    LLM_MODEL: str | None = Field(None, description="Model for audits, unless the audit config names another.")
    LLM_TIMEOUT_SECONDS: Annotated[float, at_least(0.1)] = Field(
        120, description="Timeout of a call to the language model. Minimum 0.1."
    )
    LLM_CONCURRENCY: Annotated[int, at_least(1)] = Field(
        20, description="Audits in flight at the language model at once, over all replicas. Minimum 1."
    )
    LLM_RATE_LIMIT_PER_MINUTE: Annotated[float, at_least(0.01)] | None = Field(
        None,
        description="Calls to the language model started per minute, over all replicas. Unset: no limit. Minimum 0.01.",
    )
    AUDIT_MAX_INPUT_CHARS: Annotated[int, at_least(1_000)] = Field(
        400_000, description="A fiche with a longer transcript fails `TRANSCRIPT_TOO_LONG`. Minimum 1000."
    )
    STT_UPLOAD: Literal["url", "file"] = Field(
        "url",
        description="`url`: the vendor fetches a recording by its URL. `file`: Ecluse downloads it and uploads the "
        "file.",
    )
    ECLUSE_ALLOWED_NETWORKS: Annotated[str, AfterValidator(_networks)] = Field(
        "",
        description="Private networks that URLs given by users (webhooks, recordings, connections) may reach: "
        "`10.1.0.0/16`, separated by commas. There any port is allowed, elsewhere only 80 and 443.",
    )
    ECLUSE_PUBLIC_URL: str | None = Field(
        None, description="Public URL of this server, for links in mails. Unset: no links."
    )
    ECLUSE_WEBHOOK_TIMEOUT_SECONDS: Annotated[float, at_least(1)] = Field(
        15.0, le=60, description="Timeout of a call to a webhook. Minimum 1, at most 60."
    )
    MAIL_FROM: Annotated[str, AfterValidator(_sender)] | None = Field(
        None, description="Sender of mails: `Ecluse <ecluse@example.com>`."
    )
    SMTP_HOST: str | None = Field(
        None, description="SMTP server for mails. If it or `MAIL_FROM` is unset, no mail is sent."
    )
    SMTP_PORT: Annotated[int, at_least(1)] = Field(587, le=65535, description="Port of the SMTP server.")
    SMTP_USERNAME: str | None = Field(None, description="User at the SMTP server. Unset: no log-in.")
    SMTP_PASSWORD: SecretStr | None = Field(None, description="Password of the user at the SMTP server.")
    SMTP_STARTTLS: Literal["auto", "always", "never"] = Field(
        "auto",
        description="STARTTLS: `auto` uses it if the server offers it (with `SMTP_USERNAME`, requires it), `always` "
        "requires it, `never` does not use it.",
    )
    SMTP_TLS: bool = Field(False, description="1/true: connect with TLS (port 465) instead of STARTTLS.")
    SMTP_TIMEOUT_SECONDS: Annotated[float, at_least(1)] = Field(
        30.0, le=40, description="Timeout of each command to the SMTP server. Minimum 1, at most 40."
    )

    @model_validator(mode="after")
    def _patient_enough(self) -> Settings:
        """Raise ECLUSE_DEAD_AFTER_SECONDS to two heartbeats: with less, live replicas would declare each other dead."""
        minimum = 2 * self.ECLUSE_HEARTBEAT_SECONDS
        if minimum > self.ECLUSE_DEAD_AFTER_SECONDS:
            name = "ECLUSE_DEAD_AFTER_SECONDS"
            log.warning("settings: value below its minimum, using the minimum", name=name, minimum=minimum)
            self.ECLUSE_DEAD_AFTER_SECONDS = minimum
        return self

    @property
    def allowed_networks(self) -> list[str]:
        """The networks in ECLUSE_ALLOWED_NETWORKS."""
        return _listed(self.ECLUSE_ALLOWED_NETWORKS)


def log_settings() -> tuple[Level, Form]:
    """Return level and form of the log, read before the other knobs, because warnings about those are logged. Invalid
    values are replaced by the defaults here, and refused later by `load`."""
    level, form = (os.environ.get(name, "") for name in ("ECLUSE_LOG_LEVEL", "ECLUSE_LOG_FORMAT"))
    return level if level in get_args(Level) else "INFO", form if form in get_args(Form) else "line"  # type: ignore[return-value]


def load() -> Settings:
    """Read the knobs from the environment; raise SetUpError that names the variables with invalid values."""
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
        "Every knob is an environment variable. An invalid value stops the start-up with a message that names the",
        "variable; a value below the minimum is raised to it, with a warning; unknown variables are ignored.",
        "",
        "| variable | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, knob in Settings.model_fields.items():
        default = "unset" if knob.default in (None, "") else f"`{knob.default}`"
        lines.append(f"| `{name}` | {default} | {knob.description} |")
    return "\n".join(lines) + "\n"
