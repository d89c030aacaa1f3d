"""Files of settings that build on others: ``extends`` of Primus, and its experiments of a module and a model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.strict import read_text
from farpipe.interop.megatron import read_tables_of_megatron
from farpipe.interop.settings import Draft
from farpipe.interop.yaml_files import yaml_documents

_CONFIGS: Final = Path("primus", "configs")
_VARIABLE: Final = re.compile(r"\$\{(\w+):([^{}]*)\}")
"""A variable of the environment with its default."""
_FRAMEWORK: Final = "megatron"
_MAX_DEPTH: Final = 16


def is_primus(data: Mapping[Any, Any]) -> bool:
    """True for an experiment of Primus, or a file that extends others."""
    bases = data.get("extends")
    extends = isinstance(bases, list) and all(isinstance(one, str) and one.endswith(("yaml", "yml")) for one in bases)
    return (extends and bool(bases)) or any(isinstance(one, Mapping) and "framework" in one for one in _modules(data))


def read_primus(data: Mapping[Any, Any], path: Path, known: Mapping[str, str]) -> Draft:
    """The job of the settings at `path` over those that they build on; `known` has values for variables.

    What is not understood of Primus' defaults, hundreds of them, is counted. InputError for a framework other
    than Megatron-LM, and where a file that is built on is not there.
    """
    said = set[Any]()
    if "extends" in data:
        found = _extended(data, path, known, said)
    else:
        module = next(one for one in _modules(data) if isinstance(one, Mapping) and "framework" in one)
        found = _experiment(module, path, known, said)
    values = {key: _with_defaults(value, known) if isinstance(value, str) else value for key, value in found.items()}
    draft = read_tables_of_megatron(values, str(path), "Megatron-LM by Primus")
    kept = [text for text in draft.not_understood if ": expected " in text or text.partition(":")[0] in said]
    if count := len(draft.not_understood) - len(kept):
        draft.notes.append(f"{count} settings of the files that it builds on were not understood; Primus' defaults")
    draft.not_understood = kept
    draft.changes = [text for text in draft.changes if text.partition(":")[0] in said or " " in text.partition(":")[0]]
    draft.shapes = {name: text for name, text in draft.shapes.items() if text.partition(":")[0] in said}
    return draft


def _experiment(module: Mapping[Any, Any], path: Path, known: Mapping[str, str], said: set[Any]) -> dict[Any, Any]:
    if module["framework"] != _FRAMEWORK:
        raise InputError(f"{path}: Primus' framework {module['framework']} is not read; {_FRAMEWORK} is")
    root = _configs(path)
    bases = [(root / "modules", module.get("config"), set[Any]()), (root / "models", module.get("model"), said)]
    found: dict[Any, Any] = {}
    for folder, name, names in bases:
        if name is not None:
            found |= _read(folder / _FRAMEWORK / _with_defaults(str(name), known), known, names)
    own = dict(module.get("overrides") or {})
    said |= {*own}
    return found | own


def _modules(data: Mapping[Any, Any]) -> list[Any]:
    modules = data.get("modules")
    return list(modules.values()) if isinstance(modules, Mapping) else []


def _configs(path: Path) -> Path:
    """The folder of Primus' own files; InputError outside of a checkout."""
    for folder in path.resolve().parents:
        if (folder / _CONFIGS).is_dir():
            return folder / _CONFIGS
    raise InputError(
        f"{path}: builds on files in {_CONFIGS} of Primus, which no folder above it has; copy it back there"
    )


def _read(path: Path, known: Mapping[str, str], said: set[Any], depth: int = 0) -> dict[Any, Any]:
    if depth > _MAX_DEPTH:
        raise InputError(f"{path}: extends itself")
    if not path.is_file():
        raise InputError(f"{path}: not there, and a file of Primus builds on it")
    data = next(iter(yaml_documents(read_text(path), str(path))), None) or {}
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: expected a table at the top")
    return _extended(data, path, known, said, depth)


def _extended(
    data: Mapping[Any, Any], path: Path, known: Mapping[str, str], said: set[Any], depth: int = 0
) -> dict[Any, Any]:
    """The table over those that it extends, the last of which goes before the others.

    `said` gets the names that are no defaults of Primus: a file with these extends nothing, and others extend it.
    """
    if depth == 0 or data.get("extends"):
        said |= {*data} - {"extends"}
    found: dict[Any, Any] = {}
    for name in data.get("extends") or ():
        base = path.parent / _with_defaults(str(name), known)
        found |= _read(base, known, said, depth + 1)
    return found | {key: value for key, value in data.items() if key != "extends"}


def _with_defaults(text: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: known.get(match[1], match[2]), text)
