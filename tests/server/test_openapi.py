"""The OpenAPI description, and requests that schemathesis generates from it: none is answered by a server error."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from fake_service import scripted_server
from hypothesis import HealthCheck, Phase, given, settings
from live import Live

from rest_local.server.app import create_app
from rest_local.server.operations import describe
from rest_local.server.settings import ServerSettings
from rest_local.server.state import State

DESCRIBED = create_app(State(ServerSettings(), "demo")).state.operations
OPERATIONS = [(each.method, each.path) for each in DESCRIBED]
# `make soak` asks for more examples of each route, and for others.
EXAMPLES = int(os.environ.get("REST_LOCAL_EXAMPLES", "2"))
ALLOWED = {501, 503}  # what this model cannot, and a server that is full, say so


def test_every_route_is_described(demo: Live) -> None:
    described = demo.get("/openapi.json").json()
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(OPERATIONS)
    assert described["openapi"].startswith("3.1")
    text = json.dumps(described)
    for name in ("messages", "input_prefix", "prediction", "response_format"):
        assert f'"{name}"' in text
    assert "security" not in described


def test_keys_are_described_if_there_are_any() -> None:
    assert describe(DESCRIBED, True)["security"] == [{"key": []}]


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(describe(DESCRIBED, False))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with scripted_server(metrics=True) as live:
        yield live


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # schemathesis' own libraries warn.
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_that_fits_the_description_is_a_fault(live: Live, schema: Any, method: str, path: str) -> None:
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize="REST_LOCAL_EXAMPLES" not in os.environ,
    )
    @given(case=schema[path][method].as_strategy())
    def run(case: Any) -> None:
        response = case.call(base_url=live.url)
        assert response.status_code < 500 or response.status_code in ALLOWED, response.text
        case.validate_response(response, checks=[status_code_conformance, response_schema_conformance])

    run()
    assert live.get("/health").status_code == 200
