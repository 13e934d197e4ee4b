"""Every knob of the program, by its exact environment name. `python -m ecluse.settings` prints the reference page.

A value that cannot be read stops the start-up with a message naming the variable; one below its minimum is raised to
it, with a warning. Unknown variables are none of our business.
"""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ecluse.base.errors import SetUpError

log = structlog.get_logger(__name__)

SENDER = re.compile(r"([^<>@\x00-\x1f\x7f]+ )?<[!-;=?A-~]+@[!-;=?A-~]+>|[!-;=?A-~]+@[!-;=?A-~]+")


def _at_least(minimum: float) -> Any:
    def raised(value: Any, info: ValidationInfo) -> Any:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return value  # not a number: the type's own message says so, naming the variable
        if number < minimum:
            log.warning("setting below its minimum, using the minimum", name=info.field_name, minimum=minimum)
            return minimum if isinstance(minimum, int) else float(minimum)
        return value

    return BeforeValidator(raised)


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


class Settings(BaseSettings):
    model_config = SettingsConfigDict(case_sensitive=True, extra="ignore", env_ignore_empty=True, allow_inf_nan=False)

    DATABASE_URL: str | None = Field(
        None, description="The PostgreSQL to use. Unset: an embedded one is started in `ECLUSE_DATA_DIR`."
    )
    ECLUSE_DATA_DIR: Path | None = Field(
        None,
        description="Where the embedded PostgreSQL keeps its data. Unset: `/var/lib/ecluse` for root, otherwise "
        "`$XDG_DATA_HOME/ecluse` or `~/.local/share/ecluse`.",
    )
    ECLUSE_FLOWS: str = Field(
        "", description="Flows to load besides those in the box: `package:NAME`, several separated by commas."
    )
    ECLUSE_HOST: str = Field("127.0.0.1", description="Address that the server listens on.")
    ECLUSE_PORT: Annotated[int, _at_least(0)] = Field(
        8080, le=65535, description="Port that the server listens on; 0 is any free one."
    )
    ECLUSE_HANDS: Annotated[int, _at_least(1)] = Field(
        200, description="Vendor calls in flight at once, per process. Minimum 1."
    )
    ECLUSE_HEARTBEAT_SECONDS: Annotated[float, _at_least(0.1)] = Field(
        2.0, description="How often a process says that it is alive. Minimum 0.1."
    )
    ECLUSE_DEAD_AFTER_SECONDS: float = Field(
        6.0,
        allow_inf_nan=False,
        description="Silence after which a process counts as dead and its work is taken over. Minimum: two heartbeats.",
    )
    ECLUSE_LOG_LEVEL: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Lines below are dropped."
    )
    ECLUSE_LOG_FORMAT: Literal["line", "json"] = Field("line", description="For people, or for log collectors.")
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
    PUSHER_MAX_PAYLOAD_BYTES: Annotated[int, _at_least(200)] = Field(
        9000, description="A larger event is shrunk to this, ids and statuses last. Minimum 200."
    )
    PUSHER_DRY_RUN: bool = Field(
        False,
        description="1/true: no event reaches anybody by the Pusher protocol; `GET /api/events` and all else goes on.",
    )
    AUTOMATION_SEND_EVENT_CHUNK_SIZE: Annotated[int, _at_least(1)] = Field(
        200, description="Rows of one dispatch statement at most, whatever the flow. Minimum 1."
    )
    AUTOMATION_SCHEDULER_WINDOW_MINUTES: Annotated[int, _at_least(5)] = Field(
        20,
        le=7 * 24 * 60,
        description="How long a due instant of a schedule is in time, or waits for the run before it. Minimum 5, at "
        "most a week.",
    )
    ECLUSE_CATCH_UP_HOURS: Annotated[float, _at_least(0)] = Field(
        24,
        le=366 * 24,
        description="The latest instant that nobody was there for is made up for, if it is not older than this. At "
        "most a year.",
    )
    CRM_BASE_URL: str | None = Field(
        None, description="Where the CRM answers, as docs/crm-api.md says. Unset: whatever needs it fails and says so."
    )
    CRM_API_KEY: SecretStr | None = Field(None, description="Key for it; a schedule may have one of its own.")
    CRM_TIMEOUT_SECONDS: Annotated[float, _at_least(0.1)] = Field(
        30, description="How long an answer of the CRM may take. Minimum 0.1."
    )
    ELEVENLABS_API_KEY: SecretStr | None = Field(
        None, description="Key for speech to text. Unset: a run that needs it fails at once and says so."
    )
    ELEVENLABS_BASE_URL: str = Field("https://api.elevenlabs.io", description="Where speech to text answers.")
    ELEVENLABS_MODEL: str = Field("scribe_v1", description="The model that transcribes.")
    ELEVENLABS_TIMEOUT_SECONDS: Annotated[float, _at_least(0.1)] = Field(
        600, description="How long the transcription of one recording may take. Minimum 0.1."
    )
    LLM_BASE_URL: str = Field(
        "https://api.openai.com/v1", description="Where the language model of audits answers, as OpenAI's API does."
    )
    LLM_API_KEY: SecretStr | None = Field(None, description="Key for it. Unset: audits fail and say so.")
    LLM_MODEL: str | None = Field(None, description="The model that audits, unless its config names another.")
    LLM_TIMEOUT_SECONDS: Annotated[float, _at_least(0.1)] = Field(
        120, description="How long one answer of the model may take. Minimum 0.1."
    )
    LLM_CONCURRENCY: Annotated[int, _at_least(1)] = Field(
        20, description="Audits at the model at once, over all replicas. Minimum 1."
    )
    LLM_RATE_LIMIT_PER_MINUTE: Annotated[float, _at_least(0.01)] | None = Field(
        None, description="Calls that start at the model per minute, over all replicas. Unset: no limit. Minimum 0.01."
    )
    LLM_PRICE_INPUT_PER_MILLION: Annotated[Decimal, _at_least(0)] | None = Field(
        None, description="What a million tokens of input cost. Unset, this or the next: the cost of audits is null."
    )
    LLM_PRICE_OUTPUT_PER_MILLION: Annotated[Decimal, _at_least(0)] | None = Field(
        None, description="What a million tokens of output cost."
    )
    AUDIT_MAX_INPUT_CHARS: Annotated[int, _at_least(1_000)] = Field(
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
    ECLUSE_WEBHOOK_TIMEOUT_SECONDS: Annotated[float, _at_least(1)] = Field(
        15.0, le=60, description="How long the receiver of a webhook may take to answer. Minimum 1, at most 60."
    )
    MAIL_FROM: Annotated[str, AfterValidator(_sender)] | None = Field(
        None, description="Sender of the mails, as `Ecluse <ecluse@example.com>`."
    )
    SMTP_HOST: str | None = Field(None, description="Server that takes our mails. Unset, or no `MAIL_FROM`: no mail.")
    SMTP_PORT: Annotated[int, _at_least(1)] = Field(587, le=65535, description="Its port.")
    SMTP_USERNAME: str | None = Field(None, description="To log in with. Unset: no log-in.")
    SMTP_PASSWORD: SecretStr | None = Field(None, description="The password of that user.")
    SMTP_STARTTLS: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Encrypt once connected: where the server offers it (with `SMTP_USERNAME`: always), or not without "
        "it, or never.",
    )
    SMTP_TLS: bool = Field(False, description="Encrypt from the first byte (port 465) instead.")
    SMTP_TIMEOUT_SECONDS: Annotated[float, _at_least(1)] = Field(
        30.0, le=40, description="How long the mail server may take for each answer. Minimum 1, at most 40."
    )
    INNGEST_SERVER_REPLICAS: Annotated[int, _at_least(1)] | None = Field(
        None, description="Number of replicas that concurrency defaults are computed for; before `SERVER_REPLICAS`."
    )
    SERVER_REPLICAS: Annotated[int, _at_least(1)] = Field(1, description="The same, when the former is unset.")
    INNGEST_PARALLELISM_PER_SERVER: Annotated[int, _at_least(1)] = Field(
        10, description="Share of one replica in the default global concurrency."
    )
    TRANSCRIPTION_FICHE_CONCURRENCY: Annotated[int, _at_least(1)] | None = Field(
        None,
        description="Fiches fetched anew at once, over all replicas. Unset: replicas times their share. Minimum 1.",
    )
    TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY: Annotated[int, _at_least(1)] | None = Field(
        None, description="Recordings at the provider at once, over all replicas. Unset: as before. Minimum 1."
    )
    TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY: Annotated[int, _at_least(1)] | None = Field(
        None, description="Of those, how many of one fiche. Unset: the share of one replica. Minimum 1."
    )
    TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE: Annotated[float, _at_least(0.01)] = Field(
        10, description="Calls that start at the provider per minute, over all fiches and replicas. Minimum 0.01."
    )
    TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS: Annotated[int, _at_least(1)] = Field(
        6, description="Calls per recording at most, the first included. Minimum 1."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS: Annotated[float, _at_least(0)] = Field(
        2, description="Pause before the second call; each further one is twice as long. Minimum 0."
    )
    TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS: Annotated[float, _at_least(0)] = Field(
        60, description="The longest pause, unless the provider's Retry-After says more. Minimum 0."
    )
    TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY: Annotated[int, _at_least(1)] = Field(
        3, description="`transcription.progress` is told every so many recordings, and at the end. Minimum 1."
    )
    TRANSCRIPTION_MAX_WAIT_SECONDS: Annotated[float, _at_least(30)] = Field(
        900, description="How long a caller with `wait_for_completion` waits for the run's end. Minimum 30."
    )
    TRANSCRIPTION_STALL_MINUTES: Annotated[float, _at_least(0.1)] = Field(
        10,
        description="Nothing was taken up for so long, though nothing held it back: a warning; after as long again, "
        "the recordings are given up. Minimum 0.1.",
    )
    RATE_LIMITS_TRANSCRIPTION: Annotated[int, _at_least(1)] = Field(
        50, description="Requests per fiche and minute; one more is answered 429. Minimum 1."
    )
    TRANSCRIPTION_DEBUG_LOG_TO_FILE: bool = Field(
        False,
        description="Write the log lines of every transcription run into a file of its own, in `ECLUSE_DATA_DIR`.",
    )
    TRANSCRIPTION_LOCK_TTL_MS: Annotated[int, _at_least(1)] | None = Field(
        None,
        description="No effect, because a fiche's lock is held by its run, for as long as that is open. Unset: the "
        "larger of 30 minutes and 10 minutes more than `TRANSCRIPTION_MAX_WAIT_SECONDS`.",
    )
    TRANSCRIPTION_RUN_STATE_TTL_SECONDS: Annotated[int, _at_least(1)] = Field(
        7200, description="No effect, because the state of runs is in the database, and stays."
    )
    TRANSCRIPTION_POLL_INTERVAL_SECONDS: Annotated[float, _at_least(0.1)] = Field(
        5, description="No effect, because whoever waits for a run is woken by its end."
    )
    TRANSCRIPTION_FINALIZER_CONCURRENCY: Annotated[int, _at_least(1)] | None = Field(
        None,
        description="No effect, because the commit of a run's last recording ends it. Unset: replicas times share.",
    )
    REDIS_URL: str | None = Field(None, description="No effect, because locks and state are in PostgreSQL.")

    @model_validator(mode="after")
    def _patient_enough(self) -> Settings:
        """Or the living would bury each other."""
        minimum = 2 * self.ECLUSE_HEARTBEAT_SECONDS
        if minimum > self.ECLUSE_DEAD_AFTER_SECONDS:
            name = "ECLUSE_DEAD_AFTER_SECONDS"
            log.warning("setting below its minimum, using the minimum", name=name, minimum=minimum)
            self.ECLUSE_DEAD_AFTER_SECONDS = minimum
        return self

    @model_validator(mode="after")
    def _derived(self) -> Settings:
        """Defaults that hang on other knobs."""
        for name in ("FICHE", "RECORDING_WORKER", "FINALIZER"):
            if getattr(self, knob := f"TRANSCRIPTION_{name}_CONCURRENCY") is None:
                setattr(self, knob, self.default_global_concurrency)
        if self.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY is None:
            self.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY = self.INNGEST_PARALLELISM_PER_SERVER
        if self.TRANSCRIPTION_LOCK_TTL_MS is None:
            self.TRANSCRIPTION_LOCK_TTL_MS = int(max(1_800, self.TRANSCRIPTION_MAX_WAIT_SECONDS + 600) * 1_000)
        return self

    @property
    def allowed_networks(self) -> list[str]:
        return _listed(self.ECLUSE_ALLOWED_NETWORKS)

    @property
    def default_global_concurrency(self) -> int:
        return (self.INNGEST_SERVER_REPLICAS or self.SERVER_REPLICAS) * self.INNGEST_PARALLELISM_PER_SERVER


def load() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        wrong = "; ".join(f"{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise SetUpError(f"Cannot start with this environment: {wrong}. See docs/configuration.md.") from error


def reference() -> str:
    """docs/configuration.md"""
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


if __name__ == "__main__":
    sys.stdout.write(reference())
