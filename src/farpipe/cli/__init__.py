"""The command line: one short file per command; whatever is heavy is imported inside the command."""

import errno
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from farpipe.core.errors import FarpipeError, InputError, RunError

INTERRUPTED = 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a system that has too little: of descriptors, memory, processes."""
MAX_SHOWN = 200
"""Characters of a path that an error shows."""
QUICK = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "OPENBLAS_NUM_THREADS": "1"}
"""Variables with which libraries are imported: pydantic does not look through all installed packages for its plugins,
which takes 15 ms, and numpy starts no threads, which wait for work at first: 40 ms of CPU on two cores."""
COLLECTED_AFTER = 1_000_000
"""Number of new objects after which Python collects garbage; its own 700 takes a tenth of imports and of a plan, and
200,000 once 0.06 s while numba loads its first kernel."""


def main() -> None:
    """Run the command line; every error that a user can make ends in one clear message and its exit code."""
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as a cron job may leave them
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    from farpipe.cli.output import Printable

    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Printable(stream)) for stream in streams)
    try:
        _run()
    except FarpipeError as error:
        print(f"farpipe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("farpipe: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        _drop_output()
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        print("farpipe: this is a bug in farpipe; please report it with the lines above", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.stdout, sys.stderr = streams
        gc.freeze()  # else Python looks for unreachable objects three times on its way out: 0.2 s after numba


def _run() -> None:
    """The command, and all of its output written; BrokenPipeError when nobody reads it any more."""
    with quick_imports():
        from farpipe.cli.app import called_by

        app = called_by(sys.argv[1:])

    stdout = sys.stdout
    try:
        try:
            app()
        except SystemExit as end:
            if end.code == INTERRUPTED:  # the parser leaves without a word
                raise KeyboardInterrupt from None
            if sys.stdout is not stdout:  # the parser has met a closed pipe, and would call it exit code 1
                raise BrokenPipeError from None
            stdout.flush()
            raise
    except OSError as error:
        if error.errno in NO_ROOM:
            _drop_output()
        raise _error_of_system(error) from None
    except (ValueError, RuntimeError) as error:  # what Python says of some paths
        if "embedded null" in str(error) or str(error).startswith("Symlink loop"):
            raise InputError(f"{error}; give another path") from None
        raise


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within it libraries are imported with the variables in QUICK, where these are not set."""
    added = {name: value for name, value in QUICK.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]  # not for processes that this one starts


def _error_of_system(error: OSError) -> Exception:
    """An error of the system as one for the user; itself where it is about no file and nothing that runs out."""
    place, why = _short(error.filename or ""), error.strerror
    if error.errno in NO_ROOM:
        return RunError(f"{place or 'standard output'}: can't be written: {why}")
    if error.errno in NO_ACCESS and place:
        return RunError(f"{place}: no access: {why}")
    if error.errno in NO_MORE:
        return RunError(f"{place or 'farpipe'}: {why}; raise the limit (ulimit -a), or close other programs")
    if place:  # a path that can't be: too long, through a file, around in a circle
        return InputError(f"{place}: {why}; give another path")
    return error


def _short(name: object) -> str:
    text = os.fsdecode(name) if isinstance(name, bytes | str) else str(name)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 2 :]}"


def _drop_output() -> None:
    """Drop what is still in the buffer, so that Python's own last flush has nothing to complain about."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
