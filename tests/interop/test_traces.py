"""Traces of torch.profiler: layers told apart by their attention, exact on a trace made by hand, near on a real one."""

import gzip
import json
from dataclasses import replace
from itertools import count

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.trace_files import is_trace, of_one_rank, read_trace
from farpipe.interop.traces import profile_of

JOB = """
[model]
num_layers = 3
hidden = 64
num_heads = 4
ffn_hidden = 96
vocab_size = 320
[training]
sequence_length = 256
global_batch = 4
num_steps = 5
microbatch_size = 2
precision = "fp32"
recompute = "none"
[layout]
pipeline = 1
data = 1
tensor = 1
[[cluster.sites]]
name = "site"
device = "cpu"
num_devices = 1
"""
EMBEDDING, BEFORE, LAYER, HEAD = 1000, 300, 4000, 2500  # microseconds
BACKWARD = "autograd::engine::evaluate_function: "


class Events:
    """Events of a training as the profiler writes them, on one thread, one after the other."""

    def __init__(self, gpu=False):
        self.found, self.now, self.gpu, self.numbers = [], 0.0, gpu, count(1)

    def add(self, name, duration, dims=(), category="cpu_op", start=None):
        start = self.now if start is None else start
        args = {"Input Dims": [list(shape) for shape in dims]}
        self.found.append(
            {"ph": "X", "cat": category, "name": name, "tid": 7, "ts": start, "dur": duration, "args": args}
        )
        if self.gpu and category == "cpu_op" and not name.startswith("autograd"):
            number = next(self.numbers)
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 7, "dur": 0.1}
            self.found.append(launch | {"ts": start + 0.1, "args": {"correlation": number}})
            kernel = {"ph": "X", "cat": "kernel", "name": "k", "tid": 0, "args": {"correlation": number}}
            self.found.append(kernel | {"ts": 2 * start, "dur": 2 * duration})
        if start == self.now:
            self.now += duration

    def backward(self, name, duration, dims=()):
        """An operation inside a function of the backward."""
        start = self.now
        self.add(BACKWARD + name, duration)
        self.add(name, duration, dims, start=start)

    def microbatch(self, num_layers=3, tokens=512):
        self.add("aten::embedding", EMBEDDING)
        self.add("aten::norm", BEFORE)
        for _ in range(num_layers):
            self.add("aten::scaled_dot_product_attention", 1000, [(2, 4, 256, 16)] * 3)
            self.add("aten::rest", LAYER - 1000)
        self.add("aten::logits", HEAD - BEFORE)
        self.backward("aten::mm", 500, [(320, tokens), (tokens, 64)])  # the head's weights
        self.backward("aten::mm", 700, [(tokens, 320), (320, 64)])
        for _ in range(num_layers):
            self.backward("aten::_scaled_dot_product_flash_attention_backward", 3000)
            self.backward("aten::mm", 1500, [(64, tokens), (tokens, 96)])
            self.backward("aten::mm", 1700, [(tokens, 96), (96, 64)])
        self.backward("aten::embedding_dense_backward", 400)

    def written(self, path, **more):
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.found} | more))
        return path


def trace_of(tmp_path, num_microbatches=2, gpu=False, **how):
    events = Events(gpu)
    for _ in range(num_microbatches):
        events.microbatch(**how)
    return events.written(tmp_path / "trace.json")


@pytest.mark.parametrize(("gpu", "scale"), [(False, 1e-6), (True, 2e-6)])
def test_layer_embedding_and_head_are_told_apart(gpu, scale, tmp_path):
    """A GPU's own times count where they are in the trace: here everything takes twice as long there."""
    profile, notes = profile_of([read_trace(trace_of(tmp_path, gpu=gpu))], parse_job(JOB))
    assert not notes
    found = {name: getattr(profile, name) for name in ("layer", "embedding", "head")}
    expected = {
        "layer": (LAYER, 3000 + 1700, 1500),
        "embedding": (EMBEDDING, 0, 400),
        "head": (HEAD, 700, 500),
    }
    for name, (forward, input_grad, weight_grad) in expected.items():
        times = (found[name].forward_s, found[name].input_grad_s, found[name].weight_grad_s)
        assert times == pytest.approx([scale * t for t in (forward, input_grad, weight_grad)], abs=1e-8), name


def test_a_compressed_trace_is_the_same(tmp_path):
    plain = trace_of(tmp_path)
    packed = tmp_path / "rank0.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert is_trace(plain)
    assert is_trace(packed)
    found = (profile_of([read_trace(path)], parse_job(JOB)) for path in (packed, plain))
    assert next(found) == next(found)


def test_traces_of_one_rank_count_by_their_medians(tmp_path):
    """Of three traces, one at half and one at twice the speed, the middle one counts; one without layers is named."""
    paths = [tmp_path / f"{name}.json" for name in ("slow", "usual", "fast")]
    for path, scale in zip(paths, (2, 1, 0.5), strict=True):
        events = Events()
        events.microbatch()
        for event in events.found:
            event |= {"ts": scale * event["ts"], "dur": scale * event["dur"]}
        events.written(path, distributedInfo={"rank": 0})
    empty = Events()
    empty.add("aten::embedding", 1)
    traces = [*map(read_trace, [*paths, empty.written(tmp_path / "empty.json", distributedInfo={"rank": 0})])]
    assert of_one_rank(traces)
    assert not of_one_rank([*traces[:2], replace(traces[2], rank=1)])
    profile, notes = profile_of(traces, parse_job(JOB))
    expected = profile_of([read_trace(paths[1])], parse_job(JOB))[0]
    for part in ("layer", "embedding", "head"):
        found, usual = (getattr(one, part).model_dump() for one in (profile, expected))
        assert found == pytest.approx(usual, abs=1e-8)
    assert len(notes) == 1
    assert "left out: " in notes[0]
    assert "empty.json: 0 layers" in notes[0]


def test_without_shapes_the_cost_model_divides_the_backward(tmp_path):
    path = trace_of(tmp_path)
    path.write_text(path.read_text().replace("Input Dims", "Ev Idx"))
    profile, notes = profile_of([read_trace(path)], parse_job(JOB))
    assert "no shapes" in notes[0]
    assert profile.layer.input_grad_s + profile.layer.weight_grad_s == pytest.approx(6200e-6)


def test_a_part_of_the_model_gives_its_layers_alone(tmp_path):
    path = trace_of(tmp_path, num_layers=2)
    profile, notes = profile_of([read_trace(path)], parse_job(JOB))
    assert "has 2 layers; embedding and head are modelled" in notes[-1]
    assert profile.layer.forward_s == pytest.approx(LAYER * 1e-6)


def test_recomputed_attention_is_no_layer(tmp_path):
    events = Events()
    events.microbatch()
    attention = next(event for event in events.found if "evaluate_function" in event["name"])
    again = {"name": "aten::scaled_dot_product_attention", "ts": attention["ts"] + 1, "dur": 10}
    events.found.append(attention | again)
    assert profile_of([read_trace(events.written(tmp_path / "trace.json"))], parse_job(JOB))[0].layer.forward_s == (
        pytest.approx(LAYER * 1e-6)
    )


@pytest.mark.parametrize(
    ("forward", "called", "backward"),
    [
        ("FlashAttnFunc", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward"),
        ("FlashAttnVarlenFunc", "flash_attn::_flash_attn_varlen_forward", "FlashAttnVarlenFuncBackward"),
        ("RopeLoraFlashAttnVarlenFunc", "aten::mul", "RopeLoraFlashAttnVarlenFuncBackward"),
    ],
)
def test_attentions_inside_each_other_are_one_layer(forward, called, backward, tmp_path):
    """As in GindaChen/nsys-ai's exports of two H100, deepseek-ai/profile-data and TraceLens' H100 and MI300."""
    events = Events(gpu=True)
    for _ in range(2):
        events.microbatch()
    for event in [*events.found]:
        names = {
            "aten::scaled_dot_product_attention": (forward, called),
            "aten::_scaled_dot_product_flash_attention_backward": (backward, "aten::_flash_attention_backward"),
        }
        if event["name"] in names:
            event["name"], inner = names[event["name"]]
            events.found.append(event | {"name": inner, "ts": event["ts"] + 0.05, "dur": event["dur"] - 0.1})
    found = profile_of([read_trace(events.written(tmp_path / "trace.json"))], parse_job(JOB))[0].layer
    assert found.forward_s == pytest.approx(2e-6 * LAYER)
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(2e-6 * 6200)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "broken off"),
        (lambda text: "{}", "traceEvents is missing"),
        (lambda text: text.replace('"cpu_op"', '"kernel"'), "no operations"),
        (lambda text: text.replace("aten::scaled_dot_product_attention", "aten::x"), "no forward of two layers"),
        (lambda text: text.replace("attention", "x"), "0 layers were found"),
        (lambda text: text.replace("[2, 4, 256, 16]", "[2, 4, 512, 16]"), "another training's trace"),
        (lambda text: text.replace('"dur": 1000', '"dur": null'), "without name, thread, start or duration"),
    ],
)
def test_what_is_no_trace_of_this_training_is_refused(change, words, tmp_path):
    path = trace_of(tmp_path)
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=words):
        profile_of([read_trace(path)], parse_job(JOB))


@pytest.mark.slow
def test_a_training_traced_here_is_predicted_by_its_trace(tmp_path):
    """Steps that the profiler saw, against the plan's prediction with the profile from their trace."""
    torch = pytest.importorskip("torch")
    job = parse_job(JOB.replace("hidden = 64", "hidden = 128").replace("= 96", "= 384"))
    training = small_training(torch, job)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(schedule=schedule, record_shapes=True) as profiler:
        for _ in range(4):
            training()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    profile, _ = profile_of([trace], job)
    assert planning.plan(job, [profile]).prediction.step_s == pytest.approx(sorted(trace.step_s)[1], rel=0.25)


def small_training(torch, job):
    """One optimizer step of a transformer of the job's shape on random tokens."""
    at, spec = job.model, job.training

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(at.hidden, 3 * at.hidden, bias=False)
            self.out = torch.nn.Linear(at.hidden, at.hidden, bias=False)
            self.up = torch.nn.Linear(at.hidden, at.ffn_hidden, bias=False)
            self.down = torch.nn.Linear(at.ffn_hidden, at.hidden, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, at.num_heads, -1)).permute(2, 0, 3, 1, 4)
            core = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(core.transpose(1, 2).flatten(2))
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = torch.nn.Sequential(
        torch.nn.Embedding(at.vocab_size, at.hidden),
        *(Layer() for _ in range(at.num_layers)),
        torch.nn.Linear(at.hidden, at.vocab_size, bias=False),
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        for _ in range(spec.global_batch // spec.microbatch_size):
            tokens = torch.randint(at.vocab_size, (spec.microbatch_size, spec.sequence_length))
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("x.json", '{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', True),
        ("x.json", '{"traceEvents": [{"ph": "X", "ts": 1}]}', True),
        ("x.json.gz", '{"schemaVersion": 1, "traceEvents": []}', True),
        ("x.json", '{"schemaVersion": 38, "panels": []}', False),
        ("x.json.gz", '{"schemaVersion": 2, "layers": []}', False),
        ("x.json", '{"traceEvents": 7, "the": 1}', False),
        ("x.txt", '{"schemaVersion": 1, "traceEvents": []}', False),
    ],
)
def test_a_trace_is_told_by_several_keys(name, text, is_one, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert is_trace(tmp_path / name) is is_one
