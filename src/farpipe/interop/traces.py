"""Seconds of layer, embedding and head from traces, as a profile of the device.

Layers are told apart by their attention: from the start of one to the start of the next is one layer, forward and
backward. What is before the first and after the last is embedding and head. Where kernels of a GPU are in the trace,
times are those of the kernels that an operation launched; else they are the operations' own.
"""

import bisect
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job
from farpipe.core.strict import shaped
from farpipe.interop.trace_files import Span, Trace
from farpipe.planning.cost import MeasuredPart, Profile, completed_profile

_ATTENTION: Final = (
    re.compile(r"aten::scaled_dot_product_attention|aten::scaled_dot_product_fused_attention_overrideable"),
    re.compile(
        r"(flash_attn|flash_attn_3|aten)::_?flash_attn_(varlen_)?forward|aten::_flash_attention_forward"
        r"|\w*FlashAttn\w*Func|FusedAttnFunc\w*"
    ),
    re.compile(r"aten::_softmax"),
)
_ATTENTION_BACKWARD: Final = (
    re.compile(r"aten::_(scaled_dot_product|flash|efficient)\w*attention\w*_backward"),
    re.compile(
        r"(flash_attn|flash_attn_3|aten)::_?flash_attn_(varlen_)?backward"
        r"|(\w*FlashAttn\w*Func|FusedAttnFunc\w*)Backward\w*"
    ),
    re.compile(r"aten::_softmax_backward_data"),
)
"""Operations that stand for a layer; the first kind that is in a trace counts, of those inside each other the outer."""
_PRODUCTS: Final = ("aten::mm", "aten::bmm", "aten::addmm")
_BACKWARD: Final = "autograd::engine::evaluate_function"
_OPTIMIZER: Final = re.compile(r"Optimizer\.step#(?!OptimizersContainer)")


def profile_of_any(traces: Sequence[Trace], job: Job) -> tuple[list[Profile], tuple[str, ...]]:
    """The profile of the traces, or, of several ranks' that have none, no profile and the reason."""
    try:
        profile, notes = profile_of(traces, job)
    except InputError as error:
        if len(traces) == 1:
            raise
        return [], (f"times of layers are modelled: {error}",)
    return [profile], notes


def profile_of(traces: Sequence[Trace], job: Job) -> tuple[Profile, tuple[str, ...]]:
    """Profile of the job's device from a training's traces, and notes on what they could not say.

    Of several traces, of one rank at several steps or of several ranks, the medians count; a note names those that were
    left out. InputError where fewer than two layers are in each, and where their shapes are not those of the job.
    """
    site = job.cluster.sites[0]
    device, others = site.device.name, [one.device.name for one in job.cluster.sites if one.device != site.device]
    if others:
        raise InputError(
            f"{traces[0].source}: the job has several devices, {device} and {others[0]}; a trace is of one"
        )
    with shaped(traces[0].source, "a trace of a training"):
        readers, left_out = _readers(traces, job)
        optimizers = [seconds for reader in readers if reader.is_whole and (seconds := reader.optimizer_s())]
    parts = {
        name: _median(one[name] for one in readers.values() if name in one) for name in ("layer", "embedding", "head")
    }
    profile = completed_profile(job, site, {name: part for name, part in parts.items() if part is not None})
    if optimizers:
        shares = (job.layout.data or 1) * (job.layout.context or 1) if job.training.zero else 1
        seconds = statistics.median(optimizers) / (job.model.num_params / shares)
        profile = profile.model_copy(update={"optimizer_s_per_param": seconds})
    return profile, tuple(dict.fromkeys([*left_out, *(note for reader in readers for note in reader.notes)]))


def _readers(traces: Sequence[Trace], job: Job) -> "tuple[dict[_TraceReader, dict[str, MeasuredPart]], list[str]]":
    """Readers of the traces that have layers, with their parts, and why others have none; InputError where all are
    such."""
    readers, errors = dict[_TraceReader, dict[str, MeasuredPart]](), list[InputError]()
    for trace in traces:
        try:
            reader = _TraceReader(trace, job)
            readers[reader] = dict(reader.measured())
        except InputError as error:
            errors.append(error)
    if not readers:
        raise errors[0]
    return readers, [f"left out: {error}" for error in errors]


def _median(parts: Iterable[MeasuredPart]) -> MeasuredPart | None:
    if not (found := list(parts)):
        return None
    weights = [part.weight_grad_s for part in found if part.weight_grad_s is not None]
    return _measured(
        statistics.median(part.forward_s for part in found),
        statistics.median(part.backward_s for part in found),
        statistics.median(weights) if weights else None,
    )


class _TraceReader:
    """Layers of a trace, and the seconds of each."""

    def __init__(self, trace: Trace, job: Job) -> None:
        self.trace, self.job, self.notes = trace, job, list[str]()
        self._backward = [span for span in trace.operations if span.name.startswith(_BACKWARD)]
        self._backward_starts = [span.start_s for span in self._backward]
        forward, backward = self._named(_ATTENTION), self._named(_ATTENTION_BACKWARD)
        forward = [span for span in forward if not self._in_backward(span)]
        anchors = [(self._start_s(span), False, span) for span in forward]
        anchors += [(self._start_s(span), True, span) for span in backward]
        self._runs = _runs(sorted(anchors))
        self._expect_shapes(forward)
        lengths = [len(starts) for _, starts in self._runs]
        self.num_layers = statistics.mode(lengths) if lengths else 0
        if self.num_layers < 2:
            raise InputError(
                f"{trace.source}: {self.num_layers} layers were found by their attention; two in a row are needed to "
                "tell a layer's time (is the model compiled into one graph, or was one step not recorded whole?)"
            )

    @property
    def is_whole(self) -> bool:
        """True if all layers of the model are on the traced rank."""
        return self.num_layers == self.job.model.num_layers

    def _named(self, kinds: Sequence[re.Pattern[str]]) -> list[Span]:
        """Operations of the first of some kinds that is in the trace."""
        for kind in kinds:
            if found := [span for span in self.trace.operations if kind.fullmatch(span.name)]:
                return _outermost(found)
        return []

    def _in_backward(self, span: Span) -> bool:
        """True if a function of the backward holds the operation, which then is computed again."""
        index = bisect.bisect(self._backward_starts, span.start_s) - 1
        return any(
            one.thread == span.thread and one.end_s >= span.end_s
            for one in self._backward[max(0, index - 3) : index + 1]
        )

    def _kernels(self, span: Span) -> list[Span]:
        """Kernels that an operation launched."""
        launches = self.trace.launches.get(span.thread, ())
        first, end = (bisect.bisect_left(launches, (at,)) for at in (span.start_s, span.end_s))
        numbers = (launch.arguments.get("correlation") for launch in launches[first:end])
        return [self.trace.kernels[number] for number in numbers if number in self.trace.kernels]

    def _start_s(self, span: Span) -> float:
        kernels = self._kernels(span) if self.trace.kernels else []
        return min((kernel.start_s for kernel in kernels), default=span.start_s)

    def _end_s(self, span: Span) -> float:
        kernels = self._kernels(span) if self.trace.kernels else []
        return max((kernel.end_s for kernel in kernels), default=span.end_s)

    def _seconds(self, span: Span) -> float:
        """Time that the device takes for an operation."""
        if not self.trace.kernels:
            return span.end_s - span.start_s
        return sum(kernel.end_s - kernel.start_s for kernel in self._kernels(span))

    def _expect_shapes(self, attention: Iterable[Span]) -> None:
        """InputError where attention ran over other sequences or microbatches than the job has."""
        shape = next((dims[0] for span in attention if (dims := span.arguments.get("Input Dims"))), None)
        if shape is None or len(shape) != 4:
            return
        at = self.job.training
        length = at.sequence_length // (self.job.layout.context or 1)
        if length not in shape[1:3] or (at.microbatch_size is not None and shape[0] != at.microbatch_size):
            raise InputError(
                f"{self.trace.source}: attention ran over {shape} (sequences, heads, tokens, width); the job has "
                f"microbatches of {at.microbatch_size} x {at.sequence_length} tokens: is it another training's trace?"
            )

    def measured(self) -> Iterator[tuple[str, MeasuredPart]]:
        """The layer, and embedding and head where the trace has all of the model."""
        forward_s, backward_s = (self._period_s(backward) for backward in (False, True))
        weight_s, head_weight_s = self._weight_grads()
        yield "layer", _measured(forward_s, backward_s, weight_s / self.num_layers if weight_s else None)
        if not self.is_whole:
            self.notes.append(f"the traced rank has {self.num_layers} layers; embedding and head are modelled")
            return
        begin, turn, end = self._bounds()
        ends = {name: statistics.median(map(self._seconds, found)) if (found := self._all(name)) else 0.0
                for name in ("aten::embedding", "aten::embedding_dense_backward")}  # fmt: skip
        embedding_s, gradient_s = ends.values()
        head_s = turn - begin - embedding_s - self.num_layers * forward_s
        head_back_s = end - turn - gradient_s - self.num_layers * backward_s
        yield from self._told("embedding", embedding_s, gradient_s, gradient_s)
        yield from self._told("head", head_s, head_back_s, head_weight_s)

    def _told(self, name: str, *seconds: float | None) -> Iterator[tuple[str, MeasuredPart]]:
        """The part, unless the layers' times leave no time for it; then a note says that it is modelled."""
        if all(one is None or one > 0 for one in seconds):
            yield name, _measured(*seconds)  # type: ignore[arg-type]
        else:
            self.notes.append(f"{self.trace.source}: {name} can't be separated from the layers' times; it is modelled")

    def _all(self, name: str) -> list[Span]:
        return [span for span in self.trace.operations if span.name == name]

    def _period_s(self, backward: bool) -> float:
        """Median from the start of one layer's attention to that of the next."""
        gaps = [b - a for kind, starts in self._runs if kind == backward for a, b in pairwise(starts)]
        if not gaps:
            raise InputError(f"{self.trace.source}: no {'backward' if backward else 'forward'} of two layers in a row")
        return statistics.median(gaps)

    def _bounds(self) -> tuple[float, float, float]:
        """Medians over the microbatches, from zero: begin of the forward, its end, end of the backward."""
        begins = [self._start_s(span) for span in self._all("aten::embedding")]
        starts = sorted(self._start_s(span) for span in self._backward)
        ends = sorted(self._end_s(span) for span in self._backward)
        forwards, backwards = list[float](), list[float]()
        for one, two in pairwise(self._runs):
            if one[0] or not two[0] or len(one[1]) != self.num_layers:
                continue
            begin = max((at for at in begins if at <= one[1][0]), default=one[1][0])
            turn = starts[bisect.bisect(starts, one[1][-1])]
            after = next((run[1][0] for run in self._runs if run[1][0] > two[1][-1]), float("inf"))
            forwards.append(turn - begin)
            backwards.append(ends[bisect.bisect(ends, after) - 1] - turn)
        turn = statistics.median(forwards)
        return 0.0, turn, turn + statistics.median(backwards)

    def _weight_grads(self) -> tuple[float | None, float | None]:
        """Seconds of a microbatch's products that make gradients of weights, in layers and in the head.

        A product that sums over the microbatch's tokens is one. None where the trace has no shapes, or where a width of
        the model is that number too: then the cost model divides the backward.
        """
        at, model = self.job.training, self.job.model
        tokens = (at.microbatch_size or 1) * at.sequence_length // (self.job.layout.context or 1)
        products = [span for span in self.trace.operations if span.name in _PRODUCTS and self._in_backward(span)]
        shapes = [(span, _factors(span)) for span in products]
        if not any(factors for _, factors in shapes) or tokens in (model.hidden, model.ffn_hidden, model.vocab_size):
            self.notes.append("the backward is divided into I and W by the cost model: the trace has no shapes for it")
            return None, None
        layers = head = 0.0
        for span, factors in shapes:
            if factors and factors[0][-1] == tokens:
                is_head = model.vocab_size in (*factors[0], *factors[1])
                head, layers = head + is_head * self._seconds(span), layers + (not is_head) * self._seconds(span)
        passes = max(1, sum(kind for kind, _ in self._runs))
        return layers / passes, head / passes

    def optimizer_s(self) -> float:
        """Median of the optimizer's steps; 0 where the trace names none."""
        seconds = [span.end_s - span.start_s for span in self.trace.notes if _OPTIMIZER.match(span.name)]
        return statistics.median(seconds) if seconds and not self.trace.kernels else 0.0


def _outermost(spans: Iterable[Span]) -> list[Span]:
    """Spans that no other one of their thread holds; on a GPU one attention calls another."""
    end_s = dict[object, float]()
    found = list[Span]()
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if span.end_s > end_s.get(span.thread, -1.0):
            end_s[span.thread] = span.end_s
            found.append(span)
    return found


def _runs(anchors: Iterable[tuple[float, bool, Span]]) -> list[tuple[bool, list[float]]]:
    """Starts of forwards, or of backwards, that follow each other."""
    found = list[tuple[bool, list[float]]]()
    for start_s, backward, _ in anchors:
        if not found or found[-1][0] != backward:
            found.append((backward, []))
        found[-1][1].append(start_s)
    return found


def _factors(span: Span) -> list[list[int]]:
    """Shapes of the two factors of a product."""
    dims = span.arguments.get("Input Dims") or ()
    return [shape for shape in dims if isinstance(shape, list) and len(shape) >= 2][-2:]


def _measured(forward_s: float, backward_s: float, weight_s: float | None) -> MeasuredPart:
    forward_s, backward_s = max(forward_s, 1e-9), max(backward_s, 1e-9)
    is_part = weight_s is not None and weight_s < backward_s  # of an embedding it is all, as the cost model has it
    return MeasuredPart(forward_s, backward_s, weight_s if is_part else None)
