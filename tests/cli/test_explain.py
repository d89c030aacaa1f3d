"""`farpipe explain` and `farpipe diff`: the rest of a plan, and two plans side by side."""

import json

import pytest

JOB = "init --model llama-3-8b --sites zurich=8xh100,lugano=8xh100 --link 20ms,100G"
QUICK = ("--no-strategies",)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A job with its plan, and the plan of the same over a slower link."""
    import sys
    from contextlib import chdir

    from farpipe.cli import main

    folder = tmp_path_factory.mktemp("plans")
    commands = [
        JOB,
        "plan job.toml -o plan.json",
        "plan job.toml --set cluster.links.latency=50ms --no-strategies -o far.json",
    ]
    patch = pytest.MonkeyPatch()
    with chdir(folder):
        for command in commands:
            patch.setattr(sys, "argv", ["farpipe", *command.split()])
            with pytest.raises(SystemExit) as end:
                main()
            assert not end.value.code
    patch.undo()
    return folder


def test_a_plan_is_short_and_explained_in_full(farpipe, files):
    short = farpipe("plan", files / "job.toml")
    full = farpipe("plan", files / "job.toml", "--full")
    explained = farpipe("explain", "plan.json").stdout
    assert len(short.stdout.splitlines()) <= 17
    assert "use both sites" in short.stdout
    assert "Then: " in short.stdout
    assert "farpipe explain plan.json" in short.stdout
    changes = "The cheapest changes that would help"
    for title in ("Stages", "Links between sites", "Strategies", changes, "Why the others lost"):
        assert f"\n{title}\n" not in short.stdout
        assert f"\n{title}\n" in full.stdout
        assert f"\n{title}\n" in explained
    assert "matrix products" not in short.stdout
    assert "matrix products" in full.stdout
    assert "matrix products" in explained


@pytest.mark.parametrize(
    ("topic", "title", "other"),
    [
        ("why-not", "Why the others lost", "Stages"),
        ("limits", "changes that would help", "Stages"),
        ("memory", "\nStages\n", "Strategies"),
        ("links", "Effect of inter-site bandwidth", "Stages"),
    ],
)
def test_a_topic_has_its_part(farpipe, files, topic, title, other):
    shown = farpipe("explain", files / "plan.json", topic).stdout
    assert title in shown
    assert f"\n{other}\n" not in shown
    assert list(json.loads(farpipe("explain", files / "plan.json", topic, "--json").stdout)) == [topic]


def test_every_sentence_of_the_advice_is_in_one_topic(farpipe, files):
    facts = json.loads(farpipe("explain", files / "plan.json", "--json").stdout)
    told = [line for part in facts.values() for line in part["advice"]]
    assert sorted(told) == sorted(json.loads((files / "plan.json").read_text())["advice"])
    assert "Effect of inter-site bandwidth" in " ".join(facts["links"]["advice"])


def test_another_layout_is_planned_and_put_beside_it(farpipe, files):
    data = json.loads(
        farpipe("explain", files / "plan.json", "pipeline=2,sites=zurich>lugano,virtual=1", "--json").stdout
    )
    assert data["plans"][1]["where"] == "zurich > lugano"
    assert data["differences"][0]["what"] == "layout"
    assert data["differences"][-1]["step_s"] == pytest.approx(data["plans"][1]["step_s"])


@pytest.mark.parametrize(
    ("topic", "code", "message"),
    [
        ("memry", 2, "did you mean 'memory'"),
        ("pipelines=2", 3, "layout.pipelines: unknown key; did you mean 'pipeline'"),
        ("tensor=7", 3, "tensor"),
    ],
)
def test_a_topic_that_is_none_says_why(farpipe, files, topic, code, message):
    done = farpipe("explain", files / "plan.json", topic)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_differences_are_priced_one_by_one_and_add_up(farpipe, files):
    data = json.loads(farpipe("diff", files / "plan.json", files / "far.json", "--json").stdout)
    named = [one["what"] for one in data["differences"]]
    assert named[:2] == ["zurich>lugano: latency_s", "lugano>zurich: latency_s"]
    steps = [data["plans"][0]["step_s"], *(one["step_s"] for one in data["differences"])]
    assert steps[0] < steps[1] < steps[2]
    assert steps[-1] == pytest.approx(data["plans"][1]["step_s"])
    shown = farpipe("diff", files / "plan.json", files / "far.json").stdout
    assert f"{steps[1] - steps[0]:+.3g} s" in shown


def test_a_plan_does_not_differ_from_its_job(farpipe, files):
    assert "The two plans are equal." in farpipe("diff", files / "plan.json", files / "job.toml").stdout


def test_other_sites_come_with_their_layout(farpipe, files):
    words = ("--model", "llama-3-8b", "--sites", "geneva=16xh100")
    assert farpipe("plan", *words, *QUICK, "-o", "one.json").returncode == 0
    data = json.loads(farpipe("diff", files / "plan.json", "one.json", "--json").stdout)
    assert "sites and layout" in [one["what"] for one in data["differences"]]
    assert data["differences"][-1]["step_s"] == pytest.approx(data["plans"][1]["step_s"])


def test_a_problem_has_no_plan_to_explain(farpipe, problem_file):
    done = farpipe("explain", problem_file)
    assert (done.returncode, "give a plan or a job" in done.stderr) == (3, True)


def test_a_dry_run_checks_and_writes_nothing(farpipe, files, tmp_path):
    done = farpipe("plan", files / "job.toml", "--dry-run", "--html", "page.html")
    assert done.returncode == 0
    assert "zurich (8 h100-sxm)" in done.stdout
    assert "plan.json, page.html" in done.stdout
    assert [*tmp_path.iterdir()] == []
    facts = json.loads(farpipe("plan", files / "job.toml", "--dry-run", "--json").stdout)
    assert facts["links"] == "zurich>lugano, lugano>zurich"
    assert farpipe("plan", files / "job.toml", "--dry-run", "--set", "model.preset=llama-9").returncode == 3
