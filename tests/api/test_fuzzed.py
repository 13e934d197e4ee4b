"""Every operation of the server's own OpenAPI document, fed with what the document allows and with what it does not."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from ecluse.app import create_app
from ecluse.bootstrap import Database
from ecluse.settings import Settings
from tests.support.api_server import FLOW, new_key, serving

pytestmark = pytest.mark.long

STREAMS = {"/api/events"}  # an answer without an end
FEW, MANY = 3, 10  # requests per operation, of those that the document allows and of those that it does not


def operations(app):
    document = schemathesis.openapi.from_dict(app.openapi())
    return [found.ok() for found in document.get_all_operations()]


@pytest.mark.timeout(600)
# The server is a thread of this process: what it draws for a jitter, Hypothesis takes for a draw of a strategy.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(dsn, examples):
    once = settings(
        max_examples=examples,
        derandomize=True,  # the same requests on every machine
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with serving(dsn, FLOW) as client:
        headers = {"Authorization": f"Bearer {new_key(dsn, 'admin')}"}
        failed, asked = [], 0
        for operation in operations(client.app):
            if operation.path in STREAMS:
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                @once
                @given(operation.as_strategy(generation_mode=mode))
                def no_5xx(case):
                    nonlocal asked
                    asked += 1
                    answer = case.call(base_url=f"http://127.0.0.1:{client.port}", headers=headers, timeout=30)
                    case.validate_response(answer, checks=[not_a_server_error])

                try:
                    no_5xx()
                except Exception as error:  # noqa: BLE001 - all of them are to be seen at once
                    causes = [error, *getattr(error, "exceptions", ())]  # of results that differ between two calls
                    failed.append(f"{operation.label} ({mode.value}): {'; '.join(map(repr, causes))}")
        assert not failed, "\n\n".join(failed)
        assert asked > 100


def test_every_operation_says_what_it_is_for_and_every_body_has_an_example(dsn):
    document = create_app(Settings(), Database(dsn, None), [FLOW], frozenset({"api"})).openapi()
    models = document["components"]["schemas"]
    silent, without = [], []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if not operation.get("description"):
                silent.append(f"{method} {path}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                model = models.get(content["schema"].get("$ref", "").rpartition("/")[2], content["schema"])
                shown = "example" in content or "examples" in content or "examples" in model
                if not shown and not any("examples" in field for field in model.get("properties", {}).values()):
                    without.append(f"{method} {path}")
    assert silent == []
    assert without == []
