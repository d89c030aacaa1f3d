"""Settings of light paths that are rarely changed, by the names that `--set` takes."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, InstanceOf, field_validator

from farpipe.core.arguments import named_or
from farpipe.core.document import Table
from farpipe.optical.network import Network

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_RATE: Final = 1_000_000
"""Largest rate of a random request, Gbit/s or slots: more than a fibre carries."""
NetworkOrName = Annotated[str | InstanceOf[Network], named_or(Network, "a network")]
Seeds = Annotated[int, Field(ge=1, le=1000)]
Rates = Annotated[str, Field(pattern=r"^\d+-\d+$")]


class _Settings(Table, use_attribute_docstrings=True):
    rates: Rates

    @property
    def low_and_high(self) -> tuple[int, int]:
        """Least and largest rate."""
        low, _, high = self.rates.partition("-")
        return int(low), int(high)

    @field_validator("rates", mode="before")
    @classmethod
    def _expect_two_numbers(cls, text: str) -> str:
        low, _, high = text.partition("-")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MAX_RATE):
            raise ValueError(
                f"expected two whole numbers from 1 to {MAX_RATE}, the least first, as 25-100, found {text!r}"
            )
        return text


class BlockingSettings(_Settings):
    """Candidate paths, spectrum and random requests of `optical blocking`."""

    seeds: Seeds = 5
    """Independent runs of random traffic, side by side; with --load."""
    shared: bool = False
    """Both directions of an edge share one spectrum."""
    defragment: bool = False
    """Move light paths to lower slots when a request does not fit."""
    k: Annotated[int, Field(ge=1, le=1000)] = 5
    """Candidate paths per pair of nodes."""
    by: Literal["km", "hops", "efficiency"] = "km"
    """Order of the candidates: km, hops (then km), or efficiency."""
    requests: Count = 10_000
    """Requests that are counted; with --load."""
    warm_up: Annotated[int, Field(ge=0)] | None = None
    """Requests before these that are not; default: 3000, of a trace 0."""
    truncate: Positive | None = None
    """Longest holding time in means, drawn again beyond it (DeepRMSA: 2); with --load."""
    rates: Rates = "25-100"
    """Least and largest rate in Gbit/s; with --load."""


class LightSettings(_Settings):
    """Places, spectrum, background and light paths of `optical simulate` and `optical compare`."""

    placements: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Random placements, instead of named nodes; ranks with one name in `nodes` share a node."""
    seeds: Seeds = 5
    """Backgrounds, a run on each; with `simulate` the default is 1."""
    steps: Count = 3
    """Steps that count."""
    slots: Count = 80
    """Slots per fibre."""
    slot_ghz: Positive = 12.5
    """Width of a slot in GHz."""
    guard: Annotated[int, Field(ge=0)] = 1
    """Guard slots beside every light path."""
    modulation: str = "gnpy"
    """Modulation of the messages: deeprmsa, gnpy, 64qam, bpsk, or a CSV file reach_km,bit_s_hz."""
    paths: Path | None = None
    """File of candidate paths: CSV src,dst,order,nodes,km."""
    window: str = "0-1.5"
    """Seconds of the step that the picture of `simulate` shows."""
    k: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Candidate paths; default: the policy's own."""
    by: Literal["km", "hops", "efficiency"] | None = None
    """Their order; default: the policy's own."""
    directed: bool = False
    """A spectrum per direction instead of one for both."""
    mean_holding: Positive = 0.2
    """Mean holding time of the background in seconds."""
    rates: Rates = "4-20"
    """Least and largest background request in slots."""
    trace_modulation: str | None = None
    """Modulation of the requests of --trace; default: that of the messages."""
    begin: Seconds | None = None
    """Time at which the first step begins; default: 10 mean holding times."""
    units: Count | None = None
    """Units of 75 Gbit/s that a message asks for at most."""
    setup: Seconds = 0.01
    """Seconds to set up a light path."""
    release: Seconds = 0.01
    """Seconds from the last bit until the spectrum is free for others."""
    ahead: bool = True
    """Ask for a light path `setup` seconds before it is needed."""
    keep: Seconds | None = None
    """Seconds for which a hop keeps its one light path while it is idle; default: none is kept."""
    one_per_hop: bool = False
    """A hop has one light path at a time."""
    retry: Seconds = 0.0
    """Seconds after which messages that wait try again; 0: when a light path ends."""
    skipped: Annotated[int, Field(ge=0)] = 2
    """Steps before those that count, in which a policy that learns settles."""
