"""What commands print: the text of a log, the options of the agent, why a demonstration's server is not ready."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from ecluse.base.validation import problem
from ecluse.cli import main, remote, show
from ecluse.demo.scene import not_started


def test_a_log_is_printed_as_the_text_that_it_is(capsys):
    rows = [{"attempt": 1, "text": "one\ntw"}, {"attempt": 1, "text": "o\n"}, {"attempt": 2, "text": "\x1b[2Jthree"}]
    remote._write_text(rows, ["attempt"], "text")
    printed = capsys.readouterr()
    assert printed.out == "one\ntwo\n\\u001b[2Jthree\n"
    assert printed.err == "attempt 1\nattempt 2\n"


def test_the_help_of_the_agent_lists_its_options(capsys):
    with pytest.raises(SystemExit):
        main.run(["agent", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--server", "--token-file", "--config", "--state"))


def test_numbers_have_at_most_four_decimals():
    assert [show.cell(one) for one in (0.8333333333333334, 973260.9930312402, 2)] == ["0.8333", "973260.993", "2"]


def test_a_server_that_is_not_ready_has_a_reason():
    assert not_started(1, "\n").startswith("The server ended with exit code 1. It logged nothing.")
    assert not_started(None, "a\nb\n") == "The server was not ready within 120 s. Its last log lines:\na\nb"


def test_an_unknown_field_is_answered_with_the_known_ones():
    class Body(BaseModel):
        model_config = ConfigDict(extra="forbid")
        company_siren: str = ""

    with pytest.raises(ValidationError) as refused:
        Body.model_validate({"siren": "552049447"})
    (wrong,) = refused.value.errors()
    assert problem(wrong, known=Body.model_fields) == "there is no such field (known: company_siren)"
