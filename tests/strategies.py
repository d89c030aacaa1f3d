"""Hypothesis strategies for Problems and for valid Schedules of them."""

from hypothesis import strategies as st

from farpipe.core.step import Action, Exchange, Hop, Link, Problem, Rank, Schedule, Stage, Sync, Transfer, awaited

# Halves are exact in binary, so sums of them are too, and ties really are ties.
SECONDS = st.integers(0, 12).map(lambda n: n / 2)
POSITIVE_SECONDS = st.integers(1, 12).map(lambda n: n / 2)


@st.composite
def problems(
    draw,
    max_ranks=4,
    max_stages=6,
    max_microbatches=5,
    seconds=SECONDS,
    with_sync=True,
    with_chains=True,
    with_times=True,
):
    """Any Problem: several stages per rank, figures per microbatch, links shared by hops and by collectives."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = draw(st.integers(num_ranks, max(num_ranks, max_stages)))
    num_microbatches = draw(st.integers(1, max_microbatches))
    places = draw(st.permutations(list(range(num_ranks))))
    places += draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks, max_size=num_stages - num_ranks)
    )

    def figure():
        return draw(seconds | st.lists(seconds, min_size=num_microbatches, max_size=num_microbatches).map(tuple))

    names = [f"link {i}" for i in range(draw(st.integers(1, 3)))]
    replicas = draw(st.sampled_from([1, 1, 2, 3]))

    def link():
        num_staggered = replicas if with_sync else draw(st.sampled_from([1, replicas]))
        rate = draw(st.sampled_from([1.0, 2.0]))
        return Link(latency_s=draw(SECONDS), bandwidth_bytes_per_s=rate, num_staggered=num_staggered)

    links = {name: link() for name in names}
    link_names = st.sampled_from(names)
    per_microbatch = st.lists(link_names, min_size=num_microbatches, max_size=num_microbatches).map(tuple)

    def times():
        """Now and then what a message's times are, in place of bytes, bandwidth and latency."""
        if not with_times or draw(st.integers(0, 3)):
            return {}
        return {name: figure() for name in draw(st.sets(st.sampled_from(["occupies_s", "arrives_after_s"])))}

    def transfer():
        return draw(
            st.none()
            | st.builds(lambda link: Transfer(link=link, bytes=figure(), **times()), link_names | per_microbatch)
        )

    def collective():
        return draw(st.none() | st.builds(Transfer, link=link_names, bytes=SECONDS))

    stages = tuple(
        Stage(
            rank=places[s],
            forward_s=figure(),
            input_grad_s=figure(),
            weight_grad_s=figure(),
            activation_bytes=2.0,
            weight_stash_bytes=draw(st.sampled_from([0.0, 1.0, 2.0])),
            chain_bytes=figure() if with_chains else 0.0,
        )
        for s in range(num_stages)
    )
    hops = tuple(Hop(forward=transfer(), backward=transfer()) for _ in range(num_stages - 1))
    sync = tuple(Sync(gather=collective(), reduce=collective()) for _ in range(num_stages)) if with_sync else None
    ends = draw(st.permutations(range(num_stages)))[:2] if with_sync and num_stages > 1 and draw(st.booleans()) else ()
    exchanges = tuple(
        Exchange(link=draw(link_names), bytes=draw(SECONDS), source_stage=a, target_stage=b)
        for a, b in ((ends, ends[::-1]) if ends else ())
    )
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(),) * num_ranks,
        stages=stages,
        links=links,
        hops=hops,
        sync=sync,
        exchanges=exchanges,
        follows=draw(follows(num_microbatches)) if with_chains else None,
    )


@st.composite
def follows(draw, num_microbatches):
    """Any chains of so many microbatches, also some that lie in each other, or none."""
    if draw(st.booleans()):
        return None
    chain_of = draw(st.lists(st.integers(0, 2), min_size=num_microbatches, max_size=num_microbatches))
    joined = [draw(st.booleans()) for _ in chain_of]
    last, found = {}, []
    for index, (chain, join) in enumerate(zip(chain_of, joined, strict=True)):
        found.append(last.get(chain) if join else None)
        last[chain] = index
    return tuple(found)


@st.composite
def schedules(draw, problem):
    """Any valid Schedule of `problem`: a random play in which every action's inputs are there."""
    num_stages = problem.num_stages
    microbatches = range(problem.num_microbatches)
    split = {(s, j): draw(st.booleans()) for s in range(num_stages) for j in microbatches}
    todo = [Action(s, "F", j) for s in range(num_stages) for j in microbatches]
    done, orders = set(), [[] for _ in problem.ranks]
    while todo:
        ready = [a for a in todo if all(need in done for need in _needs(problem, a))]
        action = draw(st.sampled_from(ready))
        todo.remove(action)
        stage, kind, j = action
        orders[problem.stages[stage].rank].append(action)
        done.add((stage, "F" if kind == "F" else "backward", j))
        if kind == "F":
            todo.append(Action(stage, "I" if split[stage, j] else "B", j))
        elif kind == "I":
            todo.append(Action(stage, "W", j))
    return Schedule(problem.num_microbatches, tuple(map(tuple, orders)), "random")


def _needs(problem, action):
    """Work to be done before `action` on its own stage or another, as (stage, "F" or "backward", microbatch)."""
    stage, kind, j = action
    need = awaited(action, problem.num_stages)
    if kind == "F":
        before = problem.chains.previous[j]
        chain = (stage, "F", int(before)) if before >= 0 else None
    else:
        after = problem.chains.next[j]
        chain = (stage, "backward", int(after)) if after >= 0 and kind != "W" else None
    return [need for need in (need, chain) if need is not None]


@st.composite
def problems_with_schedules(draw, **options):
    """A Problem and a valid Schedule of it."""
    problem = draw(problems(**options))
    return problem, draw(schedules(problem))
