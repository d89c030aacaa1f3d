"""Request to the processes of ``farpipe profile``, and the answer of each. Needs no torch."""

from typing import Final, Self

from farpipe.runtime.run_spec import DeviceKind
from farpipe.spec import Model, Training
from farpipe.spec.part import Flag, Part, Positive, Text
from farpipe.strict import parse_json, validate

KINDS: Final = ("forward_s", "input_grad_s", "weight_grad_s")
STACK_NAMES: Final = ("one_layer", "three_layers", "embedding_and_layer", "layer_and_head")


class ProfileRequest(Part):
    """Measurements that the measuring processes are asked for."""

    model: Model
    training: Training
    device: DeviceKind
    seconds: Positive
    """Time for which the stacks are run."""
    sequences: Flag = False
    """Measure slices of many lengths behind many prefixes, in ChunkTimes, instead of one length, in StackTimes."""

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """Read what `model_dump_json` gives."""
        return validate(cls, parse_json(text, source), source)


class ChunkTimes(Part):
    """Times that one process measured of chunks of one slice each, and the bytes held of one long sequence."""

    tokens: tuple[float, ...]
    """Of every slice."""
    pairs: tuple[float, ...]
    split_pairs: tuple[float, ...]
    """The pairs of slices of sequences that are split, else none."""
    forward_s: dict[Text, tuple[float, ...]]
    """By stack, seconds of every slice."""
    backward_s: dict[Text, tuple[float, ...]]
    held_bytes: dict[Text, float]
    """By stack, bytes per token between forward and backward; ``recomputed``: of three layers computed again."""


class StackTimes(Part):
    """Times that one process measured: seconds of one microbatch through small stacks, by name and kind."""

    one_layer: dict[Text, float]
    three_layers: dict[Text, float]
    embedding_and_layer: dict[Text, float]
    layer_and_head: dict[Text, float]
    optimizer_s_per_param: float
