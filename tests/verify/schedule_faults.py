"""Faults of schedules and their slots (I-08)."""

from __future__ import annotations

from tests.verify.plants import Fault, Plant, of, sql, then

AGAIN = "due_at + interval '1 minute', tenant_id, state, reason, run_id, decided_at FROM schedule_slots"

FAULTS = [
    Fault("I-08", "a fired instant without its run", "which does not exist",
          of("fired", "schedule_slots", "run_id = 99")),
    Fault("I-08", "a run under a name that does not follow", "which has event key",
          of("fired", "schedule_slots", "due_at = due_at + interval '1 second'")),
    Fault("I-08", "a run of another tenant", "but its run to",
          sql("UPDATE schedule_slots SET tenant_id = 'u'; UPDATE schedules SET tenant_id = 'u'")),
    Fault("I-08", "a run that does not know its schedule", "which names schedule none",
          sql("UPDATE runs SET schedule_id = NULL WHERE id = %(fired)s")),
    Fault("I-08", "a run that no slot knows of", "has no fired slot",
          of("fired", "schedule_slots", "state = 'missed', run_id = NULL")),
    Fault("I-08", "a slot in the future of its schedule", "is handled until",
          of("often", "schedules", "handled_until = handled_until - interval '10 minutes'")),
    Fault("I-08", "a slot of another tenant than its schedule", "but its schedule to",
          of("missed", "schedule_slots", "tenant_id = 'u'")),
    Fault("I-08", "two that wait", "2 slots wait at once",
          sql(f"INSERT INTO schedule_slots SELECT schedule_id, {AGAIN} WHERE state = 'waiting'")),
    Fault("I-08", "one that waits for ever", "is disabled, but", of("often", "schedules", "next_due_at = NULL")),
    Fault("I-08", "a schedule that ticks pass over", "other schedules of flow shop were fired",
          of("later", "schedules", "next_due_at = now() - interval '10 minutes'")),
    Fault("I-08", "a fired instant without its job", "which does not exist",
          sql("DELETE FROM jobs; UPDATE job_schedules SET run_count = 0")),
    Fault("I-08", "a job under a name that does not follow", "which has key",
          sql("UPDATE jobs SET key = 'schedule:x:1'")),
    Fault("I-08", "a job that no slot knows of", "but has no fired slot",
          sql("DELETE FROM schedule_slots WHERE reference IS NOT NULL")),
    Fault("I-08", "a job that its schedule does not count", "counts 0 jobs, but has 1",
          sql("UPDATE job_schedules SET run_count = 0")),
]  # fmt: skip

HARMLESS: dict[str, Plant] = {
    "a flow that no replica has loaded": then(
        of("later", "schedules", "flow = 'unknown', next_due_at = now() - interval '10 minutes'")
    ),
    "a schedule that is off": of("later", "schedules", "next_due_at = NULL"),
}
