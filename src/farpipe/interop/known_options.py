"""Options that no reader takes: without effect on a step, changing it, or perhaps saying a shape."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Literal

Kind = Literal["without effect", "changes", "shape", "unknown"]
_SHAPE: Final = frozenset(
    re.findall(
        r"\w+",
        """size sizes hidden width widths d dim dims dimension dimensions head heads layer layers expert experts moe
        attention attn mlp ffn ff rank spec kv qk qkv query latent mla mamba ssm hybrid pattern stage stages vocab
        vocabulary heterogeneous linear conv window groups adapter mtp depth depths channel channels intermediate inner
        gqa mqa mha blocks dense gated gating glu geglu reglu swiglu tie tied untie untied tying embd embed encoder
        decoder vision builder provider arch architecture teacher student degree degrees router
        recurrent rnn rwkv sparse""",
    )
)
"""Words of an option that may say how large a model is, how it is built, or how it is divided."""
_DEGREE: Final = frozenset(
    re.findall(
        r"\w+",
        """parallel parallelism tp pp cp ep sp dp etp edp vpp usp ulysses ring shard shards replicate replica replicas
        accumulation accumulate accumulative gas""",
    )
)
"""Words of an option that is a degree, or part of a batch, where its value is a number."""
_MAY_CHANGE: Final = frozenset(
    re.findall(
        r"\w+",
        """flash unfused offload offloading offloaded quantize quantized quantization quant compress compressed
        compression paged bit bits fp nvfp mxfp hpz mics hsdp remat recompute recomputation galore lomo muon lion""",
    )
)
"""Words of an option that may change the bytes or the seconds of a step."""
_UNKNOWN_CHANGE: Final = "not understood, and it may change bytes or seconds"
_KINDS: Final = frozenset(
    ("mamba", "ssm", "hybrid", "rwkv", "moe", "gqa", "mqa", "mla", "swiglu", "geglu", "reglu", "glu", "multiquery")
)
"""Words of a value by which any option says how a model is built."""
_LABELS: Final = frozenset(("name", "names", "dir", "path", "file", "id", "tag", "tags", "project", "title", "prefix"))
"""Words of options whose values are any text."""
_OFF: Final = ("", "0", "0.0", "false", "none", "null", "no", "off", "[]", "{}", "()")


@dataclass(frozen=True)
class KnownOptions:
    """Knowledge of a framework's options beside those that its reader takes."""

    without_effect: frozenset[str]
    on_their_own: frozenset[str]
    """Names without effect, unless a table around them has a name that may say a shape."""
    changes: Mapping[str, str]
    """Changes of a step that farpipe does not plan, by the option that makes them where it is on."""
    defaults: Mapping[str, list[Any]]
    """Values that change nothing."""

    def kind(self, path: str, name: str, value: Any) -> Kind:
        """Meaning for a step of the option `name` at the dotted `path` of its file."""
        around, whole = path.split(".")[:-1], path.replace("-", "_")
        above = {".".join(whole.split(".")[:depth]) for depth in range(1, whole.count(".") + 2)}
        may_change = name in self.changes or not above.isdisjoint(self.changes)
        if _is_off(name, value) or str(value) in map(str, self.defaults.get(name, ())):
            is_known = may_change or name in self.defaults or says_shape(name) or name in self.on_their_own
            return "without effect" if is_known or not self.without_effect.isdisjoint({name, *above}) else "unknown"
        if may_change:
            return "changes"
        inside = () if says_shape(name) else around
        if not self.without_effect.isdisjoint({name, *above, *inside}):
            return "without effect"
        if any(says_shape(place) for place in around):
            return "shape"
        if name in self.on_their_own:
            return "without effect"
        if says_shape(name) or _is_degree(name, value) or _is_kind(name, value):
            return "shape"
        return "unknown" if _MAY_CHANGE.isdisjoint(_words(name)) else "changes"

    def change(self, path: str, name: str) -> str:
        """Change that an option makes, in words."""
        places = (name, *(place for place in self.changes if f"{path}.".startswith(f"{place}.")))
        return next((self.changes[place] for place in places if place in self.changes), _UNKNOWN_CHANGE)


def says_shape(name: str) -> bool:
    """True if a word of an option's name may say a model's shape or how it is divided."""
    return bool({*_words(name)} & _SHAPE)


def _is_degree(name: str, value: Any) -> bool:
    number = re.fullmatch(r"\s*(\d+)(\.0*)?\s*", str(value))
    return bool({*_words(name)} & _DEGREE) and not isinstance(value, bool) and bool(number and int(number[1]) > 1)


def _is_kind(name: str, value: Any) -> bool:
    return isinstance(value, str) and not {*_words(name)} & _LABELS and bool({*_words(value.lower())} & _KINDS)


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def _is_off(name: str, value: Any) -> bool:
    """True for a value that switches an option off, as a degree of 1; a switch of a command line has None: it is on."""
    text = str(value).strip().lower()
    if {*_words(name)} & {"tie", "tied", "tying"}:  # to share weights or not: both are shapes
        return False
    return value is not None and (text in _OFF or (text == "1" and bool({*_words(name)} & _DEGREE)))


@lru_cache(maxsize=8)
def known_options(*frameworks: str) -> KnownOptions:
    """The options of one framework, or of several whose settings one file has."""
    tables = tomllib.loads(files("farpipe.interop").joinpath("known_options.toml").read_text("utf-8"))
    found = [tables[name] for name in frameworks]
    return KnownOptions(
        frozenset(name for table in found for name in table["without_effect"].split()),
        frozenset(name for table in found for name in table.get("on_their_own", "").split()),
        {name: what for table in found for what, names in table["changes"].items() for name in names.split()},
        {name: values for table in found for name, values in table.get("defaults", {}).items()},
    )
