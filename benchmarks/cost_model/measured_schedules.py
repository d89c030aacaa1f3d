"""Six schedules of one training on 8 MI300X as AMD measured them, against their simulation.

``published/primus_schedules_measured.csv`` has tokens/s, FLOP/s and memory of Llama-2-7B over eight ranks
(AMD-AGI/Primus on GitHub). Its FLOP/s over its tokens/s, 23.44 G, are those of NUM_LAYERS layers of the model and
sequences of TOKENS tokens, to four digits; of 32 layers they would be twice as many. It does not say how many
microbatches a step had, nor how the optimizer keeps its state: NUM_MICROBATCHES is the power of two whose ratios are
nearest, and the state's bytes for each parameter are those with which 1F1B needs the memory that it was measured with.

    FARPIPE_DATA=FOLDER python -m benchmarks.cost_model.measured_schedules
"""

import csv
import sys
from dataclasses import dataclass
from typing import Final

from benchmarks.shared.data import data_folder
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Model, Training, preset_model, preset_site
from farpipe.core.strict import read_text
from farpipe.planning.cost import JobCosts, Layout, place_stages, round_robin, step_cost, step_flops, v_shape
from farpipe.planning.cost.stage import stage_params

NUM_RANKS: Final = 8
NUM_LAYERS: Final = 16
NUM_MICROBATCHES: Final = 32
TOKENS: Final = 4096
OURS: Final = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zbb": "zb-h1", "zbv": "zbv"}
"""Our names of Primus' schedules; the others are called alike. ``zbb`` has 1F1B's memory, as ZB-H1 has."""
IN_V: Final = ("zbv", "v-half", "v-min")


@dataclass(frozen=True)
class Predicted:
    """One step: its seconds, and of the fullest rank the parameters and the bytes besides their state."""

    step_s: float
    ranks: tuple[tuple[float, float], ...]
    """Parameters of each rank, and its peak without their state."""

    def held_bytes(self, param_bytes: float) -> float:
        """Bytes of the fullest rank, with so many for each parameter."""
        return max(other + params * param_bytes for params, other in self.ranks)


def model() -> Model:
    """Llama-2-7B, cut to the layers that were run."""
    return preset_model("llama-2-7b").model_copy(update={"num_layers": NUM_LAYERS})


def predicted(name: str, num_microbatches: int = NUM_MICROBATCHES) -> Predicted:
    """One step in the schedule `name`."""
    cut, site = model(), preset_site("site", "mi300x", NUM_RANKS)
    virtual = 1 if name in ("1f1b", "zb-h1") else 2
    spec = Training(sequence_length=TOKENS, global_batch=num_microbatches, recompute="none", zero=0)
    layout = Layout(NUM_RANKS, 1, 1, virtual, 1, num_microbatches)
    ranks = v_shape(NUM_RANKS) if name in IN_V else round_robin(NUM_RANKS, layout.num_stages)
    layers = [NUM_LAYERS // layout.num_stages] * layout.num_stages
    placements = place_stages(ranks, ["site"] * NUM_RANKS, layers, ["none"] * layout.num_stages)
    step = step_cost(JobCosts(cut, spec), layout, placements, Cluster(sites=(site,)))
    schedule = order(name, step.problem)
    peaks = peak_memory_bytes(step.problem, schedule)
    others = [peak - rank.static_bytes for peak, rank in zip(peaks, step.problem.ranks, strict=True)]
    params = [0.0] * NUM_RANKS
    for stage, rank in enumerate(ranks):
        ends = {"embedding": stage == 0, "head": stage == layout.num_stages - 1}
        params[rank] += stage_params(cut, layers[stage], **ends)
    seconds = simulate(step.problem, schedule).makespan_s + step.overhead_s
    return Predicted(seconds, tuple(zip(params, others, strict=True)))


def state_bytes(plain: Predicted, held_bytes: float) -> float:
    """Bytes of state for each parameter with which the fullest rank of `plain` holds `held_bytes`."""
    return min((held_bytes - other) / params for params, other in plain.ranks)


def main() -> None:
    """Print a line for each schedule."""
    table = data_folder("published/") / "published" / "primus_schedules_measured.csv"
    rows = list(csv.DictReader(read_text(table).splitlines()))
    first, plain = rows[0], predicted("1f1b")
    kept = state_bytes(plain, float(first["max_memory_gb"]) * 2**30)
    flops = float(first["tflops_per_gpu"]) * 1e12 / float(first["tokens_per_s_per_gpu"])
    ours = step_flops(model(), TOKENS, 1) / TOKENS
    print(f"FLOPs of a token: {flops / 1e9:.2f} G, {ours / 1e9:.2f} G of our model; state {kept:.1f} B a parameter")
    for row in rows:
        step = predicted(OURS.get(row["schedule"], row["schedule"]))
        rate = float(row["tokens_per_s_per_gpu"])
        relative, speed = rate / float(first["tokens_per_s_per_gpu"]), plain.step_s / step.step_s
        tokens = NUM_MICROBATCHES * TOKENS / NUM_RANKS / step.step_s
        held, taken = float(row["max_memory_gb"]), step.held_bytes(kept) / 2**30
        print(
            f"{row['schedule']:18} {rate:.0f} tokens/s, predicted {tokens:.0f} ({tokens / rate - 1:+.1%}); "
            f"speed {relative:.3f}, predicted {speed:.3f} ({speed / relative - 1:+.1%}); "
            f"memory {held:.2f} GiB, predicted {taken:.2f} ({taken / held - 1:+.1%})"
        )


if __name__ == "__main__":
    sys.exit(main())
