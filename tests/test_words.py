"""Rules for the words of the source: texts begin with their subject; no direction, link or mode is called way."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "farpipe"
QUESTIONS = {"what", "whether", "how", "which", "where", "when", "why", "who"}
FRAGMENTS = {"of", "from", "for", "by", "with", "those", "between", "in", "on", "at", "to", "so", "up", "see", "as"}
PLAIN_ENGLISH = {"one_way", "both_ways"}

DOCUMENTED = '''
"""{word} a module is."""

value: int
"""{word} a value is."""


class Thing:
    """{word} a thing is."""

    field = 1
    """{word} a field is."""

    async def method(self):
        """{word} a method does."""
'''


@pytest.fixture(scope="module")
def trees():
    """Syntax trees of all files of the source."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def docstrings(tree):
    """(line, text) of every docstring: of modules, classes, functions, and of what a line above assigns."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        has_own = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        before = [None if has_own else node, *body]
        for above, statement in zip(before, body, strict=False):
            if above is None or isinstance(above, ast.Assign | ast.AnnAssign):
                match statement:
                    case ast.Expr(ast.Constant(str() as text)):
                        yield statement.lineno, text.strip()


def helps(tree):
    """(line, text) of what the command line says of its arguments and options."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword("help", ast.Constant(str() as text)):
                yield node.value.lineno, text


def questions(texts):
    return [(line, text) for line, text in texts if first_word(text) in QUESTIONS]


def first_word(text):
    return re.split(r"\W", text, maxsplit=1)[0].lower()


def names(tree):
    """(line, name) of every variable, argument, attribute, function and class."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def called_way(tree):
    return [
        (line, name)
        for line, name in names(tree)
        if {"way", "ways"} & set(re.sub("|".join(PLAIN_ENGLISH), "", name.lower()).split("_"))
    ]


def told(wrong, path):
    return [f"{path.relative_to(SOURCE.parent.parent)}:{line}: {text.splitlines()[0]}" for line, text in wrong]


def test_docstrings_name_their_subject_first(trees):
    openings = QUESTIONS | FRAGMENTS
    wrong = [
        line
        for path, tree in trees.items()
        for line in told([(at, text) for at, text in docstrings(tree) if first_word(text) in openings], path)
    ]
    assert not wrong, "begin with the subject, not with a question word or a preposition:\n" + "\n".join(wrong)


@pytest.mark.parametrize("word", ["What", "Whether", "how", "Where:"])
def test_every_docstring_is_looked_at(word):
    tree = ast.parse(DOCUMENTED.format(word=word))
    assert len(questions(docstrings(tree))) == 5
    assert not questions(docstrings(ast.parse(DOCUMENTED.format(word="Whole things"))))


def test_help_names_its_subject_first(trees):
    wrong = [line for path, tree in trees.items() for line in told(questions(helps(tree)), path)]
    assert not wrong, "begin with the subject, not with a question word:\n" + "\n".join(wrong)
    assert questions(helps(ast.parse('Option(help="How long it is valid.")')))


def test_no_name_calls_a_direction_a_way(trees):
    wrong = [line for path, tree in trees.items() for line in told(called_way(tree), path)]
    assert not wrong, "say direction, link, mode, method or path:\n" + "\n".join(wrong)


def test_every_name_is_looked_at():
    found = called_way(ast.parse("def way(way_s, one_way_s):\n    self.site_way = under_way = always = away\n"))
    assert [name for _, name in found] == ["way", "way_s", "site_way", "under_way"]
