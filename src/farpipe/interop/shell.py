"""Commands of a shell script with its variables put in, as far as they follow from the file; nothing is run."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Final

from farpipe.interop.shell_words import Token, Word, tokenize

UNKNOWN: Final = "\ufffd"
"""Mark in a word of what the file does not say: ``\\ufffdNAME\\ufffd``."""
_VARIABLE: Final = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_ARITHMETIC: Final = re.compile(r"[-+*/%() \d]+")
_NUMERIC: Final = {"-eq": "__eq__", "-ne": "__ne__", "-gt": "__gt__", "-ge": "__ge__", "-lt": "__lt__", "-le": "__le__"}
_OF_THE_PROCESS: Final = frozenset(
    (
        *("RANK", "NODE_RANK", "LOCAL_RANK", "MACHINE_RANK", "SLURM_NODEID", "SLURM_PROCID", "MASTER_PORT", "PORT"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "NCCL_IB_TIMEOUT", "NCCL_IB_TC", "OMP_NUM_THREADS"),
        *("LOG_INTERVAL", "LOGGING_LEVEL", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL"),
    )
)
"""Variables that differ from process to process, or set up their libraries: their defaults are not noted."""
_REDIRECTION: Final = re.compile(r"(\d|&)?>|\|$")
"""Beginning of a word by which output goes elsewhere, in a command that ``eval`` runs."""
_LOOPS: Final = ("for", "while", "until")
_OPENING: Final = ("if", "case", *_LOOPS)
_TURNING: Final = ("then", "do", "else", "elif", "fi", "done", "esac")
_LEFT_OUT: Final = {
    "fi": "its condition does not follow from the file",
    "esac": "its word does not follow from the file",
    "done": "loops are not followed",
}


@dataclass
class _Block:
    """A compound command that is open: whether its lines count now, and whether a branch of it has counted."""

    keyword: str
    line: int
    outer: bool
    """True if the lines around it count."""
    active: bool = False
    taken: bool = False
    known: bool = True
    """False once a condition was not settled: then no later branch counts."""
    condition: bool | None = None
    waits: bool = True
    """True while its condition is read, or the pattern of its next branch."""
    subject: str = ""
    left_out: bool = False
    open_names: set[str] = field(default_factory=set)
    """Variables without a value of which its condition or its word is made."""

    def judge(self, found: bool | None, joint: str) -> None:
        """Take in the value of a command of the condition; `joint` stands between it and the one before."""
        before = self.condition
        if joint == "&&":
            found = False if before is False or found is False else None if None in (before, found) else True
        elif joint == "||":
            found = True if before or found else None if None in (before, found) else False
        self.condition = found

    def branch(self, condition: bool | None) -> None:
        """Begin the lines behind a condition."""
        self.known = self.known and (self.taken or condition is not None)
        self.active = self.outer and self.known and not self.taken and bool(condition)
        self.taken = self.taken or self.active
        self.waits = False


@dataclass
class Script:
    """The commands of a script, each with its words; and in words what could not be followed."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    open_names: set[str] = field(default_factory=set)
    """Variables without a value on which lines that were left out depend."""
    asked: set[str] = field(default_factory=set)
    """Variables whose values from outside count: those that are read before the script sets them."""
    _assigned: set[str] = field(default_factory=set)
    _values: dict[str, list[str]] = field(default_factory=dict)
    _blocks: list[_Block] = field(default_factory=list)

    @property
    def values(self) -> list[list[str]]:
        """The values of all variables, each as words."""
        return [*self._values.values()]

    def value(self, name: str) -> str | None:
        """The last value of a variable; None for one without a value."""
        return " ".join(found) if (found := self._values.get(name)) else None

    @property
    def _block(self) -> _Block | None:
        return self._blocks[-1] if self._blocks else None

    @property
    def waits_for_pattern(self) -> bool:
        """True where the patterns of a branch of ``case`` stand."""
        return self._block is not None and self._block.keyword == "case" and self._block.waits

    def read(self, words: list[Token], line: int, joint: str) -> None:
        """Take in one simple command, which keywords may precede; `joint` stands between it and the one before."""
        while words and isinstance(words[0], Word) and (keyword := words[0].plain) is not None:
            if keyword in _OPENING:
                self._open(keyword, words[1:], line)
                return
            if keyword in _TURNING and self._block is not None:
                self._turn(keyword, self._block)
            elif keyword not in ("{", "}", "function", "time"):
                break
            words, joint = words[1:], ""
        if words and self._block is not None and self._block.keyword == "if" and self._block.waits:
            self._block.judge(self._test(words), joint)
        elif words:
            self._run(words)

    def _open(self, keyword: str, words: list[Token], line: int) -> None:
        active = self._block.active if self._block else True
        block = _Block(keyword, line, outer=active)
        self._blocks.append(block)
        if keyword == "if" and words:
            block.judge(self._test(words), "")
        elif keyword == "case" and words and isinstance(words[0], Word):
            block.subject = " ".join(self.expand(words[0], quoted=True))
            block.known = UNKNOWN not in block.subject
            block.open_names.update(unset(block.subject))

    def _turn(self, keyword: str, block: _Block) -> None:
        if keyword in ("fi", "done", "esac"):
            self._blocks.pop()
            if block.left_out and block.outer:
                self.open_names |= block.open_names
                self.notes.append(f"line {block.line}: {_left_out(keyword, block)}; lines of it were left out")
        elif keyword == "elif":
            block.waits, block.active, block.condition = True, False, None
        elif keyword == "else":
            block.branch(condition=True)
        elif keyword == "then":
            block.branch(block.condition)
        else:
            block.branch(None)

    def pattern(self, words: list[Token]) -> None:
        """Begin a branch of a ``case``, which counts where a pattern of `words` matches."""
        assert self._block is not None
        patterns = [" ".join(self.expand(word, quoted=True)) for word in words if isinstance(word, Word)]
        self._block.branch(any(fnmatchcase(self._block.subject, pattern) for pattern in patterns))

    def end_pattern(self) -> None:
        """Behind ``;;`` the next pattern is awaited."""
        if self._block is not None and self._block.keyword == "case":
            self._block.waits, self._block.active = True, False

    def _test(self, words: list[Token]) -> bool | None:
        """The value of ``[ ... ]`` or ``[[ ... ]]``; None where the file does not settle it."""
        texts = [" ".join(self.expand(word, quoted=True)) for word in words if isinstance(word, Word)]
        if self._block is not None:
            self._block.open_names.update(name for text in texts for name in unset(text))
        if len(texts) < 3 or (texts[0], texts[-1]) not in (("[", "]"), ("[[", "]]")):
            return None
        inner = texts[1:-1]
        negated = inner[0] == "!"
        found = _compared(inner[negated:])
        return found if found is None else found != negated

    def _run(self, words: list[Token]) -> None:
        if self._block is not None and not self._block.active:
            if any(isinstance(word, Word) and _tells(word) for word in words):
                self._block.left_out = not self._block.known or self._block.keyword in _LOOPS
            return
        while words and isinstance(first := words[0], Word):
            if first.plain in ("export", "declare", "local", "readonly", "-x", "-a"):
                words = words[1:]
            elif first.name is not None:
                words = self._assign(words)
            else:
                break
        found = [text for word in words if isinstance(word, Word) for text in self.expand(word)]
        if found:
            self.commands.append(found)

    def _assign(self, words: list[Token]) -> list[Token]:
        """Keep the value of the assignment that `words` begin with, and return what follows it."""
        first = words[0]
        assert isinstance(first, Word)
        assert first.name is not None
        name, more = first.name
        if first.array is not None:
            value = [text for word in first.array for text in self.expand(word)]
        else:
            value = [" ".join(self.expand(first.value, quoted=True))]
        if more and first.array is None:
            value = ["".join([*self._values.get(name, [""]), *value])]
        self._assigned.add(name)
        self._values[name] = self._values.get(name, []) + value if more and first.array is not None else value
        return words[1:]

    def expand(self, word: Word, quoted: bool = False) -> list[str]:
        """The words that `word` stands for; split at spaces where an expansion is not `quoted`."""
        found: list[str] = [""]
        for text, kind in word.pieces:
            if kind in ("", "'"):
                found[-1] += text
                continue
            values = self._value(text, kind)
            if "@" in kind + text and not quoted and "[" in text:
                values = [part for value in values for part in (value.split() if kind == "$" else [value])]
                found[-1] += values[0] if values else ""
                found += values[1:]
            elif kind == "$" and not quoted:
                parts = " ".join(values).split()
                found[-1] += parts[0] if parts else ""
                found += parts[1:]
            else:
                found[-1] += " ".join(values)
        return found if found != [""] or any(kind == "'" for _, kind in word.pieces) else []

    def _value(self, text: str, kind: str) -> list[str]:
        if kind.startswith("("):
            return [self._arithmetic(text)] if kind == "((" else [f"{UNKNOWN}$({text.strip():.40}){UNKNOWN}"]
        match = _VARIABLE.fullmatch(text)
        if match is None:
            return [f"{UNKNOWN}${{{text:.40}}}{UNKNOWN}"]
        name, index, operator, other = match.groups()
        known = self._read(name)
        if operator in (":-", "-", ":=", "=") and not (known and any(known)):
            default = " ".join(self.expand(Word.of(other), quoted=True))
            note = f"{name} is not set in the file; its default {default} was taken"
            if default.isdigit() and note not in self.notes and name not in _OF_THE_PROCESS:
                self.notes.append(note)
            if "=" in operator:
                self._values[name] = [default]
            return [default]
        if known is None:
            return [f"{UNKNOWN}${name}{UNKNOWN}"]
        if index and index[1:-1].isdigit():
            place = int(index[1:-1])
            return [known[place] if place < len(known) else ""]
        return known

    def _read(self, name: str) -> list[str] | None:
        """The values of a variable; None for one that has none."""
        if name not in self._assigned:
            self.asked.add(name)
        return self._values.get(name)

    def _arithmetic(self, text: str) -> str:
        known = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(self._read(match[1]) or [f"${match[1]}"]), text
        )
        if not _ARITHMETIC.fullmatch(known) or "**" in known or len(known) > 200:
            return f"{UNKNOWN}$(({text.strip()})){UNKNOWN}"
        try:
            # Digits, spaces, brackets and + - * / % only, as checked above.
            return str(int(eval(known.replace("/", "//"), {"__builtins__": {}})))
        except (ArithmeticError, SyntaxError, ValueError):
            return f"{UNKNOWN}$(({text.strip()})){UNKNOWN}"


def unset(text: str) -> list[str]:
    """Names of the variables and arguments in `text` that the file does not set."""
    return re.findall(rf"{UNKNOWN}\$\{{?([A-Za-z_0-9]\w*)\}}?{UNKNOWN}", text)


def _left_out(keyword: str, block: _Block) -> str:
    names = ", ".join(f"${name}" for name in sorted(block.open_names))
    return f"{_LEFT_OUT[keyword]} ({names} is open)" if names and keyword != "done" else _LEFT_OUT[keyword]


def _tells(word: Word) -> bool:
    """True if a word sets something."""
    return word.name is not None or (word.plain or "").startswith("--")


def _compared(words: list[str]) -> bool | None:
    if any(UNKNOWN in word for word in words):
        return None
    match words:
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [one, "=" | "==", other]:
            return fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatchcase(one, other)
        case [one, relation, other] if relation in _NUMERIC and one.isdigit() and other.isdigit():
            return bool(getattr(int(one), _NUMERIC[relation])(int(other)))
    return None


def read_script(text: str, known: Mapping[str, str] | None = None) -> Script:
    """The commands of the script `text`, in their order; branches that the file does not settle are left out.

    `known`: values of variables and arguments (``"1"``) that the script takes from outside.
    """
    script = Script(_values={name: [value] for name, value in (known or {}).items()})
    statement: list[Token] = []
    line, joint = 1, ""
    for token in (*tokenize(text), "\n"):
        if isinstance(token, Word):
            line = line if statement else token.line
            statement.append(token)
        elif script.waits_for_pattern and token in ("(", ")", "|") and not _is_esac(statement):
            if token == ")":
                script.pattern(statement)
                statement, joint = [], ""
        elif token not in ("(", ")"):
            if statement:
                script.read(statement, line, joint)
            if token == ";;":
                script.end_pattern()
            statement, joint = [], token
    return script


def _is_esac(statement: list[Token]) -> bool:
    return bool(statement) and isinstance(statement[0], Word) and statement[0].plain == "esac"


def flags_of(words: list[str]) -> list[str]:
    """`words` with those cut that hold several, as the argument of ``bash -c`` does, up to where output goes."""
    found: list[str] = []
    for word in words:
        if re.search(r"\s", word) and re.search(r"(^|\s)--\w", word):
            try:
                found += shlex.split(word, comments=True)
            except ValueError:
                found += word.split()
        else:
            found.append(word)
    return [*takewhile(lambda word: not _REDIRECTION.match(word), found)]
