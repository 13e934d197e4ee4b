"""The knobs of the limits per API key and tenant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import BaseSettings

from ecluse.settings.flows import at_least

Most = Annotated[int, at_least(0)]


def _most(default: int, description: str) -> Any:
    return Field(default, le=1_000_000_000, description=f"{description} 0: no limit.")


class LimitKnobs(BaseSettings):
    """The limits of an API key and of a tenant; requests beyond a limit are answered 429."""

    ECLUSE_LIMIT_KEY_REQUESTS: Most = _most(
        6_000,
        "Requests a minute of one API key, at each replica: a read counts 1, a change 5, 20 rows asked for or 10 "
        "fiches of a batch 1 more.",
    )
    ECLUSE_LIMIT_TENANT_REQUESTS: Most = _most(12_000, "The same for all keys of a tenant together.")
    ECLUSE_LIMIT_KEY_MEGABYTES: Most = _most(
        300, "Megabytes a minute that one API key sends and receives, at each replica."
    )
    ECLUSE_LIMIT_TENANT_MEGABYTES: Most = _most(600, "The same for all keys of a tenant together.")
    ECLUSE_LIMIT_KEY_PAGE_STREAMS: Most = _most(
        50, "Pages that update themselves, open at once with one API key, at each replica."
    )
    ECLUSE_LIMIT_TENANT_PAGE_STREAMS: Most = _most(100, "The same for all keys of a tenant together.")
    ECLUSE_LIMIT_KEY_STREAMS: Most = _most(
        1_000, "Streams of events (`GET /api/events`), open at once with one API key, at each replica."
    )
    ECLUSE_LIMIT_TENANT_STREAMS: Most = _most(2_000, "The same for all keys of a tenant together.")
    ECLUSE_LIMIT_KEY_POLLS: Most = _most(10, "Requests for jobs of one agent in progress at once, at each replica.")
    ECLUSE_LIMIT_TENANT_POLLS: Most = _most(1_000, "The same for all agents of a tenant together.")
    ECLUSE_LIMIT_TENANT_SOCKETS: Most = _most(2_000, "WebSockets of a tenant, open at once, at each replica.")
    ECLUSE_LIMIT_SCHEDULES: Most = _most(1_000, "Schedules of a tenant.")
    ECLUSE_LIMIT_AUDIT_CONFIGS: Most = _most(500, "Audit configs of a tenant.")
    ECLUSE_LIMIT_ENDPOINTS: Most = _most(50, "Notification endpoints of a tenant.")
    ECLUSE_LIMIT_PRICING_PROJECTS: Most = _most(100, "Pricing projects of a tenant.")
    ECLUSE_LIMIT_PRICING_RULES: Most = _most(1_000, "Pricing rules of a tenant.")
    ECLUSE_LIMIT_RULE_RUNS: Most = _most(10_000, "Rule runs of a tenant, previews included.")
    ECLUSE_LIMIT_JOB_HOSTS: Most = _most(500, "Hosts of a tenant.")
    ECLUSE_LIMIT_JOB_SERVERS: Most = _most(1_000, "Server instances of a tenant.")
    ECLUSE_LIMIT_API_KEYS: Most = _most(500, "API keys of a tenant that are in force.")
    ECLUSE_LIMIT_MAIL_ADDRESSES: Most = _most(
        500,
        "Mail addresses of a tenant that endpoints and schedules name or that were sent a link, confirmed or not.",
    )
    ECLUSE_LIMIT_ANSWER_MEGABYTES: Most = _most(10, "Megabytes of one JSON answer, before compression.")
