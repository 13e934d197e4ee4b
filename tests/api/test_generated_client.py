"""A client generated from the OpenAPI document, used against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

USE = """
import sys

from ecluse_client import AuthenticatedClient
from ecluse_client.api.audits import create_config
from ecluse_client.api.runs import end_run, list_runs, start_run
from ecluse_client.models import ErrorAnswer, NewConfig, Reason, StartRun, Step

with AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2]) as client:
    started = start_run.sync(client=client, body=StartRun(flow="test"), idempotency_key="once")
    again = start_run.sync(client=client, body=StartRun(flow="test"), idempotency_key="once")
    page = list_runs.sync(client=client, limit=5)
    assert started.run_id == again.run_id
    assert [run.id for run in page.runs] == [started.run_id], page

    step = Step(name="Consent", criteria="The customer agrees.")
    config = create_config.sync(client=client, body=NewConfig(name="Compliance", steps=[step]))
    assert (config.name, config.version, config.steps[0].max_score) == ("Compliance", 1, 10), config

    missing = end_run.sync_detailed("999", client=client, body=Reason(reason="a test"))
    assert missing.status_code == 404
    assert isinstance(missing.parsed, ErrorAnswer)
    assert missing.parsed.error.code == "NOT_FOUND"
    refused = create_config.sync(client=client, body=NewConfig(name="", steps=[step]))
    assert refused.error.details[0].where == "body.name", refused
print("used")
"""


@pytest.mark.timeout(300)
def test_a_client_is_generated_without_a_warning_and_works(api, tmp_path):
    document, package = tmp_path / "openapi.json", tmp_path / "ecluse_client"
    document.write_bytes(api.with_key(None).get("/openapi.json").body)
    bin_and_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the generator formats with ruff
    arguments = ["--path", str(document), "--output-path", str(package), "--meta", "none", "--fail-on-warning"]
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": bin_and_path},
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "arning" not in made.stdout + made.stderr
    operations = {
        one["operationId"] for methods in json.loads(document.read_text())["paths"].values() for one in methods.values()
    }
    assert {path.stem for path in package.glob("api/*/*.py")} == operations | {"__init__"}

    used = subprocess.run(
        [sys.executable, "-c", USE, f"http://127.0.0.1:{api.port}", api.key],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert used.stdout == "used\n", used.stderr
