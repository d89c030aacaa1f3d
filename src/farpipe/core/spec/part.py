"""The base of every part of a job: frozen tables without unknown keys, counts, figures, names."""

import contextlib
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from farpipe.core.arguments import plain_signature
from farpipe.core.strict import finite
from farpipe.core.units import BYTES, BYTES_PER_S, FLOPS, SECONDS, WATTS, parse

Quantity = str | Literal[0]
"""A figure as a file has it: a number with its unit; a bare zero needs none. For the JSON Schema alone."""
Value = TypeVar("Value")
Place = tuple[str | int, ...]
"""Keys and indices from the top of a job to one of its values."""

MAX_COUNT: Final = 1 << 40
"""No count in a job is larger; a typing slip is named before it turns into an endless computation."""


MAX_DEVICES: Final = 1 << 20
"""Most devices of one site; the largest that is known has some 200,000."""
MAX_LATENCY_S: Final = 3600.0
MIN_BANDWIDTH: Final = 1.0
"""Bytes per second; below it a step would outlast its computer."""
MAX_BANDWIDTH: Final = 1e18


class Part(BaseModel):
    """A table of a job: frozen, nothing unknown in it, figures in SI units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Sign in the types that callers give, without their validators."""
        cls.__signature__ = plain_signature(cls)


def at_most_an_hour(latency_s: float, written: str) -> float:
    """`latency_s`; ValueError, showing it as `written`, if it is longer than any link on Earth."""
    if latency_s > MAX_LATENCY_S:
        raise ValueError(f"a link's latency is at most an hour, found {written}")
    return latency_s


def possible_bandwidth(bytes_per_s: float, written: str) -> float:
    """`bytes_per_s`; ValueError, showing it as `written`, if times over such a link mean nothing."""
    if not MIN_BANDWIDTH <= bytes_per_s <= MAX_BANDWIDTH:
        raise ValueError(f"a bandwidth is from 8 bit/s (1 B/s) to 1e18 B/s, found {written}")
    return bytes_per_s


def _share(value: Any) -> float:
    number = finite(value)
    if number >= 1:
        raise ValueError(f"must be less than 1, found {value}")
    return number


def more_than_zero(units: dict[str, float], example: str) -> BeforeValidator:
    """Reads a quantity such as `example`, with one of `units`, that is not zero."""

    def read(text: Any) -> float:
        value = parse(text, units, example)
        if value == 0:
            raise ValueError(f"must be more than zero, found {text!r}")
        return value

    return BeforeValidator(read, json_schema_input_type=Quantity)


def site_name(name: str) -> str:
    """`name`; ValueError unless it can be a site's: it is also the name of a folder and a part of link names."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"a site's name is letters, digits, '_', '-' and '.', found {name!r}")
    return name


def _latency(text: Any) -> float:
    return at_most_an_hour(parse(text, SECONDS, "35 ms"), f"{text!r:.60}")


def _bandwidth(text: Any) -> float:
    value = parse(text, BYTES_PER_S, "400 Gbit/s")
    if value == 0:
        raise ValueError(f"must be more than zero, found {text!r:.60}")
    return possible_bandwidth(value, f"{text!r:.60}")


def _bandwidth_or_none(text: Any) -> float:
    return 0.0 if parse(text, BYTES_PER_S, "400 Gbit/s") == 0 else _bandwidth(text)


def _bytes_or_seconds(text: Any) -> tuple[float, str]:
    """A queue's length: bytes, or for how long the link has to work on it."""
    for units, kind in ((BYTES, "bytes"), (SECONDS, "seconds")):
        with contextlib.suppress(ValueError):
            if value := parse(text, units, ""):
                return value, kind
    raise ValueError(f'expected bytes or a time, more than zero, such as "1 MB" or "20 ms", found {text!r:.60}')


Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=60)]
SiteName = Annotated[Name, AfterValidator(site_name)]
NonNegative = Annotated[float, BeforeValidator(finite), Field(json_schema_extra={"minimum": 0})]
Positive = Annotated[
    float,
    BeforeValidator(lambda value: finite(value, exclusive=True)),
    Field(json_schema_extra={"exclusiveMinimum": 0}),
]
Share = Annotated[float, BeforeValidator(_share)]
LatencySeconds = Annotated[float, BeforeValidator(lambda value: at_most_an_hour(finite(value), f"{value!r:.40} s"))]
BytesPerSecond = Annotated[
    float, BeforeValidator(lambda value: possible_bandwidth(finite(value, exclusive=True), f"{value!r:.40} B/s"))
]
NumDevices = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)]

Latency = Annotated[float, BeforeValidator(_latency, json_schema_input_type=Quantity)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth, json_schema_input_type=Quantity)]
BandwidthOrNone = Annotated[float, BeforeValidator(_bandwidth_or_none, json_schema_input_type=Quantity)]
"""Bandwidth of a link that may be down: 0."""
Memory = Annotated[float, more_than_zero(BYTES, "80 GiB")]
MemoryReserve = Annotated[
    float, BeforeValidator(lambda text: parse(text, BYTES, "5 GiB"), json_schema_input_type=Quantity)
]
MemoryBandwidth = Annotated[float, more_than_zero(BYTES_PER_S, "3350 GB/s")]
Flops = Annotated[float, more_than_zero(FLOPS, "989 TFLOP/s")]
Queue = Annotated[tuple[float, str], BeforeValidator(_bytes_or_seconds, json_schema_input_type=Quantity)]
Power = Annotated[float, more_than_zero(WATTS, "700 W")]
Duration = Annotated[float, more_than_zero(SECONDS, "24 h")]


def fault(message: str, *location: str | int) -> ValidationError:
    """The error to raise for an impossible value at `location`, relative to the table being checked."""
    kind = PydanticCustomError("value_error", "{message}", {"message": message})
    return ValidationError.from_exception_data("job", [{"type": kind, "loc": location, "input": None}])


def known(look_up: Callable[[str], object]) -> AfterValidator:
    """A name that `look_up` finds in the catalogue."""

    def read(name: str) -> str:
        look_up(name)
        return name

    return AfterValidator(read)


def first(place: Place, *values: Value | None) -> Value:
    """The first value that there is; an error at `place` if there is none."""
    found = next((value for value in values if value is not None), None)
    if found is None:
        raise fault("missing; give it, or a preset that has it", *place)
    return found


class Written(Part):
    """A table of the file."""

    @abstractmethod
    def resolve(self) -> Any:
        """The part of a Job that the table describes."""

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        self.resolve()
        return self
