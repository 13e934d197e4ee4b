"""A small world that is in order, made of plain rows and real calls to the sandbox; tests break one thing in it."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
from psycopg.types.json import Jsonb

from ecluse.testing.sandbox import SandboxProcess
from tests.verify.priced import priced, set_prices

ALIVE, DIED = "host-1-alive", "host-2-died"
BUDGET = 3
# What a row goes by.
WHICH = {
    "runs": "event_key = %(name)s",
    "stages": "run_id = (SELECT id FROM runs WHERE event_key = %(name)s)",
    "items": "key = %(name)s",
    "effects": "key = %(name)s",
    "outcomes": "target = %(name)s",
    "claims": "id = (SELECT claim_id FROM items WHERE key = %(name)s)",
    "replicas": "id = %(name)s",
    "events_outbox": "event_key = %(name)s",
    "leases": "key || ' ' || fence = %(name)s",
    "schedules": "name = %(name)s",
    "schedule_slots": "state = %(name)s AND reference IS NULL",
    "dbos.workflow_status": "workflow_uuid = 't/' || %(name)s",
}
DRAWN = ("fiche_cache", "schedules", "runs", "items", "claims", "attempts", "run_log", "lanes")


# Guards are for the program; a test that plants a fault goes around them, as their owner may.
UNGUARDED = """
ALTER TABLE runs DISABLE TRIGGER USER;
ALTER TABLE outcomes DISABLE TRIGGER USER;
ALTER TABLE rule_runs DISABLE TRIGGER USER;
ALTER TABLE rule_targets DISABLE TRIGGER USER;
DO $$ DECLARE key record; BEGIN
    FOR key IN SELECT conrelid::regclass AS its_table, conname FROM pg_constraint WHERE contype = 'f' LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', key.its_table, key.conname);
    END LOOP;
END $$
"""


class World:
    def __init__(self, dsn: str, sandbox: SandboxProcess) -> None:
        self.dsn = dsn
        self.sandbox = sandbox
        self.db = psycopg.connect(dsn, autocommit=True)
        self.runs: dict[str, int] = {}
        self.items: dict[str, int] = {}
        self.effects: dict[str, uuid.UUID] = {}
        self.rule_run = 0

    def sql(self, statement: str, *parameters: object) -> list[Any]:
        cursor = self.db.execute(statement, parameters or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def one(self, statement: str, *parameters: object) -> Any:
        ((value,),) = self.sql(statement, *parameters)
        return value

    @property
    def now(self) -> datetime:
        now: datetime = self.one("SELECT clock_timestamp()")
        return now

    def ago(self, **span: float) -> datetime:
        return self.now - timedelta(**span)

    def insert(self, table: str, **columns: Any) -> Any:
        """Returns the id, where the database draws it."""
        values = [Jsonb(value) if isinstance(value, dict) else value for value in columns.values()]
        marks = ", ".join(["%s"] * len(values))
        drawn = " RETURNING id" if table in DRAWN else ""
        rows = self.sql(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}){drawn}", *values)  # noqa: S608
        return rows[0][0] if drawn else None

    def change(self, name: str, table: str, sets: str, **parameters: object) -> None:
        """Exactly one row."""
        statement = f"UPDATE {table} SET {sets} WHERE {WHICH[table]}"  # noqa: S608 - our own
        assert self.db.execute(statement, {"name": name, **parameters}).rowcount == 1, statement  # type: ignore[arg-type]

    def change_all(self, table: str, sets: str, run_id: int, **of: object) -> None:
        """Rows of a run."""
        where = " AND ".join(["run_id = %(run)s", *(f"{name} = %({name})s" for name in of)])
        self.db.execute(f"UPDATE {table} SET {sets} WHERE {where}", {"run": run_id, **of})  # type: ignore[arg-type] # noqa: S608

    def in_shop(self, prices: dict[str, str], **headers: str) -> None:
        """Set prices in a shop, all in one call."""
        set_prices(self.sandbox.url, prices, {name.replace("_", "-"): value for name, value in headers.items()})

    def write(self, method: str, path: str, body: dict[str, str], **headers: str) -> int:
        """Make a call to the price list, as our program or another client would, and return the status."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(  # noqa: S310 - the sandbox
            f"{self.sandbox.url}/price-list/articles{path}", json.dumps(body).encode(), named, method=method
        )
        try:
            with urlopen(request, timeout=10) as answer:  # noqa: S310
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    def put(self, sku: str, price: str, **headers: str) -> int:
        return self.write("PUT", f"/{sku}/price", {"price": price}, **headers)

    def price(self, sku: str) -> str:
        with urlopen(f"{self.sandbox.url}/price-list/articles/{sku}", timeout=10) as answer:  # noqa: S310
            return str(json.load(answer)["price"])

    def read(self, sku: str) -> int:
        """As our program would; whatever is answered."""
        try:
            with urlopen(f"{self.sandbox.url}/price-list/articles/{sku}", timeout=10) as answer:  # noqa: S310
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    # Rows of the program.

    def run(self, name: str, flow: str, words: list[str], *, workflow: str | None = None, **columns: Any) -> int:
        """A run and the moves through these words; a workflow makes it orchestrated."""
        given = {"tenant_id": "t", "flow": flow, "event_key": name, "orchestrated": workflow is not None}
        given |= {"status": words[-1], "created_at": self.ago(minutes=2), "started_at": self.ago(minutes=2)}
        run_id = self.runs[name] = int(self.insert("runs", **given | columns))
        for before, after in pairwise(words):
            self.insert("run_log", run_id=run_id, at=self.now, level="info", message=f"{before} -> {after}")
        if workflow is not None:
            stamp = int(self.ago(minutes=2).timestamp() * 1000)
            self.insert("dbos.workflow_status", workflow_uuid=f"t/{name}", status=workflow, executor_id=ALIVE,
                        created_at=stamp, updated_at=stamp, priority=0)  # fmt: skip
        return run_id

    def stage(self, run_id: int, expected: int, **columns: Any) -> None:
        now = self.now
        given = {"run_id": run_id, "stage": "write", "expected": expected, "fanned_out_at": now, "started_at": now}
        given |= {"deadline_at": now + timedelta(minutes=10), "progress_at": now, "budget": BUDGET}
        self.insert("stages", **given | columns)

    def claim(self, run_id: int, taken: int, replica: str = ALIVE, **counters: int) -> int:
        given = {"replica_id": replica, "run_id": run_id, "stage": "write", "lane_id": 1, "taken_at": self.now}
        return int(self.insert("claims", **given, taken=taken, **counters))

    def item(self, run_id: int, key: str, status: str, claim_id: int | None, failures: int = 0, **columns: Any) -> int:
        """Executed as often as it failed, and once more if it came to an end that is no failure."""
        now = self.now
        given = {"tenant_id": "t", "run_id": run_id, "flow": "shop", "stage": "write", "key": key, "target": key}
        given |= {"lane_id": 1, "due_at": now, "claim_id": claim_id, "status": status}
        given |= {"finished_at": None if status == "open" else now}
        given |= {"executions": failures + (status in ("succeeded", "ignored"))}
        item_id = self.items[key] = int(self.insert("items", **given | columns))
        for execution in range(1, failures + 1):
            self.attempt(key, execution)
        return item_id

    def attempt(self, key: str, execution: int, **columns: Any) -> None:
        facts = {"event_id": f"shop-write-{key}", "round": 0, "at": self.now, "replica_id": ALIVE}
        error = {"error_code": "TIMEOUT", "error": "no answer", "ambiguous": True}
        run_id = self.one("SELECT run_id FROM items WHERE id = %s", self.items[key])
        row = {"run_id": run_id, "item_id": self.items[key], "execution": execution, **facts, **error}
        self.insert("attempts", **row | columns)

    def effect(self, run_id: int, key: str, class_: str, wanted: dict[str, str], *, sends: int = 1) -> str:
        """The intent, before the call. Returns the vendor's key; the item comes later, with `settle`."""
        name = self.effects[key] = uuid.uuid4()
        now = self.now if sends else None
        facts = {"tenant_id": "t", "run_id": run_id, "item_id": 0, "stage": "write", "key": key, "target": key}
        facts |= {"round": 0, "class": class_, "wanted": wanted, "claim_id": 1, "quiet": timedelta(seconds=2)}
        facts |= {"sends": sends, "first_send_at": now, "last_send_at": now}
        state = {"state": "sending", "settled_at": None} if sends else {"state": "applied", "settled_at": self.now}
        self.insert("effects", id=name, **facts, **state)
        return str(name)

    def event(self, aggregate: str, key: str, type_: str, payload: dict[str, Any], **given: Any) -> None:
        published = given.pop("published", True)
        facts = {"tenant_id": "t", "event_key": key, "event_type": type_, "aggregate": aggregate, "payload": payload}
        facts |= {"correlation_id": "c", "producer": "ecluse", "occurred_at": self.now}
        if published:
            facts |= {"published_seq": self.one("SELECT nextval('events_published')"), "published_at": self.now}
        self.insert("events_outbox", **facts | given)

    def lease(self, key: str, fence: int, **columns: Any) -> None:
        now, ttl = self.now, timedelta(minutes=2)
        given = {"tenant_id": "t", "key": key, "fence": fence, "owner": "me", "replica_id": ALIVE, "attempt": 1}
        given |= {"ttl": ttl, "acquired_at": now, "expires_at": now + ttl}
        self.insert("leases", **given | columns)

    def settle(self, key: str, state: str) -> None:
        settled_at = None if state in ("planned", "sending", "unknown") else self.now
        self.change(key, "effects", "state = %(state)s, settled_at = %(at)s", state=state, at=settled_at)

    def resend(self, key: str) -> None:
        """One more intent to send, under one more claim."""
        self.change(key, "effects", "sends = sends + 1")
        self.claim(self.one("SELECT run_id FROM effects WHERE key = %s", key), 1, released=1)


# The tests' server has just been started, and nothing is called stuck so early: for this database it is older. A copy
# of the database has the function and not the setting.
OLD_SERVER = """
CREATE FUNCTION public.pg_postmaster_start_time() RETURNS timestamptz
LANGUAGE sql AS $$ SELECT now() - interval '1 hour' $$
"""
AS_IF_OLD = """
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, pg_catalog', current_database()); END $$
"""


def healthy(world: World) -> None:
    """Runs at every point of their lives, writes that went every way they can go."""
    world.sql(UNGUARDED)
    world.sql(OLD_SERVER)
    world.insert("lanes", name="price-list:main", per_second=1000.0)
    world.insert("replicas", id=ALIVE, host="h", pid=1, started_at=world.ago(hours=1))
    world.insert("replicas", id=DIED, host="h", pid=2, state="dead", started_at=world.ago(hours=1),
                 beat_at=world.ago(minutes=2), ended_at=world.ago(minutes=1))  # fmt: skip
    _ended(world)
    _running(world)
    world.run("waiting", "shop", ["queued"], workflow="ENQUEUED", state="queued", started_at=None)
    counts = {"selected": 0, "successful": 0, "failed": 0, "ignored": 0, "ended_at": world.now}
    forced = {"state": "failed", "end_cause": "operator"}
    world.run("stopped", "shop", ["queued", "failed"], workflow="SUCCESS", **forced, **counts)  # of an older program
    words = ["queued", "running", "partial"]
    cancelled = world.run("cancelled", "shop", words, workflow="SUCCESS", state="running", selected=2)
    world.insert("outcomes", run_id=cancelled, target="a", outcome="successful")
    world.insert("outcomes", run_id=cancelled, target="b", outcome="failed", error_code="CANCELLED")
    world.change(
        "cancelled",
        "runs",
        "state = 'cancelled', end_cause = 'operator', ended_by = 'laptop', cancelled = 1, successful = 1, failed = 1,"
        " ignored = 0, ended_at = clock_timestamp()",
    )
    # A flow with words of its own.
    words = ["QUEUED", "APPLYING", "APPLIED"]
    world.run("pricing", "pricing", words, workflow="SUCCESS", state="succeeded", end_cause="normal", **counts)
    # One that is only items.
    one = {"selected": 1, "successful": 1, "failed": 0, "ignored": 0, "ended_at": world.now, "end_cause": "normal"}
    chore = world.run("chore", "chores", ["queued", "running", "completed"], state="succeeded", **one)
    world.stage(chore, 1, ended_at=world.now, end_cause="run ended", budget=None)
    world.item(chore, "chore", "succeeded", world.claim(chore, 1, succeeded=1))
    world.insert("outcomes", run_id=chore, target="chore", outcome="successful")
    scheduled(world)
    _published(world)
    _held(world)
    _transcribed(world)
    _automated(world)
    _paid(world)
    priced(world)
    # items.id is drawn before the effects know it
    world.sql("UPDATE effects e SET item_id = i.id FROM items i WHERE i.run_id = e.run_id AND i.key = e.key")


SPEND_TOTALS = """
INSERT INTO spend_totals (tenant_id, scope, subject_id, period, starts_on, spent, reserved) VALUES
    ('t', 'tenant', 0, 'day', '2026-03-02', 1.25, 0.5), ('t', 'tenant', 0, 'month', '2026-03-01', 1.25, 0.5),
    ('t', 'schedule', 9, 'day', '2026-03-02', 1.25, 0.5), ('t', 'schedule', 9, 'month', '2026-03-01', 1.25, 0.5),
    ('t', 'run', %(run)s, 'all', '2026-03-02', 1.25, 0.5)
"""
PAID_BUDGET = """
INSERT INTO budgets (tenant_id, scope, subject_id, period, amount, created_at, updated_at)
VALUES ('t', 'tenant', 0, 'day', %s, '2026-03-01', '2026-03-01')
"""


def _paid(world: World) -> None:
    """A call that has cost 1 of 1.2 reserved, one that may have been made for 0.25, and one in flight for 0.5."""
    run = world.runs["running"]
    given: dict[str, Any] = {
        "tenant_id": "t",
        "run_id": run,
        "root_run_id": run,
        "root_day": "2026-03-02",
        "at": world.now,
    }
    given |= {"schedule_id": 9, "day": "2026-03-02", "vendor": "llm", "model": "m", "priced": True}
    for n, (state, reserved, cost) in enumerate(
        [("settled", 1.2, 1), ("unknown", 0.25, None), ("reserved", 0.5, None)]
    ):
        world.insert("paid_calls", item_id=90_000 + n, claim_id=1, state=state, reserved=reserved, cost=cost, **given)
    world.db.execute(SPEND_TOTALS, {"run": run})
    world.sql(PAID_BUDGET, 1.75)


def scheduled(world: World) -> None:
    """One that has done everything that can be done with an instant, and another that is due to come."""
    due = world.now.replace(microsecond=0) - timedelta(minutes=30)
    given = {"tenant_id": "t", "flow": "shop", "cron": "*/5 * * * *", "zone_rules": "1", "created_at": due}
    given |= {"updated_at": due, "next_due_at": world.now, "handled_until": due + timedelta(minutes=20)}
    schedule = world.insert("schedules", name="often", **given)
    world.insert("schedules", name="later", **given)
    words = {"state": "failed", "end_cause": "operator", "ended_at": world.now}
    counts = {"selected": 0, "successful": 0, "failed": 0, "ignored": 0}
    for key in (f"schedule:{schedule}:{int(due.timestamp()) * 1000}", f"schedule:{schedule}:manual-1"):
        world.run(key, "shop", ["queued", "failed"], workflow="SUCCESS", schedule_id=schedule, **words, **counts)
        world.runs.setdefault("fired", world.runs.pop(key))
    for n, state in enumerate(["fired", "missed", "skipped", "waiting"]):
        world.insert("schedule_slots", schedule_id=schedule, due_at=due + timedelta(minutes=5 * n), tenant_id="t",
                     state=state, reason="why", decided_at=world.now,
                     run_id=world.runs["fired"] if state == "fired" else None)  # fmt: skip
    _fired_as_job(world, due, given)


def _fired_as_job(world: World, due: datetime, given: dict[str, Any]) -> None:
    schedule = world.insert("schedules", name="backup", **given | {"flow": "jobs"})
    retries = {"max_retries": 0, "backoff_ms": 1000, "backoff_type": "fixed"}
    what = {"tenant_id": "t", "server_instance_id": "server", "payload": {}}
    world.insert("job_schedules", id="backup", schedule_id=schedule, job_type="noop", run_count=1, created_by_id="me",
                 **what, **retries)  # fmt: skip
    job = {"host_id": "host", "type": "noop", "max_attempts": 3, "backoff_ms": 1000, "backoff_type": "fixed"}
    job |= {"status": "succeeded", "ended_at": due + timedelta(minutes=4)}
    world.insert("jobs", id="job-1", key=f"schedule:backup:{int(due.timestamp()) * 1000}", job_schedule_id="backup",
                 due_at=due, created_by="scheduler", created_at=world.now, **what, **job)  # fmt: skip
    world.insert("schedule_slots", schedule_id=schedule, due_at=due, tenant_id="t", state="fired", reference="job-1",
                 decided_at=world.now)  # fmt: skip
    # The first was stopped and reported by its agent before the end of its lease, the second was ended after it.
    ends = [("failed", "LEASE_LOST", -15, 70), ("failed", "LEASE_LOST", None, 30), ("succeeded", None, 0, 30)]
    for n, (status, code, exit_code, lease) in enumerate(ends, 1):
        begun, over = due + timedelta(minutes=n), due + timedelta(minutes=n, seconds=40)
        world.insert("job_runs", id=f"attempt-{n}", tenant_id="t", job_id="job-1", host_id="host", attempt=n, fence=1,
                     status=status, error_code=code, exit_code=exit_code, due_at=due, agent_id="agent",
                     started_at=begun, ended_at=over, lease_ends_at=begun + timedelta(seconds=lease),
                     claim_key=uuid.uuid4())  # fmt: skip


def _ended(world: World) -> None:
    run_id = world.run("ended", "shop", ["queued", "running", "partial"], workflow="SUCCESS", state="running")
    first = world.claim(run_id, 8, succeeded=2, failed=4, ignored=1, released=1)
    second = world.claim(run_id, 1, succeeded=1)

    world.put("SKU-00001", "12.50", Idempotency_Key=world.effect(run_id, "SKU-00001", "C2", {"price": "12.50"}))
    world.settle("SKU-00001", "applied")
    world.item(run_id, "SKU-00001", "succeeded", first)

    new = {"name": "Étau", "price": "7.40"}
    key = world.effect(run_id, "new", "C1", new, sends=2)
    for _ in range(2):  # the first answer was lost
        world.write("POST", "", new, Idempotency_Key=key)
    world.settle("new", "applied")
    world.item(run_id, "new", "succeeded", second, failures=1)

    world.put("SKU-00003", "30.00", X_Client="another client")
    world.effect(run_id, "SKU-00003", "C2", {"price": "30.00"}, sends=0)
    world.item(run_id, "SKU-00003", "succeeded", first)

    world.put("SKU-00004", "many", Idempotency_Key=world.effect(run_id, "SKU-00004", "C2", {"price": "many"}))
    world.settle("SKU-00004", "rejected")
    world.item(run_id, "SKU-00004", "failed", first, failures=1)

    world.put("SKU-00005", "50.00", Idempotency_Key=world.effect(run_id, "SKU-00005", "C2", {"price": "50.00"}))
    world.settle("SKU-00005", "unknown")
    world.item(run_id, "SKU-00005", "failed", first, failures=1)

    world.item(run_id, "SKU-00006", "ignored", first)

    key = world.effect(run_id, "SKU-00007", "C2", {"price": "70.00"})
    world.put("SKU-00007", "71.00", X_Client="another client")
    world.put("SKU-00007", "70.00", Idempotency_Key=key, If_Match='"1"')
    world.settle("SKU-00007", "conflict")
    world.item(run_id, "SKU-00007", "failed", first, failures=1)

    world.item(run_id, "SKU-00008", "failed", first, failures=BUDGET)

    world.stage(run_id, 8, ended_at=world.now, end_cause="done")
    outcomes = ["successful"] * 3 + ["failed", "failed", "ignored", "failed", "failed"]
    for target, outcome in zip(world.items, outcomes, strict=True):
        doubt = target == "SKU-00005"
        world.insert("outcomes", run_id=run_id, target=target, outcome=outcome, effect_may_exist=doubt)
    counts = "selected = 8, successful = 3, failed = 4, ignored = 1"
    world.change("ended", "runs", f"state = 'partial', {counts}, ended_at = clock_timestamp(), end_cause = 'normal'")


def _running(world: World) -> None:
    run_id = world.run("running", "shop", ["queued", "running"], workflow="PENDING", state="running", selected=2)
    world.stage(run_id, 2)
    world.item(run_id, "in hand", "open", world.claim(run_id, 1))
    # Sent by a worker that then died; it has not been read back yet.
    world.claim(run_id, 1, DIED, released=1)
    world.put("SKU-00009", "90.00", Idempotency_Key=world.effect(run_id, "SKU-00009", "C2", {"price": "90.00"}))
    world.item(run_id, "SKU-00009", "open", None, crashes=1)
    for target in ("in hand", "SKU-00009"):
        world.insert("outcomes", run_id=run_id, target=target)


def _published(world: World) -> None:
    """A run with all its events, another with its first one; and some of another aggregate, which no sink takes."""
    counts = {"selected": 0, "successful": 0, "failed": 0, "ignored": 0}
    end = {"ended_at": world.now, "end_cause": "normal"}
    words = ["queued", "running", "completed"]
    run_id = world.run("published", "shop", words, workflow="SUCCESS", state="succeeded", **counts, **end)
    payload = {"run_id": str(run_id), "status": "completed", "end_cause": "normal", **counts}
    world.event(f"run:{run_id}", "published:started", "shop/started", {"run_id": str(run_id)})
    world.event(f"run:{run_id}", "published:selected", "shop/selected", {"run_id": str(run_id), "selected": 0})
    world.event(f"run:{run_id}", "published:completed", "shop/completed", payload)
    run_id = world.run("new", "shop", ["queued"], workflow="ENQUEUED", state="queued", started_at=None)
    world.event(f"run:{run_id}", "new:started", "shop/started", {"run_id": str(run_id)}, published=False)
    for n in range(2):
        world.event("fiche:1", f"fiche-{n}", "fiche/read", {}, published=False, occurred_at=world.ago(minutes=3))
    world.change("fiche-0", "events_outbox", "tries = 3, error = 'down', try_at = now() + interval '10 s'")


def _held(world: World) -> None:
    """A key that went through every kind of end; one held by a process, one by a run."""
    ends = [("released", 1), ("expired", 1), ("expired", 2), ("forced", 3)]
    for fence, (cause, attempt) in enumerate(ends, 1):
        at = world.ago(minutes=30 - fence)
        end = {"ended_at": at + timedelta(seconds=30), "end_cause": cause, "reason": "why"}
        world.lease("a", fence, attempt=attempt, acquired_at=at, **end)
    world.lease("a", 5)
    world.lease("of a run", 1, run_id=world.runs["running"], ttl=None, expires_at=None)


def _transcribed(world: World) -> None:
    """A fiche with two recordings: one has its transcript, after the worker had died with it once; the other failed."""
    now = world.now
    fiche = world.insert("fiche_cache", tenant_id="default", fiche_id="7", created_at=now, updated_at=now)
    whole = {"fiche_cache_id": fiche, "created_at": now, "updated_at": now}
    text = {"has_transcription": True, "transcription_text": "Bonjour", "transcribed_at": now}
    world.insert("recordings", call_id="7-1", **whole, **text)
    world.insert("recordings", call_id="7-2", **whole)
    run_id = world.run("fiche", "transcription", ["queued", "running", "partial"], state="running", selected=2)
    world.sql(
        "INSERT INTO transcription_runs (run_id, tenant_id, fiche_id, fiche_cache_id, target_total, processed, cached,"
        " failed) VALUES (%s, 't', '7', %s, 2, 2, 0, 1)",
        run_id,
        fiche,
    )
    for stage, expected in (("refresh", 1), ("recordings", 2)):
        world.stage(run_id, expected, stage=stage, ended_at=now, end_cause="run ended")
    done = {"replica_id": ALIVE, "run_id": run_id, "lane_id": 1, "taken_at": now}
    first = world.insert("claims", stage="refresh", taken=1, succeeded=1, **done)
    world.item(run_id, "fiche 7", "succeeded", first, flow="transcription", stage="refresh", target="")
    second = world.insert("claims", stage="recordings", taken=2, succeeded=1, failed=1, **done)
    recording = {"flow": "transcription", "stage": "recordings"}
    world.item(run_id, "7-1", "succeeded", second, crashes=1, **recording)
    world.item(run_id, "7-2", "failed", second, failures=1, **recording)
    world.attempt("7-2", 1, outage=True)
    world.attempt("7-1", 0)
    world.sql("UPDATE attempts SET error_code = 'WORKER_CRASHED', maybe_paid = true WHERE execution = 0")
    world.insert("outcomes", run_id=run_id, target="7-1", outcome="successful")
    world.insert("outcomes", run_id=run_id, target="7-2", outcome="failed")
    world.event(f"run:{run_id}", "fiche:fiche/transcribed", "fiche/transcribed", {"run_id": str(run_id)})
    counts = "successful = 1, failed = 1, ignored = 0, ended_at = clock_timestamp(), end_cause = 'normal'"
    world.change("fiche", "runs", f"status = 'partial', state = 'partial', {counts}")


def _automated(world: World) -> None:
    """A schedule by hand and its one run: the fiche above was left out because it has failed before, another has its
    transcript and its audit."""
    now = world.now
    made = {"tenant_id": "t", "created_at": now, "updated_at": now}
    schedule = world.insert("schedules", name="calls", flow="automation", zone_rules="1", handled_until=now, **made)
    run_id = world.run("calls", "automation", ["queued", "running", "partial"], workflow="SUCCESS", state="running",
                       schedule_id=schedule)  # fmt: skip
    settings = {"schedule_type": "MANUAL", "fiche_selection_mode": "manual", "last_run_status": "partial"}
    world.insert("automation_settings", id=schedule, total_runs=1, partial_runs=1, **settings)
    summary = {"successful_fiches": 1, "failed_fiches": 1, "ignored_fiches": 0, "total_fiches": 2}
    snapshot = {"run_audits": True, "run_transcription": True}
    world.insert("automation_run_facts", run_id=run_id, schedule_id=schedule, config_snapshot=snapshot,
                 result_summary=summary, transcriptions_run=0, audits_run=1)  # fmt: skip
    fiche = world.insert("fiche_cache", fiche_id="8", **made)
    text = {"has_transcription": True, "transcription_text": "Bonjour", "transcribed_at": now}
    world.insert("recordings", fiche_cache_id=fiche, call_id="8-1", created_at=now, updated_at=now, **text)
    world.insert("automation_run_fiches", run_id=run_id, fiche_id="8", fiche_cache_id=fiche, recordings_count=1)
    world.stage(run_id, 0, stage="transcribe", units=1, ended_at=world.now, end_cause="done")
    world.stage(run_id, 1, stage="audit", ended_at=world.now, end_cause="done")
    done = {"replica_id": ALIVE, "run_id": run_id, "lane_id": 1, "taken_at": now, "stage": "audit"}
    claim = world.insert("claims", taken=1, succeeded=1, **done)
    world.item(run_id, "8-1-audit", "succeeded", claim, flow="automation", stage="audit", target="8")
    world.sql(
        "INSERT INTO audits (tenant_id, run_id, automation_run_id, fiche_cache_id, fiche_id, audit_config_id,"
        " config_version, trigger_source, status, score, result, is_latest, created_at, finished_at)"
        " VALUES ('t', %s, %s, %s, '8', 1, 1, 'automation', 'completed', 50, '{}', true, now(), now())",
        run_id, run_id, fiche,
    )  # fmt: skip
    world.insert("outcomes", run_id=run_id, target="7", outcome="failed")
    world.insert("outcomes", run_id=run_id, target="8", outcome="successful")
    world.event(f"run:{run_id}", "calls:end", "automation.run.completed", {"run_id": str(run_id)})
    counts = "successful = 1, failed = 1, ignored = 0, selected = 2, ended_at = clock_timestamp(), end_cause = 'normal'"
    world.change("calls", "runs", f"status = 'partial', state = 'partial', {counts}")
