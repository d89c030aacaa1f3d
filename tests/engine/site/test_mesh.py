"""The torch world of a site: which backends it asks torch for."""

import pytest
import torch
import torch.distributed as dist

from farpipe.core.errors import InputError
from farpipe.engine.site.mesh import join_site, site_world


@pytest.mark.parametrize("has_nccl", [True, False])
def test_a_run_on_cpus_uses_gloo_alone_whatever_torch_was_built_with(monkeypatch, has_nccl):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    with site_world(dist.HashStore(), "zurich", 0, 1, device="cpu", timeout_s=10):
        dist.all_reduce(torch.ones(1))
        assert "nccl" not in dist.get_backend_config()


def test_a_run_on_gpus_asks_for_nccl_beside_gloo(monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id, **_: asked.append((backend, device_id.index))
    )
    join_site(dist.HashStore(), "zurich", 0, 1, device="cuda", timeout_s=10)
    assert asked == [("cpu:gloo,cuda:nccl", 5)], "NCCL connects now, on this process's GPU"


def test_a_run_on_gpus_is_refused_where_torch_has_no_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(InputError, match="NCCL"):
        join_site(dist.HashStore(), "zurich", 0, 1, device="cuda", timeout_s=10)
