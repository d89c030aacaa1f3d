"""Compilation of kernels by numba, with caches on disk that know all that went into a kernel.

numba's own cache knows the file of a function. It does not notice when a function or constant from another file, which
is compiled into the kernel, has changed, and it fails on an index that names types of another version of farpipe.
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from llvmlite.binding import ModuleRef, parse_assembly, parse_bitcode
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.core.environment import Environment
from numba.core.runtime.nrt import rtsys

Function = Callable[..., Any]


def _nowhere(kernel: Function) -> bool:
    return False


compiled_elsewhere: Callable[[Function], bool] = _nowhere
"""True while a background process compiles this kernel, which callers then wait for; set by who starts it."""
WAIT_S: Final = 0.05
"""Seconds between two looks into the cache for it."""
not_kept: Exception | None = None
"""Reason why a kernel could not be put into the cache, if one could not."""
SHIPPED: Final = Path(__file__).parents[2] / "kernels"
"""Folder of the kernels that came with a wheel."""
ships = False
"""True while a wheel is built: what is compiled is put into SHIPPED."""


def jit(function: Function | None = None, **options: Any) -> Any:
    """Compile a function without Python objects, and keep it in a cache on disk; a decorator with numba's `options`."""
    if function is None:
        return partial(jit, **options)
    dispatcher = njit(**options)(function)
    if dispatcher is not function:  # numba is not switched off
        try:
            dispatcher._cache = KernelCache(function)
        except RuntimeError as error:  # no folder that can be written to
            dispatcher._cache = ShippedKernel(function)
            _note(error)
    return dispatcher


def _note(error: Exception) -> None:
    global not_kept, compiled_elsewhere
    not_kept, compiled_elsewhere = error, _nowhere


def inner(function: Function | None = None, *, forceinline: bool = True) -> Any:
    """Compile a function that only kernels call, and that allocates nothing; a decorator.

    It has none of the wrappers by which Python would call it, and no cache of its own: with these the kernels of a
    plan took a fifth longer to compile. Called from Python, it ends the process. It counts no references to arrays that
    it takes out of tuples, and with `forceinline` is part of its caller's code: either was half of the time of list
    scheduling or greedy.
    """
    if function is None:
        return partial(inner, forceinline=forceinline)
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # numba's types lack these
    options |= {"_nrt": False, "forceinline": forceinline}
    return njit(**options)(function)


class ShippedKernel(NullCache):
    """A kernel that was compiled for every processor of a platform when its wheel was built.

    numba's own ahead-of-time compiler (numba.pycc) is deprecated and knows neither tuples of arrays nor inlining, and
    its cache names the processor that compiled. Here the key has the platform alone: the build compiles for the oldest
    processor (NUMBA_CPU_NAME=generic). Loops of kernels carry values from turn to turn, so that wider registers gain
    nothing, and without contraction to FMA the results are equal to the last bit.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        python = f"py{sys.version_info[0]}{sys.version_info[1]}"
        name = f"{function.__module__}.{function.__qualname__}.{python}"
        self._file = IndexDataCacheFile(str(SHIPPED), name, "")  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for these types; None where the wheel has none, or is for another release of numba."""
        try:
            data = self._file.load(self._key(sig, target_context.codegen()))  # type: ignore[no-untyped-call]
            if data is None:
                return None
            rtsys.initialize(target_context)
            return _rebuilt(target_context, data)
        except Exception:  # unpickling fails in any way
            return None

    def put(self, sig: Any, compiled: Any) -> None:
        """Put a compiled kernel into the folder; OSError where it can't be written."""
        self._file.save(self._key(sig, compiled.codegen), _reduced(compiled))  # type: ignore[no-untyped-call]

    def _key(self, sig: Any, codegen: Any) -> tuple[str, ...]:
        own = _content(self._function.__code__.co_filename).hex()
        return codegen.magic_tuple()[0], str(sig), own, _digest(self._function)


class _Parts(CompileResultCacheImpl):
    """Parts of a compiled kernel, as the cache keeps them."""

    def reduce(self, cres: Any) -> Any:
        """The parts of a kernel."""
        return _reduced(cres)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """The kernel of these parts."""
        return _rebuilt(target_context, payload)


def _reduced(compiled: Any) -> tuple[Any, ...]:
    """Parts of a kernel without the modules of numba's functions in it, which machine code never looks into: to import
    them took 0.02 s of a plan."""
    *parts, environments = compiled._reduce()
    return *parts, tuple(map(_without_module, environments))


def _without_module(found: Any) -> Any:
    if not found.globals["__name__"].startswith("numba."):
        return found
    bare = Environment({"__name__": __name__})
    bare.env_name, bare.consts[:] = found.env_name, found.consts
    return bare


def _rebuilt(target_context: Any, parts: tuple[Any, ...]) -> Any:
    """The kernel of these parts; its bitcode is only of use to compile kernels that call it, so it is parsed then."""
    (name, kind, (machine_code, bitcode)), described, *others = parts
    library = name, kind, (machine_code, _no_bitcode())
    target_context.codegen()._engine._defined_symbols.add(described.llvm_cpython_wrapper_name)  # of the machine code
    found = CompileResult._rebuild(target_context, library, described, *others)  # type: ignore[no-untyped-call]
    found.library._shared_module = _Unparsed(bitcode)
    return found


@cache
def _no_bitcode() -> bytes:
    return bytes(parse_assembly("").as_bitcode())


class _Unparsed:
    """Bitcode in place of its module, as far as numba asks for that when it links it."""

    def __init__(self, bitcode: bytes) -> None:
        self._bitcode = bitcode

    def clone(self) -> ModuleRef:
        """The module."""
        return parse_bitcode(self._bitcode)

    def as_bitcode(self) -> bytes:
        """The bitcode itself."""
        return self._bitcode


class KernelCache(FunctionCache):
    """The cache of one kernel. What can't be read, of another version or damaged, counts as empty."""

    _impl_class = _Parts

    def __init__(self, function: Function) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._shipped = ShippedKernel(function)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for these types; None where it has to be compiled."""
        found = self._shipped.load_overload(sig, target_context) or self._load(sig, target_context)
        while found is None and compiled_elsewhere(self._py_func):
            time.sleep(WAIT_S)
            found = self._load(sig, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel; without room for it each process compiles it again."""
        if ships and self._py_func.__closure__ is None:  # the key has the file alone
            self._shipped.put(sig, data)
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            _note(error)

    def _load(self, sig: Any, target_context: Any) -> Any:
        """The kernel in the cache, with numba's runtime but without its tables of types: they take 0.14 s, and a
        compilation fills them itself."""
        rtsys.initialize(target_context)
        try:
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # unpickling fails in any way
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, _digest(self._py_func))


@cache
def _digest(function: Function) -> str:
    """SHA-256 of what other files give to `function`."""
    digest = hashlib.sha256(_content(__file__))
    for part in _parts(function, {function}):
        digest.update(part)
    return digest.hexdigest()


def _parts(function: Function, seen: set[Function]) -> Iterator[bytes]:
    """Files of the functions and modules that `function` uses, and theirs, and the values of its constants."""
    for name in sorted(set(_names(function.__code__))):
        value = function.__globals__.get(name)
        inner = getattr(value, "py_func", None)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield _content(inner.__code__.co_filename)
            yield from _parts(inner, seen)
        elif isinstance(value, ModuleType) and value.__name__.startswith("farpipe."):
            yield _content(str(value.__file__))
        elif isinstance(value, bool | int | float | str | tuple):
            yield f"{name}={value!r};".encode()


def _names(code: CodeType) -> Iterator[str]:
    """Names that the code and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def _content(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()
