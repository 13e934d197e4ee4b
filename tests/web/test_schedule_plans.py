"""What a schedule of automation takes and does stands on its page, with a word where nothing is set."""

from __future__ import annotations

import pytest

SCHEDULE = """
INSERT INTO schedules (tenant_id, flow, name, timezone, enabled, zone_rules, handled_until, created_at, updated_at)
VALUES ('default', %s, %s, 'UTC', true, '', ecluse_now(), ecluse_now(), ecluse_now()) RETURNING id
"""
CONFIG = """
INSERT INTO audit_configs (tenant_id, name, system_prompt, steps, is_active, run_automatically, created_at, updated_at)
VALUES (%s, %s, 'x', '[]', %s, %s, ecluse_now(), ecluse_now()) RETURNING id
"""


@pytest.fixture
def page(reader, fill):
    """What is to be read of a schedule with these settings, between what it is and when it is due next."""

    def show(name, flow="automation", **settings):
        schedule = fill(SCHEDULE, flow, name)
        if settings:
            given = {"id": schedule, "schedule_type": "MANUAL", **settings}
            names, marks = ", ".join(given), ", ".join(["%s"] * len(given))
            sql = f"INSERT INTO automation_settings ({names}) VALUES ({marks})"  # noqa: S608 - our own names
            fill(sql, *given.values())
        _, before, rest = reader.shown(f"/ui/schedules/{schedule}").partition("run the latest missed slot")
        plan, after, _ = rest.partition("Next")
        assert (before, after) == ("run the latest missed slot", "Next")
        return plan.strip()

    return show


def test_the_days_the_filters_and_the_stages_are_said(page):
    assert page(
        "in full",
        fiche_selection_mode="filter",
        fiche_selection_date_range="custom",
        fiche_selection_start_date="2026-01-01",
        fiche_selection_end_date="2026-01-31",
        fiche_selection_groupes=["Paris", "<b>Lyon"],
        fiche_selection_only_with_recordings=True,
        fiche_selection_only_unaudited=True,
        fiche_selection_use_rlm=True,
        fiche_selection_max_fiches=1000,
        fiche_selection_max_recordings_per_fiche=20,
        skip_if_transcribed=False,
        transcription_priority="high",
        run_audits=False,
    ) == (
        "Selection Mode filter Days 2026-01-01 to 2026-01-31 Groupes Paris, <b>Lyon"
        " Only with recordings, not audited yet Limit 1,000 Max recordings per fiche 20 RLM used"
        " Stages Transcription all recordings, transcribed ones again; priority high Audits no"
    )


def test_where_nothing_is_set_it_says_so(page):
    assert page(
        "defaults", fiche_selection_mode="date_range", fiche_selection_date_range="last_7_days",
        run_transcription=False, use_automatic_audits=False,
    ) == (
        "Selection Mode date_range Days last 7 days Groupes any Only no restriction Limit none"
        " Max recordings per fiche server default RLM not used"
        " Stages Transcription no Audits – Current audit configs none"  # noqa: RUF001
    )  # fmt: skip
    assert "Fiches none given: runs complete without doing anything" in page("by hand", fiche_selection_mode="manual")
    assert page("spoilt").startswith("Selection This schedule has no automation settings: delete it")
    assert page("of another flow", flow="test") == ""


def test_of_many_fiches_and_groupes_it_says_how_many(page):
    shown = page(
        "many",
        fiche_selection_mode="manual",
        fiche_selection_fiche_ids=[str(n) for n in range(770_000, 771_500)],
        fiche_selection_groupes=[f"G{n}" for n in range(25)],
    )
    assert "Mode manual Fiches 1,500 given" in shown
    assert "G19 and 5 more" in shown
    assert "770000" not in shown


def test_the_audit_configs_that_it_takes_now_are_named(page, fill):
    fill("INSERT INTO tenants (id, name, created_at) VALUES ('neighbour', 'n', ecluse_now())")
    automatic, chosen = (
        fill(CONFIG, "default", "Every call", True, True),
        fill(CONFIG, "default", "Chosen", True, False),
    )
    off, other = fill(CONFIG, "default", "Off", False, True), fill(CONFIG, "neighbour", "Theirs", True, True)
    shown = page(
        "audited", fiche_selection_mode="manual", specific_audit_configs=[chosen, off, other],
    )  # fmt: skip
    assert shown.partition("Stages ")[2] == (
        "Transcription recordings without a transcript; priority normal"
        " Audits automatic configs and 3 specific configs"
        f" Current audit configs Every call #{automatic}, Chosen #{chosen}"
        f" Unavailable audit configs #{off} (not active), #{other} (deleted)"
    )
