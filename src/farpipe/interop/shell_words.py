"""Words of a shell script: quotes, variables and substitutions told apart, comments and here-documents left out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

_NAME: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPERATORS: Final = re.compile(r"\n|;;|&&|\|\||[;&|()]")
_REDIRECTION: Final = re.compile(r"[0-9]*(?:&>|[<>]+&?)")
_HERE: Final = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_BRACKETS: Final = {"{": "}", "(": ")"}


@dataclass
class Word:
    """A word as it is written: pieces of (text, kind).

    Kinds: ``""`` plain, ``'`` quoted, ``$`` a variable, ``"$`` one within double quotes, ``(`` a command substitution,
    ``((`` arithmetic. `array` has the words of ``NAME=( ... )``.
    """

    line: int
    pieces: list[tuple[str, str]] = field(default_factory=list)
    array: list["Word"] | None = None

    @classmethod
    def of(cls, text: str) -> "Word":
        """The one word that `text` is."""
        found = [token for token in tokenize(text.replace("\n", " ")) if isinstance(token, Word)]
        joined = cls(1)
        for place, word in enumerate(found):
            joined.pieces += [(" ", "")] * (place > 0) + word.pieces
        return joined

    @property
    def plain(self) -> str | None:
        """The text of a word without expansions; None for others."""
        return "".join(text for text, _ in self.pieces) if all(kind in ("", "'") for _, kind in self.pieces) else None

    @cached_property
    def name(self) -> tuple[str, bool] | None:
        """The variable that the word assigns, and whether it adds to it; None for other words."""
        text, kind = self.pieces[0] if self.pieces else ("", "'")
        match = _NAME.match(text) if kind == "" else None
        return (match[1], bool(match[2])) if match else None

    @property
    def value(self) -> "Word":
        """The part of an assignment behind its sign."""
        text, kind = self.pieces[0]
        return Word(self.line, [(text[text.index("=") + 1 :], kind), *self.pieces[1:]])


Token = Word | str
"""A word, or an operator: a new line, ``;``, ``;;``, ``&``, ``&&``, ``|``, ``||`` or a bracket."""


class _Scanner:
    """A position in the text of a script."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.here: list[str] = []

    def skip(self, end: int) -> str:
        """The text up to `end`, which is passed."""
        passed = self.text[self.at : end]
        self.line += passed.count("\n")
        self.at = end
        return passed

    def tokens(self, until: str = "") -> Iterator[Token]:
        """All tokens, up to the operator `until`."""
        while self.at < len(self.text):
            if self._skip_blank():
                continue
            if match := _OPERATORS.match(self.text, self.at):
                self.skip(match.end())
                if match[0] == "\n":
                    self._skip_here_documents()
                if match[0] == until:
                    return
                yield match[0]
            elif not self._skip_redirection():
                begin = self.at
                yield self.word()
                if self.at == begin:  # a sign that begins nothing, such as a blank of another alphabet
                    self.skip(begin + 1)

    def _skip_blank(self) -> bool:
        char = self.text[self.at]
        if char in " \t\r":
            self.skip(self.at + 1)
        elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
            self.skip(self.text.index("\n", self.at) + 1)
        elif char == "#":
            end = self.text.find("\n", self.at)
            self.skip(len(self.text) if end < 0 else end)
        else:
            return False
        return True

    def _skip_redirection(self) -> bool:
        if match := _HERE.match(self.text, self.at):
            self.here.append(match[1])
        else:
            match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.skip(match.end())
        if not self.here or match.re is not _HERE:
            while self.at < len(self.text) and self.text[self.at] in " \t":
                self.skip(self.at + 1)
            if self.at < len(self.text) and not _OPERATORS.match(self.text, self.at):
                self.word()
        return True

    def _skip_here_documents(self) -> None:
        for end in self.here:
            match = re.compile(rf"^\t*{end}$", re.MULTILINE).search(self.text, self.at)
            self.skip(match.end() if match else len(self.text))
        self.here = []

    def word(self) -> Word:
        """The word that begins here, with the array that it may assign."""
        word = Word(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.skip(self.at + 2)
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                word.pieces.append((self.skip(len(self.text) if end < 0 else end + 1)[1:].removesuffix("'"), "'"))
            elif char == '"':
                self._double(word)
            elif char in "$`" and self._expansion(word, "$"):
                pass
            elif char == "\\":
                word.pieces.append((self.skip(self.at + 2)[1:], "'"))
            elif char.isspace() or (_OPERATORS.match(self.text, self.at) and not self._array(word)) or char in "<>":
                break
            elif word.array is None:
                self._plain(word, char)
            else:
                break
        return word

    def _plain(self, word: Word, char: str) -> None:
        self.skip(self.at + 1)
        if word.pieces and word.pieces[-1][1] == "":
            word.pieces[-1] = (word.pieces[-1][0] + char, "")
        else:
            word.pieces.append((char, ""))

    def _array(self, word: Word) -> bool:
        """Read ``( ... )`` behind ``NAME=``; False where no array begins."""
        begins = len(word.pieces) == 1 and word.pieces[0][1] == "" and _NAME.fullmatch(word.pieces[0][0])
        if not begins or self.text[self.at] != "(":
            return False
        self.skip(self.at + 1)
        word.array = [token for token in self.tokens(until=")") if isinstance(token, Word)]
        word.__dict__.pop("name", None)
        return True

    def _double(self, word: Word) -> None:
        self.skip(self.at + 1)
        word.pieces.append(("", "'"))
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.skip(self.at + 2)[1:]
                word.pieces.append(("" if escaped == "\n" else escaped, "'"))
            elif not (self.text[self.at] in "$`" and self._expansion(word, '"$')):
                word.pieces.append((self.skip(self.at + 1), "'"))
        self.skip(self.at + 1)

    def _expansion(self, word: Word, kind: str) -> bool:
        """Read what ``$`` or a backtick begins; False for a sign that stands for itself."""
        rest = self.text[self.at : self.at + 3]
        if rest.startswith("`"):
            end = self.text.find("`", self.at + 1)
            word.pieces.append((self.skip(len(self.text) if end < 0 else end + 1)[1:-1], "("))
        elif rest == "$((":
            word.pieces.append((self._bracketed(3, "(", depth=2)[:-1], "(("))
        elif rest[:2] in ("$(", "${"):
            word.pieces.append((self._bracketed(2, rest[1]), kind if rest[1] == "{" else "("))
        elif match := re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?])").match(self.text, self.at):
            self.skip(match.end())
            word.pieces.append((match[1], kind))
        else:
            return False
        return True

    def _bracketed(self, num_opening: int, opening: str, depth: int = 1) -> str:
        """The text inside brackets, of which `num_opening` characters are passed first."""
        self.skip(self.at + num_opening)
        begin, end = self.at, self.at
        while end < len(self.text) and depth:
            depth += (self.text[end] == opening) - (self.text[end] == _BRACKETS[opening])
            end += 1
        self.skip(end)
        return self.text[begin : end - 1]


def tokenize(text: str) -> Iterator[Token]:
    """Words and operators of a script, in their order."""
    return _Scanner(text).tokens()
