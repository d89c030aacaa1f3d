"""Experts that processes of a site share: loss and gradients of the whole model, checkpoints and exports whole."""

import json
import re

import pytest
from safetensors.torch import load_file

from chosen import chosen
from engine.stages.test_training import write_model
from expert_models import MODELS
from farpipe.core.spec.hugging_face import read_model
from farpipe.engine.checkpoint.export import export_to_hugging_face
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.stages.self_check import one_thread
from farpipe.planning.planner.engine import TENSOR_WITH_EXPERT, WITH_EXPERT
from rank_processes import FAULTY_RANK
from site_processes import run_processes
from small_models import relative_error
from trainings import losses, make_run, train

ORDERS = ("1f1b", "zb-h1", "zb-2p")
TWO, FOUR = (2, 1, 1), (4, 1, 1)
"""(data, tensor, context)"""
IN_FLOAT64 = {"routers": "float64"}
"""For classes whose router multiplies in float32, where sums over a part of the tokens round otherwise."""


def cases_of(num_processes):
    """(name, degrees, order, options)"""
    options = [{}, {"recompute": "full"}, {"zero": 3, "reshard_after_forward": True}, {"recompute": "moe"}]
    if num_processes == 2:
        for at, name in enumerate(WITH_EXPERT):
            yield name, TWO, ORDERS[at % 3], {"expert": 2} | options[at % 4]
        yield from (("mixtral", TWO, method, {"expert": 2}) for method in ORDERS)
        yield "qwen3_moe", (1, 1, 2), "zb-h1", {"expert": 2}
        yield "deepseek_v3", (1, 1, 2), "zb-h1", {"expert": 2} | IN_FLOAT64
        for at, name in enumerate(TENSOR_WITH_EXPERT):
            yield name, (1, 2, 1), ORDERS[at % 3], {"expert": 2} | [{"recompute": "moe"}, options[1], IN_FLOAT64][at]
        return
    for at, name in enumerate(WITH_EXPERT):
        yield name, FOUR, ORDERS[at % 3], {"expert": 2 + 2 * (at % 2)} | options[at % 4]
    yield "mixtral", (2, 1, 2), "zb-2p", {"expert": 2, "recompute": "full"}
    yield "mixtral", FOUR, "zb-h1", {"expert": 2, "zero": 3, "reshard_after_forward": True}
    yield "mixtral", (1, 4, 1), "1f1b", {"expert": 4, "recompute": "moe"}
    yield "qwen3_moe", (2, 2, 1), "zb-2p", {"expert": 4, "zero": 3, "reshard_after_forward": True}
    yield "qwen3_moe", (1, 2, 2), "zb-h1", {"expert": 4, "recompute": "full"}
    yield "glm4_moe", (2, 2, 1), "zb-h1", {"expert": 4} | IN_FLOAT64


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", chosen([2, 4], 0))
def test_shared_experts_have_the_gradients_of_the_whole_in_every_order(num_processes):
    cases = list(cases_of(num_processes))
    found = run_processes(num_processes, [("errors", *case) for case in cases])
    wrong = {str(case): one for case, one in zip(cases, found, strict=True) if not one.get("error", 1.0) < 1e-10}
    assert not wrong


@pytest.mark.slow
def test_classes_that_tensor_parallel_processes_cant_share_say_why():
    names = {
        "olmoe": r"nothing is known of \S+\.q_norm\.weight",
        "deepseek_v3": "its plan divides no attention",
        "gpt_oss": "transformers has no plan for it",
    }
    said = [row["said"] for row in run_processes(2, [("checks", name, 2, {}) for name in names])]
    for reason, found in zip(names.values(), said, strict=True):
        assert re.search(f"^layout.tensor: .*{reason}; say layout.tensor = 1", found)


SITES = (("site0", "site1"),) * 2
"""Of the ranks of two replicas: a pipeline over two sites, whose two processes at each share the experts."""


def a_run(text_file, model, homes, tensor=1, **options):
    fields = {"transport": TransportSettings(outage_s=5.0, timeout_s=60), "emulate_links": False}
    run = make_run(
        text_file,
        model=model,
        num_replicas=len(homes),
        method="zb-h1",
        run_fields=fields,
        num_steps=4,
        zero=1,
        **options,
    )
    return run.with_plan(model=model, sites=homes[0], replicas=homes, expert=len(homes) * tensor, tensor=tensor)


@pytest.mark.nightly
def test_without_a_barrier_processes_that_share_experts_have_the_same_bits(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[None, "bold"]]))
    for barrier in (True, False):
        spec = a_run(text_file, MODELS["deepseek_v3"], SITES, clip_norm=1e-3, barrier=barrier)
        run(spec, tmp_path / str(barrier), rank_program=FAULTY_RANK)
    assert (tmp_path / "False" / "again").read_text().split(), "an update was taken back"
    assert losses(tmp_path / "False") == losses(tmp_path / "True")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "name", "tensor"),
    [("numbers", "mixtral", 2), ("numbers", "deepseek_v3", 1), ("files", "mixtral", 1)],
)
def test_a_training_with_shared_experts_over_two_sites_is_that_of_one_process_a_rank(
    origin, name, tensor, text_file, tmp_path
):
    model = MODELS[name]
    if origin == "files":
        model = read_model(write_model(tmp_path / "model", name))
    with one_thread():
        train(a_run(text_file, model, SITES[:1]), tmp_path / "alone")
    shared = a_run(text_file, model, SITES[tensor - 1 :], tensor, checkpoint_every_steps=2)
    run(shared, tmp_path / "run")
    expected = losses(tmp_path / "alone")
    limit = (
        1e-5 if tensor == 1 else 1e-4
    )  # float32 sums over parts round otherwise, and a close choice of experts flips
    for row, other in zip(losses(tmp_path / "run"), expected, strict=True):
        assert row == pytest.approx(other, rel=limit)
    again = a_run(text_file, model, SITES[:1]).model_copy(update={"resume": str(tmp_path / "run"), "num_steps": 6})
    longer = a_run(text_file, model, SITES[:1]).model_copy(update={"num_steps": 6})
    with one_thread():
        train(longer, tmp_path / "longer")
        train(again, tmp_path / "again")
    for row, other in zip(losses(tmp_path / "again"), losses(tmp_path / "longer")[4:], strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    for name in ("alone", "run"):
        export_to_hugging_face(tmp_path / name, tmp_path / f"{name} out")
    assert (tmp_path / "run out" / "tokenizer.json").exists() is (origin == "numbers"), "that of bytes"
    found, expected = ({**load_file(tmp_path / f"{name} out" / "model.safetensors")} for name in ("run", "alone"))
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in found) < 1e-3
