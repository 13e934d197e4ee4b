"""The export of outcomes: RFC 4180, every target once, and no cell that a spreadsheet would take for a formula."""

from __future__ import annotations

import csv
import io

import pytest

from ecluse.api.outcomes import COLUMNS, PAGE, cell, lines

FORMULAS = {
    "=1+1": "'=1+1",
    "+cmd|' /C calc'!A0": "'+cmd|' /C calc'!A0",
    "-2+3": "'-2+3",
    "@SUM(A1)": "'@SUM(A1)",
    "\t=1": "'\t'=1",
    "\r=1": "'\r'=1",
    "\n=1": "'\n'=1",
    '="x"': '\'="x"',
    "\tx": "'\tx",
    "a;=HYPERLINK(1)": "a;'=HYPERLINK(1)",
    "a\t+1": "a\t'+1",
    "two\r\n-lines": "two\r\n'-lines",
    "\uff1d1": "'\uff1d1",
    "a;\uff0b1;\uff0d1": "a;'\uff0b1;'\uff0d1",
    "\uff20SUM": "'\uff20SUM",
}
PLAIN = ["SKU-7", "a,b", 'say "so"', "two\r\nlines", " =1", "a; b", "a;b=1", "", "é\U0001f600", "1-2"]


@pytest.mark.parametrize(("text", "shown"), FORMULAS.items())
def test_text_that_begins_like_a_formula_is_neutralised(text, shown):
    assert cell(text) == shown


def test_every_cell_is_quoted():
    assert lines([("a;=1", None, 'say "so"', True)]) == '"a;\'=1","","say ""so""","true"\r\n'


@pytest.mark.parametrize("text", PLAIN)
def test_any_other_cell_is_left_alone(text):
    assert cell(text) == text


def test_every_outcome_is_exported_once_in_order_over_all_pages(api, query):
    run_id = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    targets = [*FORMULAS, *PLAIN, *(f"t{n:02d}" for n in range(PAGE + 20))]
    query("UPDATE runs SET selected = %s", len(targets))
    query("INSERT INTO outcomes (run_id, target) SELECT %s, unnest(%s::text[])", run_id, targets)
    query("UPDATE outcomes SET outcome = 'failed', error_code = 'BAD', reason = '=HYPERLINK(1)' WHERE target = 't05'")

    answer = api.get(f"/api/runs/{run_id}/outcomes.csv")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/csv; charset=utf-8; header=present")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="run-{run_id}-outcomes.csv"'
    header, *rows = csv.reader(io.StringIO(answer.body.decode(), newline=""))
    assert tuple(header) == COLUMNS
    assert sorted(row[0] for row in rows) == sorted(map(cell, targets))
    assert ["t05", "failed", "BAD", "'=HYPERLINK(1)", "false", "", ""] in rows
    assert query("SELECT actor, subject, address FROM audit_trail WHERE action = 'run.export'") == [
        ("key:1", f"run:{run_id}", "127.0.0.1")
    ]
    assert ["t06", "", "", "", "false", "", ""] in rows
    assert answer.body.count(b"\r\n") >= len(targets) + 1


def test_the_export_of_a_run_without_targets_is_its_header(api):
    run_id = api.post("/api/runs", {"flow": "test"}).json["run_id"]
    assert api.get(f"/api/runs/{run_id}/outcomes.csv").body.decode() == lines([COLUMNS])
