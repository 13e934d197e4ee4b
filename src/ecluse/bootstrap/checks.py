"""Checks of the settings and of the disk, for `ecluse doctor` and the API."""

from __future__ import annotations

import os
import shutil
from typing import Any

from ecluse.bootstrap.box import lacking
from ecluse.doctor.findings import Finding, graded
from ecluse.settings import Settings
from ecluse.settings.limits import LimitKnobs

FREE = (2 * 1024**3, 200 * 1024**2)  # free bytes on the disk: warn below, fail below


def check_settings(given: Settings) -> list[Finding]:
    return [
        _environment(given),
        *_flows(given),
        *_secrets(given),
        _limits(given),
        *(Finding("ok", "prices", one) for one in unpriced(given)),
    ]


def has_price(given: Settings, vendor: str, model: str) -> bool:
    if vendor == "elevenlabs":
        return model in given.speech_prices
    other = given.LLM_PRICE_INPUT_PER_MILLION is not None and given.LLM_PRICE_OUTPUT_PER_MILLION is not None
    return other or model in given.llm_prices


def unpriced(given: Settings) -> list[str]:
    """Return a sentence about each model in use that has no price, because budgets count its calls as 0."""
    found = []
    if given.LLM_API_KEY and given.LLM_MODEL and not has_price(given, "llm", given.LLM_MODEL):
        found.append(f"no price for {given.LLM_MODEL}: budgets count its audits as 0; set LLM_PRICES")
    if given.ELEVENLABS_API_KEY and not has_price(given, "elevenlabs", given.ELEVENLABS_MODEL):
        model = given.ELEVENLABS_MODEL
        found.append(f"no price for {model}: budgets count its transcriptions as 0; set ELEVENLABS_PRICES")
    return found


def check_disk(place: str) -> Finding:
    return _disk(shutil.disk_usage(place).free, place)


def _environment(given: Settings) -> Finding:
    raised = [
        f"{name}={text} is below its minimum, {getattr(given, name)} is used"
        for name in Settings.model_fields
        if (text := os.environ.get(name)) and _is_less(text, getattr(given, name))
    ]
    if raised:
        return Finding("warn", "environment", "; ".join(raised), "see docs/configuration.md for the minimum")
    return Finding("ok", "environment", "all settings are valid")


def _flows(given: Settings) -> list[Finding]:
    """Return a finding per built-in flow with unset knobs: a warning if only some of its knobs are set; a flow with
    none set is not in use."""
    return [
        Finding(
            "warn", one.flow, f"runs of this flow fail: {', '.join(one.unset)} unset", "set all variables of this flow"
        )
        if one.begun
        else Finding("ok", one.flow, f"not set up; to use it, set {', '.join(one.unset)}")
        for one in lacking(given)
    ]


def _secrets(given: Settings) -> list[Finding]:
    """Return a warning if no secret key is set. With the embedded PostgreSQL there is none, because a key is created
    automatically."""
    if given.DATABASE_URL is None or given.ECLUSE_SECRET_KEY is not None or given.ECLUSE_SECRET_KEY_FILE is not None:
        return []
    says = "no key to encrypt secrets: connections, webhooks, API keys of schedules and Pusher apps are refused"
    do = "set ECLUSE_SECRET_KEY (`openssl rand -base64 32`) or ECLUSE_SECRET_KEY_FILE, the same for every replica"
    return [Finding("warn", "secrets", says, do)]


def _limits(given: Settings) -> Finding:
    """Return the limits per key and tenant as a finding, which is a warning if some of them are off."""
    knobs = [*LimitKnobs.model_fields, "ECLUSE_MAILS_PER_DAY", "ECLUSE_TENANT_SLOTS_SHARE"]
    says = [f"{name}={getattr(given, name)}" for name in knobs]
    follows = []
    if off := [f"{name}=0" for name in LimitKnobs.model_fields if not getattr(given, name)]:
        follows.append(f"{', '.join(off)}: without a limit, one tenant can use up what others need")
    if given.ECLUSE_TENANT_SLOTS_SHARE == 1:
        follows.append("ECLUSE_TENANT_SLOTS_SHARE=1: calls of one tenant that hang can hold all worker slots")
    if not given.ECLUSE_MAILS_PER_DAY:
        follows.append("ECLUSE_MAILS_PER_DAY=0: no mail is sent")
    if follows:
        do = "change these settings, unless that is intended: with only one tenant it may be"
        return Finding("warn", "limits", f"{'; '.join(follows)}; in force: {', '.join(says)}", do)
    return Finding("ok", "limits", ", ".join(says))


def _is_less(text: str, used: Any) -> bool:
    try:
        return not isinstance(used, bool) and isinstance(used, int | float) and float(text) < used
    except ValueError:
        return False


def _disk(free: int, place: str) -> Finding:
    level = graded(-free, *(-limit for limit in FREE))
    do = "" if level == "ok" else "free disk space: PostgreSQL stops when the disk is full"
    return Finding(level, "disk", f"{free / 1024**3:.1f} GiB free in {place}", do)
