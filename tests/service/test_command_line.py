"""The commands against a real service with a real training: their output and exit codes, TLS, and refusals."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farpipe.engine.transport.security.authority import init, issue
from services import FLEET, Spawned, free_port, job_toml, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def farpipe(service, *argv, **env):
    """(exit code, output, errors) of a command that asks `service`."""
    found = {"FARPIPE_SERVER": service.url, "FARPIPE_TOKEN_FILE": str(service.root / "operator.token")} | env
    done = subprocess.run(
        [sys.executable, "-m", "farpipe", *map(str, argv)],
        env=os.environ | found,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Spawned(tmp_path_factory.mktemp("service"))
    assert made.until_ready(), made.log.read_text()
    yield made
    assert made.kill(15) == 0, made.log.read_text()
    assert "Traceback" not in made.log.read_text()


def test_a_training_from_its_submission_to_its_end(service, tmp_path):
    (tmp_path / "job.toml").write_text(job_toml())
    code, out, _ = farpipe(service, "job", "submit", "j", tmp_path / "job.toml")
    assert (code, out[:6]) == (0, "job j:")
    assert "it is starting on 2 at" in farpipe(service, "job", "why", "j")[1]
    assert farpipe(service, "job", "wait", "j", "--time-limit", 240)[0] == 0
    shown = json.loads(farpipe(service, "job", "show", "j", "--json")[1])
    assert (shown["result"], shown["num_done"], shown["attempts"][0]["result"]) == ("finish", 4.0, "finish")
    assert "attempt 1: 2 at" in farpipe(service, "job", "show", "j")[1]
    assert "step 3: " in farpipe(service, "job", "logs", "j")[1]
    assert "finish" in farpipe(service, "job", "list")[1]
    again = farpipe(service, "job", "submit", "j", tmp_path / "job.toml", "--json")[1]
    assert json.loads(again)["result"] == "finish"


def test_the_page_on_running_a_fleet_is_walked(tmp_path):
    """Every command of the page, in its order, in a folder with its files."""
    page = (Path(__file__).parents[2] / "docs/how-to/run-a-fleet.md").read_text()
    for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
        (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
    commands = [line for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE) if line.startswith("farpipe")]
    serve, *others = [[sys.executable, "-m", *shlex.split(line)] for line in commands]
    port = free_port()
    env = os.environ | {"FARPIPE_SERVER": f"http://127.0.0.1:{port}"}
    process = subprocess.Popen([*serve, "--port", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        until((tmp_path / "fleet" / "operator.token").exists, 120.0)
        for argv in others:
            done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (argv, done.stderr)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_exit_codes_are_those_of_every_command(service, tmp_path):
    (tmp_path / "job.toml").write_text(job_toml(100_000))
    submit = ("job", "submit", "long", tmp_path / "job.toml")
    assert farpipe(service, *submit, "--devices", "64")[0] == 4
    assert farpipe(service, *submit, "--devices", "many")[0] == 2
    assert farpipe(service, *submit)[0] == 0
    assert farpipe(service, "job", "wait", "long", "--time-limit", "0")[0] == 6
    assert farpipe(service, "job", "cancel", "long")[0] == 0
    code = farpipe(service, "job", "wait", "long", "--time-limit", "240")[0]
    assert code == 75
    assert "cancelled by its owner" in farpipe(service, "job", "show", "long")[1]
    assert farpipe(service, "job", "show", "nobody")[0] == 3
    assert farpipe(service, "job", "list", FARPIPE_SERVER="http://127.0.0.1:9")[0] == 6
    assert farpipe(service, "job", "list", FARPIPE_SERVER="http://example.org")[0] == 2
    (tmp_path / "wrong.token").write_text("x\n")
    assert farpipe(service, "job", "list", "--token-file", tmp_path / "wrong.token")[0] == 3


def test_operators_drain_sites_and_make_tokens(service, tmp_path):
    assert "draining" in farpipe(service, "fleet", "drain", "zurich")[1]
    assert json.loads(farpipe(service, "fleet", "undrain", "zurich", "--json")[1])[0]["state"] == "up"
    assert farpipe(service, "fleet", "drain", "bern")[0] == 3
    path = tmp_path / "viewer.token"
    assert farpipe(service, "fleet", "token", "viewer", "t", "--output", path)[0] == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, _, err = farpipe(service, "fleet", "drain", "zurich", "--token-file", path)
    assert (code, "needs the role operator" in err) == (3, True)
    assert "lugano" in farpipe(service, "fleet", "status", "--token-file", path)[1]


def test_another_address_than_loopback_needs_a_certificate_and_passwords_stay_in_files(tmp_path):
    (tmp_path / "fleet.toml").write_text(FLEET)
    serve = [sys.executable, "-m", "farpipe", "fleet", "serve", tmp_path / "fleet.toml", "--run-dir", tmp_path / "f"]
    for more, says in (
        (["--host", "0.0.0.0"], "give --certs"),
        (["--database", "postgresql+psycopg://me:secret@db/fleet"], "passfile=FILE"),
        (["--database", "nonsense"], "expected sqlite:///FILE"),
    ):
        done = subprocess.run([*serve, *more], capture_output=True, text=True, timeout=60)
        assert (done.returncode in (2, 3), says in done.stderr) == (True, True), done.stderr
        assert "secret" not in done.stderr


def test_a_service_with_a_certificate_is_asked_over_tls(tmp_path):
    init(tmp_path / "certs")
    issue(tmp_path / "certs", "here", hosts=["localhost"], ips=["127.0.0.1"])
    made = Spawned(tmp_path / "f", "--certs", str(tmp_path / "certs" / "here"))
    made.url = made.url.replace("http:", "https:")
    try:
        trusted = {"SSL_CERT_FILE": str(tmp_path / "certs" / "authority.pem")}
        until(lambda: farpipe(made, "fleet", "status", **trusted)[0] == 0, 120.0, made.log.read_text)
        code, _, err = farpipe(made, "fleet", "status")
        assert (code, "certificate" in err.lower()) == (6, True), err
    finally:
        made.kill(15)


@pytest.mark.parametrize("command", [("fleet", "serve", "fleet.toml"), ("job", "list")])
def test_without_the_extra_a_command_names_it_and_farpipe_works(tmp_path, command):
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "operator.token").write_text("x")
    gone = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'uvicorn', 'sqlalchemy', 'alembic', 'httpx']))"
    program = f"{gone}; import farpipe.service.door, farpipe.service.ranks; from farpipe.cli import main; "
    program += f"sys.argv[1:] = {command!r}; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, "pip install 'farpipe[service]'" in done.stderr) == (3, True), done.stderr
