from types import SimpleNamespace

from farpipe.core.schedule.library import order
from farpipe.engine.launch.run import changing_links
from farpipe.engine.run_settings import LinkChange
from farpipe.engine.run_spec import RunSpec
from two_sites import two_sites


def spec(**settings):
    problem = two_sites((0.02, 0.02, 0.02), (2, 2), num_ranks=2, num_microbatches=2)
    body = {"problem": problem, "schedule": order("1f1b", problem), "sites": ("a", "b"), "num_steps": 4}
    return RunSpec.bare(**body, device="sleep", emulate_links=False, **settings)


def test_links_of_a_kernel_wan_change_when_the_step_before_is_recorded():
    changes = [LinkChange(step=step, link="a>b", latency_s=0.01 * step, bandwidth_bytes_per_s=1e6) for step in (1, 3)]
    calls = []
    wan = SimpleNamespace(set=lambda link, **figures: calls.append((link, figures)))
    on_step = changing_links(spec(link_changes=tuple(changes)), wan, lambda line: calls.append(line["step"]))
    for step in range(3):
        on_step({"step": step})
    figures = [{"latency_s": 0.01 * step, "bandwidth_bytes_per_s": 1e6} for step in (1, 3)]
    assert calls == [("a>b", figures[0]), 0, 1, ("a>b", figures[1]), 2]


def test_without_changes_or_without_a_wan_steps_are_only_told():
    told = print
    assert changing_links(spec(), SimpleNamespace(), told) is told
    assert changing_links(spec(), None, None) is None


def test_a_process_sends_over_a_link_to_those_at_its_other_end():
    assert spec().peers_over("a>b", 0) == [1]
    assert spec().peers_over("a>b", 1) == []
