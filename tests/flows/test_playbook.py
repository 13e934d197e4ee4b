"""The operator's playbook: its queries, as they are written, answer its questions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ecluse.db import embedded
from tests.support.automation_scenes import MONDAY, ONLY_DETAILS, held_up, known, out_of_order, over
from tests.support.transcription_world import until

PLAYBOOK = Path(__file__).parents[2] / "docs" / "playbook.md"


def queries() -> dict[str, list[str]]:
    """By the heading they stand under; sections without queries are left out."""
    parts = re.split(r"^## (.*)$", PLAYBOOK.read_text(), flags=re.MULTILINE)[1:]
    found = {
        head: re.findall(r"```sql\n(.*?)```", body, re.DOTALL) for head, body in zip(*[iter(parts)] * 2, strict=True)
    }
    return {head: each for head, each in found.items() if each}


@pytest.fixture
def playbook(dsn):
    """All that the queries under a heading say about a run and a schedule, as psql prints it: one text per query."""

    def ask(heading: str, run: int = 0, schedule: int = 0) -> list[str]:
        command = [str(embedded.binaries() / "psql"), dsn, "-X", "-v", f"run={run}", "-v", f"schedule={schedule}"]
        said = []
        for sql in queries()[heading]:
            options = ["-v", "ON_ERROR_STOP=1", "--csv"]
            done = subprocess.run([*command, *options], input=sql, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (sql, done.stderr)
            said.append(done.stdout)
        return said

    return ask


@pytest.mark.req("AUT-192", "AUT-195", "AUT-48", "AUT-50", "AUT-55")
async def test_what_was_unexpectedly_partial_can_be_found_out(automate, playbook):
    world = await automate()
    await world.config()
    world.sandbox.set_faults([*out_of_order(MONDAY), {"kind": "unauthorized", "vendor": "crm", "ids": ["1001"]}])
    await known(world, MONDAY, f1000="Paris", f1001="Lyon", f9200="Paris", f9300="Paris")
    run = await world.run_over(fiche_selection=over())
    assert run["status"] == "partial"
    row, logs, results, known_to_fail, audits, recordings = playbook("A run in six questions", run["id"])
    assert "partial" in row
    assert "Automation run completed" in logs.splitlines()[-1]
    assert [line.split(",")[1:3] for line in results.splitlines()[1:] if line.startswith(f"{run['id']},")] == [
        ["1000", "successful"],
        ["1001", "failed"],
        ["9200", "failed"],
        ["9300", "ignored"],
    ]
    assert len(known_to_fail.splitlines()) == 1, "it has ended"
    assert audits.splitlines()[1].split(",")[1] == "completed"
    assert sorted(line.partition(",")[2] for line in recordings.splitlines()[1:]) == ["f,1", "t,1", "t,2"]
    why, stages, days = playbook("Unexpectedly partial", run["id"])
    for expected in ("DETAILS_NOT_FETCHED", "NO_URL", "9200-2", "401", "Fiche not found (404)"):
        assert expected in why
    assert [line.split(",")[:2] for line in stages.splitlines()[1:]] == [
        [stage, "done"] for stage in ("revalidate", "fetch", "transcribe", "audit")
    ]
    for expected in ('""date"": ""02/03/2026""', '""status"": 503', '""picked"": 4'):
        assert expected in days


@pytest.mark.req("AUT-195", "AUT-56")
async def test_where_a_run_is_stuck_can_be_seen(automate, playbook):
    world = await automate()
    config = await world.config()
    await world.run_over("1000", run_audits=False)
    async with held_up(world, "llm"), held_up(world, "elevenlabs"):
        audits = await world.trigger(await world.schedule("1000"))
        transcripts = await world.trigger(await world.schedule("9201"))
        await until(lambda: "Audit progress: 0/1 (completed=0, failed=0)" in world.logs(audits))
        await until(lambda: "Transcription progress: 0/3" in world.logs(transcripts))
        async with held_up(world, "crm"):
            details = await world.trigger(await world.schedule("1003", **ONLY_DETAILS))
            await until(lambda: "Fiche details progress: 0/1" in world.logs(details))
            items, fiches, lanes = playbook("Stuck in fiche details", details)
            assert items.splitlines()[1:] == ["open,f,,1,1003,"]
            assert fiches.splitlines()[1:] == ["1003,,,,"]
            assert "crm,a test,test,,,," in lanes.splitlines()
        await until(lambda: "NO_URL" in playbook("Stuck in transcription", transcripts)[0])
        known_to_fail = playbook("A run in six questions", transcripts)[3]
        assert known_to_fail.splitlines()[1:] == ["9201,NO_URL,1 of 3 recordings has no URL in the CRM (9201-2)"]
        missing, provider = playbook("Stuck in transcription", transcripts)
        assert [line.split(",")[3:5] for line in missing.splitlines()[1:]] == [
            ["9201-1", "f"],
            ["9201-2", "t"],
            ["9201-3", "f"],
        ]
        assert provider.splitlines()[1].endswith(",a test,,,,")
        resolved, late, model = playbook("Stuck in audits", audits)
        assert '""name"": ""Compliance""' in resolved
        assert late.splitlines()[1].startswith(f"1000,{config},pending,f,0")
        assert "llm,a test,test,,,," in model.splitlines()
    for run_id in (details, transcripts, audits):
        await world.ended(run_id)


@pytest.mark.req("AUT-195")
async def test_why_a_schedule_does_not_trigger_can_be_seen(automate, playbook, query):
    world = await automate()
    by_hand = await world.schedule("1000", **ONLY_DETAILS)
    daily = await world.schedule("1000", schedule_type="DAILY", time_of_day="06:30", is_active=False, **ONLY_DETAILS)
    query(
        "INSERT INTO schedule_slots (schedule_id, due_at, tenant_id, state, reason, decided_at)"
        " VALUES (%s, '2026-03-02 06:30Z', 'default', 'missed', 'no scheduler', now())",
        daily,
    )
    async with held_up(world, "crm"):
        run_id = await world.trigger(by_hand)
        await until(lambda: "Fiche details progress: 0/1" in world.logs(run_id))
        stated, slots, holder = playbook("A schedule never triggers", schedule=by_hand)
        assert stated.splitlines()[1].startswith("t,MANUAL,UTC,,,0,,")
        assert stated.splitlines()[1].endswith(",running")
        assert len(slots.splitlines()) == 1
        assert holder.splitlines()[1].startswith(f"{run_id},running,fetching,")
    await world.ended(run_id)
    stated, slots, holder = playbook("A schedule never triggers", schedule=daily)
    assert stated.splitlines()[1].startswith("f,DAILY,UTC,30 6 * * *,,0,")
    assert slots.splitlines()[1].endswith(",missed,no scheduler,")
    assert len(holder.splitlines()) == 1


@pytest.mark.req("AUT-192", "AUT-195")
def test_every_query_of_the_playbook_is_run_here():
    tested = set(re.findall(r'playbook\(\s*"([^"]+)"', Path(__file__).read_text()))
    assert tested == set(queries())
