import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from farpipe.core.errors import InputError, RunError
from farpipe.engine.links import LinkShape
from farpipe.engine.rendezvous import rendezvous_from_env
from farpipe.engine.transport import PeerError, Rendezvous, TransportConfig, connect
from proxies import free_port
from transports import RANK_PROGRAM, both_ways, connect_all, in_parallel

ENV = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not in the environment; start the ranks with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a whole number, found 'two'"),
        ({"RANK": "2"}, "RANK: must be less than WORLD_SIZE, found 2 of 2"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not in the environment"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT: expected a whole number, found '-1'"),
    ],
)
def test_an_environment_that_says_too_little_is_refused(change, message):
    env = {name: text for name, text in (ENV | change).items() if text is not None}
    with pytest.raises(InputError, match=message):
        rendezvous_from_env(env=env)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"MASTER_PORT {port} can't be listened on: Address already in use"):
            rendezvous_from_env(env=ENV | {"MASTER_PORT": str(port)})
        with pytest.raises(InputError, match=rf"can't listen on 127.0.0.1 port {port}: Address already in use"):
            connect_all(1, port=port)


@pytest.mark.slow
def test_nobody_at_the_meeting_point_is_an_error_in_time():
    env = ENV | {"RANK": "1", "MASTER_PORT": str(free_port())}
    with pytest.raises(RunError, match=r"rank 1: no meeting point at 127.0.0.1:\d+ .* within 1 s"):
        rendezvous_from_env(timeout_s=1, env=env)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    with pytest.raises(RunError, match=r"rank 0 waited 0\.2 s for the others; missing: rank 1, rank 2"):
        connect(0, 3, TransportConfig(connect_timeout_s=0.2), Rendezvous(store, 0, 3))
    with pytest.raises(RunError, match=r"rank 2 waited 0\.2 s for the others; missing: rank 1$"):
        connect(2, 3, TransportConfig(connect_timeout_s=0.2), Rendezvous(store, 2, 3))
    with pytest.raises(RunError, match=r"rank 1 waited 0\.2 s for the others; missing: rank 0$"):
        connect(1, 2, TransportConfig(connect_timeout_s=0.2), Rendezvous(dist.HashStore(), 1, 2))


def introduction(host="127.0.0.1", machine=None):
    machine = machine or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return json.dumps({"host": host, "port": free_port(), "machine": machine, "links_path": "", "encrypted": False})


def meet(rank, text, config):
    """This rank connects to another one, of which there is no more than that it introduces itself with `text`."""
    store = dist.HashStore()
    other = Rendezvous(store, 1 - rank, 2)
    in_parallel(
        lambda: other.introduce(text, 10.0), lambda: connect(rank, 2, config, Rendezvous(store, rank, 2)).close()
    )


@pytest.mark.slow
def test_a_rank_that_comes_to_the_meeting_but_not_to_the_port_is_named():
    config = TransportConfig(connect_timeout_s=0.5)
    with pytest.raises(RunError, match="rank 0 connecting to the others: no connection with rank 1 in time"):
        meet(0, introduction(), config)
    with pytest.raises(RunError, match=r"connecting to rank 0 at 127\.0\.0\.1:\d+: .*refused"):
        meet(1, introduction(), config)


def test_a_loopback_address_on_another_machine_is_refused_with_a_hint():
    with pytest.raises(InputError, match=r"rank 0 listens on 127\.0\.0\.1, where other machines can't reach it"):
        meet(0, introduction(machine="another"), TransportConfig())


def test_emulated_links_between_machines_are_refused():
    config = TransportConfig(links=both_ways(0, 1, LinkShape(0.02, 1e6)))
    with pytest.raises(InputError, match="an emulated WAN needs all ranks on one machine"):
        meet(0, introduction(host="192.0.2.1", machine="another"), config)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": "127.0.0.1", "port": "x", "links_path": ""}'])
def test_an_introduction_that_makes_no_sense_is_refused(text):
    with pytest.raises(RunError, match="what rank 1 says of itself makes no sense"):
        meet(0, text, TransportConfig(connect_timeout_s=0.5))


@pytest.mark.parametrize("text", ["", "{}", "[]", '["a", "b", "c", "d"]', "7"])
def test_what_is_no_rank_s_signature_is_refused(text):
    store = dist.HashStore()

    def sign():
        while not store.check(["meeting"]):
            time.sleep(0.01)
        store.set(f"{store.get('meeting').decode()}/rank 1", text)

    with pytest.raises(RunError, match="what rank 1 says of itself makes no sense"):
        in_parallel(sign, lambda: connect(0, 2, TransportConfig(connect_timeout_s=5.0), Rendezvous(store, 0, 2)))


def group(store, *names, start_last=None):
    """Names that each rank of a group learns of the others, and True if all have the same token."""
    ranks = [Rendezvous(store, rank, len(names)) for rank in range(len(names))]

    def come(rank):
        if rank == start_last:
            time.sleep(0.2)
        return ranks[rank].introduce(names[rank], 5.0)

    heard = in_parallel(*(lambda rank=rank: come(rank) for rank in range(len(names))))
    assert len({rank.token for rank in ranks}) == 1
    return heard, ranks[0].token


@pytest.mark.slow
@pytest.mark.parametrize("start_last", [0, 1, 2])
def test_ranks_never_hear_of_those_of_an_earlier_group_in_the_same_store(start_last):
    """As under torchrun when a machine comes: the store stays, and no count grows."""
    store, tokens = dist.HashStore(), set()
    for names in (("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i"), ("j", "k")):
        heard, token = group(store, *names, start_last=start_last)
        assert heard == [list(names)] * len(names)
        tokens.add(token)
    assert len(tokens) == 4


def test_a_rank_that_got_into_a_group_of_another_size_says_so():
    """As when a rank of a new group signs in while rank 0 of the last one still waits."""
    store = dist.HashStore()
    with pytest.raises(RunError, match=r"rank 1 is of 3 ranks and met a group of 2; is WORLD_SIZE the same everywhere"):
        in_parallel(
            lambda: Rendezvous(store, 0, 2).introduce("a", 5.0), lambda: Rendezvous(store, 1, 3).introduce("b", 5.0)
        )


def test_agents_that_count_restarts_differently_bring_their_ranks_together():
    """One agent has seen a rank fail; the other was told that a machine waits to come, which counts as no restart."""
    port = free_port()

    def come(rank):
        env = {"RANK": str(rank), "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(rank)}
        rendezvous = rendezvous_from_env(5.0, ENV | env)
        return rendezvous.introduce(str(rank), 5.0), rendezvous  # which in rank 0 serves the store, as long as it is

    assert [heard for heard, _ in in_parallel(lambda: come(0), lambda: come(1))] == [["0", "1"]] * 2


def test_a_token_from_outside_does_not_go_through_the_store():
    store = dist.HashStore()
    ranks = [Rendezvous(store, rank, 2, token=b"secret") for rank in range(2)]
    in_parallel(*(lambda rank=rank: rank.introduce("", 5.0) for rank in ranks))
    assert [rank.token for rank in ranks] == [b"secret"] * 2
    name = store.get("meeting").decode()
    assert not any(b"secret" in store.get(f"{name}/{key}") for key in ("list", "rank 1"))


@pytest.mark.parametrize("tokens", [(b"one", b"other", b"one"), (b"one", None, b"one"), (None, b"other", None)])
def test_a_rank_with_another_token_is_named_by_all_at_once(tokens):
    store = dist.HashStore()
    ranks = [Rendezvous(store, rank, 3, token=token) for rank, token in enumerate(tokens)]

    def come(rank):
        with pytest.raises(InputError, match="FARPIPE_RUN_TOKEN is not the same for rank 0 and for rank 1; set the"):
            rank.introduce("", 60.0)

    begin_s = time.monotonic()
    in_parallel(*(lambda rank=rank: come(rank) for rank in ranks))
    assert time.monotonic() - begin_s < 50


TORCHRUN_PROGRAM = (
    RANK_PROGRAM
    + """
with join() as transport:
    parts = transport.exchange("hello", str(RANK).encode(), waiting_for="hello")
    os.write(1, b"heard " + b"".join(parts) + b"\\n")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_the_same_program_runs_under_torchrun(tmp_path, backend):
    script = tmp_path / "ranks.py"
    script.write_text(TORCHRUN_PROGRAM)
    where = ["--master-port" if backend == "static" else "--rdzv-endpoint"]
    where.append(str(free_port()) if backend == "static" else f"127.0.0.1:{free_port()}")
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--rdzv-backend={backend}", *where, str(script)]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("heard 01") == 2


def test_a_rank_that_gives_up_is_heard_by_those_that_wait_and_not_in_the_next_meeting(monkeypatch):
    monkeypatch.setattr("farpipe.engine.transport.rendezvous.LOOK_S", 0.05)
    store = dist.HashStore()

    def meet(rank):
        with pytest.raises(PeerError, match=rf"rank {rank} waited for the others: rank 1 gave up: no \\x1b GPU"):
            Rendezvous(store, rank, 3).introduce("x", 30.0)

    in_parallel(
        lambda: meet(0), lambda: meet(2), lambda: time.sleep(1) or Rendezvous(store, 1, 3).give_up("no \x1b GPU")
    )
    late = [Rendezvous(store, rank, 2) for rank in range(2)]  # the next group, whose rank 0 comes last
    found = in_parallel(lambda: late[1].introduce("b", 30.0), lambda: time.sleep(1) or late[0].introduce("a", 30.0))
    assert found == [["a", "b"]] * 2
