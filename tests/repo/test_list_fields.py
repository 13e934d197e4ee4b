"""Rows of lists have no field without a bound: what may be large is counted or left out, and has a route of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI

from ecluse import api
from ecluse.access.wire import Shape

# Fields that are lists, objects or any JSON, by row, and why each has an end nevertheless.
PARTS = {
    "AutomationScheduleRow.fiche_selection.groupes": "at most 200 of 200 characters (MOST_GROUPES)",
    "AutomationScheduleRow.notify_emails": "at most 50",
    "AutomationScheduleRow.specific_audit_configs": "at most 100 ids (MOST_CONFIGS)",
    "ConnectionRow.overrides": "at most ten, and a remark (OVERRIDES_SHOWN)",
    "EndpointRow.addresses": "at most 50",
    "EndpointRow.events": "at most 50 of 200 characters",
    "ItemRow.result": "left out above 10,000 bytes (LARGEST_LISTED)",
    "KeyRow.groupes": "at most 100 of 200 characters",
    "LaneRow.overrides": "the four caps of LaneCaps",
    "RuleRow.selection.tags": "at most 50 of 255 characters",
    "RuleRunRow.totals": "counts, of exclusions by reason (REASONS)",
    "TranscriptionLogRow.data": "counts, a reason, and at most 20 call ids",
}
# Fields that are texts, and what bounds those of that name in all rows.
TEXTS = {
    "a number, a date or a code of fixed length": """
        amount available company_siren company_siret cost currency plan_hash reserved score spent time_of_day unknown
    """,
    "an id that the server makes, or one that is an entry of an index": """
        about_run_id audit_config_id automation_run_id automation_schedule_id corrects_id correlation_id endpoint_id
        event_id event_key fiche_cache_id hostId holding_run_id id inngest_event_id jobId job_id key lane lastRunJobId
        last_run_id message_id orgId parent_run_id project_id queue reconciliation_id redrive_of reference replica_id
        request_id rule_id rule_run_id rule_target_id run_id scheduleId schedule_id serverInstanceId target tenant_id
        trace_id
    """,
    "a word of the program: a flow, a stage, a status, an error code, an event": """
        action aggregate alert errorCode error_code event_type flow from_status function_id phase producer
        rollback_error_code source stage status to_status vendor
    """,
    "the key, person or process that did it": """
        actor actor_name cancelRequestedBy createdBy createdById created_by ended_by owner paused_by updated_by
    """,
    "the beginning or the end of a secret": "api_key_ends hint token token_ends",
    "at most 200 characters where it is given, or cut to them": """
        addresses[] config_name cron cronExpression cron_expression crm_user_id events[] fiche_id groupe groupes[] host
        hostname jobType model name platform specific_audit_configs[] timezone type version
    """,
    "at most 500 characters where it is given, or cut to them": """
        address legal_name product_id sku title variant_id
    """,
    "at most 2,000 characters where it is given": "base_url description recipient url webhook_url",
    "storable() cuts it, an agent's has at most 4,000 characters, or it is a sentence of the program": """
        disabled_reason enrichment_error error error_message held_reason last_failure message overrides[] paused_reason
        reason rollback_error slowed_reason stopped_reason subject summary
    """,
    "a part of a log, of at most 65,536 characters (LARGEST_CHUNK)": "text",
}
ENDLESS = re.compile(r"(?<!\\)[*+]|,\}")  # in the pattern of a text


def rows() -> set[type[Shape]]:
    """The rows of all lists of the API."""
    app = FastAPI()
    api.mount(app)
    return {listing.row for listing in app.state.listings.values()}


def unbounded(row: type[Shape]) -> tuple[set[str], set[str]]:
    """The parts of a row that are lists, objects or any JSON, and the names of its texts."""
    schema = row.model_json_schema(mode="serialization")
    found = list(_walk(schema, schema.get("$defs", {}), row.__name__))
    return {path for kind, path in found if kind == "part"}, {
        path.rpartition(".")[2] for kind, path in found if kind == "text"
    }


def _walk(schema: Mapping[str, Any], known: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    if "$ref" in schema:
        yield from _walk(known[schema["$ref"].rpartition("/")[2]], known, path)
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _walk(one, known, path)
    elif "enum" in schema or "const" in schema:
        pass
    elif schema.get("properties"):
        for name, one in schema["properties"].items():
            yield from _walk(one, known, f"{path}.{name}")
    elif schema.get("type") == "string":
        ends = {"format", "maxLength"} & set(schema) or ("pattern" in schema and not ENDLESS.search(schema["pattern"]))
        if not ends:
            yield "text", path
    elif schema.get("type") == "array":
        yield "part", path
        yield from _walk(schema["items"], known, f"{path}[]")
    elif schema.get("type") not in ("boolean", "integer", "number", "null"):
        yield "part", path


def test_lists_have_no_part_without_a_bound() -> None:
    found = [unbounded(row)[0] for row in rows()]
    assert len(found) > 30
    assert set().union(*found) == set(PARTS), "count it, and page it in a route of its own"


def test_lists_have_no_text_without_a_bound() -> None:
    """By name: a new row with a text of a known name is taken to have its bound."""
    named = [name for names in TEXTS.values() for name in names.split()]
    assert len(named) == len(set(named))
    assert set().union(*(unbounded(row)[1] for row in rows())) == set(named)


class Inner(Shape):
    ids: list[int]
    word: str


class SampleRow(Shape):
    id: int
    many: dict[str, int] | None
    some: Any
    inner: Inner | None


def test_parts_and_texts_are_found_at_every_depth() -> None:
    assert unbounded(SampleRow) == ({"SampleRow.many", "SampleRow.some", "SampleRow.inner.ids"}, {"word"})
