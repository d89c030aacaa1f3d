"""Seconds of layers, embedding and head: laws that hold whatever the constants are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import A100, gpt, layout, llama, site, training
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Training, preset_model, preset_site
from farpipe.core.spec.written import WrittenDevice
from farpipe.planning.cost import Layout, calibration_of, compute, flops
from farpipe.planning.cost.exchange import exchange_times
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.speed import Speed, attention_speed

LAW = calibration_of(A100)
HOW = {
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "sequence_parallel": st.booleans(),
    "flash_attention": st.booleans(),
    "precision": st.sampled_from(["bf16", "fp16", "fp32"]),
}
PARTS = [compute.layer_times, compute.embedding_times, compute.head_times]
SIZES = st.integers(1, 1 << 16)


def no_longer(one, other):
    """True if no time in `one` is longer than the same in `other`, rounding aside."""
    return all(a <= b * (1 + 1e-12) for a, b in zip(one, other, strict=True))


def all_times(part, model, spec, degrees, at=None, law=LAW):
    times = part(model, spec, degrees, at or site(), law)
    return times.forward_s, times.input_grad_s + times.weight_grad_s


@given(
    part=st.sampled_from(PARTS),
    size=st.integers(1, 64),
    more=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 8, 16]),
    **HOW,
)
def test_more_tokens_never_take_less_time(part, size, more, tensor, **how):
    spec = training(**how)
    few, many = (
        all_times(part, llama(), spec, layout(tensor=tensor, microbatch_size=b, num_microbatches=1))
        for b in (size, size + more)
    )
    assert no_longer(few, many)


@given(length=st.integers(1, 8192), more=st.integers(1, 8192), **HOW)
def test_longer_sequences_never_take_less_time(length, more, **how):
    few, many = (
        all_times(compute.layer_times, gpt(), training(sequence_length=s, **how), layout())
        for s in (length, length + more)
    )
    assert no_longer(few, many)


@given(part=st.sampled_from(PARTS), factor=st.floats(1, 100), **HOW)
def test_a_faster_device_never_takes_longer(part, factor, **how):
    fast = A100.model_copy(
        update={
            "peak_flops": {name: rate * factor for name, rate in A100.peak_flops.items()},
            "memory_bandwidth_bytes_per_s": A100.memory_bandwidth_bytes_per_s * factor,
        }
    )
    slow_s, fast_s = (all_times(part, llama(), training(**how), layout(), site(device=d)) for d in (A100, fast))
    assert no_longer(fast_s, slow_s)


@given(rows=SIZES, columns=SIZES, depth=SIZES)
def test_a_product_is_slower_than_the_roofline_and_efficiency_grows_with_size(rows, columns, depth):
    speed = Speed.of(A100, LAW, "bf16")
    product, larger = Product(rows, columns, depth), Product(2 * rows, 2 * columns, 2 * depth)
    seconds = speed.product_s(product)
    assert seconds >= product.flops / 312e12
    assert seconds >= product.elements * 2 / 2.039e12
    assert larger.flops / speed.product_s(larger) >= product.flops / seconds * (1 - 1e-9)


def test_a_huge_product_reaches_the_fraction_that_the_law_promises():
    speed = Speed.of(A100, LAW, "bf16")
    product = Product(1e6, 1e6, 1e6)
    assert product.flops / speed.product_s(product) == pytest.approx(312e12 * LAW.matrix_fraction, rel=1e-3)


def test_a_tiny_layer_takes_the_time_that_the_host_needs_to_launch_it():
    times = compute.layer_times(gpt(hidden=8, num_heads=1), training(sequence_length=1), layout(), site(), LAW)
    assert times.forward_s == LAW.layer_launch_s
    assert times.input_grad_s + times.weight_grad_s == pytest.approx(2 * LAW.layer_launch_s)


def test_full_recomputation_adds_one_forward_to_the_input_gradient():
    plain, again = (
        compute.layer_times(gpt(hidden=4096), training(recompute=how), layout(), site(), LAW)
        for how in ("none", "full")
    )
    assert again.input_grad_s - plain.input_grad_s == pytest.approx(plain.forward_s)
    assert (again.forward_s, again.weight_grad_s) == (plain.forward_s, plain.weight_grad_s)


def test_flash_attention_saves_the_traffic_of_the_scores():
    spec = training(sequence_length=4096)
    flash, plain = (
        compute.layer_times(gpt(), spec.model_copy(update={"flash_attention": on}), layout(), site(), LAW)
        for on in (True, False)
    )
    assert flash.forward_s < plain.forward_s
    assert flash.input_grad_s < plain.input_grad_s


def test_without_any_loss_a_layer_takes_its_flops():
    ideal = replace(
        LAW, matrix_fraction=1.0, wave_elements=0.0, depth_elements=0.0, memory_fraction=1e9, layer_launch_s=0.0
    )
    model, spec = gpt(hidden=1024), training(flash_attention=False)
    times = compute.layer_times(model, spec, layout(microbatch_size=2), site(), ideal)
    expected = flops.layer_flops(model, 256, sequences=2) / 312e12
    assert times.forward_s == pytest.approx(expected, rel=1e-6)
    assert times.input_grad_s + times.weight_grad_s == pytest.approx(2 * expected, rel=1e-6)


def test_a_fused_loss_crosses_the_logits_less_often_and_is_usual_from_hopper_on():
    def head(device, **how):
        at = site(device=WrittenDevice(preset=device).resolve())
        return compute.head_times(llama(), training(**how), layout(), at, calibration_of(at.device)).forward_s

    for device, usual in (("a100-80gb", False), ("h100-sxm", True), ("b200", True), ("mi300x", False)):
        fused, apart = (head(device, cross_entropy_loss_fusion=on) for on in (True, False))
        assert fused < apart
        assert head(device) == (fused if usual else apart)


def test_the_head_is_faster_in_8_bit_and_its_layers_are_not():
    at = site(device=WrittenDevice(preset="b200").resolve())
    for part, faster in ((compute.head_times, True), (compute.layer_times, False)):
        wide, narrow = (
            part(llama(vocab_size=100_000), training(matmul="mxfp8", fp8_output_proj=on), layout(), at, LAW)
            for on in (False, True)
        )
        assert (narrow.forward_s < wide.forward_s) is faster
        assert (narrow.weight_grad_s < wide.weight_grad_s) is faster


def test_a_precision_that_the_device_lacks_is_infeasible():
    old = A100.model_copy(update={"name": "v100", "peak_flops": {"fp16": 125e12}})
    with pytest.raises(InfeasibleError, match="'v100' has no bf16; choose one of fp16"):
        compute.layer_times(gpt(), training(), layout(), site(device=old), LAW)


def attention_s(model, **how):
    job = model, training(sequence_length=8192, **how), layout()
    return compute.attention_core_times(*job, Speed.of(A100, LAW, "bf16"))


def test_windows_spare_flash_attention_the_blocks_outside_and_no_more():
    whole, windowed, long = (attention_s(llama(sliding_window=w), flash_attention=True) for w in (None, 128, 8192))
    assert long == whole
    assert windowed.forward_s / whole.forward_s == pytest.approx(2 * 64 / (64 * 65 / 2), rel=0.01)
    half = attention_s(llama(num_layers=4, sliding_window=128, window_attn_skip_freq=2), flash_attention=True)
    assert 2 * half.input_grad_s == pytest.approx(whole.input_grad_s + windowed.input_grad_s)


def test_without_flash_attention_windows_are_masks():
    assert attention_s(llama(sliding_window=128), flash_attention=False) == attention_s(llama(), flash_attention=False)


def test_attention_goes_by_its_kernel_and_plain_pytorch_has_its_own():
    place, shape = preset_site("site", "h100-sxm", 8), preset_model("llama-3-8b")
    law = calibration_of(place.device)

    def core_s(**how):
        spec = Training(sequence_length=65536, global_batch=1, **how)
        speed = attention_speed(spec, place.device, law)
        return compute.attention_core_times(shape, spec, Layout(1, 1, 1, 1, 1, 1), speed).forward_s

    assert core_s() == core_s(attention_kernel="flash-3") < core_s(attention_kernel="flash-2")
    assert core_s(kernels="eager") == core_s(attention_kernel="sdpa") < core_s(attention_kernel="flash-1")
    assert not Training(sequence_length=8, global_batch=1, attention_kernel="eager").flash_attention
    with pytest.raises(ValueError, match="contradict each other"):
        Training(sequence_length=8, global_batch=1, attention_kernel="flash-2", flash_attention=False)


def test_graphs_of_all_but_the_experts_leave_what_these_launch():
    model, degrees = preset_model("qwen3-30b-a3b"), Layout(1, 8, 1, 1, 1, 1, expert=8)
    graphs = [Training(sequence_length=4096, global_batch=8, cuda_graphs=how) for how in (False, "part", True)]
    launches = [compute.launch_s(model, spec, degrees, LAW) for spec in graphs]
    assert launches == [LAW.layer_launch_s + LAW.expert_launch_s, LAW.expert_launch_s, 0.0]
    assert compute.launch_s(llama(), graphs[1], layout(), LAW) == 0.0


def test_the_device_waits_for_counts_unless_the_dispatcher_tells_them_in_time():
    model = preset_model("qwen3-30b-a3b")

    def waits(**how):
        return compute.waits_for_counts(model, Training(sequence_length=4096, global_batch=8, **how))

    assert waits()
    assert waits(moe_token_dispatcher_type="flex", matmul="mxfp8")
    assert not waits(moe_token_dispatcher_type="flex")
    assert not waits(cuda_graphs="part")
    assert not compute.waits_for_counts(llama(), training())


def test_attention_with_sinks_takes_longer():
    plain, spec = llama(), training()
    sinks = plain.model_copy(update={"attention_sinks": True})
    one, other = (compute.attention_core_times(m, spec, layout(), Speed.of(A100, LAW, "bf16")) for m in (plain, sinks))
    assert other.forward_s == pytest.approx(4 * one.forward_s)


def test_pytorch_hides_no_tensor_parallel_collective_beside_weight_gradients():
    degrees, asked = layout(tensor=4), training(2048)
    found = [
        exchange_times(llama(), asked.model_copy(update={"framework": name}), degrees, site(), LAW)
        for name in ("megatron", "pytorch")
    ]
    assert found[0].forward_s == found[1].forward_s == found[1].input_grad_s
    hidden = 1 - LAW.hidden_collective_fraction
    assert found[0].input_grad_s == pytest.approx(hidden * found[0].forward_s)


@pytest.mark.parametrize(("zero", "kernels", "framework", "expected"), [
    (3, "fused", None, True), (3, "fused", "megatron", False), (1, "fused", None, False), (1, "eager", None, True),
    (1, "fused", "pytorch", True),
])  # fmt: skip
def test_the_framework_is_the_one_that_is_named_or_that_settings_show(zero, kernels, framework, expected):
    assert training(zero=zero, kernels=kernels, framework=framework).by_pytorch is expected


def test_computing_beside_fsdp_s_collectives_takes_longer_by_half_of_their_time():
    degrees, parts = layout(data=8), []
    for name in ("megatron", "pytorch"):
        asked = training(2048, zero=3, framework=name)
        parts.append(compute.layer_parts(llama(hidden=2048, num_heads=16), asked, degrees, site(), LAW)["ZeRO"])
    open_s = compute.zero_times(
        llama(hidden=2048, num_heads=16), training(2048, zero=3, overlap=False), degrees, site(), LAW, parts[0]
    )
    assert parts[0].forward_s == parts[0].input_grad_s == 0, "all of it fits beside computing"
    assert parts[1].forward_s == pytest.approx(0.5 * open_s.forward_s)
    assert parts[1].input_grad_s == pytest.approx(0.5 * open_s.input_grad_s)
