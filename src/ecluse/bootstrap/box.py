"""The built-in flows, built from the settings, and the flows that ECLUSE_FLOWS or the command line names."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from ecluse.base.clock import Clock
from ecluse.base.errors import SetUpError
from ecluse.engine import Flow, Plans
from ecluse.flow import Package
from ecluse.settings import Settings

if TYPE_CHECKING:
    from ecluse.access.secrets import Secrets
    from ecluse.flows.audits.flow import Config as AuditConfig
    from ecluse.flows.automation.config import Config as AutomationConfig
    from ecluse.flows.connections.clients import Setup
    from ecluse.flows.enrichment.clients import Config as EnrichmentConfig
    from ecluse.flows.transcriptions.config import Config


def transcription_config(settings: Settings) -> Config:
    """Return the settings of the transcription flow."""
    from ecluse.flows.transcriptions.config import Config
    from ecluse.vendors.elevenlabs import Speech

    per_server = settings.INNGEST_PARALLELISM_PER_SERVER
    everywhere = settings.default_global_concurrency
    return Config(
        configured=bool(_secret(settings.ELEVENLABS_API_KEY)),
        speech=Speech(model=settings.ELEVENLABS_MODEL),
        fiche_concurrency=settings.TRANSCRIPTION_FICHE_CONCURRENCY or everywhere,
        recording_concurrency=settings.TRANSCRIPTION_RECORDING_WORKER_CONCURRENCY or everywhere,
        per_fiche=settings.TRANSCRIPTION_RECORDING_PER_FICHE_CONCURRENCY or per_server,
        per_minute=settings.TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE,
        attempts=settings.TRANSCRIPTION_ELEVENLABS_MAX_ATTEMPTS,
        backoff_base=settings.TRANSCRIPTION_ELEVENLABS_BACKOFF_BASE_SECONDS,
        backoff_longest=settings.TRANSCRIPTION_ELEVENLABS_BACKOFF_MAX_SECONDS,
        progress_every=settings.TRANSCRIPTION_PROGRESS_WEBHOOK_FREQUENCY,
        # Where we download the recording ourselves, the download may take as long as the call.
        time_limit=timedelta(seconds=2 * settings.ELEVENLABS_TIMEOUT_SECONDS + 60),
        max_wait=timedelta(seconds=settings.TRANSCRIPTION_MAX_WAIT_SECONDS),
        stall=timedelta(minutes=settings.TRANSCRIPTION_STALL_MINUTES),
        requests_per_minute=settings.RATE_LIMITS_TRANSCRIPTION,
        prices=settings.speech_prices,
        default_length=timedelta(minutes=settings.ELEVENLABS_DEFAULT_MINUTES),
    )


def vendor_setup(settings: Settings, secrets: Secrets | None = None) -> Setup:
    """Return the settings of the vendor clients; `secrets` decrypts the keys of connections and schedules."""
    from ecluse.flows.connections.clients import Access, Setup
    from ecluse.vendors.elevenlabs import Speech
    from ecluse.vendors.llm import Price, Prices

    of_input, of_output = settings.LLM_PRICE_INPUT_PER_MILLION, settings.LLM_PRICE_OUTPUT_PER_MILLION
    other = None if of_input is None or of_output is None else Price(of_input, of_output)
    models = {model: Price(*price) for model, price in settings.llm_prices.items()}
    return Setup(
        environment={
            "crm": Access(settings.CRM_BASE_URL, _secret(settings.CRM_API_KEY)),
            "speech": Access(settings.ELEVENLABS_BASE_URL, _secret(settings.ELEVENLABS_API_KEY)),
            "llm": Access(settings.LLM_BASE_URL, _secret(settings.LLM_API_KEY), settings.LLM_MODEL),
        },
        read_secret=secrets.get if secrets else None,
        allowed_networks=settings.allowed_networks,
        deadlines={
            "crm": settings.CRM_TIMEOUT_SECONDS,
            "speech": settings.ELEVENLABS_TIMEOUT_SECONDS,
            "llm": settings.LLM_TIMEOUT_SECONDS,
        },
        connections=settings.ECLUSE_HANDS,
        speech=Speech(model=settings.ELEVENLABS_MODEL),
        prices=Prices(models, other, settings.LLM_RESERVED_OUTPUT_TOKENS),
        upload=settings.STT_UPLOAD == "file",
    )


def vendors(settings: Settings, secrets: Secrets | None = None) -> Callable[[Clock], AbstractAsyncContextManager[Any]]:
    """Return the factory of vendor clients for the built-in flows that call CRM, speech to text or the language model
    (`Flow.vendors`)."""
    from ecluse.flows.connections.registry import Vendors

    return partial(Vendors, vendor_setup(settings, secrets))


def _transcription(settings: Settings) -> Flow:
    """Build the transcription flow."""
    from ecluse.flows.transcriptions.flow import Transcription

    return Transcription(transcription_config(settings), vendors(settings)).flow


def audit_config(settings: Settings) -> AuditConfig:
    """Return the settings of audits."""
    from ecluse.flows.audits.flow import Config

    return Config(
        concurrency=settings.LLM_CONCURRENCY,
        per_minute=settings.LLM_RATE_LIMIT_PER_MINUTE,
        call_seconds=settings.LLM_TIMEOUT_SECONDS,
        max_input_chars=settings.AUDIT_MAX_INPUT_CHARS,
        model=settings.LLM_MODEL,
    )


def automation_config(settings: Settings) -> AutomationConfig:
    """Return the settings of the automation flow."""
    from ecluse.flows.automation.config import Config

    return Config(
        details_wait=timedelta(milliseconds=settings.AUTOMATION_FICHE_DETAILS_MAX_WAIT_MS),
        details_poll=timedelta(seconds=settings.AUTOMATION_FICHE_DETAILS_POLL_INTERVAL_SECONDS),
        transcription_wait=timedelta(milliseconds=settings.AUTOMATION_TRANSCRIPTION_MAX_WAIT_MS),
        transcription_poll=timedelta(seconds=settings.AUTOMATION_TRANSCRIPTION_POLL_INTERVAL_SECONDS),
        audit_wait=timedelta(milliseconds=settings.AUTOMATION_AUDIT_MAX_WAIT_MS),
        audit_poll=timedelta(seconds=settings.AUTOMATION_AUDIT_POLL_INTERVAL_SECONDS),
        grace=timedelta(milliseconds=settings.AUTOMATION_SCHEDULER_STALE_GRACE_MS),
        max_recordings=settings.AUTOMATION_MAX_RECORDINGS_PER_FICHE,
        crm_concurrency=settings.CRM_CONCURRENCY,
        per_minute=settings.TRANSCRIPTION_ELEVENLABS_RATE_LIMIT_PER_MINUTE,
        chunk=settings.AUTOMATION_SEND_EVENT_CHUNK_SIZE,
        transcript_cost=transcription_config(settings).cost,
        unset=tuple(name for one in lacking(settings) if one.flow == "automation" for name in one.unset),
    )


def _automation(settings: Settings, transcription: Flow) -> Flow:
    """Build the automation flow, which starts runs of `transcription`; without secrets, which `bootstrap` adds."""
    from ecluse.flows.automation.flow import Automation

    return Automation(automation_config(settings), audit_config(settings), transcription, vendors(settings)).flow


def automation_plans(settings: Settings, secrets: Secrets | None) -> Plans:
    from ecluse.flows.automation.schedules import AutomationPlans
    from ecluse.vendors.guarded import GuardedHttp

    return AutomationPlans(automation_config(settings), secrets, GuardedHttp(settings.allowed_networks))


def _audit(settings: Settings) -> Flow:
    """Build the flow of single audits."""
    from ecluse.flows.audits.flow import Audit

    return Audit(audit_config(settings), vendors(settings)).flow


def shops(settings: Settings, secrets: Secrets | None = None) -> Callable[[Clock], AbstractAsyncContextManager[Any]]:
    """Return the factory of shop clients for the pricing flow (`Flow.vendors`)."""
    from ecluse.flows.connections.shops import Shops

    return partial(Shops, vendor_setup(settings, secrets), settings.PRICING_CALL_TIMEOUT_SECONDS)


def _pricing(settings: Settings) -> Flow:
    """Build the pricing flow; without secrets, which `bootstrap` adds."""
    from ecluse.flows.pricing.flow import Config, Pricing

    config = Config(
        per_second=settings.PRICING_REQUESTS_PER_SECOND,
        burst=settings.PRICING_BURST,
        call=timedelta(seconds=settings.PRICING_CALL_TIMEOUT_SECONDS),
        target=timedelta(seconds=settings.PRICING_TARGET_TIMEOUT_SECONDS),
        soon=timedelta(seconds=settings.PRICING_RECONCILE_AFTER_SECONDS),
    )
    return Pricing(config, shops(settings)).flow


def enrichment_config(settings: Settings) -> EnrichmentConfig:
    """Return the settings of company enrichment."""
    from ecluse.flows.enrichment.clients import Config
    from ecluse.flows.enrichment.rules import Limits
    from ecluse.vendors.registers import Source

    user, password = settings.INPI_USERNAME, _secret(settings.INPI_PASSWORD)
    return Config(
        urls={
            Source.SEARCH: settings.RECHERCHE_ENTREPRISES_BASE_URL,
            Source.INPI: settings.INPI_BASE_URL,
            Source.RCS: settings.API_ENTREPRISE_BASE_URL,
        },
        per_second={
            Source.SEARCH: settings.RECHERCHE_ENTREPRISES_PER_SECOND,
            Source.INPI: None,
            Source.RCS: settings.API_ENTREPRISE_PER_MINUTE / 60,
        },
        inpi=(user, password) if user and password else None,
        token=_secret(settings.API_ENTREPRISE_TOKEN),
        context=settings.API_ENTREPRISE_CONTEXT,
        object=settings.API_ENTREPRISE_OBJECT,
        recipient=settings.API_ENTREPRISE_RECIPIENT,
        deadline=timedelta(milliseconds=settings.ENRICHMENT_SOURCE_TIMEOUT_MS),
        sync_wait=timedelta(milliseconds=settings.ENRICHMENT_SYNC_WAIT_MS),
        keep=timedelta(days=settings.ECLUSE_KEEP_COMPANIES_DAYS) or None,
        limits=Limits(
            fresh=timedelta(days=settings.ENRICHMENT_FRESHNESS_TTL_DAYS),
            after_failure=timedelta(minutes=settings.ENRICHMENT_FAILED_COOLDOWN_MINUTES),
            after_partial=timedelta(hours=settings.ENRICHMENT_PARTIAL_RETRY_HOURS),
        ),
        connections=settings.ECLUSE_HANDS,
    )


def _enrichment(settings: Settings) -> Flow:
    """Build the flow of company enrichment."""
    from ecluse.flows.enrichment.clients import Registers
    from ecluse.flows.enrichment.flow import Enrichment

    config = enrichment_config(settings)
    return Enrichment(config, partial(Registers, config)).flow


def _secret(given: SecretStr | None) -> str | None:
    """Return the value of a secret knob; None if it is unset or blank."""
    return given.get_secret_value().strip() or None if given is not None else None


@dataclass(frozen=True)
class Lacking:
    """The unset knobs without which the runs of a built-in flow fail."""

    flow: str
    unset: list[str]
    begun: bool  # some of its knobs are set, so the operator means to use it


def lacking(settings: Settings) -> list[Lacking]:
    """Return the built-in flows whose runs would fail because knobs are unset."""
    wanted = {
        "transcription": ("CRM_BASE_URL", "CRM_API_KEY", "ELEVENLABS_API_KEY"),
        "audit": ("LLM_API_KEY", "LLM_MODEL"),
        "automation": ("CRM_BASE_URL", "CRM_API_KEY", "ELEVENLABS_API_KEY", "LLM_API_KEY", "LLM_MODEL"),
    }
    found = []
    for flow, knobs in wanted.items():
        values = {name: getattr(settings, name) for name in knobs}
        unset = [name for name, v in values.items() if not (_secret(v) if isinstance(v, SecretStr) else v)]
        if unset:
            found.append(Lacking(flow, unset, begun=len(unset) < len(knobs)))
    return found


def load_flows(settings: Settings, extra: Sequence[str] = ()) -> list[Flow]:
    """Return the built-in flows, then those of other packages (`load_packages`). Raise SetUpError if a flow cannot be
    loaded, or if two flows have the same name."""
    transcription = _transcription(settings)
    automation, pricing = _automation(settings, transcription), _pricing(settings)
    enriching = _enrichment(settings)
    box = [transcription, _audit(settings), automation, pricing, _jobs(), enriching, _notifications()]
    others = [(package.name, flow) for package in load_packages(settings, extra) for flow in package.made()]
    known = Counter([flow.name for flow in box] + [flow.name for _, flow in others])
    if twice := sorted(name for name, count in known.items() if count > 1):
        where = ", ".join(dict.fromkeys(name for name, flow in others if flow.name in twice))
        raise SetUpError(f"Two flows have the name {', '.join(twice)}: load only one of them ({where}).")
    return [*box, *(flow for _, flow in others)]


def load_packages(settings: Settings, extra: Sequence[str] = ()) -> list[Package]:
    """Return the packages that are not built in, each once: the installed ones (entry point `ecluse.flows`), those of
    ECLUSE_FLOWS, then those in `extra`. Raise SetUpError if one cannot be loaded."""
    installed = {f"{one.value}": one.name for one in entry_points(group="ecluse.flows")}
    named = [name.strip() for name in settings.ECLUSE_FLOWS.split(",") if name.strip()]
    return [_load(name) for name in dict.fromkeys((*installed, *named, *extra))]


def _load(name: str) -> Package:
    """Import the package or the flow named `module:NAME`, also from the current directory; raise SetUpError if that is
    not possible."""
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # an installed script searches its own directory, not the current one
    try:
        found = getattr(importlib.import_module(module), attribute)
    except SyntaxError as error:
        raise SetUpError(f"Cannot load flow {name!r}: correct the syntax of {error.filename}: {error}.") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SetUpError(
            f"Cannot load flow {name!r}: {error}. Give it as package:NAME, with a module that is installed or in the "
            "current directory."
        ) from error
    if isinstance(found, Flow):
        return Package(name, flows=lambda _: [found])
    if not isinstance(found, Package):
        raise SetUpError(f"{name!r} is not a Flow or a Package but a {type(found).__name__}.")
    return found


def _jobs() -> Flow:
    from ecluse.flows.jobs.flow import FLOW

    return FLOW


def _notifications() -> Flow:
    from ecluse.notify.flow import FLOW

    return FLOW
