"""The numbers in a Problem's document, checked: seconds, bytes, one per microbatch or one for all."""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

from farpipe.core.arguments import Checked, plain_signature
from farpipe.core.strict import finite

MAX_SECONDS: Final = 1e15
"""Largest seconds of one action or message, thirty million years; sums of longer ones overflow."""


def _positive(value: Any) -> float:
    return finite(value, exclusive=True)


def _seconds(value: Any) -> float:
    seconds = finite(value)
    if seconds > MAX_SECONDS:
        raise ValueError(f"must be at most {MAX_SECONDS:g} s, found {value!r}")
    return seconds


def _number_or_list(value: Any) -> float | tuple[float, ...]:
    return tuple(map(finite, value)) if isinstance(value, list | tuple) else finite(value)


def _seconds_or_list(value: Any) -> float | tuple[float, ...]:
    return tuple(map(_seconds, value)) if isinstance(value, list | tuple) else _seconds(value)


def _name_or_list(value: Any) -> str | tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("expected the name of a link, or a list with one name per microbatch")
    return tuple(names) if isinstance(value, list | tuple) else str(value)


NonNegative = Annotated[float, BeforeValidator(finite)]
Positive = Annotated[float, BeforeValidator(_positive)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
PerMicrobatch = Annotated[float | tuple[float, ...], BeforeValidator(_number_or_list)]
"""A figure that is the same for every microbatch (a number) or differs (one number per microbatch)."""
SecondsPerMicrobatch = Annotated[float | tuple[float, ...], BeforeValidator(_seconds_or_list)]
LinkNames = Annotated[str | tuple[str, ...], BeforeValidator(_name_or_list)]


class ProblemPart(BaseModel, metaclass=Checked):
    """A part of a Problem: immutable, read strictly."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    _defaults: ClassVar[dict[str, Any]]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Sign in the types that callers give, without their validators."""
        cls.__signature__ = plain_signature(cls)
        cls._defaults = {name: field.get_default() for name, field in cls.__pydantic_fields__.items()}

    @classmethod
    def computed(cls, **figures: Any) -> Self:
        """A part whose figures a program has computed from checked ones: not checked again, which takes most of the
        time of making one."""
        part = cls.__new__(cls)  # as `model_construct`, which takes four times as long to look for aliases and defaults
        object.__setattr__(part, "__dict__", cls._defaults | figures)
        object.__setattr__(part, "__pydantic_fields_set__", set(figures))
        for unused in ("__pydantic_extra__", "__pydantic_private__"):
            object.__setattr__(part, unused, None)
        return part
