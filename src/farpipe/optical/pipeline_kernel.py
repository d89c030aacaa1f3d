"""The compiled simulator of a pipeline whose messages are light paths, among background traffic.

One queue of events. At the same time come, in this order: light paths that end, background requests, actions that end,
messages that arrive, requests ahead of time, light paths that may have been kept long enough, light paths that replace
kept ones, periodic retries. Whenever a light path ends (or periodically) the messages that wait try again, by priority
and then in order of asking; at a hop of one light path at a time none tries before those ahead of it are served.
"""

import numpy as np

from farpipe.core.step.codes import W
from farpipe.core.step.inlined import arrival_of, direction_of, kind_of, message_of, slot_of
from farpipe.core.step.jit import jit
from farpipe.optical.assign_kernel import choose, slots_needed
from farpipe.optical.pipeline_state import AT_ONCE, NEXT, NOTHING, RETRYING, SENDING, WAITING
from farpipe.optical.sending_kernel import (
    ACTION,
    ARRIVAL,
    ASK,
    IDLE,
    RELEASE,
    REQUEST,
    RETRY,
    SWITCH,
    assign,
    assign_message,
    divide,
    post,
    release,
    replace_kept,
    switch,
    widen,
)
from farpipe.optical.spectrum_kernel import pop, subroutine


@subroutine
def _launch(net, orders, rule, state, out, message):  # type: ignore[no-untyped-def]
    """Send a message whose producer's end is known over the light paths that it holds."""
    out.start_s[message] = max(out.ready_s[message], out.grant_s[message] + rule.setup_s)
    divide(net, orders, rule, state, out, message, out.start_s[message], orders.gbit[message])
    if rule.keep_s >= 0:
        _stay(rule, state, message // orders.num_microbatches, out.end_s[message])
    if rule.widen and rule.keep_s < 0:
        state.sending[state.counters[SENDING]] = message
        state.counters[SENDING] += 1


@subroutine
def _stay(rule, state, hop, end_s):  # type: ignore[no-untyped-def]
    """Keep the hop's light path until it has been idle long enough after `end_s`."""
    state.kept_until_s[hop] = end_s
    if rule.keep_s < np.inf and not state.watched[hop]:
        state.watched[hop] = True
        post(state, end_s + rule.keep_s, np.int64(IDLE), hop)


@subroutine
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


@subroutine
def _serve(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """Give a message its light path: 1 served, 0 refused for lack of spectrum, -1 its hop's turn has not come."""
    hop = message // orders.num_microbatches
    if rule.keep_s >= 0 and state.kept[hop] >= 0:
        if out.ready_s[message] == np.inf or state.kept_until_s[hop] == np.inf:
            return -1
        _reuse(net, orders, rule, state, out, message, now_s)
        return 1
    if (rule.one_at_a_time or rule.keep_s >= 0) and state.num_active[hop] > 0:
        return -1
    if not assign_message(net, orders, rule, state, out, message, now_s):
        return 0
    out.grant_s[message] = now_s
    if rule.keep_s >= 0:
        state.kept[hop], state.kept_units[hop] = out.held[0, message], out.units[message]
        state.kept_until_s[hop] = np.inf  # until it is known when its first message will be through
    if out.ready_s[message] < np.inf:
        _launch(net, orders, rule, state, out, message)
    return 1


@subroutine
def _wait(rule, state, message):  # type: ignore[no-untyped-def]
    """Queue a message behind those of the same priority or a higher one."""
    place = state.counters[WAITING]
    while place > 0 and rule.priority[state.waiting[place - 1]] > rule.priority[message]:
        state.waiting[place] = state.waiting[place - 1]
        place -= 1
    state.waiting[place] = message
    state.counters[WAITING] += 1


@subroutine
def _behind(orders, rule, state, out, message):  # type: ignore[no-untyped-def]
    """True for a message of a hop of one light path that waits for others of that hop to be served first."""
    if not rule.one_at_a_time and rule.keep_s < 0:
        return False
    for place in range(state.counters[WAITING]):
        other = state.waiting[place]
        same_hop = other // orders.num_microbatches == message // orders.num_microbatches
        first = rule.priority[other] <= rule.priority[message] and out.ready_s[other] <= out.ready_s[message]
        if same_hop and first and out.grant_s[other] == np.inf:
            return True
    return False


@subroutine
def _ask(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """The first request of a message."""
    out.ask_s[message] = now_s
    behind = _behind(orders, rule, state, out, message)
    served = -1 if behind else _serve(net, orders, rule, state, out, message, now_s)
    out.refused[message] = served == 0
    if served <= 0:
        _wait(rule, state, message)
        if rule.retry_s > 0 and state.counters[RETRYING] == 0:
            post(state, now_s + rule.retry_s, np.int64(RETRY), 0)
            state.counters[RETRYING] = 1


@subroutine
def _retry(net, orders, rule, state, out, now_s):  # type: ignore[no-untyped-def]
    """Serve the messages that wait, by priority, then in order of asking.

    At a hop of one light path none overtakes: `ahead` has, of those that go on waiting, the first that was ready.
    """
    kept, in_turn, ahead = 0, rule.one_at_a_time or rule.keep_s >= 0, state.ahead
    ahead[:] = -1
    for place in range(state.counters[WAITING]):
        message = state.waiting[place]
        if out.grant_s[message] < np.inf:
            continue
        hop = message // orders.num_microbatches
        first = ahead[hop]
        behind = in_turn and first >= 0 and out.ready_s[first] <= out.ready_s[message]
        if behind or _serve(net, orders, rule, state, out, message, now_s) <= 0:
            state.waiting[kept] = message
            kept += 1
            if first < 0 or out.ready_s[message] < out.ready_s[first]:
                ahead[hop] = message
    state.counters[WAITING] = kept


@subroutine
def _use_released(net, orders, rule, state, out, now_s):  # type: ignore[no-untyped-def]
    """A light path has ended: messages that wait try again, others are widened."""
    if rule.retry_s == 0:
        _retry(net, orders, rule, state, out, now_s)
    if rule.widen and rule.keep_s >= 0:
        replace_kept(net, orders, rule, state, now_s)
    widen(net, orders, rule, state, out, now_s)


@subroutine
def _retry_later(background, rule, state, now_s):  # type: ignore[no-untyped-def]
    """Post the next periodic retry if messages wait and anything else can still happen."""
    goes_on = state.events[3][0] > 0 or state.counters[NEXT] < background.arrival_s.size
    state.counters[RETRYING] = state.counters[WAITING] > 0 and goes_on
    if state.counters[RETRYING]:
        post(state, now_s + rule.retry_s, np.int64(RETRY), 0)


@subroutine
def _ready_at(net, orders, rule, state, out, message, now_s, end_s):  # type: ignore[no-untyped-def]
    """The producer of a message has started and will end at `end_s`."""
    out.ready_s[message] = end_s
    if out.grant_s[message] < np.inf:
        _launch(net, orders, rule, state, out, message)
    elif rule.ahead and out.ask_s[message] == np.inf:
        post(state, max(now_s, end_s - rule.setup_s), np.int64(ASK), message)


@subroutine
def _begin(net, orders, rule, state, out, rank, now_s):  # type: ignore[no-untyped-def]
    """Start the next action of a rank if it is free and the input is there."""
    at = np.int64(orders.begin[rank]) + out.position[rank]
    if out.running[rank] or at == orders.begin[rank + 1]:
        return
    code, per_direction = np.int64(orders.codes[at]), orders.num_stages * orders.num_microbatches
    kind, slot = kind_of(code), slot_of(code)
    message = message_of(direction_of(kind), slot, per_direction)
    if kind != W and not out.there[message]:
        return
    end_s = now_s + orders.duration_s[kind * per_direction + slot]
    out.action_s[at], out.running[rank] = now_s, True
    post(state, end_s, np.int64(ACTION), rank)
    if kind != W and orders.pair_of_hop[message // orders.num_microbatches] >= 0:
        _ready_at(net, orders, rule, state, out, message, now_s, end_s)


@subroutine
def _arrive(net, orders, rule, state, out, message, now_s):  # type: ignore[no-untyped-def]
    """A message is with its consumer."""
    direction = message // (orders.num_stages * orders.num_microbatches)
    target = arrival_of(message, direction, orders.num_microbatches)
    out.there[target] = True
    stage = target // orders.num_microbatches - direction * orders.num_stages
    _begin(net, orders, rule, state, out, np.int64(orders.rank_of_stage[stage]), now_s)


@subroutine
def _finish(net, orders, rule, state, out, rank, now_s):  # type: ignore[no-untyped-def]
    """An action has ended: its message asks for a light path, and the rank goes on."""
    code = np.int64(orders.codes[orders.begin[rank] + out.position[rank]])
    out.position[rank] += 1
    out.running[rank] = False
    kind, slot = kind_of(code), slot_of(code)
    if kind != W:
        message = message_of(direction_of(kind), slot, orders.num_stages * orders.num_microbatches)
        pair = orders.pair_of_hop[message // orders.num_microbatches]
        if pair == AT_ONCE:
            _arrive(net, orders, rule, state, out, message, now_s)
        elif pair != NOTHING and out.ask_s[message] == np.inf:
            _ask(net, orders, rule, state, out, message, now_s)
        elif pair != NOTHING and out.grant_s[message] == np.inf:
            _retry(net, orders, rule, state, out, now_s)  # it may have asked before its hop's light path had an end
    _begin(net, orders, rule, state, out, rank, now_s)


@subroutine
def _idle(net, state, hop, keep_s, now_s):  # type: ignore[no-untyped-def]
    """Give a hop's light path back if it has been idle for `keep_s`, or look again later; whether it was."""
    until_s = state.kept_until_s[hop] + keep_s
    state.watched[hop] = state.kept[hop] >= 0 and now_s < until_s < np.inf
    if state.watched[hop]:
        post(state, until_s, np.int64(IDLE), hop)
    if state.kept[hop] < 0 or now_s < until_s:
        return False
    for kept in (state.kept, state.wider):
        if kept[hop] >= 0:
            release(net, state, kept[hop], now_s)
            kept[hop] = -1
    return True


@subroutine
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
        place = assign(net, state, (path, start, net.need[path - low]), -1 - request, -1, now_s)
        state.lights.until_s[place] = now_s + background.holding_s[request]
        post(state, state.lights.until_s[place], np.int64(RELEASE), place)


@subroutine
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


@subroutine
def _change_lights(net, background, orders, rule, state, out, kind, item, now_s):  # type: ignore[no-untyped-def]
    """A light path ends or is replaced, or messages that wait try again."""
    if kind == RELEASE and state.lights.until_s[item] == now_s:  # else it has been widened, and ended before
        release(net, state, item, now_s)
        _use_released(net, orders, rule, state, out, now_s)
    elif kind == RETRY:
        _retry(net, orders, rule, state, out, now_s)
        _retry_later(background, rule, state, now_s)
    elif kind == SWITCH:
        switch(net, orders, rule, state, item, now_s)
    elif kind == IDLE and _idle(net, state, item, rule.keep_s, now_s):
        _retry(net, orders, rule, state, out, now_s)


@jit(nogil=True)
def play(net, background, orders, rule, state, out, begin_s, until_s):  # type: ignore[no-untyped-def]
    """Play one step from `begin_s` on; when it ends, or -1 when nothing can happen any more.

    With a finite `until_s` the pipeline rests, and the background goes on alone until then.
    """
    left = orders.codes.size if until_s == np.inf else 0
    state.counters[SENDING] = 0
    for rank in range(out.running.size if left > 0 else 0):
        _begin(net, orders, rule, state, out, np.int64(rank), begin_s)
    now_s = begin_s
    while left > 0 or now_s < until_s < np.inf:
        now_s, kind, item = _next_event(background, state, until_s)
        if kind < 0:
            return until_s if until_s < np.inf else -1.0
        if kind == REQUEST:
            _request(net, background, state, now_s)
        elif kind == ACTION:
            left -= 1
            _finish(net, orders, rule, state, out, item, now_s)
        elif kind == ARRIVAL and out.arrival_s[item] == now_s:  # else it has been widened, and arrived before
            _arrive(net, orders, rule, state, out, item, now_s)
        elif kind == ASK and out.ask_s[item] == np.inf:
            _ask(net, orders, rule, state, out, item, now_s)
        else:
            _change_lights(net, background, orders, rule, state, out, kind, item, now_s)
    return now_s
