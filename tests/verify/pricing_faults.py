"""Faults of rule runs (I-23), and of calls that write several records (I-03, I-04, I-06)."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, sql, then
from tests.verify.priced import look, variant
from tests.verify.world import World

SKIPPED = sql("DELETE FROM rule_history WHERE to_status = 'APPLYING' AND rule_target_id ="
              " (SELECT id FROM rule_targets WHERE status = 'APPLIED')")  # fmt: skip
JUMPED = sql("UPDATE rule_history SET from_status = 'QUEUED' WHERE to_status = 'APPLIED' AND rule_target_id ="
             " (SELECT id FROM rule_targets WHERE status = 'APPLIED')")  # fmt: skip

PROJECT = """
INSERT INTO pricing_projects (id, tenant_id, name, connector, base_url, currency, created_by, created_at, updated_by,
                              updated_at)
OVERRIDING SYSTEM VALUE VALUES (1, 't', 'Shop', 'shopify', 'https://shop', 'EUR', 'a test', now(), 'a test', now())
"""


def unbound(table: str, constraint: str) -> Plant:
    return lambda world: world.sql(f"ALTER TABLE {table} DROP CONSTRAINT {constraint}")


def with_the_key_of_another(prices: dict[str, str]) -> Plant:
    """Written by the call of the applied target, sent once more."""

    def plant(world: World) -> None:
        ((effect, key, run),) = world.sql(
            "SELECT e.id::text, e.key, e.run_id FROM effects e JOIN rule_targets t ON t.id::text = e.key"
            " WHERE t.status = 'APPLIED'"
        )
        world.resend(key)
        world.change_all("claims", "stage = 'apply'", run)
        world.in_shop(prices, Idempotency_Key=effect)

    return plant


ALERT = """INSERT INTO alerts (flow, tenant_id, record_id, measure, alert, severity, summary, action, raised_at)
VALUES ('pricing', 't', '1', 'dead letters', 'DLQ Critical', 'critical', 's', 'a', now())"""
FAULTS = [
    Fault("I-23", "a run applied with failed targets", "APPLIED, but its targets are: 1 APPLIED, 1 FAILED",
          sql("UPDATE rule_runs SET status = 'APPLIED'")),
    Fault("I-23", "a run failed with applied targets", "FAILED, but its targets are",
          sql("UPDATE rule_runs SET status = 'FAILED'")),
    Fault("I-23", "a run that nothing applies", "APPLYING, but no execution of it is open",
          sql("UPDATE rule_runs SET status = 'APPLYING', finished_at = NULL")),
    Fault("I-23", "a run finished before it was queued", "queued",
          then(unbound("rule_runs", "rule_runs_order"),
               sql("UPDATE rule_runs SET finished_at = queued_at - interval '1 minute'"))),
    Fault("I-23", "too many retries", "APPLIED after 9 retries",
          then(unbound("rule_targets", "rule_targets_attempts"),
               sql("UPDATE rule_targets SET attempts = 9 WHERE status = 'APPLIED'"))),
    Fault("I-23", "applied at no time", "APPLIED, but not at any time",
          then(unbound("rule_targets", "rule_targets_applied"),
               sql("UPDATE rule_targets SET applied_at = NULL WHERE status = 'APPLIED'"))),
    Fault("I-23", "a target lost", "its plan changes 4 and excludes 1 variants, but it has 3 targets",
          then(sql("DELETE FROM rule_history WHERE rule_target_id ="
                   " (SELECT id FROM rule_targets WHERE status = 'PREVIEW')"),
               sql("DELETE FROM rule_targets WHERE status = 'PREVIEW'"))),
    Fault("I-23", "a mismatch lost", "counts 1 mismatches, but has 0", sql("DELETE FROM rule_mismatches")),
    Fault("I-23", "a gap in a history", "moved from APPLYING to APPLIED when it was QUEUED",
          SKIPPED),
    Fault("I-23", "a change that is not allowed", "moved from QUEUED to APPLIED, which is not allowed",
          then(SKIPPED, JUMPED)),
    Fault("I-23", "applied without a write", "APPLIED, but no write of it is applied",
          sql("UPDATE rule_targets SET status = 'APPLIED', applied_at = now() WHERE status = 'PREVIEW'")),
    Fault("I-23", "rolled back without a write", "ROLLED_BACK, but no write of it is applied",
          sql("UPDATE rule_targets SET status = 'ROLLED_BACK' WHERE status = 'APPLIED'")),
    Fault("I-23", "failed though it is written", "FAILED (NO), but its write",
          sql("UPDATE rule_targets SET status = 'FAILED', applied_at = NULL, error_code = 'NO'"
              " WHERE status = 'APPLIED'")),
    Fault("I-23", "failed though it is found written afterwards", "FAILED (STORE_FAILED), but its write",
          then(sql("UPDATE rule_targets SET status = 'FAILED', applied_at = NULL, error_code = 'STORE_FAILED'"
                   " WHERE status = 'APPLIED'"),
               sql("UPDATE effects SET settled_at = now() + interval '1 minute' WHERE stage = 'apply'"))),
    Fault("I-23", "a write outside the plan", "which the plan does not",
          sql("UPDATE rule_targets SET after_amount = 1 WHERE status = 'APPLIED'")),
    Fault("I-09", "an alert without an event", "raised, but without an event", sql(ALERT)),
    Fault("I-14", "faster than the lane of a shop", "2 at once and 2 a second are allowed",
          then(sql(PROJECT), sql("INSERT INTO lanes (name, per_second) VALUES ('shop/t/project-1', 2)"),
               lambda world: [look(world.sandbox.url) for _ in range(20)])),
    Fault("I-06", "a variant written beside those of its call", "applied without a key",
          with_the_key_of_another({variant(0): "18.00", variant(7): "1.00"})),
    Fault("I-03", "a variant changed twice by a call over several", "changed the record 2 times",
          then(lambda world: world.in_shop({variant(0): "5.00"}, X_Client="another client"),
               with_the_key_of_another({variant(0): "18.00"}))),
]  # fmt: skip

HARMLESS: dict[str, Plant] = {
    "a price changed by another client afterwards": lambda world: world.in_shop(
        {variant(0): "5.00", variant(2): "5.00"}, X_Client="another client"
    ),
    "a price sent twice": with_the_key_of_another({variant(0): "18.00"}),
}
