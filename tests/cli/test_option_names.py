"""One grammar of commands: an option's name has one meaning in all of them, and there are few."""

from pathlib import Path
from typing import Final, get_args, get_origin

import pytest

from test_docs import INTERFACE

COMMON: Final = ("--json", "--csv", "--set", "--server", "--token-file")
"""Options that nearly every command has, every table of figures, or every client of a service, counted once."""
MOST: Final = 145
"""Options of all commands; a rare one is a key of the job or a setting, which `--set` names."""
NAMES: Final = {
    "reads": "--certs --hostfile --job --jobs --learned-from --lengths --light-paths --links --log --paths --plan "
    "--profile --resume --schedule --token-file --trace",
    "writes": "--calibrate --csv --events --html --output --perfetto --plot --run-dir --write",
    "flag": "--allow-plaintext --dry-run --full --json --listen --strategies --timeline --wan",
    "number": "--cut --days --guard --load --port --processes --sample --second-site --seconds "
    "--slot-ghz --slots --steps --time-limit --tolerance --top",
    "word": "--accept --advertise-host --as --column --database --device --devices --dtype --format --host --message "
    "--link --method --model --modulation --network --nodes --objective --on-lost-site --over --policy --recipe "
    "--server --set --site --sites --token --tokens --waits",
}
"""The table of names: every option of every command, by what its value is; of a file, whether it is read or written."""
KINDS: Final = {name: kind for kind, names in NAMES.items() for name in names.split()}
EVERY: Final = [
    (command, option)
    for command, found in INTERFACE.items()
    for option in found.params
    if option.param_type_name == "option" and "--help" not in option.opts
]
"""(command, option)."""
TYPES: Final = {bool: "flag", int: "number", float: "number", Path: "file"}
"""Kinds of values; all others are words."""
WRITING: Final = ("Write", "Draw", "File ", "File;", "Directory of the run")
"""Beginnings of what help says of a file that a command writes."""


def test_every_option_is_in_the_table_of_names_and_no_other_is():
    assert set(KINDS) == {option.opts[0] for _, option in EVERY}


@pytest.mark.parametrize(("command", "option"), EVERY, ids=[f"{name} {one.opts[0]}" for name, one in EVERY])
def test_an_option_is_the_same_in_every_command(command, option):
    kind = KINDS[option.opts[0]]
    is_file = kind in ("reads", "writes")
    annotation = option.type_descriptor.annotation
    bare = next(iter(get_args(annotation)), annotation) if get_origin(annotation) is list else annotation
    assert TYPES.get(bare, "word") == ("file" if is_file else kind)
    if is_file:
        assert option.help.startswith(WRITING) == (kind == "writes"), option.help


def test_there_are_few_options():
    ours = [option.opts[0] for command, option in EVERY if command.startswith("farpipe")]
    assert len([name for name in ours if name not in COMMON]) + len(COMMON) <= MOST
