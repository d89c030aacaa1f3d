"""Training of the model: batches, precision, optimizer, adapters, data."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from farpipe.core.spec.local_steps import LocalSteps
from farpipe.core.spec.lora import Lora
from farpipe.core.spec.part import Count, Flag, Natural, NonNegative, Part, Positive, Share, Text, fault
from farpipe.core.spec.recompute import RecomputeChoice
from farpipe.core.strict import finite

Precision = Literal["bf16", "fp16", "fp32"]
ContextExchange = Literal["ring", "ulysses"]
"""Method of context parallelism: keys and values go round, or tokens are exchanged for heads."""
Zero = Literal[0, 1, 2, 3]
"""State divided among the replicas of one site (Rajbhandari et al., arXiv 1910.02054): 0 nothing, 1 the optimizer's
state, 2 gradients too, 3 parameters too (FSDP), which are gathered layer by layer."""
Rate = Literal[Precision, "tf32", "fp8", "mxfp8", "nvfp4"]
"""Number formats in which a device has a rate."""
Matmul = Literal["same", "tf32", "fp8", "fp8_rowwise", "mxfp8", "nvfp4"]
"""Number format of matrix products: the training's precision, or narrower numbers; sums stay in 32 bit. ``fp8`` has a
scale for each tensor (Transformer Engine's delayed and current scaling), ``fp8_rowwise`` one for each row (TorchAO),
``mxfp8`` one for 32 numbers, ``nvfp4`` one for 16."""
QUANTIZED: Final = ("fp8", "fp8_rowwise", "mxfp8", "nvfp4")
"""Formats of matrix products whose factors are made from wider numbers, with scales."""
WireType = Literal["none", "bf16", "fp8", "int8"]
"""Numbers that activations and their gradients are rounded to between sites."""


def rate_name(precision: Precision, matmul: Matmul) -> Rate:
    """The rate of a device that matrix products run at, whatever shares a scale."""
    if matmul == "same":
        return precision
    return "fp8" if matmul == "fp8_rowwise" else matmul


def _not_of_products(value: Any) -> Any:
    if value in ("tf32", *QUANTIZED):
        wide = "fp32" if value == "tf32" else "bf16"
        raise ValueError(f'{value} is for products alone; set matmul = "{value}" and precision = "{wide}"')
    return value


WrittenPrecision = Annotated[Precision, BeforeValidator(_not_of_products)]
"""Precision as users write it: a format of products is refused with the key that it belongs to."""


def _or_none(value: Any) -> Any:
    """TOML has no null: there the word none switches clipping off."""
    return None if value is None or value == "none" else finite(value, exclusive=True)


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected 'auto' or 0 to 3, found a flag")
    return value


CudaGraphs = Flag | Literal["part"]
"""Layers replayed from CUDA graphs: none, all, or all but the experts."""
AttentionKernel = Literal["flash-1", "flash-2", "flash-3", "cudnn", "sdpa", "eager"]
"""Kernels of attention: FlashAttention by its version, 1 being also its form in Triton; cuDNN's; the one that PyTorch's
`scaled_dot_product_attention` takes; one for each operation, which keeps the scores."""


class Training(Part):
    """Settings of a training: what an optimizer step is, its precision, the optimizer."""

    sequence_length: Count
    """Tokens in one sequence."""
    global_batch: Count
    """Sequences in one optimizer step, over all replicas."""
    microbatch_size: Count | None = None
    """Sequences in one microbatch; divides `global_batch`. Default: the planner chooses."""
    num_steps: Count = 100
    """Optimizer steps."""
    precision: WrittenPrecision = "bf16"
    """`"bf16"`, `"fp16"` (both with float32 master weights; the engine does not train `fp16`) or `"fp32"`; every site's
    device needs a rate for it."""
    recompute: RecomputeChoice = "auto"
    """Activations that the backward pass computes again: `"auto"` (the planner decides for each stage), `"none"`,
    `"full"` (all but a layer's input), operations by name such as `"layernorm mlp"` (`"selective"` is `"core_attn"`,
    attention's scores), or `"op"`, all but every second product as in torchtitan (planned only)."""
    wire_type: WireType = "none"
    """Number format to which activations and their gradients are rounded between sites: `"none"`, `"bf16"` (for
    `precision = "fp32"` only), or `"fp8"` or `"int8"` with a scale for every 128 numbers. It changes numerics; a run
    reports how large the rounding was."""
    zero: Annotated[Literal["auto"] | Zero, BeforeValidator(_no_flag)] = "auto"
    """Stage of ZeRO, what the replicas of a site divide among them: `0` nothing, `1` the optimizer's state, `2`
    gradients too, `3` parameters too (FSDP); `"auto"` leaves it to the planner; `zero1 = true` is another way to write
    `1`. The engine runs `2` and `3` (torch's FSDP2) with models of transformers and modules of your own, without
    `data.packing`."""
    zero_group_size: Annotated[Count | None, Field(exclude_if=lambda size: size is None)] = None
    """Devices among which ZeRO divides (hybrid sharding), or the largest divisor that they share with the replicas;
    gradients are summed over the groups. Default: all that hold the same slice. Planned only."""
    elastic: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """Sites may leave and return while the others continue: the same number of whole replicas at each; `zero` is then
    `0` by default, `2` or `3` inside a site; see
    [a site that leaves](../how-to/keep-a-run-going.md#a-site-that-leaves-and-returns)."""
    sequence_parallel: Literal["auto"] | Flag = "auto"
    """Norms are divided over the tensor-parallel devices as well; `"auto"` leaves it to the planner."""
    flash_attention: Flag = True
    """Attention never keeps the matrix of scores."""
    attention_kernel: Annotated[AttentionKernel | None, Field(exclude_if=lambda kernel: kernel is None)] = None
    """Kernel of attention, for planning: FlashAttention by version, `"flash-1"` (also its Triton form), `"flash-2"` or
    `"flash-3"`; `"cudnn"`; `"sdpa"`, PyTorch's choice; `"eager"`, which keeps the scores. Default: the fastest that
    Transformer Engine has for the device, or `"sdpa"` where `kernels` are eager."""
    matmul: Matmul = "same"
    """Number format of the layers' matrix products: `"same"` (as `precision`), `"tf32"` (for `fp32` only), `"fp8"` (a
    scale for every tensor, delayed or current), `"fp8_rowwise"` (a scale for every row, TorchAO's), `"mxfp8"` (a scale
    for every 32 numbers; Blackwell), `"nvfp4"` (4 bit, a scale for every 16; Blackwell); the engine runs `"same"`."""
    fp8_param_gather: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """Keep and gather the layers' weights in the format of `matmul` alone, beside the optimizer's 32-bit masters
    (Megatron-LM's `--fp8-param-gather`); `false` keeps them in `precision` as well."""
    grad_reduce_in_fp32: Annotated[Flag | None, Field(exclude_if=lambda on: on is None)] = None
    """Accumulate and reduce gradients in 32 bit. Default, as in Megatron-LM: yes beside bf16, no beside fp16
    (`--grad-reduce-in-bf16` is `false` here). The engine always accumulates in 32 bit."""
    tp_comm_overlap: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """Tensor-parallel collectives run part by part beside the products before and after them (Megatron-LM's
    `--tp-comm-overlap`); needs sequence parallelism."""
    fp8_dot_product_attention: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """Attention multiplies 8-bit numbers too (Megatron-Core's name); needs an 8- or 4-bit `matmul`."""
    fp8_output_proj: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """The head multiplies 8-bit numbers too (Megatron-Core's name); needs `matmul = "mxfp8"`."""
    cross_entropy_loss_fusion: Annotated[Flag | None, Field(exclude_if=lambda on: on is None)] = None
    """One kernel computes the loss and its gradient (Megatron-LM's `--cross-entropy-loss-fusion`). Default: on Hopper
    and Blackwell, as published trainings do. It changes planned times alone."""
    moe_token_dispatcher_type: Annotated[
        Literal["alltoall", "flex"], Field(exclude_if=lambda kind: kind == "alltoall")
    ] = "alltoall"
    """Exchange of tokens with experts (Megatron-Core's name): `"alltoall"` sends a copy for each expert, `"flex"`
    (DeepEP, HybridEP) one for each device, and between machines one for each machine."""
    overlap_moe_expert_parallel_comm: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """The exchange of tokens runs beside the computation of another microbatch (Megatron-LM's
    `--overlap-moe-expert-parallel-comm`)."""
    moe_router_bias_update_rate: Annotated[NonNegative, Field(exclude_if=lambda rate: rate == 0)] = 0.0
    """How far the routers' correction biases move in a step towards experts that were chosen less often than the mean
    (Megatron-LM's `--moe-router-bias-update-rate`), as DeepSeek-V3 was trained; `0`: they stay."""
    lora: Annotated[Lora | None, Field(exclude_if=lambda given: given is None)] = None
    """Low-rank adapters beside frozen weights, a [table](#traininglora). The engine trains them by peft, without
    tensor and context parallelism and ZeRO-2 and 3."""
    local_steps: Annotated[LocalSteps | None, Field(exclude_if=lambda given: given is None)] = None
    """Sites train alone and exchange their progress every few steps, a [table](#traininglocal_steps). Default: all
    sites train each step together."""
    activation_func_fp8_input_store: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """The MLP's nonlinearity keeps its input for the backward in 8 bit (Megatron-Core's name)."""
    cpu_offloading_num_layers: Annotated[Natural, Field(exclude_if=lambda count: count == 0)] = 0
    """Layers whose activations wait in the host's memory for the backward (Megatron-Core's name), in pipelines of one
    rank and without recomputation."""
    kernels: Literal["fused", "eager"] = "fused"
    """Kernels between matrix products: `"fused"` (Megatron-LM's, or torch.compile's) or `"eager"` (plain PyTorch, one
    kernel per operation, 2.1 times the traffic). For planning; the engine's own are eager."""
    framework: Annotated[Literal["megatron", "pytorch"] | None, Field(exclude_if=lambda name: name is None)] = None
    """Framework to plan for: PyTorch hides no tensor-parallel collectives beside weight gradients, does not recompute a
    layer's last product, and slows beside FSDP's. Default: `"pytorch"` with `zero = 2` or `3` or eager kernels."""
    cuda_graphs: CudaGraphs = False
    """Replay layers from CUDA graphs, so that the host's launches never delay them; `"part"`: all of a layer but its
    experts (Megatron-Core's scopes `attn`, `moe_router` and `moe_preprocess`). Planned only."""
    dropout: Flag = False
    """Drop out activations and attention, which takes masks. The engine trains it in `torch.nn.Dropout` of your own
    module only; masks follow from seed, step and microbatch, so orders and cuts train alike."""
    overlap: Flag = True
    """Replicas' collectives run beside the rank's own computation where the device allows it, and messages between
    stages beside the next stage's (Megatron-LM's `--overlap-grad-reduce`, `--overlap-param-gather` and, with several
    stages on a rank, `overlap_p2p_comm`)."""
    overlap_param_gather: Annotated[Flag | None, Field(exclude_if=lambda on: on is None)] = None
    """`false`: ZeRO-1's gather is exposed (no `--overlap-param-gather`). Default: as `overlap`. Planned only."""
    learning_rate: Positive = 3e-4
    """Learning rate of AdamW."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Betas of AdamW, two numbers from 0 up to but not including 1."""
    weight_decay: NonNegative = 0.1
    """Weight decay of AdamW."""
    clip_norm: Annotated[
        Positive | None,
        BeforeValidator(_or_none, json_schema_input_type=Positive | Literal["none"]),
        PlainSerializer(lambda norm: norm or "none"),
    ] = 1.0
    """Largest norm of the whole gradient; `"none"` does not clip."""
    barrier: Annotated[Flag, Field(exclude_if=lambda on: on)] = True
    """All ranks end a step together, when the norm of the whole gradient is known. `false`: a rank updates its weights
    and goes on when its own gradients are there; an update that should have been clipped is taken back, and the step
    after it is done again. The result is the same to the last bit."""
    seed: Natural = 0
    """Seed of the first weights and of the order of the data."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises in equal parts: step 0 learns at `learning_rate / (warmup_steps + 1)`."""
    decay: Literal["none", "cosine"] = "none"
    """How the learning rate goes on after warm-up: `"none"` (it stays) or `"cosine"` (half a cosine down to
    `final_learning_rate`)."""
    decay_steps: Natural = 0
    """Step at which the decay ends; `0` is the end of the run, and then a longer run has another curve."""
    final_learning_rate: NonNegative = 0.0
    """Learning rate at the end of the decay; not above `learning_rate`."""
    evaluate_every_steps: Natural = 0
    """Steps between two evaluations on the text that `data.held_out` keeps back (required then), with one more at the
    end; `0`: none."""
    evaluation_batches: Count = 1
    """Batches, each as large as a step's, in one evaluation; the same ones every time."""
    checkpoint_every_steps: Natural = 0
    """Steps between two checkpoints; `0`: only the clock counts."""
    checkpoint_every_minutes: NonNegative = 10.0
    """Minutes between two checkpoints; `0`: only the steps count."""
    keep_checkpoints: Natural = 2
    """How many of the newest checkpoints are kept; `0`: none is written, not even at the end."""
    mirror: Annotated[Flag, Field(exclude_if=lambda on: not on)] = False
    """Every site keeps the newest checkpoint in full, in `sites/NAME/checkpoints` of the run directory: what other
    sites wrote is sent there meanwhile, with what a step leaves free of the link."""
    bucket: Annotated[Text | None, Field(exclude_if=lambda url: url is None)] = None
    """Bucket or folder to which the newest checkpoint is copied as well, as `"s3://name/folder"`: what fsspec and its
    drivers know. `--resume` takes the same URL."""

    @model_validator(mode="before")
    @classmethod
    def _read_zero1(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "zero1" not in given or "zero" in given:
            return given
        if not isinstance(given["zero1"], bool):
            raise fault("input should be a valid boolean", "zero1")
        return {key: value for key, value in given.items() if key != "zero1"} | {"zero": int(given["zero1"])}

    @model_validator(mode="before")
    @classmethod
    def _read_elastic(cls, given: Any) -> Any:
        """Sites that may leave divide nothing among them, so no planner need choose."""
        if not isinstance(given, Mapping) or given.get("elastic") is not True or given.get("zero", "auto") != "auto":
            return given
        return dict(given) | {"zero": 0}

    @model_validator(mode="before")
    @classmethod
    def _read_attention_kernel(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("attention_kernel") is None:
            return given
        kept = given["attention_kernel"] == "eager"
        if given.get("flash_attention", not kept) is kept:
            raise fault(f"{given['attention_kernel']!r} and flash_attention contradict each other", "attention_kernel")
        return dict(given) | {"flash_attention": not kept}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.microbatch_size is not None and self.global_batch % self.microbatch_size:
            raise fault(f"{self.microbatch_size} does not divide global_batch {self.global_batch}", "microbatch_size")
        if self.wire_type == "bf16" and self.precision != "fp32":
            raise fault(f"'bf16' is no narrower than precision {self.precision}; 'fp8' and 'int8' are", "wire_type")
        if self.matmul == "tf32" and self.precision != "fp32":
            raise fault(f"tf32 is for fp32, but precision is {self.precision}", "matmul")
        if self.fp8_param_gather and self.matmul not in QUANTIZED:
            raise fault(f"weights are narrow only with matmul {' or '.join(QUANTIZED)}", "fp8_param_gather")
        if self.fp8_dot_product_attention and self.matmul not in QUANTIZED:
            raise fault(f"only with matmul {' or '.join(QUANTIZED)}", "fp8_dot_product_attention")
        if self.matmul == "fp8_rowwise" and (self.fp8_param_gather or self.fp8_dot_product_attention):
            name = "fp8_param_gather" if self.fp8_param_gather else "fp8_dot_product_attention"
            raise fault("TorchAO has it not with a scale for every row; leave it out, or set matmul = 'fp8'", name)
        if self.fp8_output_proj and self.matmul != "mxfp8":
            raise fault("only with matmul mxfp8", "fp8_output_proj")
        if self.tp_comm_overlap and self.sequence_parallel is False:
            raise fault("it divides what sequence parallelism gathers; set sequence_parallel = true", "tp_comm_overlap")
        if self.grad_reduce_in_fp32 is False and self.precision == "fp32":
            raise fault("gradients of fp32 are 32 bit wide; leave it out", "grad_reduce_in_fp32")
        self._check_mirror()
        self._check_frozen()
        self._check_group()
        self._check_offloading()
        self._check_decay()
        return self

    def _check_frozen(self) -> None:
        if self.lora is not None and self.moe_router_bias_update_rate:
            raise fault("frozen routers stay as they are; leave it out with lora", "moe_router_bias_update_rate")
        if self.lora is not None and self.fp8_param_gather:
            raise fault("frozen weights are not gathered; say training.lora.base_weights", "fp8_param_gather")

    def _check_group(self) -> None:
        hides = self.overlap_param_gather and not self.overlap
        if self.overlap_param_gather is not None and (hides or self.zero not in ("auto", 1)):
            raise fault("parameters are gathered by zero = 1, beside computing with overlap", "overlap_param_gather")
        if self.zero_group_size is not None and self.zero in ("auto", 0):
            raise fault(f"it divides what ZeRO does; set zero = 1, 2 or 3, not {self.zero!r}", "zero_group_size")

    def _check_mirror(self) -> None:
        if self.mirror and not self.keep_checkpoints:
            raise fault("no checkpoint is written: keep_checkpoints is 0", "mirror")
        if self.bucket is not None and not (self.keep_checkpoints and "://" in self.bucket):
            raise fault("a URL as s3://name/folder, with keep_checkpoints above 0", "bucket")

    def _check_offloading(self) -> None:
        if self.cpu_offloading_num_layers and self.recompute not in ("auto", "none"):
            raise fault('what is computed again is not offloaded; set recompute = "none"', "cpu_offloading_num_layers")
        if self.cpu_offloading_num_layers and self.cuda_graphs:
            raise fault(
                "layers are not replayed from graphs then; set cuda_graphs = false", "cpu_offloading_num_layers"
            )

    def _check_decay(self) -> None:
        if self.decay == "none":
            return
        if self.final_learning_rate > self.learning_rate:
            raise fault(
                f"{self.final_learning_rate:g} is more than learning_rate {self.learning_rate:g}", "final_learning_rate"
            )
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise fault(f"{self.decay_steps} steps are over before warmup_steps {self.warmup_steps}", "decay_steps")

    def grouped(self, num_devices: int) -> int:
        """Devices among which ZeRO divides what `num_devices` hold."""
        return math.gcd(num_devices, self.zero_group_size or num_devices)

    @property
    def by_pytorch(self) -> bool:
        """True if PyTorch computes it without Megatron-LM: as it says, or with FSDP or eager kernels."""
        return self.framework == "pytorch" if self.framework else self.zero in (2, 3) or self.kernels == "eager"

    @property
    def zero1(self) -> bool:
        """True if the optimizer's state is divided over the replicas."""
        return self.zero in (1, 2, 3)

    def decided(self, zero: Zero = 1) -> Self:
        """The same with this stage of ZeRO and with sequence parallelism where they are left open."""
        wanted = {"zero": zero, "sequence_parallel": True}
        chosen = {key: value for key, value in wanted.items() if getattr(self, key) == "auto"}
        return self.model_copy(update=chosen) if chosen else self

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.sequence_length * self.global_batch

    @property
    def num_bytes_per_param(self) -> float:
        """Bytes that a parameter surely takes on its device: weight, gradient and AdamW's state.

        Two 16-bit figures beside float32 master weight and two moments, or four float32 figures (ZeRO, arXiv
        1910.02054, section 3.1). What ZeRO divides, or could, over the replicas is left out, for they may be many;
        stage 3 has a whole layer's weights at a time. Frozen ones are weights alone.
        """
        width = 4 if self.precision == "fp32" else 2
        if self.lora is not None:
            return 0 if self.zero == 3 else self.lora.base_bytes or width
        narrowed = 1 if self.fp8_param_gather else 0
        if self.zero == 0:
            return 16 - narrowed
        return (2 * width if self.zero == 1 else width) - narrowed
