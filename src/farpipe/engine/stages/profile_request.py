"""Request to the processes of ``farpipe profile``, and the answer of each. Needs no torch."""

from typing import Final, Self

from farpipe.core.spec import Model, Training
from farpipe.core.spec.part import Flag, Part, Positive, Text
from farpipe.core.strict import parse_json, validate
from farpipe.engine.run_settings import DeviceKind

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
    share_cores: Flag = False
    """More processes measure than there are cores: that each has the CPU for a part of the time only is meant."""

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """Read what `model_dump_json` gives."""
        return validate(cls, parse_json(text, source), source)


class ChunkTimes(Part):
    """Times that one process measured of slices and packed chunks, and the bytes held of one long sequence."""

    tokens: tuple[float, ...]
    """Tokens of every slice."""
    pairs: tuple[float, ...]
    split_pairs: tuple[float, ...]
    """The pairs of slices of sequences that are split, else none."""
    further_calls: tuple[float, ...]
    """Calls of attention after the first, of chunks of packed sequences."""
    forward_s: dict[Text, tuple[float, ...]]
    """Seconds of every slice, by stack."""
    backward_s: dict[Text, tuple[float, ...]]
    held_bytes: dict[Text, float]
    """Bytes per token between forward and backward, by stack; ``recomputed``: of three layers computed again."""
    cpu_share: float
    """Share of their time for which the measured actions had the CPU; 1 where nobody looks, as on a GPU."""


class StackTimes(Part):
    """Times that one process measured: seconds of one microbatch through small stacks, by name and kind."""

    one_layer: dict[Text, float]
    three_layers: dict[Text, float]
    embedding_and_layer: dict[Text, float]
    layer_and_head: dict[Text, float]
    optimizer_s_per_param: float
    cpu_share: float
    """Share of their time for which the measured actions had the CPU; 1 where nobody looks, as on a GPU."""
