"""The documentation says what is there: commands and options, links, command lines, TOML."""

import importlib.util
import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from farpipe.core.spec import parse_job
from farpipe.core.step import Problem, Schedule
from farpipe.fleet.scenario import load_scenario
from farpipe.optical.settings import BlockingSettings, LightSettings
from farpipe.planning.planner.reference_points import load_points

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_name(path):
    return str(path.relative_to(ROOT))


def load(path):
    """The script of that path, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load(ROOT / "docs" / "commands.py")
INTERFACE = SCRIPT.interface()


def test_the_problem_and_the_schedule_of_the_file_formats_are_read():
    page = (ROOT / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")
    problem, schedule = [text for kind, text in FENCE.findall(page) if kind == "json"][:2]
    assert Problem.from_json(problem, "problem").num_ranks == 2
    assert Schedule.from_data(json.loads(schedule)).num_microbatches == 2


def test_the_page_of_commands_is_written_from_their_help():
    assert SCRIPT.PAGE.read_text(encoding="utf-8") == SCRIPT.page(), "run: python docs/commands.py"


def test_the_table_of_choices_is_what_the_gate_says():
    script = load(ROOT / "docs" / "choices.py")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run: python docs/choices.py"


@pytest.mark.parametrize("kind", [BlockingSettings, LightSettings])
def test_the_reference_has_every_setting_of_light_paths(kind):
    page = (ROOT / "docs" / "reference" / "optical.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | {field.description} |" in page for name, field in kind.model_fields.items())


def code_lines(text):
    """Lines of code blocks, fenced or indented; lines that end in a backslash are joined with the next."""
    blocks = [body for _, body in FENCE.findall(text)]
    outside = FENCE.sub("", text)
    lines = "\n".join([*blocks, *re.findall(r"^    \S.*$", outside, re.MULTILINE)]).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines]


def command_lines(text):
    """(command, arguments) of every call of farpipe in code blocks, placeholders and comments removed."""
    for line in code_lines(text):
        for name, command in INTERFACE.items():
            words = name.removeprefix("python ").split()
            call = re.search(rf"(?:^|[ ;(])({re.escape(' '.join(words))})(?= |$)(.*)", line)
            if call and (name == SCRIPT.RANK_MAIN or line.startswith(name)) and "[OPTIONS]" not in line:
                yield line, command, arguments(call[2])


def arguments(text):
    """Arguments that stand before a comment, a pipe, a redirection or the next command."""
    return shlex.split(re.split(r"\s\d?[|&><]|[;)]", text)[0], comments=True)


SHOWN = [(page_name(page), *call) for page in PAGES for call in command_lines(page.read_text(encoding="utf-8"))]


def test_there_are_command_lines_to_check():
    assert {command.name for _, _, command, _ in SHOWN} >= {"plan", "profile", "simulate", "train", "report"}
    assert sum("rank_main" in line for _, line, _, _ in SHOWN) >= 2


@pytest.mark.parametrize(("page", "line", "command", "words"), SHOWN, ids=[f"{p}: {c}" for p, c, *_ in SHOWN])
def test_every_command_line_that_is_shown_parses(page, line, command, words):
    try:
        command.make_context(command.name, list(words))
    except Exception as error:
        pytest.fail(f"{page}: {line}: {error}")


def named(pattern):
    """(page, name) of what pages name by a pattern; the log and the changelog tell of what may be gone."""
    told = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "log"]
    return sorted({(page_name(page), name) for page in told for name in re.findall(pattern, page.read_text())})


NAMED = named(r"`((?:tests|benchmarks|recipes|src|docs)/[\w./-]+|test_\w+\.py)`")


@pytest.mark.parametrize(("page", "name"), NAMED)
def test_files_that_a_page_names_are_there(page, name):
    assert (ROOT / name).exists() if "/" in name else [*ROOT.glob(f"tests/**/{name}")], page


SCRIPTS = named(r"python3? -m (benchmarks[.\w]+)")


@pytest.mark.parametrize(("page", "module"), SCRIPTS)
def test_scripts_that_a_page_runs_are_there(page, module):
    place = ROOT.joinpath(*module.split("."))
    assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), page


INLINE = [
    (page_name(page), call)
    for page in PAGES
    for call in re.findall(r"`(farpipe [^`]*)`", FENCE.sub("", page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("page", "call"), INLINE)
def test_commands_named_in_a_sentence_have_the_options_that_are_named(page, call):
    words, options = call.split(), re.findall(r"(?<=\s)(--?[a-z][\w-]*)", call)
    if words[1].startswith("-") or words[1].isupper():
        return
    command = INTERFACE.get(" ".join(words[:3])) or INTERFACE.get(" ".join(words[:2]))
    if command is None and len(words) == 2:  # a whole group, such as `farpipe wan`
        assert any(known.startswith(f"{call} ") for known in INTERFACE), f"{page}: there is no command {call!r}"
        return
    assert command is not None, f"{page}: there is no command {call!r}"
    known = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
    assert {*options} <= known | {"--help"}, f"{page}: {call}"


LINKS = [
    (page_name(page), target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    if not re.match(r"[a-z]+:", target)
]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_every_link_points_to_something(page, target):
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists(), f"{page}: {target}"
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: {target}"


def anchors(text):
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


TOML = [
    (page_name(page), index, body)
    for page in PAGES
    for index, (kind, body) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    if kind == "toml" and not body.startswith("[project.")
]


@pytest.mark.parametrize(("page", "index", "body"), TOML, ids=[f"{page} {index}" for page, index, _ in TOML])
def test_every_toml_block_loads(page, index, body, tmp_path):
    data = tomllib.loads(body)
    if data.get("format", "").startswith("farpipe/points/"):
        (tmp_path / "points.toml").write_text(body, encoding="utf-8")
        assert load_points(tmp_path / "points.toml")
    elif "clock" in data:
        (tmp_path / "fleet.toml").write_text(body, encoding="utf-8")
        assert load_scenario(tmp_path / "fleet.toml")
    else:
        assert parse_job(body if "model" in data else completed(page, index, body))


def completed(page, index, body):
    """Some tables of a job together with the other tables of the job before them on the page."""
    whole = next(text for other, place, text in reversed(TOML) if (other, place) < (page, index) and "[model]" in text)
    tables = re.split(r"^(?=\[)", whole, flags=re.MULTILINE)
    given = set(re.findall(r"^\[.*?\]$", body, re.MULTILINE))
    return "".join(table for table in tables if table.splitlines()[:1] and table.splitlines()[0] not in given) + body


IMPORTED = sorted(
    {
        (page_name(page), module, name)
        for page in PAGES
        for body in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        for module, names in re.findall(r"^ *from (farpipe[\w.]*) import ([\w, ]+)$", body, re.M)
        for name in names.split(", ")
    }
)


@pytest.mark.parametrize(("page", "module", "name"), IMPORTED)
def test_names_that_python_examples_import_exist(page, module, name):
    if module == "farpipe.torch":
        pytest.importorskip("torch")
    assert hasattr(import_module(module), name), page


def test_every_page_is_reachable_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        todo += [page.parent / target for target in targets if not re.match(r"[a-z]+:", target)]
    assert {page.resolve() for page in ROOT.glob("docs/**/*.md")} <= seen


MAX_WIDTH = 120
"""Characters of a line of prose; code, tables and pictures may be wider."""
WRAPPED = [page for page in PAGES if page.parent.name != "raw"]


@pytest.mark.parametrize("page", WRAPPED, ids=page_name)
def test_lines_of_prose_are_short(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    free = ("|", "![", "    ", "<!--", ":::")
    assert not [
        line
        for line in prose
        if len(line) > MAX_WIDTH and not (line.startswith("    ") or line.lstrip().startswith(free))
    ]


def test_the_navigation_has_every_page_but_for_raw_figures():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md") if page.parent.name != "raw"}
    assert pages == set(re.findall(r"[\w/-]+\.md", nav))
