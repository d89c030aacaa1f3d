"""Whatever stands in a job file, the answer is a job or an InputError; never a traceback."""

import math
import tomllib

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import (
    Cluster,
    Data,
    Device,
    Job,
    LocalLink,
    Model,
    Pins,
    Site,
    SiteLink,
    Training,
    load_job,
    parse_job,
)
from farpipe.core.spec.links import WrittenLink
from farpipe.core.spec.written import (
    WrittenCluster,
    WrittenDevice,
    WrittenJob,
    WrittenModel,
    WrittenSchedule,
    WrittenSite,
)
from farpipe.core.strict import validate
from job_files import PLAIN

MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**40, 2**64, 10**400, 1e308, -0.0, math.nan, math.inf, -math.inf]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["h100", "llama-3-8b", "1 GiB", "35 ms", "100 Gbit/s", "zurich", "lugano", "none", "auto", "fp16"]),
    st.datetimes(),
    st.dates(),
    st.times(),
)
TABLES = [
    Job,
    Model,
    Training,
    Data,
    Pins,
    Cluster,
    Site,
    Device,
    SiteLink,
    LocalLink,
    WrittenJob,
    WrittenModel,
    WrittenSite,
]
TABLES += [WrittenCluster, WrittenDevice, WrittenLink, WrittenSchedule]
KEYS = sorted({field.alias or name for table in TABLES for name, field in table.model_fields.items()} | {"[key]"})
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=20,
)


def answer(read, *arguments):
    """Result of `read`, or the one line in which it says what is wrong."""
    try:
        return read(*arguments)
    except FarpipeError as error:
        assert error.exit_code == 3
        assert len(str(error)) < 1000
        assert len(str(error).splitlines()) == 1
        return error


@MANY
@given(values)
def test_random_tables_are_a_job_or_an_error(data):
    answer(validate, WrittenJob, data, "job.toml")
    answer(validate, Job, data, "plan.json")


def places(data, path=()):
    """The path of every value in nested tables and lists."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(data, path, value):
    """`data` with `value` at `path`."""
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(data[path[0]], path[1:], value)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WrittenJob, Job])
@MANY
@given(data=st.data())
def test_one_wrong_value_anywhere_is_a_job_or_an_error(kind, data):
    plain = tomllib.loads(PLAIN) if kind is WrittenJob else parse_job(PLAIN).model_dump(mode="json")
    path = data.draw(st.sampled_from(list(places(plain))))
    result = answer(validate, kind, replaced(plain, path, data.draw(values)), "job.toml")
    assert isinstance(result, kind | FarpipeError)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_an_extra_key_anywhere_is_an_error(data):
    plain = tomllib.loads(PLAIN)
    tables = [path for path in places(plain) if isinstance(at(plain, path), dict)]
    path = data.draw(st.sampled_from(tables))
    key = data.draw(st.text(max_size=8).filter(lambda key: key not in KEYS))
    wrong = replaced(plain, path, at(plain, path) | {key: data.draw(values)})
    assert isinstance(answer(validate, WrittenJob, wrong, "job.toml"), FarpipeError)


def at(data, path):
    """The value at `path`."""
    return at(data[path[0]], path[1:]) if path else data


@MANY
@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf[model]")
@example(b"a.b.c.d.e.f = 1\na.b = 2")
@example(b'x = "\\ud800"')
def test_random_bytes_are_an_error(tmp_path, content):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    assert isinstance(answer(load_job, path), FarpipeError)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(PLAIN)), st.integers(0, len(PLAIN)), st.text(max_size=3))
def test_a_job_with_a_piece_cut_out_is_a_job_or_an_error(start, end, filling):
    result = answer(parse_job, PLAIN[: min(start, end)] + filling + PLAIN[max(start, end) :])
    assert isinstance(result, Job | FarpipeError)


@pytest.mark.parametrize("length", range(0, len(PLAIN), 7))
def test_a_truncated_job_is_a_job_or_an_error(length):
    complete = length > PLAIN.index("num_devices")  # the first site alone is a cluster
    result = answer(parse_job, PLAIN[:length])
    assert isinstance(result, Job | FarpipeError if complete else FarpipeError)
