"""Every knob by its exact name: what it is when unset, and what happens to a value that cannot be used."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ecluse.base.errors import SetUpError
from ecluse.bootstrap import automation_config
from ecluse.engine.schedule.ticks import TICK_SECONDS
from ecluse.settings import Settings, load

DEFAULTS = {
    "DATABASE_URL": None,
    "ECLUSE_DATA_DIR": None,
    "ECLUSE_DB_POOL": 10,
    "ECLUSE_FLOWS": "",
    "ECLUSE_HOST": "127.0.0.1",
    "ECLUSE_PORT": 8080,
    "ECLUSE_HANDS": 200,
    "ECLUSE_HEARTBEAT_SECONDS": 2.0,
    "ECLUSE_DEAD_AFTER_SECONDS": 6.0,
    "ECLUSE_LOG_LEVEL": "INFO",
    "ECLUSE_LIMIT_KEY_REQUESTS": 6_000,
    "ECLUSE_LIMIT_TENANT_REQUESTS": 12_000,
    "ECLUSE_LIMIT_KEY_MEGABYTES": 300,
    "ECLUSE_LIMIT_TENANT_MEGABYTES": 600,
    "ECLUSE_LIMIT_KEY_PAGE_STREAMS": 50,
    "ECLUSE_LIMIT_TENANT_PAGE_STREAMS": 100,
    "ECLUSE_LIMIT_KEY_STREAMS": 1_000,
    "ECLUSE_LIMIT_TENANT_STREAMS": 2_000,
    "ECLUSE_LIMIT_KEY_POLLS": 10,
    "ECLUSE_LIMIT_TENANT_POLLS": 1_000,
    "ECLUSE_LIMIT_TENANT_SOCKETS": 2_000,
    "ECLUSE_LIMIT_SCHEDULES": 1_000,
    "ECLUSE_LIMIT_AUDIT_CONFIGS": 500,
    "ECLUSE_LIMIT_ENDPOINTS": 50,
    "ECLUSE_LIMIT_ANSWER_MEGABYTES": 10,
    "ECLUSE_KEEP_RUNS_DAYS": 90,
    "ECLUSE_KEEP_DELIVERIES_DAYS": 14,
    "ECLUSE_KEEP_EVENTS_DAYS": 30,
    "ECLUSE_KEEP_LOGS_DAYS": 30,
    "ECLUSE_KEEP_ATTEMPTS_DAYS": 30,
    "ECLUSE_KEEP_SLOTS_DAYS": 90,
    "ECLUSE_KEEP_WORKFLOWS_DAYS": 7,
    "ECLUSE_KEEP_PAID_RESULTS_DAYS": 30,
    "ECLUSE_KEEP_SPEND_DAYS": 400,
    "ECLUSE_KEEP_LEASES_DAYS": 7,
    "ECLUSE_KEEP_AUDITS_DAYS": 0,
    "ECLUSE_KEEP_FICHES_DAYS": 0,
    "ECLUSE_KEEP_AUDIT_TRAIL_DAYS": 0,
    "ECLUSE_LOG_FORMAT": "line",
    "WORKFLOW_LOG_DB_ENABLED": False,
    "ECLUSE_SECRET_KEY": None,
    "ECLUSE_SECRET_KEY_FILE": None,
    "PUSHER_APP_ID": None,
    "PUSHER_KEY": None,
    "PUSHER_SECRET": None,
    "PUSHER_CLUSTER": None,
    "PUSHER_HOST": None,
    "PUSHER_USE_PRIVATE_CHANNELS": True,
    "PUSHER_MAX_PAYLOAD_BYTES": 9000,
    "PUSHER_DRY_RUN": False,
    "AUTOMATION_SEND_EVENT_CHUNK_SIZE": 200,
    "AUTOMATION_SCHEDULER_WINDOW_MINUTES": 20,
    "AUTOMATION_SCHEDULER_CRON": "*/1 * * * *",
    "AUTOMATION_SCHEDULER_STALE_GRACE_MS": 900_000,
    "AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS": 600_000,
    "AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS": 20.0,
    "AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS": 900_000,
    "AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS": 30.0,
    "AUTOMATION_AUDIT_MAX_WAIT_MS": 1_800_000,
    "AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS": 60.0,
    "AUTOMATION_MAX_RECORDINGS_PER_FICHE": None,
    "AUTOMATION_DEBUG_LOG_TO_FILE": False,
    "FICHE_SALES_CACHE_CONCURRENCY": 10,
    "ECLUSE_CATCH_UP_HOURS": 24.0,
    "CRM_BASE_URL": None,
    "CRM_API_KEY": None,
    "CRM_CONCURRENCY": 20,
    "CRM_TIMEOUT_SECONDS": 30.0,
    "ELEVENLABS_API_KEY": None,
    "ELEVENLABS_BASE_URL": "https://api.elevenlabs.io",
    "ELEVENLABS_MODEL": "scribe_v1",
    "ELEVENLABS_TIMEOUT_SECONDS": 600.0,
    "LLM_BASE_URL": "https://api.openai.com/v1",
    "LLM_API_KEY": None,
    "LLM_MODEL": None,
    "LLM_TIMEOUT_SECONDS": 120.0,
    "LLM_CONCURRENCY": 20,
    "LLM_RATE_LIMIT_PER_MINUTE": None,
    "LLM_PRICES": "",
    "LLM_RESERVED_OUTPUT_TOKENS": 4000,
    "ELEVENLABS_PRICES": "",
    "ELEVENLABS_DEFAULT_MINUTES": 10,
    "LLM_PRICE_INPUT_PER_MILLION": None,
    "LLM_PRICE_OUTPUT_PER_MILLION": None,
    "AUDIT_MAX_INPUT_CHARS": 400_000,
    "STT_UPLOAD": "url",
    "ECLUSE_ALLOWED_NETWORKS": "",
    "INNGEST_SERVER_REPLICAS": None,
    "SERVER_REPLICAS": 1,
    "INNGEST_PARALLELISM_PER_SERVER": 10,
    "TRANSCRIPTION_FICHE_CONCURRENCY": 10,
    "TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY": 10,
    "TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY": 10,
    "TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE": 10.0,
    "TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS": 6,
    "TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS": 2.0,
    "TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS": 60.0,
    "TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY": 3,
    "TRANSCRIPTION_MAX_WAIT_SECONDS": 900.0,
    "TRANSCRIPTION_STALL_MINUTES": 10.0,
    "RATE_LIMITS_TRANSCRIPTION": 50,
    "TRANSCRIPTION_DEBUG_LOG_TO_FILE": False,
    "TRANSCRIPTION_LOCK_TTL_MS": 1_800_000,
    "TRANSCRIPTION_RUN_STATE_TTL_SECONDS": 7200,
    "TRANSCRIPTION_POLL_INTERVAL_SECONDS": 5.0,
    "TRANSCRIPTION_FINALIZER_CONCURRENCY": 10,
    "RECHERCHE_ENTREPRISES_BASE_URL": "https://recherche-entreprises.api.gouv.fr",
    "RECHERCHE_ENTREPRISES_PER_SECOND": 7.0,
    "INPI_BASE_URL": "https://registre-national-entreprises.inpi.fr",
    "INPI_USERNAME": None,
    "INPI_PASSWORD": None,
    "API_ENTREPRISE_BASE_URL": "https://entreprise.api.gouv.fr",
    "API_ENTREPRISE_TOKEN": None,
    "API_ENTREPRISE_RECIPIENT": None,
    "API_ENTREPRISE_CONTEXT": "enrichment",
    "API_ENTREPRISE_OBJECT": "company enrichment",
    "API_ENTREPRISE_PER_MINUTE": 50.0,
    "ENRICHMENT_SOURCE_TIMEOUT_MS": 5000,
    "ENRICHMENT_SYNC_WAIT_MS": 1200,
    "ENRICHMENT_FRESHNESS_TTL_DAYS": 30.0,
    "ENRICHMENT_FAILED_COOLDOWN_MINUTES": 15.0,
    "ENRICHMENT_PARTIAL_RETRY_HOURS": 24.0,
    "PRICING_REQUESTS_PER_SECOND": 2.0,
    "PRICING_BURST": 40,
    "PRICING_CALL_TIMEOUT_SECONDS": 30.0,
    "PRICING_TARGET_TIMEOUT_SECONDS": 900.0,
    "PRICING_RECONCILE_AFTER_SECONDS": 60.0,
    "ECLUSE_LIMIT_PRICING_PROJECTS": 100,
    "ECLUSE_LIMIT_PRICING_RULES": 1000,
    "ECLUSE_LIMIT_RULE_RUNS": 10000,
    "ECLUSE_LIMIT_JOB_HOSTS": 500,
    "ECLUSE_LIMIT_JOB_SERVERS": 1_000,
    "ECLUSE_LIMIT_API_KEYS": 500,
    "ECLUSE_LIMIT_MAIL_ADDRESSES": 500,
    "ECLUSE_KEEP_JOBS_DAYS": 90,
    "ECLUSE_KEEP_RULE_RUNS_DAYS": 400,
    "ECLUSE_KEEP_COMPANIES_DAYS": 0,
    "ECLUSE_JOB_LEASE_SECONDS": 30.0,
    "ECLUSE_JOB_PENDING_SECONDS": 3600.0,
    "REDIS_URL": None,
    "ECLUSE_PUBLIC_URL": None,
    "ECLUSE_WEBHOOK_TIMEOUT_SECONDS": 15.0,
    "MAIL_FROM": None,
    "SMTP_HOST": None,
    "SMTP_PORT": 587,
    "SMTP_USERNAME": None,
    "SMTP_PASSWORD": None,
    "SMTP_STARTTLS": "auto",
    "SMTP_TLS": False,
    "SMTP_TIMEOUT_SECONDS": 30.0,
    "ECLUSE_REQUEST_DEADLINE_SECONDS": 10.0,
    "ECLUSE_MAX_CONNECTIONS": 10000,
    "ECLUSE_MAX_CONNECTIONS_PER_ADDRESS": None,
    "FORWARDED_ALLOW_IPS": "127.0.0.1",
    "ECLUSE_SECRET_KEY_OLD": None,
    "ECLUSE_SECRET_KEY_OLD_FILE": None,
    "ECLUSE_KEY_LIFETIME_DAYS": 365,
    "ECLUSE_MAILS_PER_DAY": 500,
    "ECLUSE_TENANT_SLOTS_SHARE": 0.75,
}


@pytest.fixture
def given(monkeypatch):
    """Load the settings from exactly these variables."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name, raising=False)

    def read(**variables: str) -> Settings:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return load()

    return read


@pytest.mark.req("ENG-100")
def test_each_knob_has_its_exact_name_and_default(given):
    assert given().model_dump() == DEFAULTS


@pytest.mark.req("ENG-17")
@pytest.mark.parametrize(
    ("variables", "concurrency"),
    [
        ({}, 10),
        ({"INNGEST_SERVER_REPLICAS": "6", "INNGEST_PARALLELISM_PER_SERVER": "10"}, 60),
        ({"SERVER_REPLICAS": "3"}, 30),
        ({"INNGEST_SERVER_REPLICAS": "2", "SERVER_REPLICAS": "9"}, 20),
        ({"INNGEST_SERVER_REPLICAS": "", "SERVER_REPLICAS": "4"}, 40),
        ({"INNGEST_PARALLELISM_PER_SERVER": "7"}, 7),
        ({"INNGEST_SERVER_REPLICAS": "0", "SERVER_REPLICAS": "9"}, 10),
    ],
    ids=["defaults", "the compose example", "second name", "first name wins", "empty is unset", "per server", "zero"],
)
def test_default_concurrency_is_replicas_times_the_share_of_one(given, variables, concurrency):
    assert given(**variables).default_global_concurrency == concurrency


@pytest.mark.req("ENG-100")
@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("ECLUSE_PORT", "-1", 0),
        ("ECLUSE_HANDS", "0", 1),
        ("ECLUSE_HANDS", "-5.0", 1),
        ("ECLUSE_HEARTBEAT_SECONDS", "0.01", 0.1),
        ("ECLUSE_HEARTBEAT_SECONDS", "-inf", 0.1),
        ("ECLUSE_DEAD_AFTER_SECONDS", "0", 4.0),
        ("PUSHER_MAX_PAYLOAD_BYTES", "1", 200),
        ("AUTOMATION_SEND_EVENT_CHUNK_SIZE", "0", 1),
        ("INNGEST_SERVER_REPLICAS", "-3", 1),
        ("SERVER_REPLICAS", "0", 1),
        ("INNGEST_PARALLELISM_PER_SERVER", "0", 1),
    ],
)
def test_a_value_below_its_minimum_is_raised_to_it_with_a_warning(given, name, value, used):
    with capture_logs() as lines:
        settings = given(**{name: value})
    assert getattr(settings, name) == used
    assert [(line["log_level"], line["name"], line["minimum"]) for line in lines] == [("warning", name, used)]


def test_networks_are_listed_with_commas(given):
    assert given().allowed_networks == []
    assert given(ECLUSE_ALLOWED_NETWORKS="10.0.0.0/8, ::1/128,").allowed_networks == ["10.0.0.0/8", "::1/128"]


def test_a_value_at_its_minimum_is_used_without_a_word(given):
    with capture_logs() as lines:
        settings = given(ECLUSE_HANDS="1", ECLUSE_HEARTBEAT_SECONDS="0.1", ECLUSE_PORT="0")
    assert (settings.ECLUSE_HANDS, settings.ECLUSE_HEARTBEAT_SECONDS, settings.ECLUSE_PORT) == (1, 0.1, 0)
    assert lines == []


@pytest.mark.req("ENG-101")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ECLUSE_HANDS", "many"),
        ("ECLUSE_HANDS", "1.5"),
        ("ECLUSE_HANDS", "0x10"),
        ("ECLUSE_HANDS", "nan"),
        ("ECLUSE_HANDS", "inf"),
        ("ECLUSE_HEARTBEAT_SECONDS", "2s"),
        ("ECLUSE_HEARTBEAT_SECONDS", "nan"),
        ("ECLUSE_DEAD_AFTER_SECONDS", "inf"),
        ("SERVER_REPLICAS", "six"),
        ("INNGEST_SERVER_REPLICAS", "6 replicas"),
        ("ECLUSE_PORT", "http"),
        ("ECLUSE_PORT", "65536"),
        ("ECLUSE_CATCH_UP_HOURS", "1e300"),
        ("AUTOMATION_SCHEDULER_WINDOW_MINUTES", "99999999999999"),
        ("ECLUSE_LOG_LEVEL", "loud"),
        ("ECLUSE_LOG_FORMAT", "xml"),
        ("WORKFLOW_LOG_DB_ENABLED", "maybe"),
        ("WORKFLOW_LOG_DB_ENABLED", "2"),
        ("STT_UPLOAD", "both"),
        ("LLM_RATE_LIMIT_PER_MINUTE", "many"),
        ("LLM_PRICE_INPUT_PER_MILLION", "cheap"),
        ("LLM_PRICES", "gpt-4.1=2"),
        ("LLM_PRICES", "2/8"),
        ("ELEVENLABS_PRICES", "scribe_v1=-1"),
        ("ELEVENLABS_PRICES", "scribe_v1=NaN"),
        ("ECLUSE_ALLOWED_NETWORKS", "10.0.0.0/8, localhost"),
        ("ECLUSE_ALLOWED_NETWORKS", "10.0.0.1/8"),
    ],
)
def test_a_value_that_cannot_be_read_stops_the_start_and_names_its_variable(given, name, value):
    with pytest.raises(SetUpError) as refused:
        given(**{name: value})
    assert f"{name}={value!r}" in refused.value.message
    assert "docs/configuration.md" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.req("ENG-101", "ENG-81")
@pytest.mark.parametrize(
    ("value", "used"), [("1", True), ("true", True), ("TRUE", True), ("0", False), ("false", False)]
)
def test_a_switch_takes_one_true_zero_false(given, value, used):
    assert given(WORKFLOW_LOG_DB_ENABLED=value).WORKFLOW_LOG_DB_ENABLED is used


def test_all_that_is_wrong_is_said_at_once(given):
    with pytest.raises(SetUpError, match=r"ECLUSE_PORT='x'.*ECLUSE_HANDS='y'"):
        given(ECLUSE_PORT="x", ECLUSE_HANDS="y")


def test_an_empty_variable_counts_as_unset(given):
    with capture_logs() as lines:
        assert given(**dict.fromkeys(DEFAULTS, "")).model_dump() == DEFAULTS
    assert lines == []


@pytest.mark.req("AUT-19", "AUT-91", "AUT-92", "AUT-93")
def test_the_scheduler_looks_every_second_whatever_its_cron_says(given):
    """More often than each minute, the default of a knob that is read and has no effect."""
    used = given(AUTOMATION_SCHEDULER_WINDOW_MINUTES="1", AUTOMATION_SCHEDULER_CRON="*/7 * * * *")
    assert (used.AUTOMATION_SCHEDULER_CRON, used.AUTOMATION_SCHEDULER_WINDOW_MINUTES) == ("*/7 * * * *", 5)
    assert Settings.model_fields["AUTOMATION_SCHEDULER_CRON"].description.startswith("No effect, because")
    assert timedelta(seconds=TICK_SECONDS) < timedelta(minutes=1)
    assert automation_config(given()).longest == timedelta(minutes=10 + 15 + 30 + 15)
    assert automation_config(given(AUTOMATION_SCHEDULER_STALE_GRACE_MS="0")).longest == timedelta(minutes=55)


def test_unknown_variables_and_other_spellings_are_ignored(given):
    assert given(ECLUSE_HANDZ="many", ecluse_hands="3").model_dump() == DEFAULTS


def test_a_value_is_used_as_its_type(given):
    settings = given(ECLUSE_DATA_DIR="/tmp/x", ECLUSE_HEARTBEAT_SECONDS="0.5", ECLUSE_HANDS=" 7 ")  # noqa: S108
    used = (settings.ECLUSE_DATA_DIR, settings.ECLUSE_HEARTBEAT_SECONDS, settings.ECLUSE_HANDS)
    assert used == (Path("/tmp/x"), 0.5, 7)  # noqa: S108


@pytest.mark.parametrize("sender", ["ecluse@example.com", "Ecluse <ecluse@example.com>"])
def test_mail_comes_from_an_address(given, sender):
    assert sender == given(MAIL_FROM=sender).MAIL_FROM


@pytest.mark.parametrize("sender", ["ecluse", "<>", "a@b\nBcc: c@d", "a@b, c@d", "Ecluse <a@b> <c@d>"])
def test_a_sender_that_is_no_address_stops_the_start(given, sender):
    with pytest.raises(SetUpError) as refused:
        given(MAIL_FROM=sender)
    assert f"MAIL_FROM={sender!r}: not a mail address" in refused.value.message
