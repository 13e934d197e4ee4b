"""The engine's tables: runs, stages, items, claims, attempts, outcomes, run_log, lanes, replicas.

Hot tables have no foreign keys (they cost a check per row) and `status` is in no index (so that finishing an item is a
HOT update); the auditor checks what a foreign key would guarantee.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

CLOCK = """
CREATE TABLE clock_offset (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    "offset" interval NOT NULL DEFAULT '0'
);
INSERT INTO clock_offset DEFAULT VALUES;
COMMENT ON TABLE clock_offset IS 'Zero outside tests, which move it instead of waiting.';

CREATE FUNCTION ecluse_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT clock_timestamp() + (SELECT "offset" FROM public.clock_offset) $$;
"""

RUNS = """
CREATE TABLE runs (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id      text NOT NULL,
    flow           text NOT NULL,
    event_key      text NOT NULL,
    parent_run_id  bigint REFERENCES runs,
    orchestrated   boolean NOT NULL,
    status         text NOT NULL,
    state          text NOT NULL CHECK (state IN
                   ('draft', 'queued', 'running', 'succeeded', 'partial', 'failed', 'skipped', 'reverted', 'expired')),
    phase          text,
    input          jsonb NOT NULL DEFAULT '{}',
    correlation_id text,
    selected       integer,
    successful     integer,
    failed         integer,
    ignored        integer,
    reason         text,
    error_code     text,
    error_message  text,
    error_details  jsonb,
    end_cause      text CHECK (end_cause IN ('normal', 'operator', 'stale', 'catastrophic')),
    created_at     timestamptz NOT NULL,
    started_at     timestamptz,
    ended_at       timestamptz,
    CONSTRAINT runs_event_key UNIQUE (tenant_id, event_key),
    CONSTRAINT runs_end CHECK ((state IN ('draft', 'queued', 'running')) = (ended_at IS NULL)),
    CONSTRAINT runs_end_cause CHECK ((ended_at IS NULL) = (end_cause IS NULL)),
    CONSTRAINT runs_conservation CHECK (ended_at IS NULL OR
        (selected IS NOT NULL AND selected = successful + failed + ignored))
);
CREATE INDEX runs_open ON runs (id) WHERE ended_at IS NULL;
COMMENT ON COLUMN runs.status IS 'the flow''s own word; state is the neutral one, set beside it by the one setter';
COMMENT ON COLUMN runs.orchestrated IS 'a workflow leads it; otherwise it is only items, and closes itself';

CREATE TABLE stages (
    run_id        bigint NOT NULL REFERENCES runs,
    stage         text NOT NULL,
    expected      integer NOT NULL DEFAULT 0,
    fanned_out_at timestamptz,
    started_at    timestamptz NOT NULL,
    deadline_at   timestamptz NOT NULL,
    round         smallint NOT NULL DEFAULT 0,
    progress      integer NOT NULL DEFAULT 0,
    progress_at   timestamptz NOT NULL,
    ended_at      timestamptz,
    end_cause     text CHECK (end_cause IN ('done', 'timeout', 'run ended')),
    PRIMARY KEY (run_id, stage)
);
"""

WORK = """
CREATE TABLE lanes (
    id            integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text NOT NULL UNIQUE,
    max_in_flight integer CHECK (max_in_flight > 0),
    max_per_key   integer CHECK (max_per_key > 0),
    per_second    double precision CHECK (per_second > 0),
    burst         integer NOT NULL DEFAULT 1 CHECK (burst > 0),
    next_free_at  timestamptz NOT NULL DEFAULT '-infinity',
    held_until    timestamptz,
    held_reason   text
);
COMMENT ON TABLE lanes IS 'where an item waits: one credential (or quota) at one vendor; caps hold over all replicas';
COMMENT ON COLUMN lanes.next_free_at IS 'GCRA: the instant at which the next call conforms';

CREATE TABLE items (
    id          bigint GENERATED ALWAYS AS IDENTITY (CACHE 100) PRIMARY KEY,
    tenant_id   text NOT NULL,
    run_id      bigint NOT NULL,
    flow        text NOT NULL,
    stage       text NOT NULL,
    key         text NOT NULL,
    target      text NOT NULL,
    lane_id     integer NOT NULL,
    group_key   text,
    due_at      timestamptz NOT NULL,
    claim_id    bigint,
    status      text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'succeeded', 'failed', 'ignored')),
    permanent   boolean NOT NULL DEFAULT false,
    round       smallint NOT NULL DEFAULT 0,
    executions  smallint NOT NULL DEFAULT 0,
    crashes     smallint NOT NULL DEFAULT 0,
    payload     jsonb,
    result      jsonb,
    error_code  text,
    error       text,
    finished_at timestamptz,
    CONSTRAINT items_key UNIQUE (run_id, stage, key),
    CONSTRAINT items_finished CHECK ((status = 'open') = (finished_at IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX items_waiting ON items (lane_id, tenant_id, due_at, id) WHERE claim_id IS NULL;
CREATE INDEX items_group ON items (claim_id) WHERE group_key IS NOT NULL;
COMMENT ON COLUMN items.claim_id IS 'NULL = waiting; else the claim that has or had it in hand';
COMMENT ON COLUMN items.permanent IS 'failed for good: a further round would not help';

CREATE TABLE claims (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    replica_id text NOT NULL,
    run_id     bigint NOT NULL,
    stage      text NOT NULL,
    lane_id    integer NOT NULL,
    fence      integer NOT NULL DEFAULT 1,
    taken      integer NOT NULL,
    succeeded  integer NOT NULL DEFAULT 0,
    failed     integer NOT NULL DEFAULT 0,
    ignored    integer NOT NULL DEFAULT 0,
    released   integer NOT NULL DEFAULT 0,
    taken_at   timestamptz NOT NULL,
    in_flight  integer GENERATED ALWAYS AS (taken - succeeded - failed - ignored - released) STORED,
    CONSTRAINT claims_in_flight CHECK (taken >= succeeded + failed + ignored + released)
);
CREATE INDEX claims_stage ON claims (run_id, stage);
CREATE INDEX claims_open ON claims (lane_id, replica_id) WHERE in_flight > 0;
COMMENT ON TABLE claims IS 'one row per claim statement and (run, stage): fence and counters for all its items';

CREATE TABLE attempts (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id     bigint NOT NULL,
    item_id    bigint NOT NULL,
    event_id   text NOT NULL,
    round      smallint NOT NULL,
    execution  smallint NOT NULL,
    at         timestamptz NOT NULL,
    replica_id text NOT NULL,
    error_code text NOT NULL,
    error      text NOT NULL,
    ambiguous  boolean NOT NULL,
    retry_at   timestamptz
);
CREATE INDEX attempts_item ON attempts (item_id);
CREATE INDEX attempts_run ON attempts (run_id);
COMMENT ON TABLE attempts IS 'failed or ambiguous executions, one row each; successes are the item itself';
"""

OUTCOMES = """
CREATE TABLE outcomes (
    run_id     bigint NOT NULL,
    target     text NOT NULL,
    outcome    text CHECK (outcome IN ('successful', 'failed', 'ignored')),
    error_code text,
    reason     text,
    PRIMARY KEY (run_id, target)
) WITH (fillfactor = 45);
COMMENT ON TABLE outcomes IS 'what became of each target: written at selection with outcome NULL, none NULL at the end';

CREATE TABLE run_log (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id   bigint NOT NULL,
    at       timestamptz NOT NULL,
    level    text NOT NULL CHECK (level IN ('info', 'warning', 'error')),
    message  text NOT NULL,
    event_id text,
    data     jsonb
);
CREATE INDEX run_log_run ON run_log (run_id, id);

CREATE TABLE replicas (
    id         text PRIMARY KEY,
    host       text NOT NULL,
    pid        integer NOT NULL,
    state      text NOT NULL DEFAULT 'live' CHECK (state IN ('live', 'dead', 'left')),
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    beat_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at   timestamptz
);
COMMENT ON TABLE replicas IS 'heartbeats, on real time; a row that ended stays for a while as a tombstone';
"""

# The guard locks the run FOR SHARE before it reads it: otherwise a late writer with an open transaction could add an
# outcome to a run that is being finalized (write skew). Statement level: a row-level trigger is ten times slower.
CONSERVATION = """
CREATE FUNCTION outcomes_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    affected bigint[] := (SELECT array_agg(DISTINCT run_id) FROM touched);
    ended bigint;
BEGIN
    PERFORM 1 FROM runs WHERE id = ANY(affected) ORDER BY id FOR SHARE;
    SELECT id INTO ended FROM runs WHERE id = ANY(affected) AND ended_at IS NOT NULL LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'outcomes of run % are final: it has ended', ended
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER outcomes_insert AFTER INSERT ON outcomes REFERENCING NEW TABLE AS touched
    FOR EACH STATEMENT EXECUTE FUNCTION outcomes_guard();
CREATE TRIGGER outcomes_update AFTER UPDATE ON outcomes REFERENCING NEW TABLE AS touched
    FOR EACH STATEMENT EXECUTE FUNCTION outcomes_guard();
CREATE TRIGGER outcomes_delete AFTER DELETE ON outcomes REFERENCING OLD TABLE AS touched
    FOR EACH STATEMENT EXECUTE FUNCTION outcomes_guard();

CREATE FUNCTION outcomes_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outcomes cannot be moved to another run, nor truncated: delete those of an open run instead'
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER outcomes_move BEFORE UPDATE OF run_id ON outcomes FOR EACH STATEMENT EXECUTE FUNCTION outcomes_refuse();
CREATE TRIGGER outcomes_truncate BEFORE TRUNCATE ON outcomes FOR EACH STATEMENT EXECUTE FUNCTION outcomes_refuse();

CREATE FUNCTION runs_conserve() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    n record;
BEGIN
    -- an older snapshot would count what was true before somebody else committed
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'end runs in a read committed transaction' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    SELECT count(*) AS selected,
           count(*) FILTER (WHERE outcome = 'successful') AS successful,
           count(*) FILTER (WHERE outcome = 'failed') AS failed,
           count(*) FILTER (WHERE outcome = 'ignored') AS ignored
      INTO n FROM outcomes WHERE run_id = NEW.id;
    IF (n.selected, n.successful, n.failed, n.ignored)
       IS DISTINCT FROM (NEW.selected::bigint, NEW.successful::bigint, NEW.failed::bigint, NEW.ignored::bigint) THEN
        RAISE EXCEPTION
            'run % does not add up: % = % + % + % (selected, successful, failed, ignored), outcomes % = % + % + %',
            NEW.id, NEW.selected, NEW.successful, NEW.failed, NEW.ignored, n.selected, n.successful, n.failed, n.ignored
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER runs_conserve AFTER INSERT OR UPDATE ON runs DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.ended_at IS NOT NULL) EXECUTE FUNCTION runs_conserve();
"""


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    for part in (CLOCK, RUNS, WORK, OUTCOMES, CONSERVATION):
        connection.execute(part)  # type: ignore[union-attr]
