"""The sealing key is replaced while servers go on, and webhook URLs of earlier versions are sealed."""

from __future__ import annotations

import asyncio
import base64

import psycopg
import pytest

from ecluse.access import maintenance, sealing
from ecluse.access.secrets import Secrets
from ecluse.base.crash import POINTS_OF_ROTATION
from ecluse.base.errors import SetUpError
from ecluse.bootstrap import keep_days
from ecluse.db.connect import pool
from ecluse.doctor.database import check_database
from ecluse.notify.webhook_signature import schedule_url_name
from ecluse.settings import Settings

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
BY_KEY = "SELECT key_id, count(*) FROM secrets GROUP BY 1"
KEEP = keep_days(Settings())
COUNT = 2 * sealing.BATCH + 30
URL = "https://ann:pw@hooks.example.com:8443/services/T00/canary?token=canary"
ORIGIN = "https://hooks.example.com:8443/…"


def encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


@pytest.fixture
async def connection(dsn):
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def stored(connection):
    """Secrets that the old key has sealed, last changed long ago."""
    for n in range(COUNT):
        await Secrets(OLD).put(connection, "default", f"s{n}", f"value {n}")
    await connection.execute("UPDATE secrets SET updated_at = '2020-01-01Z'")


async def values(connection, secrets: Secrets) -> list[str]:
    return [await secrets.get(connection, "default", f"s{n}") for n in range(COUNT)]


@pytest.fixture
def rotating(ecluse):
    """`ecluse secrets rotate`, from the old key to the new one."""
    keys = {"ECLUSE_SECRET_KEY": encoded(NEW), "ECLUSE_SECRET_KEY_OLD": encoded(OLD)}
    return lambda **variables: ecluse("secrets", "rotate", **(keys | variables))


@pytest.mark.parametrize("point", POINTS_OF_ROTATION)
async def test_a_rotation_that_is_killed_goes_on_later_and_replicas_with_both_keys_work_meanwhile(
    connection, stored, rotating, query, point
):
    wanted, both = [f"value {n}" for n in range(COUNT)], Secrets(NEW, OLD)
    assert await values(connection, both) == wanted
    assert rotating(ECLUSE_CRASH_AT=point).code == -9
    done = sealing.BATCH if point == "after rotation" else 0
    assert dict(query(BY_KEY)).get(both.key_id, 0) == done
    assert await values(connection, both) == wanted
    await both.put(connection, "default", "s0", "value 0")
    answer = rotating()
    assert (answer.code, both.key_id in answer.out) == (0, True), answer.err
    assert query(BY_KEY) == [(both.key_id, COUNT)]
    assert await values(connection, Secrets(NEW)) == wanted
    assert query("SELECT count(*) FROM secrets WHERE updated_at > '2020-01-01Z'") == [(1,)], "the one that was put"
    assert query("SELECT action, subject FROM audit_trail") == [("secrets.rotate", f"key:{both.key_id}")]


async def test_a_server_with_both_keys_reads_all_the_time_while_rotations_are_killed_and_run(
    connection, stored, rotating, query
):
    wanted, both, found = [f"value {n}" for n in range(COUNT)], Secrets(NEW, OLD), []

    def rotate() -> list[int]:
        killed = [rotating(ECLUSE_CRASH_AT=point).code for point in POINTS_OF_ROTATION]
        return [*killed, rotating().code]

    rotation = asyncio.create_task(asyncio.to_thread(rotate))
    while not rotation.done():
        found.append(await values(connection, both))
    assert await rotation == [-9, -9, 0]
    assert len(found) > 3
    assert all(one == wanted for one in found)
    assert query(BY_KEY) == [(both.key_id, COUNT)]


async def test_with_a_wrong_old_key_nothing_is_changed(connection, stored, rotating, query):
    before = query("SELECT * FROM secrets ORDER BY name")
    for old in (encoded(OTHER), ""):
        answer = rotating(ECLUSE_SECRET_KEY_OLD=old)
        assert answer.code == 2
        assert f"encrypted with key {Secrets(OLD).key_id}" in answer.err
        assert "ECLUSE_SECRET_KEY_OLD" in answer.err
    await connection.execute("UPDATE secrets SET ciphertext = nonce WHERE name = 's0'")
    with pytest.raises(SetUpError, match="'s0' of tenant default"):
        await sealing.rotate(connection, Secrets(NEW, OLD))
    assert query("SELECT * FROM secrets WHERE name <> 's0' ORDER BY name") == [row for row in before if row[1] != "s0"]


async def test_the_doctor_says_how_many_secrets_which_key_has_sealed(connection, dsn):
    for name, key in (("a", OLD), ("b", OLD), ("c", NEW)):
        await Secrets(key).put(connection, "default", name, "x")
    ids = [Secrets(key).key_id for key in (NEW, OLD)]

    async def found(*key_ids: str) -> tuple[str, str]:
        (one,) = [one for one in await check_database(dsn, 10, KEEP, key_ids) if one.what == "secrets"]
        return one.level, one.says

    level, says = await found(*ids)
    assert level == "warn"
    assert f"2 encrypted with the old key ({ids[1]})" in says
    assert f"1 encrypted with the current key ({ids[0]})" in says
    assert (await found(ids[0]))[0] == "fail"
    await sealing.rotate(connection, Secrets(NEW, OLD))
    assert await found(ids[0]) == ("ok", f"3 encrypted with the current key ({ids[0]})")


EARLIER = """
INSERT INTO notification_endpoints (tenant_id, kind, url, events, created_at, updated_at)
VALUES ('default', 'webhook', %(url)s, '{*}', ecluse_now(), ecluse_now());
INSERT INTO schedules (tenant_id, flow, name, cron, timezone, input, overlap, catch_up, enabled, handled_until,
                       created_at, updated_at, zone_rules)
VALUES ('default', 'automation', 'nightly', '0 2 * * *', 'UTC', '{}', 'wait', 'latest', false, ecluse_now(),
        ecluse_now(), ecluse_now(), '');
INSERT INTO automation_settings (id, schedule_type, fiche_selection_mode, webhook_url)
SELECT id, 'MANUAL', 'manual', %(url)s FROM schedules;
INSERT INTO runs (tenant_id, flow, event_key, orchestrated, status, state, created_at, schedule_id)
SELECT 'default', f.flow, f.flow, false, 'queued', 'queued', ecluse_now(), s.id
FROM schedules s, unnest('{automation,notifications}'::text[]) AS f(flow);
INSERT INTO deliveries (run_id, tenant_id, kind, recipient, event_key, event_type, about_run, message, created_at)
SELECT n.id, 'default', 'webhook', %(url)s, 'e', 't', a.id, '{}', ecluse_now()
FROM runs n, runs a WHERE n.flow = 'notifications' AND a.flow = 'automation';
INSERT INTO maintenance (what, subject, asked_by, asked_at) VALUES ('seal urls', '', 'migration:0027', ecluse_now());
"""


async def test_urls_of_earlier_versions_are_sealed_by_a_scheduler_that_has_the_key(connection, dsn, query):
    with psycopg.ClientCursor(psycopg.connect(dsn, autocommit=True)) as cursor:
        cursor.execute(EARLIER, {"url": URL})
        cursor.connection.close()
    everything = (
        "SELECT url FROM notification_endpoints UNION ALL SELECT webhook_url FROM automation_settings"
        " UNION ALL SELECT recipient FROM deliveries"
    )
    async with pool(dsn, size=2) as own:
        await maintenance.job({}, [], {}, None).run(own)
        assert {row[0] for row in query(everything)} == {URL}, "not without a key"
        warned = [one.says for one in await check_database(dsn, 10, KEEP) if one.level == "warn"]
        assert "2 webhook URLs are stored in plain text" in warned
        for _ in range(2):
            await maintenance.job({}, [], {}, Secrets(NEW)).run(own)
    assert {row[0] for row in query(everything)} == {ORIGIN}
    ((endpoint,), (schedule,)) = query("SELECT id FROM notification_endpoints UNION ALL SELECT id FROM schedules")
    for name in (f"webhook:{endpoint}:url", schedule_url_name(schedule)):
        assert await Secrets(NEW).get(connection, "default", name) == URL
    assert query("SELECT url_name FROM deliveries") == [(schedule_url_name(schedule),)]
    assert query("SELECT count(*) FROM maintenance") == [(0,)]
    assert query("SELECT action, reason FROM audit_trail") == [("secrets.seal", "webhook URLs: 2, deliveries: 1")]
    assert "canary" not in str(query("SELECT to_jsonb(d) FROM deliveries d"))
