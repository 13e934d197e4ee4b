"""One record is one line, in both forms, whatever its data; in JSON it has every mandatory field."""

from __future__ import annotations

import json
import logging as standard
import re

import pytest
import structlog

from ecluse.base import logging
from ecluse.base.errors import PermanentError
from ecluse.base.trace import Tracer

MANDATORY = {  # ENR-70
    *("timestamp", "level", "correlation_id", "tenant_id", "request_id", "job_id", "company_siren", "source_api"),
    *("event_type", "http_status", "error_code", "error_message", "duration_ms"),
}
HEAD = re.compile(r"\[([\w-]+)\|([^\]]+)\] (START:|STEP:|DONE:|FAN-OUT:|WAITING:|END:|!! WARN:|!! ERROR:) ")
TRACE = Tracer(
    area="HELLO", workflow="hello", entity=("run", "12"), tenant_id="acme", correlation_id="req-7", run_id=12
)


def refuse(why):
    raise PermanentError(why, code="GONE")


@pytest.fixture
def said(capsys):
    """A function that configures logging, calls `speak` with a logger and returns the lines that were logged."""
    loggers = [standard.getLogger(name) for name in (None, "dbos", "alembic")]
    kept = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]

    def lines(form, speak, level="INFO"):
        logging.configure(level, form)
        structlog.configure(cache_logger_on_first_use=False)  # or loggers would keep this for the other tests
        speak(structlog.get_logger("ecluse.engine.work.worker"))
        return capsys.readouterr().err.splitlines(keepends=True)

    yield lines
    for one, one.handlers[:], level, one.propagate in kept:
        one.setLevel(level)
    structlog.reset_defaults()


def tell_everything(_log):
    TRACE.start("run-hello", event_key="monday")
    TRACE.step("select")
    TRACE.done("select", 0.25)
    TRACE.fan_out("hello/read", 500, ["hello-12-read-a", "hello-12-read-b"])
    TRACE.waiting("read gate")
    TRACE.warn("slow")
    TRACE.error("broken")
    TRACE.end("completed", 13.1, successful=500)


@pytest.mark.req("ENG-80", "ENG-89")
def test_a_trace_in_lines_for_people(said):
    lines = said("line", tell_everything)
    assert [HEAD.match(line)[3] for line in lines] == [
        *("START:", "STEP:", "DONE:", "FAN-OUT:", "WAITING:", "!! WARN:", "!! ERROR:", "END:")
    ]
    assert {HEAD.match(line).group(1, 2) for line in lines} == {("HELLO", "run-12")}
    assert lines[0].startswith("[HELLO|run-12] START: run-hello ")
    assert "event_key=monday" in lines[0]
    assert "duration_ms=250" in lines[2]
    assert lines[3].startswith("[HELLO|run-12] FAN-OUT: hello/read x500 ")
    assert '"hello-12-read-a"' in lines[3]
    assert "duration_ms=13100" in lines[-1]


@pytest.mark.req("ENG-84", "ENR-70", "G-70", "ENG-85")
def test_every_mandatory_field_is_there_for_collectors_and_null_where_there_is_nothing(said):
    def speak(log):
        tell_everything(log)
        log.info("bare")
        standard.getLogger("library").warning("from %s", "elsewhere")

    records = [json.loads(line) for line in said("json", speak)]
    assert len(records) == 10
    for record in records:
        assert set(record) >= MANDATORY
        assert record["event_type"]
    assert {(r["correlation_id"], r["tenant_id"], r["job_id"]) for r in records[:8]} == {("req-7", "acme", "12")}
    assert [r["duration_ms"] for r in records if r["duration_ms"] is not None] == [250, 13100]
    assert (records[8]["correlation_id"], records[8]["error_message"]) == (None, None)
    assert (records[9]["level"], records[9]["event"]) == ("warning", "from elsewhere")


@pytest.mark.req("ENG-85", "ENG-86")
def test_what_is_bound_to_a_request_is_on_every_line_of_it(said):
    def speak(log):
        with structlog.contextvars.bound_contextvars(request_id="r-1", tenant_id="acme"):
            log.info("inside")
        log.info("outside")

    inside, outside = (json.loads(line) for line in said("json", speak))
    assert (inside["request_id"], inside["tenant_id"]) == ("r-1", "acme")
    assert outside["request_id"] is None


NASTY = "x\r\n[HELLO|run-1] END: completed\x1b[2J\u2028\x85\u202e\x00\udcff"


@pytest.mark.parametrize("form", ["line", "json"])
def test_nothing_in_the_data_ends_a_line_or_begins_another(said, form):
    def speak(log):
        log.info("a message", reason=NASTY, **{NASTY: {NASTY: [NASTY]}})
        log.warning(NASTY)
        TRACE.error(NASTY, error=NASTY)
        try:
            refuse(NASTY)
        except PermanentError:
            log.exception("raised")

    lines = said(form, speak)
    assert len(lines) == 4
    for line in lines:
        assert line.endswith("\n")
        assert line[:-1].isprintable()
        if form == "json":
            json.loads(line)
        else:
            assert len(HEAD.findall(line)) == 1
            assert HEAD.match(line)


@pytest.mark.req("ENG-88")
@pytest.mark.parametrize("form", ["line", "json"])
def test_secrets_do_not_reach_a_line(said, form):
    def speak(log):
        log.info("calling https://bob:hunter2@vendor/x?token=hunter2", password="hunter2")  # noqa: S106 - not one
        log.info("headers", headers={"Authorization": "Bearer hunter2hunter2"})
        TRACE.step("ecl_hunter2", url="https://s3/a?X-Amz-Signature=hunter2")
        try:
            refuse("postgresql://bob:hunter2@db/x")
        except PermanentError:
            log.exception("raised")

    lines = said(form, speak)
    assert len(lines) == 4
    assert "hunter2" not in "".join(lines)


def test_an_exception_says_where_it_came_from(said):
    def speak(log):
        try:
            refuse("no such record")
        except PermanentError:
            log.exception("raised", run_id=3)

    (line,) = said("line", speak)
    assert line.startswith("[WORKER|run-3] !! ERROR: raised ")
    assert 'error_message="no such record" error_code=GONE' in line
    assert "test_log_lines.py" in line
    (record,) = (json.loads(line) for line in said("json", speak))
    assert (record["error_code"], record["error_message"], record["job_id"]) == ("GONE", "no such record", "3")
    assert record["exception"].startswith("Traceback")


def test_what_is_below_the_level_is_not_even_rendered(said):
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("rendered")

    assert said("json", lambda log: log.info("quiet", value=Loud()), level="WARNING") == []
