"""Arguments that Megatron-LM prints into its log, as a job."""

import pytest

from farpipe.core.errors import InputError
from farpipe.interop.files import read_draft
from farpipe.interop.printed_arguments import arguments_of

ARGUMENTS = {
    "add_bias_linear": False,
    "attention_backend": "AttnBackend.auto",
    "attention_dropout": 0.0,
    "bf16": True,
    "cp_comm_type": "['p2p']",
    "data_parallel_size": 2,
    "data_path": "['corpus_text_document']",
    "dino_head_hidden_size": 4096,
    "encoder_num_layers": 24,
    "ffn_hidden_size": 8192,
    "global_batch_size": 128,
    "group_query_attention": True,
    "hidden_dropout": 0.0,
    "hidden_size": 2048,
    "kv_channels": 128,
    "micro_batch_size": 2,
    "moe_ffn_hidden_size": 8192,
    "moe_token_dropping": True,
    "normalization": "RMSNorm",
    "num_attention_heads": 16,
    "num_experts": None,
    "num_layers": 24,
    "num_query_groups": 8,
    "overlap_p2p_comm": False,
    "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope",
    "retro_add_retriever": False,
    "seq_length": 4096,
    "swiglu": True,
    "tensor_model_parallel_size": 4,
    "tokenizer_type": "HuggingFaceTokenizer",
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "use_rope_scaling": False,
    "vision_pretraining_type": "classify",
    "world_size": 16,
    "zero_stage": "1.0",
}
"""A part of what a start prints: the figures of a made-up training beside defaults of what it does not use."""
STEP = " iteration {0:8}/  100 | elapsed time per iteration (ms): 5000.0 | global batch size:   128 | lm loss: 9.0 |\n"


def printed(prefix="", **changed):
    lines = [f"{prefix}  {name} {'.' * (48 - len(name))} {value}" for name, value in {**ARGUMENTS, **changed}.items()]
    text = "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}"])
    return f"{text}\n > padded vocab (size: 50000) with 176 dummy tokens (new size: 50176)\n"


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "train.log"
        path.write_text(text + "".join(map(STEP.format, range(1, 20))))
        return path

    return write


def test_printed_arguments_become_a_job(log):
    draft = read_draft([log("using world size: 16\n" + printed())])
    draft.settle()
    value = draft.value
    keys = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn_hidden", "vocab_size", "norm", "bias")
    assert [value("model", key) for key in keys] == [24, 2048, 16, 8, 8192, 50176, "rmsnorm", False]
    keys = ("sequence_length", "global_batch", "microbatch_size", "precision", "zero", "dropout")
    assert [value("training", key) for key in keys] == [4096, 128, 2, "bf16", 1, False]
    assert [value("layout", key) for key in ("tensor", "pipeline", "data")] == [4, 2, 2]
    assert [*draft.missing(), *draft.shapes, *draft.changes, *draft.not_understood, *draft.notes] == []


def test_groups_of_queries_count_where_they_are_switched_on(log):
    draft = read_draft([log(printed(group_query_attention=False, num_query_groups=1, bf16=False, fp16=True))])
    assert draft.value("model", "num_kv_heads") is None
    assert draft.tables["training"]["precision"].origin == "fp16"


def test_the_last_start_counts_and_a_rank_may_stand_before_each_line(log):
    path = log(printed(num_layers=12) + printed("[default0]:", num_layers=48))
    assert read_draft([path]).value("model", "num_layers") == 48


def test_a_switch_of_another_kind_of_model_stops_the_import(log):
    assert list(read_draft([log(printed(retro_add_retriever=True, vision_pretraining=True))]).shapes) == [
        "vision_pretraining"
    ]
    assert list(read_draft([log(printed(own_expert_width=3))]).shapes) == ["own_expert_width"]


def test_experts_and_interleaved_stages_take_their_arguments(log):
    changed = {"num_experts": 8, "moe_router_topk": 2, "virtual_pipeline_model_parallel_size": 2}
    draft = read_draft([log(printed(**changed))])
    assert draft.value("model", "experts")["num_experts"] == 8
    assert draft.value("layout", "virtual") == 2
    assert [text.partition(":")[0] for text in draft.changes] == ["overlap_p2p_comm", "moe_token_dropping"]


def test_a_log_that_breaks_off_among_its_arguments_is_refused(tmp_path):
    (tmp_path / "cut.log").write_text(printed().partition("  num_layers")[0])
    with pytest.raises(InputError, match="breaks off among the arguments"):
        arguments_of(tmp_path / "cut.log")
