"""Shell scripts are read as bash would run them, as far as the file tells, and never run."""

import subprocess

import pytest

from farpipe.interop.shell import UNKNOWN, read_script

SCRIPTS = {
    "arrays, comments, appending": """
        N=2  # machines
        ARGS=(
            --num-layers $N   # a comment
            # --left-out 3
            --hidden-size 4096
        )
        ARGS+=("--split '9,1'" --more)
        show ${ARGS[@]} "${ARGS[@]}"
    """,
    "strings over several lines": r"""
        OPTIONS=" \
            --seq-length 4096 \
            --lr 1e-4"
        show $OPTIONS \
            --last "$OPTIONS"
    """,
    "arithmetic and defaults": """
        GPUS=8; NODES=${MISSING:-4}
        WORLD=$((GPUS * $NODES / 2))
        show ${GPUS} $WORLD ${EMPTY-none} "${NODES:-1}"x
    """,
    "branches": """
        A=one
        if [[ "$A" == "two" ]]; then show two
        elif [ -z "$A" ] || [ "$A" != "three" ]; then show elif
        else show other; fi
        if [ $A = one ] && [ 3 -gt 4 ]; then show and; else show else; fi
        if [ ! -n "$A" ]; then show not; fi
        case "$A" in
          1|one) show first ;;
          *) show rest ;;
        esac
    """,
    "quotes": """
        A='single $A'; B="double \\"$A\\" \\$A"
        show "$A" '$B' "$B" a"b"c'd' \\$x
    """,
    "here-documents and redirections": """
        cat <<END > /dev/null
        show this --not
END
        show after > /dev/stdout 2>&1
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_are_those_that_bash_would_run(name):
    """The twin is bash itself: `show` prints its words."""
    function = 'show() { for word in "$@"; do printf "%s\\0" "$word"; done; printf "\\n\\0"; }\n'
    done = subprocess.run(["bash", "-c", function + SCRIPTS[name]], capture_output=True, text=True, check=True)
    expected = [words.split("\0")[:-1] for words in done.stdout.split("\n\0")[:-1]]
    shown = [command[1:] for command in read_script(SCRIPTS[name]).commands if command[0] == "show"]
    assert shown == expected


def test_what_the_file_does_not_settle_is_left_out_and_told():
    script = read_script('if [ -n "$KEY" ]; then\nA=3\nfi\nfor i in 1 2; do B=3; done\nshow $KEY $(date)\n')
    assert script.commands == [["show", f"{UNKNOWN}$KEY{UNKNOWN}", f"{UNKNOWN}$(date){UNKNOWN}"]]
    assert script.notes == [
        "line 1: its condition does not follow from the file ($KEY is open); lines of it were left out",
        "line 4: loops are not followed; lines of it were left out",
    ]


def test_values_from_outside_are_put_in():
    found = read_script("show $1 ${NODES:-2} ${11}", {"1": "a", "NODES": "8", "11": "b"})
    assert found.commands == [["show", "a", "8", "b"]]
    kept = read_script(': "${TP:=4}" "${GBS:=$((TP * 2))}"; show $TP $GBS').commands
    assert kept[-1] == ["show", "4", "8"]


def test_nothing_is_run(tmp_path):
    script = f"A=$(touch {tmp_path}/made); B=$((__import__('os').system('touch {tmp_path}/made'))); show $A $B"
    read_script(script)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ['A="never closed', "A=(1 2", "echo ${A", "if [ 1", "case $A in", "<<", "))", "\\"])
def test_broken_scripts_end(text):
    read_script(text)
