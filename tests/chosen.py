"""A chosen few of long combinations for `make test`; the others run each night (`make test-all`)."""

import pytest


def chosen(values, *places):
    """`values` as parameters of a test, all but those at `places` marked `nightly`."""
    return [
        value
        if place in places
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for place, value in enumerate(values)
    ]
