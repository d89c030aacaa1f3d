import pytest
import torch

from farpipe import planning
from farpipe.core.errors import RunError
from farpipe.core.spec import Training, parse_job
from farpipe.engine.executor.wire_types import WIRE_TYPES, NarrowMessenger, Rounding, narrow, narrowed_form, widen
from farpipe.engine.launch.runs import run_spec_of
from farpipe.engine.transport import Tag
from farpipe.planning.cost.transfer import wire_bytes
from in_process import run_ranks
from job_files import cluster_text
from small_models import LLAMA
from trainings import losses, make_run, metrics, train

ERRORS = {"bf16": 4e-3, "fp8": 4e-2, "int8": 2e-2}
"""Of normally distributed numbers, generously: half a unit in the last place, and of the block's largest for int8."""


def wide(sent):
    return widen(sent, narrowed_form(sent))


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (127,), (128,), (3, 5, 77)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_arrives_is_nearly_what_was_sent(wire_type, shape, dtype):
    x = torch.randn(shape).to(dtype)
    sent = narrow(x, wire_type)
    y = wide(sent)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert sent.nbytes == wire_bytes(x.numel(), x.itemsize, wire_type, x.dim())
    if x.numel() > 100:
        error = (y.float() - x.float()).norm() / x.float().norm()
        assert error < ERRORS[wire_type]
        assert error > 0 or (wire_type, dtype) == ("bf16", torch.bfloat16)


@pytest.mark.parametrize("wire_type", ["fp8", "int8"])
def test_a_large_number_costs_only_its_own_block_precision(wire_type):
    x = torch.randn(1280)
    x[0] = 1e6
    y = wide(narrow(x, wire_type))
    assert (y[128:] - x[128:]).norm() / x[128:].norm() < ERRORS[wire_type]
    assert y[0] == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_zeros_and_very_large_and_small_numbers_survive(wire_type):
    for x in (torch.zeros(300), torch.full((300,), 3e37), torch.full((300,), 1e-30)):
        assert torch.allclose(wide(narrow(x, wire_type)), x, rtol=0.01, atol=0)


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_pass_for_a_number(wire_type, bad):
    x = torch.randn(10)
    x[3] = bad
    assert not wide(narrow(x, wire_type)).isfinite().all()


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\1\0", b"\0\7\0\0", b"\0\0\1\0" + b"\xff" * 8, b"\0\0\1\0" + b"\5" + bytes(9)]
)
def test_bytes_that_were_not_narrowed_are_refused(data):
    with pytest.raises(RunError, match="not a narrowed message"):
        narrowed_form(
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
        )


def test_only_messages_between_sites_are_narrowed_and_their_error_is_measured():
    x = torch.randn(4, 256)

    def work(peers):
        narrowed = NarrowMessenger(peers, ("zurich", "zurich", "lugano"), "int8", measure_every=2)
        if peers.rank == 0:
            for number in range(4):
                for peer in (1, 2):
                    narrowed.send(peer, "forward", Tag(0, 0, number), x)
            return narrowed.rounding
        return narrowed.receive(0, "forward", Tag(0, 0, 0), waiting_for="it")

    rounding, near, far = run_ranks(3, work)
    assert torch.equal(near.tensor, x)
    assert near.num_bytes == x.nbytes
    assert not torch.equal(far.tensor, x)
    assert far.num_bytes == wire_bytes(x.numel(), 4, "int8", 2) < x.nbytes / 3.5
    assert rounding.num_messages == 2
    assert rounding.relative_error == pytest.approx(float((far.tensor - x).norm() / x.norm()), rel=1e-4)
    assert "times fewer bytes" in str(rounding)
    assert Rounding().relative_error == 0


def losses_of(folder, wire_type):
    """The losses of a short training over two sites."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 400)
    train(make_run(text, model=LLAMA, sequence_length=16, wire_type=wire_type), folder)
    return [loss for _, loss, _ in losses(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_a_training_with_narrowed_messages_learns_nearly_the_same(tmp_path, wire_type, capfd):
    exact, narrowed = losses_of(tmp_path / "exact", "none"), losses_of(tmp_path / "narrowed", wire_type)
    assert len(narrowed) == len(exact) == 6
    assert narrowed[-1] < narrowed[0]
    assert narrowed != exact
    assert narrowed == pytest.approx(exact, rel=0.02)
    assert f"wire type {wire_type}: relative error" in capfd.readouterr().err


JOB = """\
[model]
num_layers = 3
hidden = 72
num_heads = 2
ffn_hidden = 64
vocab_size = 256

[training]
sequence_length = 17
global_batch = 6
microbatch_size = 3
num_steps = 2
precision = "{precision}"
wire_type = "{wire_type}"

[data]
source = "{text}"

{cluster}
[layout]
pipeline = 3
layers = [1, 1, 1]
sites = ["zurich", "lugano"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire_type", "precision"), [("none", "fp32"), ("bf16", "fp32"), ("fp8", "fp32"), ("int8", "bf16")]
)
def test_the_planned_bytes_are_those_on_the_wire(tmp_path, wire_type, precision):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 400)
    cluster = cluster_text(device="a100-80gb", num_devices=(2, 1), latency="1 ms", bandwidth="1 Gbit/s")
    job = JOB.format(wire_type=wire_type, precision=precision, text=text, cluster=cluster)
    plan = planning.plan(parse_job(job))
    run = run_spec_of(plan, num_steps=2, device="cpu")
    train(run, tmp_path)
    sent = metrics(tmp_path)[-1]["link_bytes"]
    assert {name: sent[name] for name in ("zurich>lugano", "lugano>zurich")} == {
        "zurich>lugano": 2 * wire_bytes(3 * 17 * 72, 4 if precision == "fp32" else 2, wire_type),
        "lugano>zurich": 2 * wire_bytes(3 * 17 * 72, 4 if precision == "fp32" else 2, wire_type),
    }
    assert sent == plan.prediction.link_bytes


def test_a_wire_type_that_is_no_narrower_is_refused():
    with pytest.raises(ValueError, match="'bf16' is no narrower than precision bf16"):
        Training(sequence_length=16, global_batch=8, precision="bf16", wire_type="bf16")
