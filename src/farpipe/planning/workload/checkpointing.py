"""Stage-aware chunk-level checkpointing: the layers that every stage recomputes for every chunk.

Recomputing a chunk on one stage makes its neighbours wait on the same diagonal of the schedule, so all of a diagonal
recompute equally much: one integer per diagonal is the choice (InfiniPipe, arXiv 2509.21275, section 5):
``recomputed(p, k) = c[place of k's backward + shift of p]``. An integer program minimises the time that recomputation
costs, subject to the memory of every stage at every backward, where memory peaks.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from farpipe.core.errors import InfeasibleError
from farpipe.core.step import forgiving, levels, num_fitting
from farpipe.core.units import format_bytes
from farpipe.planning.cost.chunk_laws import Load
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload.chunk import Floats, Ints
from farpipe.planning.workload.order import ChunkOrder

CheckpointRule = Literal["chunk", "uniform", "full", "none"]
_GAP: Final = 0.005
_TOLERANCE: Final = 1e-9
_MAX_ROWS: Final = 150
"""Constraints of the program that gives a bound, about; neighbours hardly differ."""
_MAX_ENTRIES: Final = 2_000_000
"""Largest number of constraints times diagonals of a program; beyond, every stage and chunk recomputes equally much."""
_MAX_INTEGER_ENTRIES: Final = 30_000
"""Largest number of them in an integer program; its root takes seconds beyond and gains at most 1.4 %."""


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of every stage at every backward, where memory peaks, as a function of what is recomputed.

    A chunk takes `held` [p, j] less `saved` [p, j] for every recomputed layer, from its forward to its backward, beside
    the gradients of keys and values of the chains, `chains` [p, k].
    """

    order: ChunkOrder
    held: Floats
    saved: Floats
    chains: Floats
    num_layers: Ints
    again_s: Floats
    headroom: Floats
    """[p]: bytes for all that."""
    headroom_without: Floats
    """[p]: the same where nothing is computed again."""

    @property
    def diagonals(self) -> Ints:
        """The diagonal of every stage and chunk: [num_stages, num_chunks]."""
        return np.asarray(self.order.shift[:, None] + self.order.backward_place[None, :])

    def used(self, recomputed: Ints) -> Floats:
        """Bytes at every backward: [num_stages, num_backwards]."""
        held = self.held - recomputed * self.saved
        begun = np.take_along_axis(held.cumsum(axis=1), self.order.forwards_before - 1, axis=1)
        taken = np.diff(begun, axis=1, prepend=0.0)
        return np.asarray(levels(taken, held[:, self.order.chains.backwards]) + self.chains)

    def live(self, stages: Ints, places: Ints) -> NDArray[np.bool_]:
        """True where a chunk is held on these stages at these backwards, pairwise: [num_pairs, num_chunks]."""
        since, until = self.order.backwards_before[stages], self.order.backward_place
        return np.asarray((since <= places[:, None]) & (places[:, None] <= until))

    def fits(self, recomputed: Ints) -> bool:
        """True if no stage ever exceeds its headroom."""
        return bool((self.used(recomputed) <= forgiving(self.headroom)[:, None]).all())

    @property
    def fits_without(self) -> bool:
        """True if nothing has to be computed again."""
        nothing = np.zeros_like(self.held, np.int64)
        return bool((self.used(nothing) <= forgiving(self.headroom_without)[:, None]).all())

    def layers_of(self, counts: Floats) -> Ints:
        """Layers that every stage recomputes of every chunk, given the count of every diagonal for the deepest stage.

        A stage with fewer layers recomputes the same share of them, rounded up.
        """
        share = self.num_layers / max(1, int(self.num_layers.max()))
        found = np.ceil(counts[self.diagonals] * share[:, None] - 1e-6)
        return np.asarray(np.minimum(found, self.num_layers[:, None]), np.int64)


def memory_model(costs: ChunkCosts, load: Load, order: ChunkOrder) -> MemoryModel:
    """The memory of one pipeline of chunks, stage p on rank p, less what a backward needs for a while."""
    backwards, nothing = order.chains.backwards, np.zeros((costs.num_stages, order.num_chunks), np.int64)
    chain_bytes = np.stack([stage.chain_of(load) for stage in costs.stages])
    taken = np.where(order.chains.is_last, order.chains.sums(chain_bytes), 0.0)
    return MemoryModel(
        order,
        np.stack([stage.held_bytes(load, 0) for stage in costs.stages]),
        np.stack([stage.saved_of(load) for stage in costs.stages]),
        levels(taken[:, backwards], chain_bytes[:, backwards]),
        np.array([stage.num_layers for stage in costs.stages], np.int64),
        costs.again_s(load),
        costs.headroom_bytes(load, nothing + 1),
        costs.headroom_bytes(load, nothing),
    )


def choose_layers(model: MemoryModel, rule: CheckpointRule = "chunk") -> Ints:
    """Layers to recompute, [num_stages, num_chunks], by a rule.

    InfeasibleError, with what is missing, when even recomputing everything is not enough.
    """
    nothing = np.zeros_like(model.held, np.int64)
    if rule != "full" and model.fits_without:
        return nothing
    everything = np.broadcast_to(model.num_layers[:, None], nothing.shape)
    if rule == "none" or not model.fits(everything):
        raise _shortage(model, nothing if rule == "none" else everything)
    if rule == "full":
        return np.array(everything)
    return _uniform(model) if rule == "uniform" else _solve(model)


def _uniform(model: MemoryModel) -> Ints:
    """The fewest layers, the same of every stage and chunk, that fit."""
    most = int(model.num_layers.max())
    num_diagonals = int(model.diagonals.max()) + 1
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        fits = model.fits(model.layers_of(np.full(num_diagonals, float(middle))))
        low, high = (low, middle) if fits else (middle + 1, high)
    return model.layers_of(np.full(num_diagonals, float(low)))


def _shortage(model: MemoryModel, recomputed: Ints) -> InfeasibleError:
    over = model.used(recomputed) - model.headroom[:, None]
    stage, place = np.unravel_index(int(over.argmax()), over.shape)
    live = int(model.live(np.array([stage]), np.array([place])).sum())
    return InfeasibleError(
        f"stage {stage} would hold {live} chunks at once and be {format_bytes(float(over[stage, place]))} over the "
        f"{format_bytes(float(model.headroom[stage]))} that it has for activations, though it recomputes "
        + ("nothing" if not recomputed.any() else "every layer")
    )


def diagonal_program(model: MemoryModel, most_rows: int | None = None) -> tuple[Floats, Floats, Floats, Floats]:
    """(price of every diagonal, rows of the constraints, what each must save at least, upper bounds).

    Minimise price @ c subject to rows @ c >= least, 0 <= c <= bound. Rows that hold without recomputation are left out,
    and of more than about `most_rows` all but evenly spread ones.
    """
    diagonals, num = model.diagonals, int(model.diagonals.max()) + 1
    share = model.num_layers / max(1, int(model.num_layers.max()))
    price = np.zeros(num)
    np.maximum.at(price, diagonals, model.again_s * share[:, None])
    stages, places, least = _binding(model)
    chosen = slice(None, None, 1 if most_rows is None else max(1, least.size // most_rows))
    stages, places, least = stages[chosen], places[chosen], least[chosen]
    rows = np.zeros((least.size, num))
    values = model.live(stages, places) * (model.saved * share[:, None])[stages]
    np.put_along_axis(rows, diagonals[stages], values, axis=1)
    return price, rows, least, np.full(num, float(model.num_layers.max()))


def _binding(model: MemoryModel) -> tuple[Ints, Ints, Floats]:
    """Stages and backwards at which something must be recomputed, and the bytes that it must save."""
    least = model.used(np.zeros_like(model.held, np.int64)) - model.headroom[:, None]
    stages, places = np.nonzero(least > _TOLERANCE * model.headroom[:, None])
    return stages, places, least[stages, places]


def _solve(model: MemoryModel) -> Ints:
    """The integer program at the root of its search tree, where it is small, or its relaxation rounded up and refined,
    whichever costs less."""
    if _binding(model)[0].size * (int(model.diagonals.max()) + 1) > _MAX_ENTRIES:
        return _uniform(model)
    price, rows, least, bound = diagonal_program(model)
    if not least.size:  # only what recomputing itself takes is too much: one layer of the dearest diagonal is enough
        least, rows = np.zeros(1), np.zeros((1, price.size))
    relaxed = solve_program(price, rows, least, bound, integer=False)
    rounded = bound if relaxed is None else refined(price, rows, least, np.ceil(relaxed - 1e-6))
    counts = rounded
    if relaxed is not None and rows.size <= _MAX_INTEGER_ENTRIES and price @ rounded > price @ relaxed * (1 + _GAP):
        exact = solve_program(price, rows, least, bound, integer=True)
        counts = rounded if exact is None or price @ exact > price @ rounded else np.rint(exact)
    layers = model.layers_of(np.minimum(counts, bound))
    return layers if model.fits(layers) else model.layers_of(bound)


def refined(price: Floats, rows: Floats, least: Floats, counts: Floats) -> Floats:
    """The dearest counts first, each lowered as far as every constraint still holds."""
    counts, spare = counts.copy(), rows @ counts - least
    slack = _TOLERANCE * np.maximum(1.0, np.abs(least))
    for index in np.argsort(-price, kind="stable"):
        mine = rows[:, index]
        hit = mine > 0
        lower = counts[index] if not hit.any() else np.floor(((spare[hit] + slack[hit]) / mine[hit]).min())
        lower = max(0.0, min(counts[index], lower))
        counts[index] -= lower
        spare -= lower * mine
    return counts


def solve_program(
    price: Floats, rows: Floats, least: Floats, bound: Floats, *, integer: bool, presolves: bool = True
) -> Floats | None:
    """min price @ c with rows @ c >= least and 0 <= c <= bound, by HiGHS; None where the root has no solution.

    Limited in nodes, not in seconds, so that equal input gives an equal answer. A small relaxation is solved in half of
    the time where HiGHS does not look for simplifications first (not `presolves`).
    """
    from ortools.math_opt.python import mathopt

    model = mathopt.Model.from_model_proto(_as_proto(price, rows, least, bound, integer))
    limits: Any = {"node_limit": 1, "relative_gap_tolerance": _GAP} if integer else {}
    options = mathopt.SolveParameters(presolve=None if presolves else mathopt.Emphasis.OFF, **limits)
    nothing: Any = mathopt.SparseVectorFilter(filtered_items=())
    wanted = mathopt.ModelSolveParameters(dual_values_filter=nothing, reduced_costs_filter=nothing)
    with _stdout_on_stderr() if integer else nullcontext():
        result: Any = mathopt.solve(model, mathopt.SolverType.HIGHS, params=options, model_params=wanted)
    if not result.has_primal_feasible_solution():
        return None
    found = np.zeros(price.size)
    for variable, value in result.variable_values().items():
        found[variable.id] = value
    return found


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Redirection of what C prints on stdout: HiGHS prints a line, which is no JSON, where it mends the solution of an
    integer program that it had simplified. Without simplifying plans are up to 0.15 % longer."""
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _as_proto(price: Floats, rows: Floats, least: Floats, bound: Floats, integer: bool) -> Any:
    """The program as MathOpt's message, which is much faster than its operators; rows are scaled to 1."""
    from ortools.math_opt import model_pb2

    scale = 1 / np.maximum(np.abs(rows).max(axis=1), 1e-300)
    which, columns = np.nonzero(rows)
    proto = model_pb2.ModelProto()
    variables, objective = proto.variables, proto.objective.linear_coefficients
    constraints, matrix = proto.linear_constraints, proto.linear_constraint_matrix
    for field, values in (
        (variables.ids, range(price.size)),
        (variables.lower_bounds, [0.0] * price.size),
        (variables.upper_bounds, bound.tolist()),
        (variables.integers, [integer] * price.size),
        (objective.ids, range(price.size)),
        (objective.values, (price / max(price.max(), 1e-300)).tolist()),
        (constraints.ids, range(least.size)),
        (constraints.lower_bounds, (least * scale).tolist()),
        (constraints.upper_bounds, [np.inf] * least.size),
        (matrix.row_ids, which.tolist()),
        (matrix.column_ids, columns.tolist()),
        (matrix.coefficients, (rows[which, columns] * scale[which]).tolist()),
    ):
        field.extend(values)
    return proto


def recomputation_bound_s(model: MemoryModel) -> float:
    """The least that recomputation can add, by the relaxed program with a sample of its constraints.

    Infinite where memory is not enough.
    """
    if model.fits_without:
        return 0.0
    if not model.fits(np.broadcast_to(model.num_layers[:, None], model.held.shape)):
        return np.inf
    price, rows, least, bound = diagonal_program(model, _MAX_ROWS)
    found = solve_program(price, rows, least, bound, integer=False, presolves=False) if least.size else 0 * price
    return float(price @ (bound if found is None else found))


def recomputation_s(model: MemoryModel, recomputed: Ints) -> float:
    """Time that recomputation adds to a step: on every diagonal the slowest stage's, summed."""
    longest = np.zeros(int(model.diagonals.max()) + 1)
    np.maximum.at(longest, model.diagonals, recomputed * model.again_s)
    return float(longest.sum())


def token_limit(costs: ChunkCosts, longest: int) -> int:
    """The most tokens of a chunk that fits every stage alone, recomputing everything.

    InfeasibleError when a sequence of `longest` tokens does not fit in any number of slices: all its slices' inputs,
    keys, values and their gradients are held when its first backward begins.
    """
    costs = costs.folded
    one = Load(*(np.array([value]) for value in (1.0, 0.0, False, 0.0, False, 0.0, 0.0)))
    split = Load(*(np.array([value]) for value in (1.0, 0.0, True, 1.0, False, 0.0, 0.0)))
    limits, tightest = [], (math.inf, 0, 0.0, 0.0)
    headrooms = costs.headroom_bytes(one, np.zeros((costs.num_stages, 1), np.int64)).tolist()
    for rank, (stage, headroom) in enumerate(zip(costs.stages, headrooms, strict=True)):
        whole = float(stage.held_bytes(one, stage.num_layers)[0]) + max(stage.working_bytes, stage.logit_bytes)
        slices = float(stage.held_bytes(split, stage.num_layers)[0] + stage.chain_of(split)[0])
        limits.append(headroom / whole)
        tightest = min(tightest, (headroom / min(slices, whole), rank, headroom, min(slices, whole)))
    if tightest[0] < longest:
        raise _too_long(costs, *tightest[1:], longest)
    return int(min(*limits, 1 << 50))


def unrecomputed_tokens(costs: ChunkCosts) -> int:
    """The most tokens of a chunk of whole sequences that fits every stage alone with nothing recomputed."""
    one = Load(*(np.array([value]) for value in (1.0, 0.0, False, 0.0, False, 0.0, 0.0)))
    headrooms = costs.headroom_bytes(one, np.zeros((costs.num_stages, 1), np.int64)).tolist()
    each = [float(stage.held_bytes(one, 0)[0]) + stage.logit_bytes for stage in costs.stages]
    return int(min(1 << 50, *(room / need for room, need in zip(headrooms, each, strict=True))))


def _too_long(costs: ChunkCosts, rank: int, headroom: float, per_token: float, longest: int) -> InfeasibleError:
    if headroom <= 0:
        return InfeasibleError(
            f"rank {rank} has no memory left for activations: its layers' state is {format_bytes(-headroom)} too "
            "large; more stages, tensor parallelism or ZeRO-1 would help"
        )
    layers, fits = costs.stages[rank].num_layers, num_fitting(headroom, per_token)
    needed = per_token * longest
    stages = math.ceil(costs.num_stages * needed / headroom)
    return InfeasibleError(
        f"a sequence of {longest} tokens does not fit in any number of slices: rank {rank} must hold at least "
        f"{format_bytes(needed)} of it for {layers} layers (inputs, keys, values and their gradients, all else "
        f"recomputed) and has {format_bytes(headroom)}; at most {fits} tokens fit. About {stages} stages instead of "
        f"{costs.num_stages}, {needed / headroom:.1f} times as many devices for each stage, or cutting at {fits} "
        "would help"
    )
