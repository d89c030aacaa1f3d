"""A rank in bad surroundings: ``python rank.py RUN_DIR ...``; the environment says in which.

FARPIPE_TEST_PROXY: the port where a Proxy tells through which port to go; FARPIPE_TEST_BEHIND: the ranks between which
it stands, all by default. FARPIPE_TEST_SKEWS: the clock of every rank,
a JSON list in nanoseconds. FARPIPE_TEST_SLOW: a rank whose actions take three times as long. FARPIPE_TEST_PAUSE_S:
a pause before every step, so that a training lasts long enough for something to happen to it.
"""

import json
import os
import socket
import time

import typer

from farpipe.engine.executor.work import Trainer
from farpipe.engine.launch import rank_main
from farpipe.engine.stages import stage
from farpipe.engine.transport import meeting
from farpipe.engine.transport.clock import SKEW_VARIABLE

RANK = int(os.environ["RANK"])
introduce = meeting.introduce


def route(address):
    """The address to dial in the place of `address`."""
    with socket.create_connection(("127.0.0.1", int(os.environ["FARPIPE_TEST_PROXY"]))) as asking:
        asking.sendall(f"{address[0]} {address[1]}\n".encode())
        return "127.0.0.1", int(asking.makefile().readline())


def introduce_through_proxy(rank, *arguments):
    ranks = introduce(rank, *arguments)
    behind = set(json.loads(os.environ.get("FARPIPE_TEST_BEHIND", "null")) or range(len(ranks)))
    if rank not in behind:
        return ranks
    mine = behind - {rank}
    return [known._replace(address=route(known.address)) if peer in mine else known for peer, known in enumerate(ranks)]


def begin_after_a_pause(learning, step):
    time.sleep(float(os.environ["FARPIPE_TEST_PAUSE_S"]))
    begin_step(learning, step)


begin_step = Trainer.begin_step
if "FARPIPE_TEST_PAUSE_S" in os.environ:
    Trainer.begin_step = begin_after_a_pause
if "FARPIPE_TEST_PROXY" in os.environ:
    meeting.introduce = introduce_through_proxy
if "FARPIPE_TEST_SKEWS" in os.environ:
    os.environ[SKEW_VARIABLE] = str(json.loads(os.environ["FARPIPE_TEST_SKEWS"])[RANK])
if os.environ.get("FARPIPE_TEST_SLOW") == str(RANK):
    once = stage._sleep
    stage._sleep = lambda seconds: once(3 * seconds)
typer.run(rank_main.main)
