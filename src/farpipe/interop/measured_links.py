"""The link between two sites by measurements of it: the figures of a job, their origin, and what was left out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, SiteLink
from farpipe.core.units import format_rate
from farpipe.interop.link_tests import LinkTest, read_link_test

_SAME_RATE: Final = 0.1
"""Relative difference of two measurements of one link."""


@dataclass
class MeasuredLink:
    """Figures of a link as a job.toml writes them, each with its origin: of one direction, and what is otherwise in
    the other; notes in words."""

    there: dict[str, tuple[Any, str]] = field(default_factory=dict)
    back: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def give(self, figures: Mapping[str, str]) -> None:
        """Let figures of the command line, by key, take the place of measured ones in both directions."""
        for name, text in figures.items():
            self.there[name] = (text, "--link")
            self.back.pop(name, None)


def read_link_tests(paths: Iterable[Path]) -> dict[Path, LinkTest]:
    """The measurements among the files, by path; one that was run from the other end counts for that direction."""
    tests = {path: test for path in paths if (test := read_link_test(path)) is not None}
    first = next((test.ends for test in tests.values() if all(test.ends)), None)
    return {path: _turned(test) if first and test.ends == first[::-1] else test for path, test in tests.items()}


def _turned(test: LinkTest) -> LinkTest:
    return replace(
        test, bandwidth_bytes_per_s=test.back_bytes_per_s, back_bytes_per_s=test.bandwidth_bytes_per_s, ends=("", "")
    )


def link_of(tests: Iterable[LinkTest]) -> MeasuredLink:
    """The link that measurements describe.

    Of several figures the least latency and the largest bandwidth count: what the link does when nothing disturbs;
    and the largest loss and jitter.
    """
    tests = list(tests)
    there, back = (_fastest(tests, direction) for direction in (_rate_there, _rate_back))
    found = MeasuredLink(
        {name: figure for name, figure in _of_both_ways(tests) if figure}, notes=_notes(tests, there, back)
    )
    if fastest := there or back:
        found.there["bandwidth"] = _bandwidth(*fastest)
    if there and back and abs(there[0] / back[0] - 1) > _SAME_RATE:
        found.back["bandwidth"] = _bandwidth(*back)
    return found


def _rate_there(test: LinkTest) -> float | None:
    return test.bandwidth_bytes_per_s


def _rate_back(test: LinkTest) -> float | None:
    return test.back_bytes_per_s


def _fastest(tests: Sequence[LinkTest], direction: Callable[[LinkTest], float | None]) -> tuple[float, LinkTest] | None:
    """The largest rate in one direction, and its test."""
    rates = [(rate, test) for test in tests if (rate := direction(test))]
    return max(rates, key=lambda found: found[0], default=None)


def _bandwidth(rate: float, test: LinkTest) -> tuple[str, str]:
    return f"{rate * 8e-9:.4g} Gbit/s", f"{test.origin}; {test.bound}" if test.bound else test.origin


def _of_both_ways(tests: Sequence[LinkTest]) -> list[tuple[str, tuple[Any, str] | None]]:
    """Latency, loss and jitter: of a round trip, so that both directions have them."""
    least = min((test for test in tests if test.latency_s), key=lambda test: test.latency_s or 0.0, default=None)
    lossy, late = (
        max(tests, key=lambda test: getattr(test, name) or 0.0, default=None) for name in ("loss", "jitter_s")
    )
    return [
        ("latency", (f"{(least.latency_s or 0.0) * 1e3:.4g} ms", f"{least.origin}, one way") if least else None),
        ("loss", (float(f"{lossy.loss:.4g}"), f"{lossy.origin}, packets lost") if lossy and lossy.loss else None),
        (
            "jitter",
            (f"{late.jitter_s * 1e3:.4g} ms", f"{late.origin}, spread of packets") if late and late.jitter_s else None,
        ),
    ]


def _notes(
    tests: Sequence[LinkTest], there: tuple[float, LinkTest] | None, back: tuple[float, LinkTest] | None
) -> tuple[str, ...]:
    """Sentences on bounds, on a direction that was not measured, and on what became no figure."""
    counted = {id(found[1]): found for found in (there, back) if found}
    bounds = [
        f"{test.origin}: {format_rate(rate)} is {test.bound}: the link may carry more"
        for rate, test in counted.values()
        if test.bound
    ]
    one_way = (
        [f"{back[1].origin}: measured backwards only (reverse): taken for both directions"]
        if back and not there
        else []
    )
    return (*mixed_units(tests), *bounds, *one_way, *(f"{test.source}: {test.note}" for test in tests if test.note))


def mixed_units(tests: Iterable[LinkTest], known: Iterable[float] = ()) -> tuple[str, ...]:
    """Sentences on rates that are eight times another one: bits there and bytes here. `known` are rates of a job."""
    tests = list(tests)
    rates = [(rate, test.origin) for test in tests for rate in (_rate_there(test), _rate_back(test)) if rate]
    rates += [(rate, "the job") for rate in dict.fromkeys(known)]
    return tuple(
        f"{format_rate(high)} ({source}) is 8 times {format_rate(low)} ({other}): were bits and bytes mixed up?"
        for high, source in rates
        for low, other in rates
        if abs(high / low / 8 - 1) < _SAME_RATE
    )


def with_measured_links(job: Job, paths: Iterable[Path]) -> tuple[Job, tuple[str, ...]]:
    """The job with the figures in files in place of those of the link between its two sites; and sentences on what is
    doubtful in them.

    A rate of one direction only counts for both, and "there" is the direction of the job's first link. InputError for a
    file of no known tool, and for a job with links between several pairs of sites.
    """
    paths = list(paths)
    tests = read_link_tests(paths)
    if other := next((path for path in paths if path not in tests), None):
        raise InputError(f"{other}: no output of iperf3, ping, mtr, nccl-tests, perftest or qperf")
    links = job.cluster.links
    if len({frozenset((link.source, link.target)) for link in links}) != 1:
        raise InputError(
            f"measured links: the job has links between {len(links)} pairs of sites, and the files name none; write "
            "the figures into cluster.links (`farpipe import FILE` prints them)"
        )
    there, back = (_fastest([*tests.values()], direction) for direction in (_rate_there, _rate_back))
    first = (links[0].source, links[0].target)
    updated = tuple(
        _measured(link, [*tests.values()], (there or back) if (link.source, link.target) == first else (back or there))
        for link in links
    )
    notes = [
        *mixed_units(tests.values(), (link.bandwidth_bytes_per_s for link in links)),
        *link_of(tests.values()).notes,
    ]
    if there and back:
        notes.append(f"measured there and back: there is taken as {first[0]} to {first[1]}")
    cluster = job.cluster.model_copy(update={"links": updated})
    return job.model_copy(update={"cluster": cluster, "text": ""}), tuple(dict.fromkeys(notes))


def _measured(link: SiteLink, tests: Sequence[LinkTest], fastest: tuple[float, LinkTest] | None) -> SiteLink:
    """The link with the figures of its measurements; one that is a lower bound does not lower its rate."""
    update: dict[str, float] = {}
    latencies = [test.latency_s for test in tests if test.latency_s]
    if latencies:
        update["latency_s"] = min(latencies)
    for name in ("loss", "jitter_s"):
        if found := max((getattr(test, name) or 0.0 for test in tests), default=0.0):
            update[name] = found
    if fastest is not None:
        rate, test = fastest
        update["bandwidth_bytes_per_s"] = max(rate, link.bandwidth_bytes_per_s) if test.bound else rate
    return link.model_copy(update=update)
