"""Layouts that were submitted to MLPerf Training, as options of Megatron-LM: planned as they ran, and predicted.

Steps: logs of MLPerf Training v5.0, github.com/mlcommons/training_results_v5.0 (Apache-2.0), Llama-3.1-405B.
"""

import pytest

from farpipe import planning
from farpipe.core.spec import parse_job
from farpipe.interop.megatron import read_script_of_megatron

OPTIONS = """\
--nnodes 64 --nproc-per-node 8 --num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248
--vocab-size 128256 --make-vocab-size-divisible-by 1 --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --position-embedding-type rope --group-query-attention --num-query-groups 8
--seq-length 8192 --global-batch-size 1152 --micro-batch-size 1 --bf16 --hidden-dropout 0 --attention-dropout 0
--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size 8 --context-parallel-size 2 --sequence-parallel
--num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--fp8-format hybrid --fp8-param-gather --grad-reduce-in-bf16 --tp-comm-overlap
"""


@pytest.mark.parametrize(("device", "tensor", "step_s"), [("h100", 8, 55.132), ("h200", 4, 50.014)])
def test_eight_stages_a_rank_fit_and_take_what_they_took(device, tensor, step_s):
    draft = read_script_of_megatron(OPTIONS.format(tensor=tensor), "options.txt")
    draft.settle()
    plan = planning.plan(parse_job(draft.to_toml(device)))
    assert (plan.layout.virtual, plan.layout.context, plan.schedule.method) == (8, 2, "interleaved")
    assert [place.num_layers for place in plan.placements] == [1, *[2] * 62, 1]
    assert plan.prediction.step_s == pytest.approx(step_s, rel=0.05)
