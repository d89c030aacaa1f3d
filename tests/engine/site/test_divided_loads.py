"""Weights are read by slices: each process of a site its own part of each tensor, and nothing else."""

import pytest

from site_processes import run_processes


@pytest.mark.slow
def test_each_process_reads_its_own_part_of_each_tensor(tmp_path):
    folder = str(tmp_path)
    cases = [
        ("loads", folder, "llama", (2, 2), {"vocab_size": 66}),
        ("loads", folder, "qwen3", (2, 2), {"tied": True}),
        ("loads", folder, "mixtral", (4, 1), {"vocab_size": 67}),
        ("loads", folder, "gpt2", (4, 1), {"vocab_size": 67, "tied": True}),
        ("refusals", folder, (2, 2), {}),
    ]
    *found, refused = run_processes(4, cases)
    assert found == [{"wrong": [], "beyond": [0] * 4}] * 4
    assert all("there is no tensor model.layers.3.mlp.down_proj.weight" in missing for missing, _ in refused["said"])
    assert all("model.layers.3.mlp.down_proj.weight is [" in shape for _, shape in refused["said"])
