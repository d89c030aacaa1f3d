"""Quantities as people write them ("400 Gbit/s", "35 ms", "80 GiB") and as farpipe keeps them (SI floats)."""

import difflib
import math
import re
from decimal import Context, Decimal
from typing import Final

_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES: Final = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS: Final = {f"{p}bit": f / 8 for p, f in (_DECIMAL | _BINARY).items()}

SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES: Final = _BYTES
BYTES_PER_S: Final = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()} | {
    f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()
}
FLOPS: Final = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()} | {
    f"{prefix}FLOPS": factor for prefix, factor in _DECIMAL.items()
}
COUNTS: Final = _DECIMAL | {"B": 1e9}
WATTS: Final = {"W": 1.0, "kW": 1e3, "MW": 1e6}

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal, or turn the direction of what follows; line ends and tabs are none of them."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d]\S*)\s*")


def parse(text: object, units: dict[str, float], example: str) -> float:
    """`text` such as ``"35 ms"`` in SI units, rounded once: ``"3.4 us"`` is 3.4e-6 and not its neighbour.

    `units` is one of this module's tables and `example` what the error suggests. A bare zero needs no unit.
    Raises ValueError for anything that is not a finite, non-negative quantity in one of `units`.
    """
    if not isinstance(text, bool) and isinstance(text, int | float) and text == 0:
        return 0.0
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'expected a quantity with its unit such as "{example}", found {_shorten(text)}')
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"unknown unit {unit[:20]!r} in {_shorten(text)}{_nearest(unit, units, example)}")
    exact = Context(prec=60, traps=[])  # what is too large becomes infinite and is reported below
    value = float(exact.multiply(exact.create_decimal(number.replace("_", "")), Decimal(repr(units[unit]))))
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"must be finite and not negative, found {_shorten(text)}")
    return value + 0.0  # no negative zero


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(unit: str, units: dict[str, float], example: str) -> str:
    """Units that the writer may have meant: ``Gb/s`` can be bits or bytes, so both are offered."""
    bits_or_bytes = [unit.removesuffix("b/s") + ending for ending in ("bit/s", "B/s")]
    same_letters = [known for known in units if known.lower() == unit.lower()]
    close = difflib.get_close_matches(unit[:20], units, n=1, cutoff=0.6)
    guesses = [guess for guess in bits_or_bytes if guess in units] or same_letters[:1] or close
    return f"; did you mean {' or '.join(map(repr, guesses))}?" if guesses else f'; write it like "{example}"'


def format_about(seconds: float, *, is_rough: bool) -> str:
    """Predicted seconds, with ``~`` before them where such predictions were never compared with measurements."""
    return f"{'~' if is_rough else ''}{format_seconds(seconds)}"


def format_seconds(seconds: float) -> str:
    """Three significant digits in the unit that a person would choose: ``1.21 s``, ``35.0 ms``, ``12 us``."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if abs(seconds) >= 120:
        sign = "-" if seconds < 0 else ""
        minutes, rest = divmod(round(abs(seconds)), 60)
        hours, minutes = divmod(minutes, 60)
        if hours >= 100:
            return f"{sign}{hours // 24} days {hours % 24} h"
        return sign + (f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s")
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def format_bytes(num_bytes: float) -> str:
    """Binary prefixes, three significant digits: ``79.6 GiB``; what is whole loses its zeros: ``80 GiB``."""
    steps = [(f"{p}B", f) for p, f in sorted(_BINARY.items(), key=lambda item: -item[1])]
    return _scaled(num_bytes, (*steps, ("B", 1.0)), whole=True)


def format_rate(bytes_per_s: float) -> str:
    """Bits per second with decimal prefixes, as networks are sold: ``200 Mbit/s``."""
    steps = [(f"{p}bit/s", f) for p, f in sorted(_DECIMAL.items(), key=lambda item: -item[1]) if p not in "K"]
    return _scaled(bytes_per_s * 8, (*steps, ("bit/s", 1.0)), whole=True)


def format_flops(flops_per_s: float) -> str:
    """FLOP/s with decimal prefixes: ``312 TFLOP/s``."""
    steps = [(f"{p}FLOP/s", f) for p, f in sorted(_DECIMAL.items(), key=lambda item: -item[1]) if p not in "K"]
    return _scaled(flops_per_s, (*steps, ("FLOP/s", 1.0)), whole=True)


def format_large(number: float) -> str:
    """A number of parameters or tokens as people say it: ``8.03 B``, ``1 T``; below a million in full."""
    if number < 1e6:
        return format_count(number)
    return _scaled(number, (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6)), whole=True)


def format_percent(share: float, num_digits: int = 1) -> str:
    """A share: ``12.3 %``, with this number of digits after the point."""
    return f"{share * 100:.{num_digits}f} %"


def format_change(share: float) -> str:
    """A relative difference with its sign: ``+12.3 %``, ``-5.1 %``; what rounds to nothing is ``0.0 %``."""
    text = f"{share * 100:+.1f}"
    return f"{text if float(text) else '0.0'} %"


def format_hours(hours: float) -> str:
    """Device-hours: ``0.0115``, ``31.2``, ``12,345``."""
    return format_count(hours) if hours >= 100 else f"{hours:.3g}"


def format_count(number: float) -> str:
    """A whole number with commas between the thousands: ``6,979``."""
    return f"{number:,.0f}"


def counted(number: int, thing: str) -> str:
    """A number of things: ``1 point``, ``1,024 points``, ``2 microbatches``."""
    plural = thing + ("es" if thing.endswith("ch") else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def _scaled(value: float, steps: tuple[tuple[str, float], ...], *, whole: bool = False) -> str:
    """`value` in three digits; where `whole`, one that is whole in its unit goes without its zeros."""
    if not math.isfinite(value):
        return f"{value:g} {steps[-1][0]}"
    unit, factor = next(((u, f) for u, f in steps if abs(value) >= f * 0.9995), steps[-1])
    scaled = value / factor if value else 0.0
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{0 if whole and scaled == round(scaled) else digits}f} {unit}"


def printable(text: str) -> str:
    """`text` with escapes such as ``\\x1b`` in the place of what would steer the terminal that it is shown on.

    Names and messages come from files and machines of other people.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
