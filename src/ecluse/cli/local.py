"""Commands that this program executes itself, as opposed to commands of a server. Their modules are imported when they
run: `ecluse --help` must be quick."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from ecluse.cli import authors, show
from ecluse.cli.arguments import Parser
from ecluse.cli.catalogue import Json, Local, packaged
from ecluse.cli.client import Client
from ecluse.cli.completion import SCRIPTS, candidates
from ecluse.cli.failure import OK, misused
from ecluse.cli.follow import watch
from ecluse.cli.target import DEFAULT, Given, checked_url, client_for, profiles, read_key, save_profiles

FLOW_HELP = "load this flow too, as package:NAME; repeatable"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise misused(f"--port: {text!r} is not a port: 0 to 65535.")
    return int(text)


def _serve_arguments(parser: Parser) -> None:
    parser.add_argument("--flow", action="append", default=[], metavar="PACKAGE:NAME", help=FLOW_HELP)
    parser.add_argument("--host", help="address to listen on; default ECLUSE_HOST")
    parser.add_argument("--port", type=_port, help="port to listen on, 0 picks a free one; default ECLUSE_PORT")
    role = "run only this role; health and metrics are always served; repeatable"
    parser.add_argument("--role", action="append", choices=("api", "worker", "scheduler"), help=role)


def serve(_: Given, given: Namespace) -> int:
    from ecluse.cli import serve

    return serve.run(given.flow, given.host, given.port, given.role)


def _migrate_arguments(parser: Parser) -> None:
    parser.add_argument("--flow", action="append", default=[], metavar="PACKAGE:NAME", help=FLOW_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def migrate(before: Given, given: Namespace) -> int:
    from ecluse.cli import database

    return database.migrate(given.flow, as_json=before.json or given.json)


def psql(words: list[str]) -> int:
    from ecluse.cli import database

    return database.psql(words)


def _verify_arguments(parser: Parser) -> None:
    parser.add_argument("--ledger", metavar="URL", help="compare with the ledger of the sandbox at this URL as well")
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")


def verify(given: Given, parsed: Namespace) -> int:
    from ecluse.cli import database

    return database.verify(parsed.ledger, as_json=parsed.json or given.json)


def secrets_rotate(given: Given, parsed: Namespace) -> int:
    from ecluse.cli import secrets

    return secrets.rotate(as_json=parsed.json or given.json)


def _sandbox_arguments(parser: Parser) -> None:
    parser.add_argument("--port", type=_port, default=8089, help="port to listen on, 0 picks a free one; default 8089")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same records and faults")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="JSON file with the fault rules to start with")


def sandbox(_: Given, given: Namespace) -> int:
    from ecluse.sandbox.__main__ import main

    faults = ["--faults", str(given.faults)] if given.faults else []
    return main(["--port", str(given.port), "--seed", str(given.seed), *faults])


def agent(words: list[str]) -> int:
    from ecluse.agent.__main__ import main

    return main(words)


def _json_argument(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line")


def _demo_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--fiches", type=int, default=200, metavar="N", help="number of fiches, 10 to 1000; default 200"
    )
    _kept_arguments(parser)


def _kept_arguments(parser: Parser) -> None:
    database = "use the database of DATABASE_URL, which must hold no runs"
    parser.add_argument("--given-database", action="store_true", help=database)
    _keep_argument(parser)


def _keep_argument(parser: Parser) -> None:
    parser.add_argument("--keep", action="store_true", help="leave server and sandbox running at the end")
    _json_argument(parser)


def demo(_: Given, given: Namespace) -> int:
    from ecluse.cli import demos

    if not 10 <= given.fiches <= 1_000:
        raise misused(f"--fiches: {given.fiches} is not from 10 to 1000.")
    return demos.automation(given.fiches, keep=given.keep, as_json=given.json, given_database=given.given_database)


def demo_pricing(_: Given, given: Namespace) -> int:
    from ecluse.cli import demos

    return demos.pricing(keep=given.keep, as_json=given.json, given_database=given.given_database)


def demo_enrichment(_: Given, given: Namespace) -> int:
    from ecluse.cli import demos

    return demos.enrichment(keep=given.keep, as_json=given.json, given_database=given.given_database)


def demo_jobs(_: Given, given: Namespace) -> int:
    from ecluse.cli import demos

    return demos.jobs(keep=given.keep, as_json=given.json)


def demo_transcription(_: Given, given: Namespace) -> int:
    from ecluse.cli import demos

    return demos.transcription(as_json=given.json)


def doctor(given: Given, _: Namespace) -> int:
    from ecluse.cli import doctor

    return doctor.run(given)


def _watch_arguments(parser: Parser) -> None:
    parser.add_argument("run_id", metavar="RUN_ID", help="id of the run")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop following the run after this time")


def runs_watch(given: Given, parsed: Namespace) -> int:
    return watch(client_for(given), parsed.run_id, timeout=parsed.timeout, as_json=given.json)


def login(given: Given, _: Namespace) -> int:
    if given.url is None or given.key_file is None:
        raise misused("missing: --url and --key-file. See `ecluse login --help`.")
    url, key, name = checked_url(given.url), read_key(given.key_file), given.profile or DEFAULT
    me = Client(url, key).get("/api/me")
    save_profiles({**profiles(), name: {"url": url, "key": key}})
    answer = {"profile": name, "url": url, **me}
    _answer(given, answer, f"logged in to {url} as {me['role']} of tenant {me['tenant_id']}, profile {name}")
    return OK


def logout(given: Given, _: Namespace) -> int:
    name, known = given.profile or DEFAULT, profiles()
    was = known.pop(name, None)
    if was is not None:
        save_profiles(known)
    text = f"logged out of {was['url']}, profile {name}" if was else f"there is no profile {name}; nothing was changed"
    _answer(given, {"profile": name, "removed": was is not None}, text)
    return OK


def _answer(given: Given, answer: dict[str, Any], text: str) -> None:
    if given.json:
        show.write_json(answer)
    else:
        show.write(show.harmless(text))


def _completion_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=SCRIPTS, metavar="SHELL", help="bash, zsh or fish")


def completion(_: Given, given: Namespace) -> int:
    show.write(SCRIPTS[given.shell].rstrip("\n"))
    return OK


def complete(words: list[str]) -> int:
    for word in candidates(all_commands(), words[1:] if words[:1] == ["--"] else words):
        show.write(word)
    return OK


COMMANDS = [
    Local(
        "serve",
        "Run the server: API, pages, scheduler and worker in one process. Start it again, with another port, to add a "
        "replica. Exit code 0: stopped by a signal, 2: it cannot start, for the reason on stderr, 3: it failed while "
        "it started, 70: its engine failed, start it again.",
        serve,
        _serve_arguments,
        example="serve --port 8080",
    ),
    Local(
        "migrate",
        "Migrate the database to this program's schema. Servers also do this when they start.",
        migrate,
        _migrate_arguments,
    ),
    Local(
        "psql",
        "Open psql on the database of this host; further arguments are passed to psql.",
        psql,
        takes_rest=True,
        example='psql -c "SELECT count(*) FROM runs"',
    ),
    Local(
        "verify",
        "Check that stored data keeps the documented promises. Read-only. Exit code 0: clean, 1: violations, 2: the "
        "check was not possible.",
        verify,
        _verify_arguments,
    ),
    Local(
        "secrets rotate",
        "Encrypt all stored secrets with the key in ECLUSE_SECRET_KEY: those encrypted with the key in "
        "ECLUSE_SECRET_KEY_OLD, and those not encrypted yet. Servers that have both keys keep working meanwhile. "
        "After a crash, run it again.",
        secrets_rotate,
        _json_argument,
    ),
    Local(
        "sandbox",
        "Simulate the vendors over HTTP, with faults on demand and a ledger of every call they receive.",
        sandbox,
        _sandbox_arguments,
    ),
    Local(
        "agent",
        "Execute the jobs of this host: claim them from the server given by --server, and run those that the agent's "
        "configuration file allows.",
        agent,
        takes_rest=True,
        own_help=True,
        example="agent --server https://ecluse.example.com --token-file token.txt",
    ),
    Local(
        "demo",
        "Run a scripted demonstration, offline, with simulated vendors: `ecluse demo automation`.",
        demo,
        _demo_arguments,
    ),
    Local(
        "demo automation",
        "Transcribe and audit the calls of 200 fiches at unreliable vendors, and kill the server half-way.",
        demo,
        _demo_arguments,
    ),
    Local(
        "demo enrichment",
        "Ask three simulated registers for companies: known, stored, aged, partly known, failing and unknown ones, one "
        "of them in two tenants at once; kill the server between two registers.",
        demo_enrichment,
        _kept_arguments,
    ),
    Local(
        "demo pricing",
        "Change 500 prices in an unreliable shop, kill the server half-way, retry, reconcile, roll back, and compare "
        "with the shop's ledger.",
        demo_pricing,
        _kept_arguments,
    ),
    Local(
        "demo jobs",
        "Create jobs from 50 schedules for three agents; kill one agent and the server, cut another agent off, and "
        "account for each due time.",
        demo_jobs,
        _keep_argument,
    ),
    Local(
        "demo transcription",
        "Transcribe 20 fiches at unreliable vendors, kill the server half-way, and compare API, database and vendor.",
        demo_transcription,
        _json_argument,
    ),
    Local(
        "doctor",
        "Show what the server finds wrong with settings, disk and database, with advice for each problem; without a "
        "server, this host checks them. Read-only. Exit code 0 if no check failed, else 1.",
        doctor,
        connects=True,
    ),
    Local(
        "runs watch",
        "Follow a run until it ends. Exit code 0: it succeeded, 1: it did not, 4: it is still open.",
        runs_watch,
        _watch_arguments,
        connects=True,
        example="runs watch 7 --timeout 600",
    ),
    Local(
        "login",
        "Store the URL of a server and a key as a profile, in ~/.config/ecluse/profiles.json.",
        login,
        connects=True,
        example="login --url https://ecluse.example.com --key-file key.txt",
    ),
    Local("logout", "Remove a profile.", logout, connects=True),
    Local(
        "completion",
        "Print a script that completes commands and options in a shell.",
        completion,
        _completion_arguments,
        example="completion bash > /etc/bash_completion.d/ecluse",
    ),
    Local("complete", "", complete, takes_rest=True),
    *authors.COMMANDS,
]


def all_commands() -> list[Local | Json]:
    """Return the commands of this program and those of a server of the same version (commands.json). A command of this
    program replaces the server's command of the same name."""
    own = {one.name for one in COMMANDS}
    return [*COMMANDS, *(one for one in packaged() if one["name"] not in own)]
