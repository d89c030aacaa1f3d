"""Experiments of Primus: a module, a model and overrides, each over the files that it extends."""

import pytest

from farpipe.core.errors import InputError
from farpipe.interop.files import read_draft

pytest.importorskip("yaml")

FILES = {
    "primus/configs/modules/megatron/base.yaml": "micro_batch_size: 1\nseq_length: 1024\nsome_default: 3\n",
    "primus/configs/modules/megatron/pre_trainer.yaml": "extends: [base.yaml]\nlr: 2.0e-5\ntrain_iters: 9\n",
    "primus/configs/models/megatron/llama_base.yaml": "swiglu: true\nuntie_embeddings_and_output_weights: true\n"
    "hidden_size: 1024\nnormalization: RMSNorm\nadd_bias_linear: false\nposition_embedding_type: rope\n",
    "primus/configs/models/megatron/llama3_8B.yaml": "extends:\n  - llama_base.yaml\nhidden_size: 4096\n"
    "num_layers: 32\nnum_attention_heads: 32\nffn_hidden_size: 14336\ngroup_query_attention: true\n"
    "num_query_groups: 8\ntokenizer_model: meta-llama/Llama-3.1-8B\n",
}
EXPERIMENT = """
exp_name: ${PRIMUS_EXP_NAME:llama}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:llama3_8B}.yaml
    overrides:
      global_batch_size: 128
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      use_turbo_attention: true
      use_own_kernel: true
"""


@pytest.fixture
def experiment(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / "examples" / "llama.yaml"
    path.parent.mkdir()
    path.write_text(EXPERIMENT)
    return path


def test_an_experiment_is_read_over_what_it_extends(experiment):
    """As examples/megatron/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml of AMD-AGI/Primus."""
    draft = read_draft([experiment])
    draft.settle()
    value = draft.value
    assert draft.missing() == []
    assert [value("model", key) for key in ("hidden", "num_layers", "num_kv_heads", "vocab_size")] == [
        *(4096, 32, 8, 128256)
    ]
    assert [value("training", key) for key in ("sequence_length", "global_batch", "num_steps")] == [1024, 128, 9]
    assert value("layout", "tensor") == 2
    assert draft.not_understood == ["use_own_kernel: True"]
    assert "1 settings of the files that it builds on were not understood; Primus' defaults" in draft.notes


def test_a_variable_of_the_environment_can_be_given(experiment):
    assert read_draft([experiment], known={"PRIMUS_TP": "4"}).value("layout", "tensor") == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / "primus/configs/models/megatron/llama_base.yaml").unlink(), "not there, and a file of"),
        (lambda root: (root / "primus").rename(root / "x"), "which no folder above it has"),
        (
            lambda root: (root / "primus/configs/modules/megatron/base.yaml").write_text("extends: [pre_trainer.yaml]"),
            "extends itself",
        ),
        (
            lambda root: (root / "examples/llama.yaml").write_text(EXPERIMENT.replace("megatron", "maxtext")),
            "framework maxtext is not read; megatron is",
        ),
    ],
)
def test_what_an_experiment_lacks_is_named(experiment, change, words):
    change(experiment.parents[1])
    with pytest.raises(InputError, match=words):
        read_draft([experiment])
