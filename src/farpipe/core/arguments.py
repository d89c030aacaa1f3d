"""Arguments of the Python interface: one of another type, or that can't be, is an InputError that names it."""

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ValidationError

from farpipe.core.errors import InputError
from farpipe.core.strict import explain, finite, show

if TYPE_CHECKING:  # a class whose metaclass has `__call__` would have no signature of its own
    from pydantic._internal._model_construction import ModelMetaclass

    Checked = ModelMetaclass

else:

    class Checked(type(BaseModel)):
        """Class of settings that are made in Python: a wrong value is an InputError, not pydantic's error."""

        def __call__(cls, *args, **values):
            """The settings; the error begins with the name of their class and the key."""
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise InputError(explain(cls, error, cls.__name__)) from None


def named_or(kind: type, what: str) -> BeforeValidator:
    """Checks a value that may be the name of something, or the thing itself, a `kind`."""

    def read(value: Any) -> Any:
        if not isinstance(value, str | kind):
            raise ValueError(f"expected {what}: its name or an object of {kind.__name__}; found {show(value)}")
        return value

    return BeforeValidator(read)


def expect_kind(place: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """InputError at `place` for a value that is none of `kinds`; `wanted` says what it should be and how to get it."""
    if not isinstance(value, kinds):
        raise InputError(f"{place}: expected {wanted}; found {show(value)}")


def expect_list(place: str, values: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """InputError at `place` if `values` is not a list, or for the first value of none of `kinds`."""
    expect_kind(place, values, (list, tuple), f"a list, each entry {wanted}")
    for index, value in enumerate(values):  # type: ignore[arg-type, var-annotated]
        expect_kind(f"{place}[{index}]", value, kinds, wanted)


def expect_seconds(place: str, value: object) -> float:
    """`value` as seconds, 0 or more; InputError at `place` for anything else."""
    try:
        return finite(value)
    except ValueError as error:
        raise InputError(f"{place}: {error}") from None


def plain_signature(model: type) -> inspect.Signature:
    """The signature of a model's class with plain types: what validates them is for the documents."""
    found = inspect.signature(model)
    plain = get_type_hints(SimpleNamespace(__annotations__={n: one.annotation for n, one in found.parameters.items()}))
    return found.replace(parameters=[one.replace(annotation=plain[n]) for n, one in found.parameters.items()])
