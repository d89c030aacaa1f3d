"""The compiled part of `partition.divide_layers`."""

import numpy as np

from farpipe.core.step.jit import inner, jit


@jit
def divide(figures, pinned, num_layers):  # type: ignore[no-untyped-def]
    """(layers of every stage [S], its option [S], seconds of the slowest stage).

    `figures` [S, options, 3]: seconds besides layers, seconds of a layer, most layers. `pinned` [S] or []: the layers
    of every stage. Stages together hold all layers.
    """
    num_stages = figures.shape[0]
    seconds = np.full((num_stages, num_layers + 1), np.inf)
    choice = np.zeros((num_stages, num_layers + 1), np.int64)
    for s in range(num_stages):
        for n in range(num_layers + 1):
            if n < 1 if pinned.size == 0 else n != pinned[s]:
                continue
            for option in range(figures.shape[1]):
                if n <= figures[s, option, 2]:
                    option_s = figures[s, option, 0] + n * figures[s, option, 1]
                    if option_s < seconds[s, n]:
                        seconds[s, n], choice[s, n] = option_s, option
    slowest_s = _least_slowest(seconds, np.ones(num_stages, np.int64)) if pinned.size == 0 else 0.0
    for s in range(pinned.size):
        slowest_s = max(slowest_s, seconds[s, pinned[s]])
    layers, chosen = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    sums, counts = np.empty((2, num_layers + 1)), np.empty((num_stages, num_layers + 1), np.int64)
    _cheapest(seconds, slowest_s * (1 + 1e-9), sums, counts, layers)
    for s in range(num_stages):
        chosen[s] = choice[s, layers[s]]
    return layers, chosen, slowest_s


@inner
def _least_slowest(seconds, held):  # type: ignore[no-untyped-def]
    """The least time of the slowest stage in which all together hold all layers; `held` [S]: ones.

    A stage that may take longer never holds fewer layers, so the time goes up from that of a layer each to the next at
    which any stage holds one more.
    """
    num_layers, slowest_s = seconds.shape[1] - 1, 0.0
    for s in range(held.size):
        slowest_s = max(slowest_s, seconds[s, 1])
    while True:
        total, next_s = 0, np.inf
        for s in range(held.size):
            while held[s] < num_layers and seconds[s, held[s] + 1] <= slowest_s:
                held[s] += 1
            total += held[s]
            if held[s] < num_layers:
                next_s = min(next_s, seconds[s, held[s] + 1])
        if total >= num_layers or next_s == np.inf:
            return slowest_s
        slowest_s = next_s


@inner
def _cheapest(seconds, limit_s, sums, counts, layers):  # type: ignore[no-untyped-def]
    """The `layers` that add up to all with the least sum of squared times, none above `limit_s`.

    `sums` [2, layers + 1] and `counts` [S, layers + 1] are space: the least sum of the stages so far by their layers
    together, and the layers of the last of them.
    """
    num_stages, width = seconds.shape
    before, now = sums
    for n in range(width):
        before[n] = seconds[0, n] ** 2 if seconds[0, n] <= limit_s else np.inf
        counts[0, n] = n
    for s in range(1, num_stages):
        for whole in range(width):
            now[whole], counts[s, whole] = np.inf, 0
        for n in range(width):
            if seconds[s, n] <= limit_s:
                price = seconds[s, n] ** 2
                for whole in range(n, width):
                    if before[whole - n] + price < now[whole]:
                        now[whole], counts[s, whole] = before[whole - n] + price, n
        before, now = now, before
    left = width - 1
    for s in range(num_stages - 1, -1, -1):
        layers[s] = counts[s, left]
        left -= layers[s]
