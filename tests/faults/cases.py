"""The faults, one function each: what is done to a world, and what must be seen besides the common account (`check`).

A case knows the engine's tables and the vendor's ledger, and nothing of the flow: it runs with any subject.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.faults import measure
from tests.faults.chaos import LYING, WRITES, Plan, play, slow
from tests.faults.subjects import SUBJECTS, Subject
from tests.faults.world import ENDED_SECONDS, QUICK_HEART, World
from tests.support.servers import address
from tests.support.wire import bad_wire

FEW_HANDS = {"ECLUSE_HANDS": "6"}
# The life of a replica in a storm: shorter than the silence after which it counts as dead.
STORM_SECONDS = 2.0
STORM_HEART = {"ECLUSE_HEARTBEAT_SECONDS": "0.5", "ECLUSE_DEAD_AFTER_SECONDS": "3"}
OTHERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
MAY_EXIST = "SELECT target FROM outcomes WHERE run_id = %s AND effect_may_exist"


@dataclass(frozen=True)
class Case:
    play: Callable[[World], None]
    needs: Literal["nothing", "own server", "small disk"] = "nothing"
    heart: Mapping[str, str] = field(default_factory=lambda: QUICK_HEART)
    alone: bool = False  # it measures: nothing else may use the machine
    checked: bool = True  # it ends as without the fault
    slow: bool = False
    only: Literal["effect", "paid"] | None = None  # of subjects of this kind


def killed_at(point: str) -> Case:
    def kill(world: World) -> None:
        world.sandbox.set_faults([{**LYING, "per_id_times": 1}])
        world.start_run()
        victim = world.start_replica({"ECLUSE_CRASH_AT": point}, wait=False).child
        code = victim.wait(ENDED_SECONDS)
        assert code == -signal.SIGKILL, f"never came to {point!r}: exit code {code}\n{victim.tail()}"
        world.start_replica()

    return Case(kill)


def all_killed_at_once(world: World) -> None:
    world.sandbox.set_faults([LYING, slow(0.1)])
    replicas = world.start_replicas(3, FEW_HANDS)
    world.start_run()
    for effects in (5, world.subject.targets // 2):
        world.wait_for_effects(effects)
        for replica in replicas:
            replica.child.signal(signal.SIGKILL)
        assert [replica.child.wait(10) for replica in replicas] == [-signal.SIGKILL] * 3
        replicas = world.start_replicas(3, FEW_HANDS)


def random_kills(world: World) -> None:
    plan = Plan(kills=8, effects=150, targets=world.subject.targets, pause=(0.2, 1.2), freezes=1, seed=1)
    report = play(world, plan, quiet=True)
    assert not (problems := report.problems()), problems


def restart_storm(world: World) -> None:
    """No replica lives as long as it takes to declare another one dead, and still dead ones are declared dead."""
    world.sandbox.set_faults([slow(0.2)])
    replicas = world.start_replicas(2, FEW_HANDS)
    world.start_run()
    world.wait_until_busy()
    ended_before = world.now()
    for kill in range(10):
        time.sleep(STORM_SECONDS / 2)
        replicas[kill % 2].kill()
        replicas[kill % 2] = world.start_again(replicas[kill % 2])
    buried = world.one("SELECT count(*) FROM replicas WHERE state = 'dead' AND ended_at > %s", ended_before)
    assert buried, f"in {5 * STORM_SECONDS:g} s no replica was declared dead\n{world.diagnosis()}"


def put_to_sleep(world: World) -> None:
    """A replica that is stopped beyond its heartbeat is declared dead: it exits by itself, and stores nothing."""
    world.sandbox.set_faults([slow(0.3)])
    zombie = world.start_replica(FEW_HANDS)
    world.start_run()
    world.wait_for_effects(1)
    world.wait_until_busy(zombie, 3)
    zombie.signal(signal.SIGSTOP)
    held = measure.held_by(world, zombie)
    assert held, "it had nothing in hand: the case proves nothing"
    other = world.start_replica(FEW_HANDS)
    world.wait_for(lambda: not measure.held_by(world, zombie), "what it held was taken from it")
    # Long enough for another replica to have begun with it.
    world.wait_until_busy(other, 1)
    zombie.signal(signal.SIGCONT)
    assert zombie.child.wait(10) == 70, zombie.child.tail()
    assert "declared dead" in zombie.child.said(), "it does not say why it left"
    world.wait_until_ended()
    assert other.lives
    state = world.one("SELECT state FROM replicas WHERE id = %s", zombie.id)
    assert state == "dead"
    # `check` counts what it wrote after its death.


def restarted(mode: Literal["fast", "immediate"], away: float) -> Callable[[World], None]:
    def restart(world: World) -> None:
        world.sandbox.set_faults([slow(0.1)])
        replicas = world.start_replicas(2, FEW_HANDS)
        world.start_run()
        world.wait_for_effects(3)
        seconds = measure.restart_database(world, mode, away)
        assert seconds <= 5, f"work went on {seconds:.1f} s after the database was up"
        world.wait_until_ended()
        assert all(replica.lives for replica in replicas), world.diagnosis()
        assert world.one("SELECT count(*) FROM replicas WHERE state <> 'live'") == 0

    return restart


def lost_answers(world: World) -> None:
    with bad_wire(address(world.dsn), world.folder / "wire", one_in=40) as wire:
        world.replicas_dsn = wire.dsn(world.dsn)
        world.start_replicas(2, FEW_HANDS)
        wire.losing = True
        world.start_run(2 * world.subject.targets)
        world.wait_until_ended(2 * ENDED_SECONDS)  # an answer that is lost is waited for
        wire.losing = False
        print(f"{wire.cut} answers lost, {wire.commits_cut} of them to a COMMIT")
        assert wire.cut >= 20, f"only {wire.cut} answers were lost"
        assert wire.commits_cut >= 1, "no transaction of several statements lost the answer to its COMMIT"
        assert len(world.living) == 2, world.diagnosis()


def killed_connections(world: World) -> None:
    """Close connections of any replica at any moment, as an administrator or a failing network does."""
    chance, killed = random.Random(1), 0  # noqa: S311 - repeatable, not secret
    world.sandbox.set_faults([slow(0.05)])
    replicas = world.start_replicas(2, FEW_HANDS)
    world.start_run()
    world.wait_until_busy()
    until = time.monotonic() + 6
    while time.monotonic() < until and killed < 60:
        victims = world.ask(OTHERS)
        if victims:
            killed += world.one("SELECT pg_terminate_backend(%s)::int", chance.choice(victims)["pid"])
        time.sleep(chance.uniform(0.02, 0.15))
    world.wait_until_ended()
    assert killed >= 30
    assert all(replica.lives for replica in replicas), world.diagnosis()


def disk_full(world: World) -> None:
    world.sandbox.set_faults([slow(0.05)])
    assert world.disk is not None
    replicas = world.start_replicas(2, FEW_HANDS)
    world.start_run(2 * world.subject.targets)
    world.wait_for_effects(3)
    world.disk.fill()
    try:
        # Rows still fit into the pages there are: what needs a new page must come first.
        world.wait_for(
            lambda: any("No space left" in replica.child.said() for replica in replicas),
            "a replica finds the disk full",
        )
        time.sleep(2)
    finally:
        world.disk.free()
    freed_at = world.now()
    world.wait_for(lambda: measure.progress_since(world, freed_at), "work goes on after the disk has room again", 10)
    world.wait_until_ended()
    assert all(replica.lives for replica in replicas), world.diagnosis()


def stopped_gracefully(world: World) -> None:
    """A graceful stop with calls in flight: what cannot be finished is given back at once, the run is led elsewhere."""
    world.watch_claims()
    world.sandbox.set_faults([slow(1.8)])
    world.start_replica({"ECLUSE_HANDS": "2"})  # already there: the calls of the one that leaves have just begun then
    leaving = world.start_replica(FEW_HANDS)
    world.start_run(12)
    world.wait_until_busy(leaving, 4)
    handover = measure.hand_over(world, leaving)
    assert handover.code == 0, leaving.child.tail()
    assert handover.exit_seconds < 5
    assert handover.claims, "nothing was given back: the case proves nothing"
    assert handover.claim_seconds <= 4, handover  # `make chaos` measures it on a machine of its own
    assert handover.workflow_seconds <= 4, handover
    assert "Traceback" not in leaving.child.said()
    world.sandbox.set_faults([])
    world.wait_until_ended()
    assert world.one("SELECT coalesce(sum(crashes), 0) FROM items") == 0, "leaving is not dying"


def ended_by_operator(world: World) -> None:
    world.sandbox.set_faults([{**slow(0.6), "methods": WRITES}])  # so that there is always one in flight
    world.start_replicas(2, FEW_HANDS)
    run = world.start_run(2 * world.subject.targets)
    world.wait_for_effects(8)
    code, out, err = world.command("runs", "end", str(run), "--reason", "wrong percentage", "--yes")
    assert code == 0, out + err
    ended_at = world.one("SELECT extract(epoch FROM ended_at)::float FROM runs WHERE id = %s", run)
    row = world.ask("SELECT state, end_cause, selected, failed, error_message FROM runs WHERE id = %s", run)[0]
    assert (row["state"], row["end_cause"]) == ("cancelled", "operator"), row
    assert "wrong percentage" in str(row["error_message"])
    open_effects = "SELECT count(*) FROM effects WHERE run_id = %s AND class = %s AND state IN ('sending', 'unknown')"
    in_flight = world.ask(
        "SELECT target FROM effects WHERE run_id = %s AND (state IN ('sending', 'unknown') OR settled_at > %s)",
        run,
        world.one("SELECT ended_at FROM runs WHERE id = %s", run),
    )
    assert in_flight, "no write was in flight: the case proves nothing"
    flagged = {r["target"] for r in world.ask(MAY_EXIST, run)}
    assert {r["target"] for r in in_flight} <= flagged, "an outcome says that nothing can have happened"
    world.wait_for(lambda: world.one(open_effects, run, "C2") == 0, "writes in flight are settled", 4 + 10)
    time.sleep(1.5)
    calls = [call for call in world.sandbox.ledger(vendor=world.subject.vendor, kind="call") if call["at"] > ended_at]
    # Between the commit of an intent and the first byte on the wire there is no asking once more.
    late_writes = [call for call in calls if call["method"] in WRITES and call["at"] > ended_at + 0.2]
    assert late_writes == [], f"{len(late_writes)} writes began after the end"
    asked = {row["key"] for row in world.ask("SELECT key FROM effects WHERE run_id = %s", run)}
    late_reads = [
        call
        for call in calls
        if call["method"] == "GET" and call["at"] > ended_at + 1 and call["ref"] not in asked  # a look back is no work
    ]
    assert late_reads == [], f"{len(late_reads)} reads began a second after the end"
    assert world.one("SELECT count(*) FROM outcomes WHERE run_id = %s AND outcome IS NULL", run) == 0
    found = world.tally()
    problems = [line for line in found.problems() if not line.startswith("false_outcomes")]
    assert problems == [], f"{problems}\n{world.diagnosis()}"


def ended_by_operator_while_paying(world: World) -> None:
    """What was paid for by then is kept; nothing more is bought for the run itself."""
    world.sandbox.set_faults([{**slow(0.6), "methods": WRITES}])
    world.start_replicas(2, FEW_HANDS)
    run = world.start_run(2 * world.subject.targets)
    bought = "SELECT count(*) >= 2 FROM items WHERE run_id = %s AND target <> '' AND status = 'succeeded'"
    world.wait_for(lambda: world.one(bought, run), "the run's last stage is under way", ENDED_SECONDS)
    in_hand = world.one("SELECT coalesce(sum(in_flight), 0) FROM claims WHERE run_id = %s", run)
    code, out, err = world.command("runs", "end", str(run), "--reason", "wrong day", "--yes")
    assert code == 0, out + err
    ended_at = world.one("SELECT extract(epoch FROM ended_at)::float FROM runs WHERE id = %s", run)
    row = world.ask("SELECT status, state, end_cause, selected, successful, failed FROM runs WHERE id = %s", run)[0]
    assert (row["status"], row["state"], row["end_cause"]) == ("partial", "cancelled", "operator"), row
    assert row["successful"] >= 2
    assert row["failed"] >= 1, "nothing was left to do: the case proves nothing"
    reasons = world.ask(
        "SELECT DISTINCT error_code, reason FROM outcomes WHERE run_id = %s AND outcome = 'failed'", run
    )
    who = world.one("SELECT ended_by FROM runs WHERE id = %s", run)
    assert reasons == [{"error_code": "CANCELLED", "reason": f"Cancelled by {who}: wrong day"}]
    before = world.ask("SELECT * FROM outcomes WHERE run_id = %s ORDER BY target", run)
    assert in_hand, "no call was in flight: the case proves nothing"
    time.sleep(1.5)  # longer than what was in flight takes
    # Between the decision to call and the first byte on the wire there is no asking once more.
    late = [
        call for call in world.sandbox.ledger(kind="call") if call["method"] in WRITES and call["at"] > ended_at + 1
    ]
    assert late == [], f"{len(late)} calls began a second after the end"
    assert world.ask("SELECT * FROM outcomes WHERE run_id = %s ORDER BY target", run) == before
    world.wait_until_ended()
    found = world.tally()
    problems = [line for line in found.problems() if not line.startswith("false_outcomes")]
    assert problems == [], f"{problems}\n{world.diagnosis()}"


CASES: dict[str, Case] = {
    **{f"killed {point}": killed_at(point) for point in dict.fromkeys(p for one in SUBJECTS for p in one.points)},
    "random kills": Case(random_kills),
    "all killed at once": Case(all_killed_at_once),
    "restart storm": Case(restart_storm, heart=STORM_HEART, alone=True),
    "put to sleep": Case(put_to_sleep),
    "database restarted": Case(restarted("fast", 4.0), needs="own server", heart={}),
    "database crashed": Case(restarted("immediate", 1.0), needs="own server", heart={}),
    "lost answers": Case(lost_answers, heart={}),
    "killed connections": Case(killed_connections, heart={}),
    "disk full": Case(disk_full, needs="small disk", heart={}),
    "database away for long": Case(restarted("fast", 35.0), needs="own server", heart={}, slow=True),
    "stopped gracefully": Case(stopped_gracefully, alone=True),
    "ended by the operator": Case(ended_by_operator, checked=False, only="effect"),
    "ended by the operator while paying": Case(ended_by_operator_while_paying, checked=False, only="paid"),
}


def fits(name: str, subject: Subject) -> bool:
    """Whether the case says anything about the subject."""
    return CASES[name].only in (None, subject.kind) and (
        not name.startswith("killed ") or name == "killed connections" or name.removeprefix("killed ") in subject.points
    )
