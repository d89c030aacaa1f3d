"""Questions to the agents of sites: answered to those of the same run alone."""

import socket
from contextlib import contextmanager

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.outer.calls import Caller, CallServer
from farpipe.engine.transport.security.tls import Credentials
from transports import tls_files

SITES = ("zurich", "lugano")
PLAIN = Credentials(None)


def answer(source, question):
    if question.get("ask") == "trouble":
        raise RunError("no such question")
    return {"asked": dict(question), "by": source}


@contextmanager
def server(credentials=PLAIN, token=b"secret"):
    sock = socket.create_server(("127.0.0.1", 0))
    serving = CallServer(sock, 0, SITES, token, credentials, answer)
    try:
        yield sock.getsockname()
    finally:
        serving.close()


@contextmanager
def caller(address, *, source=1, token=b"secret", credentials=PLAIN):
    calling = Caller(address, source, 0, SITES, token, credentials)
    try:
        yield calling
    finally:
        calling.close()


def test_questions_are_answered_one_after_the_other():
    with server() as address, caller(address) as calling:
        for number in range(3):
            assert calling.call({"ask": "x", "n": number}) == {"asked": {"ask": "x", "n": number}, "by": 1}


def test_a_refusal_is_told_and_the_connection_goes_on():
    with server() as address, caller(address) as calling:
        with pytest.raises(RunError, match="no such question"):
            calling.call({"ask": "trouble"})
        assert calling.call({"ask": "x"})["by"] == 1


def test_an_agent_that_is_gone_is_an_os_error_and_one_that_is_back_answers():
    with server() as address:
        pass
    with caller(address) as calling:
        with pytest.raises(OSError, match="agent of site zurich"):
            calling.call({"ask": "x"})
        sock = socket.create_server(address)
        serving = CallServer(sock, 0, SITES, b"secret", PLAIN, answer)
        assert calling.call({"ask": "x"})["by"] == 1
        serving.close()


def test_another_run_is_refused():
    with server() as address, caller(address, token=b"other") as calling, pytest.raises(RunError, match="token"):
        calling.call({"ask": "x"})


def test_with_certificates_a_site_is_who_it_says(tmp_path):
    files = tls_files(tmp_path, SITES)
    own, other = map(Credentials, files)
    with server(own) as address:
        with caller(address, credentials=other) as calling:
            assert calling.call({"ask": "x"})["by"] == 1
        with caller(address, source=0, credentials=own) as calling:
            assert calling.call({"ask": "x"})["by"] == 0
        with caller(address, source=0, credentials=other) as calling, pytest.raises(RunError, match="certificate"):
            calling.call({"ask": "x"})
        with caller(address) as calling, pytest.raises(OSError, match="agent of site zurich"):
            calling.call({"ask": "x"}, limit_s=1.0)
