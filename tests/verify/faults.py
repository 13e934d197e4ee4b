"""One fault each, planted into a world in order, under the invariant that it breaks, and no other."""

from __future__ import annotations

import uuid

from tests.verify.plants import (
    CRASHED,
    ENDED_OTHERWISE,
    NOT_BEGUN,
    OVERDUE,
    WORKFLOW,
    Fault,
    Plant,
    item_failed_after_all,
    item_reopened,
    move,
    of,
    put,
    resend,
    run_unclosed,
    settled,
    sql,
    then,
    third_party,
    warn,
    with_retry_after,
    write_of_former_round,
)
from tests.verify.world import ALIVE, BUDGET, DIED, World

FAULTS = [
    Fault(
        "I-01", "an outcome lost", "selected 8 but 7 outcomes", sql("DELETE FROM outcomes WHERE target = 'SKU-00001'")
    ),
    Fault("I-01", "two counters forged", "outcomes are 3 + 4 + 1", of("ended", "runs", "successful = 2, ignored = 2")),
    Fault(
        "I-01", "an outcome left open", "1 targets without an outcome", of("SKU-00006", "outcomes", "outcome = NULL")
    ),
    Fault(
        "I-01",
        "an outcome without a selection",
        "no targets selected",
        sql("INSERT INTO outcomes (run_id, target) VALUES (%(waiting)s, 'x')"),
    ),
    Fault(
        "I-01",
        "an outcome of no run",
        "the run does not exist",
        sql("INSERT INTO outcomes (run_id, target) VALUES (99, 'x')"),
    ),
    Fault("I-01", "work for a target not selected", "was not selected", of("in hand", "items", "target = 'stranger'")),
    Fault(
        "I-01",
        "a stranger among the targets of a run without a story",
        "was not selected",
        then(
            lambda world: world.item(
                world.runs["chore"], "stranger", "succeeded", world.claim(world.runs["chore"], 1, succeeded=1)
            ),
            of("chore", "stages", "expected = 2"),
        ),
    ),
    #
    Fault("I-02", "a state flipped", "give partial", of("ended", "runs", "state = 'failed'")),
    Fault(
        "I-02",
        "failures called a success, in the log too",
        "give partial",
        then(of("ended", "runs", "status = 'completed', state = 'succeeded'"), ENDED_OTHERWISE),
    ),
    Fault("I-02", "ended by force, yet partial", "give failed", of("ended", "runs", "end_cause = 'stale'")),
    Fault(
        "I-02", "another state than its word", "queued does not match state", of("waiting", "runs", "state = 'running'")
    ),
    Fault(
        "I-02",
        "a word with two meanings",
        "status APPLIED stands for running and succeeded",
        lambda world: world.run("other", "pricing", ["QUEUED", "APPLIED"], workflow="PENDING", state="running"),
    ),
    #
    Fault(
        "I-03",
        "a creation applied twice",
        "applied 2 times",
        then(resend("new"), put("SKU-00100", "1.00", key_of="new")),
    ),
    Fault(
        "I-03",
        "another client's price overwritten by a repetition",
        "not from the same value",
        then(third_party("SKU-00001", "13.00"), resend("SKU-00001"), put("SKU-00001", "12.50", key_of="SKU-00001")),
    ),
    Fault(
        "I-03",
        "one key, two prices",
        "changed the record 2 times",
        then(resend("SKU-00001"), put("SKU-00001", "14.00", key_of="SKU-00001")),
    ),
    #
    Fault(
        "I-04",
        "called applied, never written",
        "no entry for that record",
        then(of("SKU-00004", "effects", "state = 'applied'"), warn("SKU-00004", of_effect=True)),
    ),
    Fault(
        "I-04",
        "called applied, another's price",
        "the record had '71.00'",
        then(of("SKU-00007", "effects", "state = 'applied'"), warn("SKU-00007", of_effect=True)),
    ),
    Fault(
        "I-04",
        "called created, never created",
        "no effect with its key",
        then(of("SKU-00004", "effects", "class = 'C1', state = 'applied'"), warn("SKU-00004", of_effect=True)),
    ),
    Fault(
        "I-04",
        "created otherwise than wanted",
        "7.40",
        of("new", "effects", """wanted = '{"name": "Étau", "price": "7.41"}'"""),
    ),
    Fault(
        "I-04",
        "called as wanted already, which it was not",
        "the record had '30.00'",
        of("SKU-00003", "effects", """wanted = '{"price": "31.00"}'"""),
    ),
    Fault("I-04", "successful with a failed item", "is failed", item_failed_after_all("SKU-00001")),
    Fault("I-04", "succeeded with its write in doubt", "is unknown", settled("SKU-00001", "unknown")),
    Fault(
        "I-04",
        "successful with a former round in doubt",
        "(round 0) is unknown",
        lambda world: write_of_former_round(world, "unknown"),
    ),
    #
    Fault("I-05", "called not applied, but applied", "the vendor applied it", settled("SKU-00005", "not_applied")),
    Fault("I-05", "called a conflict, but applied", "the vendor applied it", settled("SKU-00005", "conflict")),
    Fault("I-05", "called refused, but applied", "the vendor applied it", settled("SKU-00005", "rejected")),
    Fault("I-05", "back to planned, but applied", "the vendor applied it", settled("SKU-00009", "planned")),
    Fault("I-05", "a warning missing", "without effect_may_exist", warn("SKU-00005", of_effect=False)),
    Fault(
        "I-05",
        "a warning missing, of a write settled after the end",
        "without effect_may_exist",
        then(warn("SKU-00005", of_effect=False), settled("SKU-00005", "applied")),
    ),
    Fault(
        "I-05",
        "a warning missing, of a write known to be applied",
        "without effect_may_exist",
        then(
            warn("SKU-00005", of_effect=False),
            of("SKU-00005", "effects", "state = 'applied', settled_at = last_send_at + interval '1 ms'"),
        ),
    ),
    Fault("I-05", "a warning without a write", "no write was applied", warn("SKU-00008", of_effect=True)),
    Fault(
        "I-05",
        "a warning about a write settled long before",
        "no write was applied",
        then(warn("SKU-00004", of_effect=True), of("ended", "runs", "ended_at = ended_at + interval '5 seconds'")),
    ),
    Fault("I-05", "a warning about a success", "but is successful", warn("SKU-00001", of_effect=True)),
    #
    Fault("I-06", "an intent lost", "no intent is recorded", sql("DELETE FROM effects WHERE key = 'new'")),
    Fault(
        "I-06",
        "sent before the intent",
        "before its intent was recorded",
        of("SKU-00001", "effects", "first_send_at = first_send_at + interval '1 second'"),
    ),
    Fault(
        "I-06",
        "applied, though nothing was sent",
        "was never sent",
        of("SKU-00001", "effects", "sends = 0, first_send_at = NULL, last_send_at = NULL"),
    ),
    Fault(
        "I-06", "sent more often than intended", "called 2 times, but 1", put("SKU-00001", "12.50", key_of="SKU-00001")
    ),
    Fault(
        "I-06",
        "a refused call without an intent",
        "called 1 times, but 0",
        lambda world: world.put("SKU-00001", "many", Idempotency_Key=str(uuid.uuid4())),
    ),
    Fault("I-06", "a write without a key", "applied without a key", lambda world: world.put("SKU-00001", "1.00")),
    Fault(
        "I-06",
        "a write without a key long after its send",
        "applied without a key",
        then(
            of("SKU-00001", "effects", "last_send_at = last_send_at - interval '1 minute'"),
            of("SKU-00001", "effects", "first_send_at = first_send_at - interval '1 minute'"),
            lambda world: world.put("SKU-00001", "12.50"),
        ),
    ),
    #
    Fault("I-11", "a move not recorded", "when it was queued", NOT_BEGUN),
    Fault(
        "I-11",
        "a move that does not exist",
        "from queued to partial, which is not allowed",
        then(NOT_BEGUN, sql("UPDATE run_log SET message = 'queued -> partial' WHERE message = 'running -> partial'")),
    ),
    Fault(
        "I-11",
        "back from the end",
        "from partial to running, which is not allowed",
        then(lambda world: move(world, "partial -> running"), lambda world: move(world, "running -> partial")),
    ),
    Fault("I-11", "another last word", "but it is partial", ENDED_OTHERWISE),
    Fault(
        "I-11",
        "a gap in words of a flow's own",
        "when it was APPLYING",
        sql("UPDATE run_log SET message = 'REVIEW -> APPLIED' WHERE message = 'APPLYING -> APPLIED'"),
    ),
    #
    Fault("I-12", "too many expected", "expects 9 items", of("ended", "stages", "expected = 9")),
    Fault("I-12", "too few expected", "expects 7 items", of("ended", "stages", "expected = 7")),
    Fault(
        "I-12",
        "a claim's counter forged",
        "1 succeeded",
        of("SKU-00001", "claims", "succeeded = succeeded - 1, released = released + 1"),
    ),
    Fault("I-12", "more in flight than there is", "2 in flight", of("in hand", "claims", "taken = taken + 1")),
    Fault("I-12", "a claim lost", "the claim does not exist", sql("DELETE FROM claims WHERE run_id = %(chore)s")),
    Fault(
        "I-12",
        "finished under no claim",
        "but has no claim",
        then(of("chore", "claims", "taken = 0, succeeded = 0"), of("chore", "items", "claim_id = NULL")),
    ),
    Fault("I-12", "under the claim of another stage", "stage other", of("chore", "claims", "stage = 'other'")),
    Fault("I-12", "items of no stage", "the stage does not exist", sql("DELETE FROM stages WHERE run_id = %(chore)s")),
    #
    Fault(
        "I-13",
        "one execution over the budget",
        "the budget is 3",
        then(
            lambda world: world.attempt("SKU-00008", BUDGET + 1),
            of("SKU-00008", "items", "executions = executions + 1"),
        ),
    ),
    Fault("I-13", "a gap in the numbers", "{1,2,4}", sql("UPDATE attempts SET execution = 4 WHERE execution = 3")),
    Fault("I-13", "a number twice", "{1,2,2}", sql("UPDATE attempts SET execution = 2 WHERE execution = 3")),
    Fault("I-13", "an outage counted", "{1,1}", sql("UPDATE attempts SET outage = NULL WHERE outage")),
    Fault("I-13", "a crash counted", "but 0 recorded as failed", of("SKU-00006", "items", "executions = 2")),
    Fault("I-13", "given up for deaths in company", "only 2 of them", of("SKU-00008", "items", CRASHED)),
    Fault(
        "I-13",
        "sent after the budget was spent",
        "after the last execution",
        then(
            of("ended", "stages", "budget = 1"),
            sql(
                "UPDATE effects e SET last_send_at = a.at + interval '1 ms' FROM attempts a WHERE a.item_id = e.item_id"
            ),
        ),
    ),
    Fault(
        "I-13",
        "sent after its item was finished",
        "after the item was finished",
        of("SKU-00001", "effects", "last_send_at = last_send_at + interval '1 minute'"),
    ),
    Fault("I-13", "sent more often than taken up", "3 times under 2 claims", of("SKU-00001", "effects", "sends = 3")),
    Fault(
        "I-13",
        "sent more often than anything was taken up",
        "items were claimed 9 times",
        sql("UPDATE effects SET sends = 2 WHERE sends = 1 AND run_id = %(ended)s"),
    ),
    #
    Fault(
        "I-14",
        "faster than the lane",
        "1 at once and 2 a second are allowed",
        then(sql("UPDATE lanes SET per_second = 2"), lambda world: [world.read("SKU-00001") for _ in range(20)]),
    ),
    Fault(
        "I-14",
        "called during a Retry-After",
        "during the Retry-After of 20 s",
        then(with_retry_after(20), lambda world: world.read("SKU-00001")),
    ),
    #
    Fault("I-19", "a claim of the dead", "is dead", of("in hand", "claims", f"replica_id = '{DIED}'")),
    Fault(
        "I-19",
        "a claim of one who left",
        "is left",
        then(of(DIED, "replicas", "state = 'left'"), of("in hand", "claims", f"replica_id = '{DIED}'")),
    ),
    Fault("I-19", "a claim of an unknown replica", "which is unknown", of("in hand", "claims", "replica_id = 'who?'")),
    Fault(
        "I-19",
        "a claim of one who is silent",
        "is live, last heartbeat",
        then(
            of(DIED, "replicas", "state = 'live', beat_at = now() - interval '11 minutes'"),
            of("in hand", "claims", f"replica_id = '{DIED}'"),
        ),
    ),
    Fault("I-19", "an open item of an ended run", "the run has ended", item_reopened("SKU-00008")),
    Fault("I-19", "an open stage of an ended run", "the run has ended", of("ended", "stages", "ended_at = NULL")),
    Fault(
        "I-19",
        "a workflow lost",
        "running, but the run has no workflow",
        sql("DELETE FROM dbos.workflow_status WHERE workflow_uuid = 't/running'"),
    ),
    Fault(
        "I-19",
        "a run that no worker takes",
        "queued, but the run has no workflow",
        sql("DELETE FROM dbos.workflow_status WHERE workflow_uuid = 't/waiting'"),
    ),
    Fault("I-19", "a workflow that is over", "the workflow is ERROR", of("running", WORKFLOW, "status = 'ERROR'")),
    Fault("I-19", "a workflow of the dead", "is dead", of("running", WORKFLOW, f"executor_id = '{DIED}'")),
    Fault("I-19", "a gate that does not close", "should have ended", of("running", "stages", OVERDUE)),
    Fault("I-19", "a run of items that does not end", "but the run is open", run_unclosed),
    Fault(
        "I-19",
        "a write in doubt that is not read back",
        "has not been read back",
        then(
            of("SKU-00009", "items", "due_at = now() - interval '2 minutes'"),
            sql("UPDATE claims SET taken_at = now() - interval '2 minutes'"),
        ),
    ),
]


def restored_by_another_client(world: World) -> None:
    """A, ours, A again by another client, ours once more: reading back cannot distinguish it."""
    third_party("SKU-00009", "9.00")(world)
    world.effect(world.runs["running"], "SKU-00009 again", "C2", {"price": "8.00"})
    put("SKU-00009", "8.00", key_of="SKU-00009 again")(world)
    third_party("SKU-00009", "9.00")(world)
    world.resend("SKU-00009 again")
    put("SKU-00009", "8.00", key_of="SKU-00009 again")(world)


# What looks odd and is in order.
def stage_before_the_selection(world: World) -> None:
    """An item that found the targets, of a run without a story."""
    run_id = world.runs["chore"]
    world.stage(run_id, 1, stage="find", ended_at=world.now, end_cause="run ended")
    claim = world.claim(run_id, 1, succeeded=1)
    world.item(run_id, "finder", "succeeded", claim, stage="find", target="")
    world.change("finder", "claims", "stage = 'find'")


HARMLESS: dict[str, Plant] = {
    # As a call over several records does, which has no key for each.
    "a write without a key that was intended": then(
        of("SKU-00001", "effects", "quiet = interval '1 minute'"),
        lambda world: world.put("SKU-00001", "12.50"),
    ),
    "a stage that came before the selection": stage_before_the_selection,
    "a paid call sent again after a crash": then(
        lambda world: world.attempt("SKU-00001", 0),
        sql("UPDATE attempts SET maybe_paid = true, error_code = 'WORKER_CRASHED' WHERE execution = 0"),
    ),
    "another client put the old price back, unseen, and we wrote again": restored_by_another_client,
    "a conflict: ours was applied, and overwritten before we looked": then(
        third_party("SKU-00005", "51.00"), settled("SKU-00005", "conflict")
    ),
    "in doubt at the end, settled since": settled("SKU-00005", "applied"),
    "in doubt at the end, found since not to have been sent": then(
        settled("SKU-00004", "planned"), warn("SKU-00004", of_effect=True)
    ),
    "settled while the run was being ended": warn("SKU-00004", of_effect=True),
    "a former round that was refused": lambda world: write_of_former_round(world, "rejected"),
    "a write in doubt, asked about beyond the budget": then(
        *[lambda world, n=n: world.attempt("SKU-00005", n) for n in range(2, BUDGET + 3)],
        of("SKU-00005", "items", f"executions = {BUDGET + 2}"),
    ),
    "a budget that was not recorded": sql("UPDATE stages SET budget = NULL"),
    "a replica that died a moment ago": then(
        of(DIED, "replicas", "ended_at = now() - interval '3 seconds'"),
        of("in hand", "claims", f"replica_id = '{DIED}'"),
        of("running", WORKFLOW, f"executor_id = '{DIED}'"),
    ),
    "a new replica that has not yet seen what the dead left": then(
        of(ALIVE, "replicas", "started_at = now() - interval '3 seconds'"),
        of("in hand", "claims", f"replica_id = '{DIED}'"),
        of("running", WORKFLOW, f"executor_id = '{DIED}'"),
        of("running", "stages", OVERDUE),
    ),
    "a stage opened by a workflow that had not heard of the end": lambda world: world.stage(world.runs["stopped"], 0),
    "a run that was asked for a moment ago": then(
        sql("DELETE FROM dbos.workflow_status WHERE workflow_uuid = 't/waiting'"),
        of("waiting", "runs", "created_at = now() - interval '3 seconds'"),
    ),
    "a run that waits at another gate than the one overdue": then(
        of("running", "stages", OVERDUE), lambda world: world.stage(world.runs["running"], 0, stage="later")
    ),
    "a write in doubt that waits in a lane paused by an operator": then(
        of("SKU-00009", "items", "due_at = now() - interval '2 minutes'"),
        sql("UPDATE claims SET taken_at = now() - interval '2 minutes'"),
        sql("UPDATE lanes SET paused_at = now() - interval '2 minutes', paused_by = 'cli:ann', paused_reason = 'x'"),
    ),
    "a write in doubt that waits in a busy lane": of("SKU-00009", "items", "due_at = now() - interval '2 minutes'"),
    "an error that quotes an arrow": lambda world: world.insert(
        "run_log", run_id=world.runs["ended"], at=world.now, level="error", message="a -> b", event_id="shop-1"
    ),
    "a dispatch under way": of("running", "stages", "expected = 1"),
    "a call under way when another got a Retry-After": then(
        lambda world: world.sandbox.set_faults([{"kind": "throttle", "retry_after": 20, "times": 1}]),
        lambda world: [world.read("SKU-00001") for _ in range(2)],
    ),
    "a Retry-After beyond the longest that is honoured": then(
        with_retry_after(901), lambda world: world.read("SKU-00001")
    ),
    "a replica that died with the answer": then(
        with_retry_after(20),
        lambda world: world.read("SKU-00001"),
        of(DIED, "replicas", "ended_at = clock_timestamp() + interval '6 seconds'"),
    ),
    "another client during a Retry-After": then(
        with_retry_after(20), lambda world: world.put("SKU-00001", "1.00", Idempotency_Key="mine")
    ),
    "a person's write, with a key of their own": lambda world: world.put("SKU-00001", "1.00", Idempotency_Key="mine"),
}
