"""Options of plans in Megatron-LM's own parser and validation, where a megatron-core that has them is installed."""

import importlib.util
import random

import pytest

from farpipe.core.errors import FarpipeError

pytest.importorskip("megatron", reason="pip install 'megatron-core>=0.19' triton einops (Python 3.12)")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="megatron-core before 0.19")
def test_megatron_lm_takes_the_options_of_random_plans():
    from benchmarks.engine.megatron_options import complaint, parser_of, random_plan

    arguments, draw, taken = parser_of(), random.Random(3), 0
    while taken < 20:
        try:
            found = random_plan(draw)
        except FarpipeError:  # the draw is no plan
            continue
        assert complaint(arguments, found) == ""
        taken += 1
