"""Which lanes of the flows in the box have a breaker."""

from __future__ import annotations

from ecluse.bootstrap import load_flows
from ecluse.engine.model.breaker import OUTAGES
from ecluse.settings import Settings

ALL_VENDORS = {
    "CRM_BASE_URL": "https://crm.example.com",
    "CRM_API_KEY": "k",
    "ELEVENLABS_API_KEY": "k",
    "LLM_BASE_URL": "https://llm.example.com/v1",
    "LLM_API_KEY": "k",
    "LLM_MODEL": "m",
    "SMTP_HOST": "mail.example.com",
    "MAIL_FROM": "ecluse@example.com",
}
WITHOUT = {
    "webhooks": "each receiver is a vendor of its own: one that is down says nothing of the others",
    "here": "no vendor is called: what is done there is done in this database",
    **dict.fromkeys(
        ("recherche-entreprises", "inpi-rne", "api-entreprise"),
        "a company that a register cannot answer for is failed after two retries, and asked for again by the sweep",
    ),
}


def test_every_lane_to_a_vendor_has_a_breaker_for_outages():
    lanes = {stage.lane.name: stage.lane for flow in load_flows(Settings(**ALL_VENDORS)) for stage in flow.stages}
    assert lanes.keys() >= {"crm", "crm-sales", "crm-transcription", "elevenlabs", "llm", "mail", *WITHOUT}
    assert {name for name, lane in lanes.items() if lane.breaker is None} == set(WITHOUT)
    # The breaker of a shop is for throttling alone: a target that a shop in an outage does not take is a dead letter.
    assert [name for name, lane in lanes.items() if lane.breaker and not lane.breaker.codes & OUTAGES] == ["shop"]
    assert not lanes["webhooks"].one_vendor
