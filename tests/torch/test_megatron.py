"""What Megatron-Core's schedules get; they themselves are run by benchmarks/engine/megatron_core.py."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

import farpipe.torch


@dataclass
class Config:
    """Settings of Megatron-Core's that matter."""

    batch_p2p_comm: bool = True


@dataclass
class Groups:
    pp: str = "ranks of the pipeline"
    tp: str = "tensor"

    @classmethod
    def use_mpu_process_groups(cls):
        return cls(pp="Megatron's")


@dataclass
class Communicator:
    pp_group: str
    config: Config


@pytest.fixture
def megatron_core(monkeypatch):
    """A stand-in for the package; its pipeline has as many ranks as is set."""
    home = sys.modules["farpipe.torch.megatron"]
    size = {"ranks": 2}
    core = ModuleType("megatron.core")
    core.__version__ = "0.16.1"
    communication, config = ModuleType("p2p_communication"), ModuleType("process_groups_config")
    communication.P2PCommunicator, config.ProcessGroupCollection = Communicator, Groups
    modules = {"megatron": ModuleType("megatron"), "megatron.core": core}
    modules["megatron.core.pipeline_parallel"] = ModuleType("pipeline_parallel")
    modules["megatron.core.pipeline_parallel.p2p_communication"] = communication
    modules["megatron.core.process_groups_config"] = config
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(home, "farpipe_group", lambda group: f"farpipe's of {group}")
    monkeypatch.setattr(home.dist, "get_world_size", lambda group: size["ranks"])
    return size


def test_only_the_group_of_the_pipeline_is_another(megatron_core):
    given, config = Groups(), Config()
    found = farpipe.torch.megatron(config, given)
    assert found["pg_collection"] == Groups("farpipe's of ranks of the pipeline", "tensor")
    assert found["p2p_communicator"] == Communicator("farpipe's of ranks of the pipeline", config)
    assert given == Groups()
    assert farpipe.torch.megatron(config)["pg_collection"].pp == "farpipe's of Megatron's"


def test_messages_over_the_group_of_all_ranks_are_refused(megatron_core):
    with pytest.raises(ValueError, match="half of the messages of two pipeline ranks over the group of all ranks"):
        farpipe.torch.megatron(Config(batch_p2p_comm=False), Groups())
    megatron_core["ranks"] = 4
    assert farpipe.torch.megatron(Config(batch_p2p_comm=False), Groups())


def test_a_pipeline_of_one_rank_is_refused(megatron_core):
    megatron_core["ranks"] = 1
    with pytest.raises(ValueError, match="over one rank has no peer to send to"):
        farpipe.torch.megatron(Config(), Groups())
