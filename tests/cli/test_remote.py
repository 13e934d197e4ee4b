"""Commands of a server, over HTTP: what they send, what they print, how they end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import psycopg
import pytest

from ecluse.cli.catalogue import packaged
from ecluse.cli.client import Client
from ecluse.cli.remote import show_result
from ecluse.flows.pricing.runs import NewRun, create_rule_run, store_plan
from tests.support.api_server import add_tenant, new_key
from tests.support.command_line import environment, free_port, operating
from tests.support.pricing_rows import BY, RULE, connected, new_project, plan_of

STEPS = '[{"name": "Consent", "criteria": "agrees", "weight": 2}]'


@pytest.fixture(scope="module")
def dsn(databases):
    with databases.one() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def operator(bare, dsn):
    with operating(bare, dsn) as one:
        yield one


@pytest.fixture(scope="module")
def config(operator):
    made = operator.done("audits", "configs", "create", "Compliance", "--steps", STEPS, "--run-automatically")
    return made["id"]


def refused(answer, *said, code=2):
    assert (answer.code, answer.out) == (code, ""), answer
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("ecluse: ")
    for text in said:
        assert text in answer.err
    return True


def test_a_thing_is_made_listed_shown_changed_and_deleted(operator):
    made = operator.done("audits", "configs", "create", "Sales\x1b[2J", "--steps", STEPS, "--model", "m")
    assert (made["name"], made["run_automatically"], made["model"]) == ("Sales\x1b[2J", False, "m")
    listed = operator("audits", "configs", "list")
    head, *rows = listed.out.splitlines()
    assert head.split() == ["id", "version", "run", "automatically", "is", "active", "step", "count", "name"]
    row = next(row for row in rows if row.split()[0] == made["id"])
    assert row.split()[1:] == ["1", "no", "yes", "1", "Sales\\u001b[2J"]
    shown = operator("audits", "configs", "show", made["id"]).out
    assert re.search(r"^model +m$", shown, re.MULTILINE)
    assert re.search(r"^steps:\n  name +weight +criteria +max score\n  Consent +2\.0 +agrees +10$", shown, re.MULTILINE)
    changed = operator.done("audits", "configs", "update", made["id"], "--model", "null", "--no-is-active")
    assert (changed["model"], changed["is_active"], changed["version"]) == (None, False, 2)
    assert operator.done("audits", "configs", "delete", made["id"]) == {"id": made["id"], "deleted": True}
    refused(operator("audits", "configs", "show", made["id"]), "NOT_FOUND", "request ")


def test_a_body_comes_from_a_file_and_options_are_added_to_it(operator, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"name": "From a file", "steps": json.loads(STEPS), "description": "x"}))
    made = operator.done("audits", "configs", "create", "--body", f"@{file}", "--description", "y")
    assert (made["name"], made["description"], len(made["steps"])) == ("From a file", "y", 1)
    steps = tmp_path / "steps.json"
    steps.write_text(STEPS)
    assert (
        operator.done("audits", "configs", "create", "Other", "--steps", f"@{steps}")["steps"][0]["name"] == "Consent"
    )
    refused(operator("audits", "configs", "create", "--body", "[]"), "--body must be a JSON object")
    refused(operator("audits", "configs", "create", "x", "--steps", "@/nowhere"), "--steps: cannot read /nowhere")
    refused(operator("audits", "configs", "create", "x", "--steps", "{"), "--steps is not valid JSON")
    refused(operator("audits", "configs", "create"), "missing: NAME, --steps", "ecluse audits configs create --help")


def test_pages_are_followed_to_the_last(operator, config):
    for number in range(3):
        operator.done("audits", "configs", "create", f"page {number}", "--steps", STEPS)
    everything = operator.done("audits", "configs", "list", "--all", "--limit", "2")
    ids = [row["id"] for row in everything["configs"]]
    assert (everything["next_cursor"], len(ids) >= 4, ids == sorted(ids, key=int)) == (None, True, True)
    first = operator("audits", "configs", "list", "--limit", "1")
    cursor = re.search(r"--cursor (\S+) the next 1", first.err)[1]
    second = operator.done("audits", "configs", "list", "--limit", "1", "--cursor", cursor)
    assert second["configs"][0]["id"] == ids[1]


def test_of_nothing_it_says_so_on_stderr(operator):
    answer = operator("audits", "list")
    assert (answer.code, answer.out, answer.err) == (0, "", "no audits\n")
    assert operator("audits", "list", "--json").json["audits"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("audits", "list", "--statu", "failed"), "there is no option --statu. Did you mean --status?"),
        (("audits", "lst"), "there is no command 'lst'. Did you mean list?"),
        (("adits", "list"), "there is no command 'adits'. Did you mean audits?"),
        (("--jsn", "audits", "list"), "there is no option '--jsn'."),
        (("audits", "list", "--status", "faled"), "'faled' is not one of pending, running, completed, failed. Did you"),
        (("audits", "list", "--limit", "many"), "--limit: 'many' is not an integer."),
        (("audits", "list", "--limit", "0"), "INVALID_INPUT"),
        (("audits", "list", "surplus"), "unexpected argument 'surplus'."),
        (("pricing", "alerts", "true"), "--severity, --open, --limit"),
        (("audits", "list", "--limit"), "expected one argument"),
        (("audits", "show"), "missing: AUDIT_ID"),
        (("audits", "show", "seven"), "There is no audit seven."),
        (("audits", "show", "../audit-configs"), "NOT_FOUND"),
        (("--tenant", "nobody", "audits", "list"), "tenants create nobody"),
        (("--key-file", "/nowhere", "audits", "list"), "--key-file: cannot read /nowhere: No such file"),
        (("--url",), "--url needs a value"),
        (("--url", "ftp://x", "audits", "list"), "must begin with http:// or https://"),
        (("--profile", "none", "audits", "list"), "There is no profile 'none'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(operator, arguments, said):
    refused(operator(*arguments), said)


def test_keys_that_are_unknown_or_expired_and_things_of_other_tenants(operator, dsn, config):
    said = "Give a valid key with --key-file or ECLUSE_KEY"
    refused(operator("audits", "list", ECLUSE_KEY="ecl_unknown"), said, "UNAUTHENTICATED")
    expired = new_key(dsn, "admin", expires_in=timedelta(seconds=-1))
    refused(operator("audits", "list", ECLUSE_KEY=expired), said)
    refused(operator("audits", "list", ECLUSE_KEY="two words"), "ECLUSE_KEY does not hold an API key")
    refused(operator("audits", "list", ECLUSE_KEY=""), "There is no key for http://127.0.0.1")
    add_tenant(dsn, "acme")
    foreign = new_key(dsn, "admin", "acme")
    refused(operator("audits", "configs", "show", config, ECLUSE_KEY=foreign), "There is no audit config")
    refused(operator("--tenant", "default", "audits", "list", ECLUSE_KEY=foreign), "FORBIDDEN")
    viewer = new_key(dsn, "viewer")
    refused(operator("audits", "configs", "delete", config, ECLUSE_KEY=viewer), "permission audits.write")
    assert operator.done("--tenant", "acme", "audits", "configs", "list")["configs"] == []


def test_a_server_that_is_not_there_is_exit_code_3(operator, bare):
    closed = f"http://127.0.0.1:{free_port()}"
    answer = operator("audits", "list", ECLUSE_URL=closed)
    refused(answer, f"The server at {closed} cannot be reached: Connection refused. Check the URL", code=3)
    refused(operator("audits", "list", ECLUSE_URL="http://no-such-host.invalid"), "cannot be reached", code=3)
    refused(operator("audits", "list", ECLUSE_URL="http://127.0.0.1:99999"), "99999")
    refused(bare("audits", "list"), "No server is running on this host", "ecluse serve", "--url and --key-file", code=3)


class Line:
    """A server that answers each connection with the next of these, and keeps what was sent."""

    def __init__(self, *answers: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.seen: list[bytes] = []
        self.thread = threading.Thread(target=self.serve, args=answers)
        self.thread.start()

    def serve(self, *answers: bytes) -> None:
        for answer in answers:
            connection, _ = self.listener.accept()
            with connection:
                self.seen.append(connection.recv(65536))
                connection.sendall(answer)
        self.listener.close()

    def keys(self) -> list[bytes]:
        self.thread.join(20)
        return [re.search(rb"Idempotency-Key: (\w+)", one)[1] for one in self.seen]


GOOD = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 28\r\n\r\n{"id": "1", "deleted": true}'


def test_a_request_whose_answer_was_lost_is_repeated_once_under_the_same_key(operator):
    line = Line(b"", GOOD)
    assert operator("audits", "configs", "delete", "1", "--json", ECLUSE_URL=line.url).json["deleted"] is True
    first, second = line.keys()
    assert first == second
    line = Line(b"", b"")
    refused(operator("audits", "configs", "delete", "1", ECLUSE_URL=line.url), "was lost twice", code=3)
    assert len(set(line.keys())) == 1


def test_what_is_no_server_of_ours_and_what_fails_is_exit_code_3(operator):
    page = b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>"
    refused(operator("audits", "list", ECLUSE_URL=Line(page).url), "status 404", "check the URL", code=3)
    other = b'{"error": {"code": "not_found", "message": "No vendor is mounted at /api/runs."}}'
    answer = b"HTTP/1.1 404 Oh\r\nContent-Length: %d\r\n\r\n%s" % (len(other), other)
    refused(operator("audits", "list", ECLUSE_URL=Line(answer).url), "not as a server of Ecluse", code=3)
    error = b'{"error": {"code": "INTERNAL", "message": "Something went wrong", "details": null, "request_id": "r1"}}'
    answer = b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%s" % (len(error), error)
    failed = operator("audits", "list", ECLUSE_URL=Line(answer).url)
    refused(failed, "Something went wrong. (INTERNAL, request r1)", code=3)


def test_a_url_with_a_wrong_path_is_named(operator):
    url = operator.variables["ECLUSE_URL"] + "/wrong"
    said = "There is no route GET /wrong/api/audits.", f"Check the URL {url}, and that the server has the version"
    refused(operator("audits", "list", ECLUSE_URL=url), *said)


@pytest.mark.parametrize("command", packaged(), ids=lambda command: command["name"])
def test_every_command_explains_itself_without_a_server(bare, command):
    answer = bare(*command["name"].split(), "--help", ECLUSE_URL="nonsense")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"Usage: ecluse {command['name']} ")
    for option in [field["option"] for field in command["fields"] if "place" not in field]:
        assert option in answer.out
    assert "--json" in answer.out


@pytest.mark.parametrize("command", packaged(), ids=lambda command: command["name"])
def test_every_command_answers_json_or_a_refusal(operator, command):
    """Asked of what does not exist: the answer is JSON, or a sentence that names the server's code."""
    given = ["x" if field["type"] != "json" else "{}" for field in command["fields"] if "place" in field]
    answer = operator(*command["name"].split(), *given, "--json", *(["--yes"] if command["method"] != "GET" else []))
    if answer.code == 0:
        assert isinstance(answer.json, dict)
    else:
        assert (answer.code, answer.out) == (2, ""), answer
        assert re.search(r"\([A-Z_]+, request \w+\)\n$|^ecluse: missing: |is not one of", answer.err), answer


@pytest.fixture
def at_terminal(operator):
    """A command at a terminal of some width: exit code, what it printed."""

    def run(*arguments, columns=80, typed="", **variables):
        ours, theirs = pty.openpty()
        os.write(ours, typed.encode())
        seen: list[bytes] = []

        def read() -> None:
            try:
                while part := os.read(ours, 65536):
                    seen.append(part)
            except OSError:  # the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        given = environment(**(operator.variables | {"COLUMNS": str(columns), "TERM": "xterm"} | variables))
        given = {name: value for name, value in given.items() if value}
        command = [sys.executable, "-m", "ecluse", *arguments]
        done = subprocess.run(command, env=given, stdin=theirs, stdout=theirs, stderr=theirs, timeout=90, check=False)
        os.close(theirs)
        reader.join(20)
        os.close(ours)
        return done.returncode, b"".join(seen).decode().replace("\r\n", "\n")

    return run


def test_at_a_terminal_a_table_has_colours_and_fits(operator, at_terminal, config, one):
    code, wide = at_terminal("audits", "configs", "list", NO_COLOR="")
    assert (code, "\x1b[1mid\x1b[0m" in wide) == (0, True)
    long = operator.done("audits", "configs", "create", "A name of several words " * 5 + "x" * 30, "--steps", STEPS)[
        "id"
    ]
    try:
        for columns in (80, 40, 14):
            code, narrow = at_terminal("audits", "configs", "list", columns=columns, NO_COLOR="1")
            assert code == 0
            assert "\x1b" not in narrow
            assert max(len(line) for line in narrow.splitlines()) <= columns
            assert "".join(narrow.split()).count("x" * 5) >= 1
        piped = operator("audits", "configs", "list").out
        assert "x" * 30 in piped
    finally:
        operator.done("audits", "configs", "delete", long)


def test_a_command_takes_no_longer_than_a_person_notices(operator):
    """CPU time of a process that starts from nothing, which a busy machine does not change."""
    code = (
        "import os, sys, runpy; sys.argv = ['ecluse', *sys.argv[1:]]\n"
        "try: runpy.run_module('ecluse', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'pydantic', 'fastapi', 'psycopg', 'typer', 'httpx', 'rich', 'structlog'} & sys.modules.keys()\n"
        "print(sum(os.times()[:2]), *heavy, file=sys.stderr)"
    )
    for arguments in (["--help"], ["audits", "configs", "list"], ["audits", "configs", "list", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment(**operator.variables),
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, *heavy = done.stderr.splitlines()[-1].split()
        print(f"{seconds} s: ecluse {' '.join(arguments)}")  # pytest -rP
        assert (heavy, float(seconds) < 0.7) == ([], True)


@pytest.mark.parametrize(("count", "is_next"), [(3, True), (0, False)])
def test_a_followed_preview_ends_with_its_plan_and_the_next_command(operator, dsn, capsys, count, is_next):
    async def planned():
        async with connected(dsn) as connection:
            project = await new_project(connection, name=f"Shop {count}")
            async with connection.transaction():
                run = await create_rule_run(connection, NewRun("default", project, "EUR", None, RULE), BY)
                await store_plan(connection, run, plan_of(count), BY)
            return run

    run = asyncio.run(planned())
    client = Client(operator.variables["ECLUSE_URL"], operator.variables["ECLUSE_KEY"])
    declared = next(one for one in packaged() if one["name"] == "pricing runs preview")["result"]
    show_result(client, declared, str(run))
    said = capsys.readouterr()
    plan = client.get(f"/api/pricing/runs/{run}")["plan_hash"]
    assert re.search(rf"^id +{run}\nplan hash +{plan}$", said.out, re.MULTILINE)
    assert re.search(rf"^  changed +{count}$", said.out, re.MULTILINE)
    assert said.err == (f"Next: ecluse pricing runs queue {run} {plan}\n" if is_next else "")


def test_a_followed_preview_that_failed_ends_with_the_reason(operator, dsn, capsys, query):
    async def unplanned():
        async with connected(dsn) as connection:
            project = await new_project(connection)
            async with connection.transaction():
                return await create_rule_run(connection, NewRun("default", project, "EUR", None, RULE), BY)

    run = asyncio.run(unplanned())
    query("UPDATE rule_runs SET stopped_reason = 'the preview failed (refused)' WHERE id = %s", run)
    client = Client(operator.variables["ECLUSE_URL"], operator.variables["ECLUSE_KEY"])
    declared = next(one for one in packaged() if one["name"] == "pricing runs preview")["result"]
    show_result(client, declared, str(run))
    assert capsys.readouterr().err == "stopped reason: the preview failed (refused)\n"


def test_text_of_vendors_controls_no_terminal_and_reaches_files_unchanged(operator, at_terminal, dsn):
    nasty = "a\x1b[2J\x9b2J\u202e\nb\u2028c"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO audit_trail (tenant_id, at, actor, action, subject, reason)"
            " VALUES ('default', now(), 'cli:ann', 'x.nasty', 'n', %s)",
            (nasty,),
        )
    for words in (("export",), ("export", "--format", "ndjson"), ("--json",), ()):
        code, shown = at_terminal("trail", *words, "--action", "x.nasty", NO_COLOR="1")
        assert (code, "x.nasty" in shown) == (0, True), shown
        assert shown.replace("\n", "").isprintable(), words
    for form in ("csv", "ndjson"):
        (row,) = operator.done("trail", "export", "--format", form, "--action", "x.nasty")["rows"]
        assert row["reason"] == nasty
    assert nasty in operator("trail", "export", "--action", "x.nasty").out
