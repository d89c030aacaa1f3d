"""The service against its own OpenAPI, by schemathesis: no 500, nothing undocumented."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from services import Threaded

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed: pip install schemathesis")
def test_no_request_that_its_own_description_allows_or_forbids_ends_in_a_500(tmp_path, pytestconfig):
    service = Threaded(tmp_path)
    examples = max(1, int(5 * pytestconfig.getoption("examples")))
    token = (tmp_path / "operator.token").read_text().strip()
    program = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    options = [
        "--checks",
        CHECKS,
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--phases",
        "examples,coverage,fuzzing",
    ]
    try:
        assert service.operator().submit("first").status_code == 201
        done = subprocess.run(
            [*program, f"{service.url}/openapi.json", *options, "--header", f"Authorization: Bearer {token}"],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        tried = re.search(r"(\d+) generated", done.stdout)
        assert tried, done.stdout
        assert int(tried[1]) > 100
    finally:
        service.close()
