"""Objects of one shape on the command line, such as the fields of a company: a table, and lists below it."""

from __future__ import annotations

from ecluse.cli import show

AT = "2026-11-18T03:00:00Z"


def test_the_card_of_a_company_is_a_table_with_its_lists_below():
    company = {
        "legal_name": {"value": "LA POSTE", "source": "INPI_RNE", "at": AT},
        "capital_amount": {"value": 12, "source": "INPI_RNE", "at": AT},
        "directors": {"value": [{"role": "Gérant", "last_name": "GARÇON"}], "source": "INPI_RNE", "at": AT},
    }
    assert show.fields({"id": "3", "company": company}, None) == [
        "id  3",
        "",
        "company:",
        "  field           value     source    at",
        "  legal name      LA POSTE  INPI_RNE  2026-11-18 03:00:00Z",
        "  capital amount  12        INPI_RNE  2026-11-18 03:00:00Z",
        "",
        "  directors (INPI_RNE, 2026-11-18 03:00:00Z):",
        "    role    last name",
        "    Gérant  GARÇON",
    ]


def test_labels_are_words_and_codes_stay_codes():
    row = {"outcomes": {"NO_URL": 2, "successful": 1}, "activeRun": "7", "sample": [{"run_id": "7", "key": "a"}]}
    shown = show.fields({**row, "groups": [{"cause": "held", "sample": row["sample"]}]}, None)
    assert "  NO_URL      2" in shown
    assert "active run  7" in shown
    assert "  held   7 a" in shown


def test_objects_of_different_shapes_stay_fields():
    assert show.fields({"of": {"a": {"x": 1}, "b": {"y": 2}}}, None) == [
        "",
        "of:",
        "",
        "  a:",
        "    x  1",
        "",
        "  b:",
        "    y  2",
    ]


def test_an_object_in_a_table_is_shown_and_an_empty_one_is_a_dash():
    rows = [{"labels": {"of": "24h"}}, {"labels": {}}]
    assert show.table(rows, ["labels"], None) == ["labels", '{"of": "24h"}', "-"]
