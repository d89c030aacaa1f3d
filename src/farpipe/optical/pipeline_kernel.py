"""The compiled simulator of a pipeline whose messages are light paths, among background traffic.

One queue of events. At the same time come, in this order: light paths that end, background requests, actions that end,
messages that arrive, requests ahead of time, light paths that may have been kept long enough. Whenever a light path
ends, those who wait try again, by priority and then in order of asking.
"""

import numpy as np
from numba import njit

from farpipe.optical.assign_kernel import choose, slots_needed
from farpipe.optical.booking_kernel import cancel, wait_for_end
from farpipe.optical.choice_kernel import first_spread, soonest
from farpipe.optical.compiled import inner
from farpipe.optical.heap_kernel import pop
from farpipe.optical.lights_kernel import dark, light
from farpipe.optical.pipeline_state import AT_ONCE, NEXT, NOTHING, SENDING, WAITING
from farpipe.optical.sending_kernel import (
    ACTION,
    ARRIVAL,
    ASK,
    IDLE,
    RELEASE,
    REQUEST,
    divide,
    improve,
    light_blocks,
    post,
)

_F, _W = 0, 2


@inner
def _launch(net, orders, rule, state, out, message):  # type: ignore[no-untyped-def]
    """Send a message whose producer's end is known over the light paths that it holds."""
    out.start_s[message] = max(out.ready_s[message], out.grant_s[message] + rule.setup_s)
    divide(net, orders, rule, state, out, message, out.start_s[message], orders.gbit[message])
    if rule.keep_s >= 0:
        _stay(rule, state, message // orders.num_microbatches, out.end_s[message])
    if rule.widen or rule.move:
        state.sending[state.counters[SENDING]] = message
        state.counters[SENDING] += 1


@inner
def _stay(rule, state, hop, end_s):  # type: ignore[no-untyped-def]
    """Keep the hop's light path until it has been idle long enough after `end_s`."""
    state.kept_until_s[hop] = end_s
    if rule.keep_s < np.inf and not state.watched[hop]:
        state.watched[hop] = True
        post(state, end_s + rule.keep_s, np.int64(IDLE), hop)


@inner
def _reuse(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Send a message over the light path that its hop has kept."""
    hop = message // orders.num_microbatches
    place = state.kept[hop]
    start_s = max(now_s, out.ready_s[message], state.kept_until_s[hop])
    end_s = start_s + orders.gbit[message] / (state.kept_units[hop] * rule.unit_gbit)
    out.grant_s[message], out.units[message] = now_s, state.kept_units[hop]
    out.path[message] = state.lights.path[place]
    out.start_s[message], out.end_s[message] = start_s, end_s
    out.arrival_s[message] = end_s + net.latency_s[out.path[message]]
    _stay(rule, state, hop, end_s)
    post(state, out.arrival_s[message], np.int64(ARRIVAL), message)


@inner
def _light_message(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Light up to `max_blocks` paths for a message: 1 lit, 0 none is free, -1 it waits for a better one."""
    pair, gbit = orders.pair_of_hop[message // orders.num_microbatches], orders.gbit[message]
    most, least, best = rule.want[message], rule.least[message], -1
    if rule.earliest:
        best = soonest(net, rule, pair, most, least, gbit)
    elif rule.spread:
        cancel(net, state, message, now_s)
        best, seconds = first_spread(net, rule, pair, most, least, gbit)
        if wait_for_end(net, orders, rule, state, out, message, now_s, seconds):
            return -1
    return 1 if light_blocks(net, orders, rule, state, out, message, now_s, best, gbit) > 0 else 0


@inner
def _serve(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Give a message its light path: 1 served, 0 refused for lack of spectrum, -1 it is to wait."""
    hop = message // orders.num_microbatches
    if rule.keep_s >= 0 and state.kept[hop] >= 0:
        if out.ready_s[message] == np.inf or state.kept_until_s[hop] == np.inf:
            return -1
        _reuse(net, orders, rule, state, out, message, now_s)
        return 1
    if (rule.one_at_a_time or rule.keep_s >= 0) and state.lit[hop] > 0:
        return -1
    lit = _light_message(net, orders, rule, state, out, message, now_s)
    if lit <= 0:
        return lit
    out.grant_s[message] = now_s
    if rule.keep_s >= 0:
        state.kept[hop], state.kept_units[hop] = out.held[0, message], out.units[message]
        state.kept_until_s[hop] = np.inf  # until it is known when its first message will be through
    if out.ready_s[message] < np.inf:
        _launch(net, orders, rule, state, out, message)
    return 1


@inner
def _wait(rule, state, message):  # type: ignore[no-untyped-def]
    """Queue a message behind those of the same priority or a higher one."""
    place = state.counters[WAITING]
    while place > 0 and rule.priority[state.waiting[place - 1]] > rule.priority[message]:
        state.waiting[place] = state.waiting[place - 1]
        place -= 1
    state.waiting[place] = message
    state.counters[WAITING] += 1


@inner
def _ask(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """The first request of a message."""
    out.ask_s[message] = now_s
    served = _serve(net, orders, rule, state, out, message, now_s)
    out.refused[message] = served == 0
    if served <= 0:
        _wait(rule, state, message)


@inner
def _retry(net, orders, rule, state, out, now_s):  # type: ignore[no-untyped-def]
    """Those who wait try again."""
    kept = 0
    for place in range(state.counters[WAITING]):
        message = state.waiting[place]
        if out.grant_s[message] == np.inf and _serve(net, orders, rule, state, out, message, now_s) <= 0:
            state.waiting[kept] = message
            kept += 1
    state.counters[WAITING] = kept


@inner
def _ready_at(net, orders, rule, state, out, message, now_s, end_s):  # type: ignore[no-untyped-def]
    """The producer of a message has started and will end at `end_s`."""
    out.ready_s[message] = end_s
    if out.grant_s[message] < np.inf:
        _launch(net, orders, rule, state, out, message)
    elif rule.ahead and out.ask_s[message] == np.inf:
        post(state, max(now_s, end_s - rule.setup_s), np.int64(ASK), message)


@inner
def _begin(net, orders, rule, state, out, rank, now_s):  # type: ignore[no-untyped-def]
    """Start the next action of a rank if it is free and the input is there."""
    at = np.int64(orders.begin[rank]) + out.position[rank]
    if out.running[rank] or at == orders.begin[rank + 1]:
        return
    code, per_direction = np.int64(orders.codes[at]), orders.num_stages * orders.num_microbatches
    kind, slot = code & 3, code >> 2
    direction = 0 if kind == _F else 1
    if kind != _W and not out.there[direction * per_direction + slot]:
        return
    end_s = now_s + orders.duration_s[kind * per_direction + slot]
    out.action_s[at], out.running[rank] = now_s, True
    post(state, end_s, np.int64(ACTION), rank)
    message = direction * per_direction + slot
    if kind != _W and orders.pair_of_hop[message // orders.num_microbatches] >= 0:
        _ready_at(net, orders, rule, state, out, message, now_s, end_s)


@inner
def _arrive(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """A message is with its consumer."""
    direction = message // (orders.num_stages * orders.num_microbatches)
    target = message + (1 - 2 * direction) * orders.num_microbatches
    out.there[target] = True
    stage = target // orders.num_microbatches - direction * orders.num_stages
    _begin(net, orders, rule, state, out, np.int64(orders.rank_of_stage[stage]), now_s)


@inner
def _finish(net, orders, rule, state, out, rank, now_s):  # type: ignore[no-untyped-def]
    """An action has ended: its message asks for a light path, and the rank goes on."""
    code = np.int64(orders.codes[orders.begin[rank] + out.position[rank]])
    out.position[rank] += 1
    out.running[rank] = False
    kind, slot = code & 3, code >> 2
    if kind != _W:
        message = (0 if kind == _F else 1) * orders.num_stages * orders.num_microbatches + slot
        pair = orders.pair_of_hop[message // orders.num_microbatches]
        if pair == AT_ONCE:
            _arrive(net, orders, rule, state, out, message, now_s)
        elif pair != NOTHING and out.ask_s[message] == np.inf:
            _ask(net, orders, rule, state, out, message, now_s)
        elif pair != NOTHING and out.grant_s[message] == np.inf:
            _retry(net, orders, rule, state, out, now_s)  # it may have asked before its hop's light path could tell
    _begin(net, orders, rule, state, out, rank, now_s)


@inner
def _idle(net, state, hop, keep_s, now_s):  # type: ignore[no-untyped-def]
    """Give a hop's light path back if it has been idle for `keep_s`, or look again later; whether it was."""
    until_s = state.kept_until_s[hop] + keep_s
    state.watched[hop] = state.kept[hop] >= 0 and now_s < until_s < np.inf
    if state.watched[hop]:
        post(state, until_s, np.int64(IDLE), hop)
    if state.kept[hop] < 0 or now_s < until_s:
        return False
    dark(net, state, state.kept[hop], now_s)
    state.kept[hop] = -1
    return True


@inner
def _request(net, background, state, now_s):  # type: ignore[no-untyped-def]
    """The next background request is carried or refused."""
    request = state.counters[NEXT]
    state.counters[NEXT] += 1
    pair = background.pair[request]
    low, high = np.int64(net.first[pair]), np.int64(net.first[pair + 1])
    slots_needed(background.per_slot, low, high, background.gbit_s[request], net.guard, net.need)
    path, start = choose(net.spectrum, net.table, background.policy, low, high, net.need, net.mask)
    background.path[request] = path
    if path >= 0:
        place = light(net, state, (path, start, net.need[path - low]), -1 - request, -1, now_s)
        state.lights.until_s[place] = now_s + background.holding_s[request]
        post(state, state.lights.until_s[place], np.int64(RELEASE), place)


@inner
def _next_event(background, state, until_s):  # type: ignore[no-untyped-def]
    """(time, kind, item) of what comes next, a background request or the head of the queue; kind -1: nothing."""
    events, request = state.events, state.counters[NEXT]
    there = request < background.arrival_s.size
    if events[3][0] > 0:
        first_s, rank = events[0][0], events[1][0]
        earlier = first_s < background.arrival_s[request] if there else True
        if earlier or (first_s == background.arrival_s[request] and rank >> 44 == RELEASE):
            if first_s > until_s:
                return until_s, -1, 0
            at_s, rank, item = pop(events)
            return at_s, rank >> 44, item
    if not there or background.arrival_s[request] > until_s:
        return until_s, -1, 0
    return background.arrival_s[request], REQUEST, 0


@njit(cache=True, nogil=True)
def play(net, background, orders, rule, state, out, begin_s, until_s):  # type: ignore[no-untyped-def]  # noqa: C901
    """Play one step from `begin_s` on; when it ends, or -1 when nothing can happen any more.

    With a finite `until_s` the pipeline rests, and the background goes on alone until then.
    """
    left = orders.codes.size if until_s == np.inf else 0
    state.counters[SENDING] = 0
    for message in range(rule.ask_s.size):
        if rule.ask_s[message] < np.inf:
            post(state, begin_s + rule.ask_s[message], np.int64(ASK), np.int64(message))
    for rank in range(out.running.size if left > 0 else 0):
        _begin(net, orders, rule, state, out, np.int64(rank), begin_s)
    now_s = begin_s
    while left > 0 or now_s < until_s < np.inf:
        now_s, kind, item = _next_event(background, state, until_s)
        if kind == RELEASE:
            if state.lights.until_s[item] == now_s:  # else it has been widened, and ended before
                booked = state.lights.booked[item]
                dark(net, state, item, now_s)
                if booked >= 0:
                    _serve(net, orders, rule, state, out, booked, now_s)
                _retry(net, orders, rule, state, out, now_s)
                improve(net, orders, rule, state, out, now_s)
        elif kind == REQUEST:
            _request(net, background, state, now_s)
        elif kind == ACTION:
            left -= 1
            _finish(net, orders, rule, state, out, item, now_s)
        elif kind == ARRIVAL:
            if out.arrival_s[item] == now_s:
                _arrive(net, orders, rule, state, out, item, now_s)
        elif kind == ASK:
            if out.ask_s[item] == np.inf:
                _ask(net, orders, rule, state, out, item, now_s)
        elif kind == IDLE:
            if _idle(net, state, item, rule.keep_s, now_s):
                _retry(net, orders, rule, state, out, now_s)
        else:
            return until_s if until_s < np.inf else -1.0
    return now_s
