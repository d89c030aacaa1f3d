"""Kernels' caches: nothing stale is run, and nothing that can't be read stops a command."""

import errno
import importlib.util
import os
import pickle
import subprocess
import sys

import numba
import pytest
from numba.core import caching

from farpipe.core.step import jit as compiling

INNER = """
from farpipe.core.step.jit import jit
SHIFT = {shift}
@jit
def inner(x):
    return {factor} * x + SHIFT
"""
OUTER = """
from inner_of_kernel import inner, SHIFT
from farpipe.core.step.jit import jit
@jit
def outer(x):
    return inner(x) + 100 * SHIFT
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """`kernel(factor, shift)` loads the two files as a new process would; `outer` is never written to again."""
    (tmp_path / "outer.py").write_text(OUTER)
    os.utime(tmp_path / "outer.py", (0, 0))

    def load(factor=2, shift=1):
        (tmp_path / "inner_of_kernel.py").write_text(INNER.format(factor=factor, shift=shift))
        compiling._content.cache_clear()
        for name in ("inner_of_kernel", "outer"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(importlib.sys.modules, name, module)
            spec.loader.exec_module(module)
        return module.outer

    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return load


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_an_unchanged_kernel_is_compiled_once(kernel):
    assert kernel()(3) == 107
    again = kernel()
    assert again(3) == 107
    assert hits(again) == 1


@pytest.mark.parametrize(("change", "expected"), [({"factor": 5}, 116), ({"shift": 2}, 208)])
def test_a_change_in_another_file_is_noticed(change, expected, kernel):
    assert kernel()(3) == 107
    changed = kernel(**change)
    assert changed(3) == expected
    assert hits(changed) == 0


class Gone:
    """A type that the next version does not have."""

    def __reduce__(self):
        return importlib.import_module, ("farpipe.no_such_module",)


@pytest.mark.parametrize("content", [b"", b"damaged", pickle.dumps(numba.__version__) + pickle.dumps((None, Gone()))])
def test_a_cache_that_can_not_be_read_counts_as_empty(content, kernel, tmp_path):
    assert kernel()(3) == 107
    (index,) = tmp_path.rglob("outer.outer*.nbi")
    index.write_bytes(content)
    assert kernel()(3) == 107
    again = kernel()
    assert again(3) == 107
    assert hits(again) == 1, "it was written anew"


def test_a_damaged_kernel_is_compiled_anew(kernel, tmp_path):
    assert kernel()(3) == 107
    (data,) = tmp_path.rglob("outer.outer*.nbc")
    data.write_bytes(data.read_bytes()[:100])
    assert kernel()(3) == 107


@pytest.mark.parametrize("place", ["read-only", "full"])
def test_without_a_cache_kernels_are_compiled_and_nothing_is_waited_for(place, kernel, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "full":
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    else:
        monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    monkeypatch.setattr(compiling, "not_kept", None)
    monkeypatch.setattr(compiling, "compiled_elsewhere", lambda function: function.__name__ == "outer")
    outer = kernel()
    assert importlib.sys.modules["inner_of_kernel"].inner(3) == 7
    assert outer(3) == 107
    assert compiling.not_kept


def test_a_kernel_that_another_process_compiles_is_waited_for(kernel, monkeypatch):
    asked = []

    def elsewhere(function):
        asked.append(function.__name__)
        return asked.count(function.__name__) < 3

    monkeypatch.setattr(compiling, "compiled_elsewhere", elsewhere)
    assert kernel()(3) == 107
    assert asked.count("outer") == 3
    assert kernel()(3) == 107
    assert asked.count("outer") == 3, "it was there"


DRAWS = """
import sys
import numpy as np
from farpipe.core.step.jit import jit
@jit
def drawn(n):
    np.random.seed(7)
    return np.random.random(n) + np.arange(n)
@jit
def later(n):
    return drawn(n).sum()
print(*drawn(3), sum(drawn.stats.cache_hits.values()))
print(*("numba." + name in sys.modules for name in ("typed.typedlist", "np.random.legacy", "np.arrayobj")))
if len(sys.argv) > 1:
    print(later(3) == drawn(3).sum())
"""


@pytest.mark.slow
def test_a_cached_kernel_is_loaded_without_numbas_tables_of_types_and_functions(tmp_path):
    program = tmp_path / "draws.py"
    program.write_text(DRAWS)

    def run(*arguments):
        command = (sys.executable, str(program), *arguments)
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout.split()

    compiled, loaded, then_compiling = run(), run(), run("later")
    assert compiled[3:] == ["0", *["True"] * 3]
    assert loaded == [*compiled[:3], "1", *["False"] * 3]
    assert then_compiling == [*loaded, "True"]


@pytest.fixture
def wheel(kernel, tmp_path, monkeypatch):
    """`outer` as a wheel brings it: compiled into a folder, and in no cache."""
    monkeypatch.setattr(compiling, "SHIPPED", tmp_path / "kernels")
    monkeypatch.setattr(compiling, "ships", True)
    (tmp_path / "kernels").mkdir()
    assert kernel()(3) == 107
    monkeypatch.setattr(compiling, "ships", False)
    for file in tmp_path.glob("__pycache__/*.nb?"):
        file.unlink()
    return tmp_path / "kernels"


@pytest.mark.parametrize("place", ["new", "read-only"])
def test_a_kernel_that_came_with_the_wheel_is_not_compiled(wheel, kernel, place, tmp_path, monkeypatch):
    if place == "read-only":
        monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
        monkeypatch.setattr(compiling, "not_kept", None)
    os.utime(tmp_path / "outer.py", (9, 9))  # as an installation leaves it
    found = kernel()
    assert found(3) == 107
    assert hits(found) == 1
    assert not [*tmp_path.glob("__pycache__/outer*.nbc")]


@pytest.mark.parametrize(("change", "expected"), [({"factor": 5}, 116), ({"shift": 2}, 208)])
def test_a_kernel_of_other_sources_is_not_taken_from_the_wheel(wheel, kernel, change, expected):
    changed = kernel(**change)
    assert (changed(3), hits(changed)) == (expected, 0)


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_a_damaged_kernel_of_the_wheel_is_compiled(wheel, kernel, ending):
    for file in wheel.glob(f"*outer.*{ending}"):
        file.write_bytes(b"damaged")
    found = kernel()
    assert (found(3), hits(found)) == (107, 0)


def test_a_kernel_for_other_types_is_compiled(wheel, kernel):
    found = kernel()
    assert (found(3.5), hits(found)) == (108.0, 0)


OLDEST = """
import sys
from pathlib import Path
import numpy as np
from farpipe.core.step import jit
jit.SHIPPED, jit.ships = Path(sys.argv[1]), len(sys.argv) > 2
@jit.jit
def summed(x, y):
    total = 0.0
    for i in range(x.size):
        total += x[i] * y[i] + np.exp(x[i]) / (1.0 + y[i] * y[i])
    return total
random = np.random.default_rng(7)
print(repr(summed(random.random(10_000), random.random(10_000))), sum(summed.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_is_compiled_for_every_processor_computes_the_same_to_the_last_bit(tmp_path):
    def run(*arguments, **environment):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / str(len(arguments)))} | environment
        command = [sys.executable, str(tmp_path / "oldest.py"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=250)
        return done.stdout.split()

    (tmp_path / "oldest.py").write_text(OLDEST)
    (tmp_path / "kernels").mkdir()
    built = run(str(tmp_path / "kernels"), "ships", NUMBA_CPU_NAME="generic")
    shipped = run(str(tmp_path / "kernels"))
    own = run(str(tmp_path / "none"))
    assert (built[1], shipped[1], own[1]) == ("0", "1", "0")
    assert built[0] == shipped[0] == own[0]
