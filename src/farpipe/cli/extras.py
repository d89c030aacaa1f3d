"""Commands that need a library of an optional extra say so before they do anything."""

from importlib.util import find_spec

from farpipe.errors import InputError


def need_torch(what: str) -> None:
    """InputError naming the extra to install where PyTorch is missing; `what` needs it."""
    if not _is_there("torch"):
        raise InputError(f"{what} needs PyTorch: pip install 'farpipe[train]'")


def _is_there(library: str) -> bool:
    """True if `library` can be found, without the seconds that importing it may take."""
    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):
        return False
