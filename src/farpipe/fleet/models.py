"""Models of a fleet's jobs: presets of the catalogue, and files."""

from functools import lru_cache
from pathlib import Path

from farpipe.catalog import model_row
from farpipe.spec import Model, load_model, preset_model
from farpipe.strict import seen_from

SUFFIXES = (".json", ".toml")


def model_name(text: str, folder: Path) -> str:
    """The name that `model_of` knows a job's model by: a preset's, or the path of a file, seen from `folder`.

    ValueError, or InputError in a file, tells what is wrong.
    """
    if Path(text).suffix not in SUFFIXES:
        return model_row(text).name
    name = str(seen_from(folder, text).resolve())
    model_of(name)
    return name


@lru_cache(maxsize=1024)
def model_of(name: str) -> Model:
    """The model called `name` in a job: a preset, a config of Hugging Face (.json), or a TOML with [model]."""
    return load_model(name) if Path(name).suffix in SUFFIXES else preset_model(name)
