import time

import pytest

from farpipe.core.cpu_share import Timed, other_work, timed, undisturbed


def test_what_sleeps_does_not_have_the_cpu_and_what_computes_does():
    assert timed(lambda: time.sleep(0.05)).cpu_share < 0.2
    computing = [timed(lambda: sum(range(20_000))) for _ in range(20)]
    assert max(sample.cpu_share for sample in computing) > 0.9


def test_samples_beside_other_work_are_left_out_unless_there_are_no_others():
    alone, beside, hardly = Timed(1.0, 0.99), Timed(2.0, 1.0), Timed(5.0, 1.0)
    assert undisturbed([beside, alone, hardly, alone], least=2) == [alone, alone]
    assert undisturbed([hardly, beside, alone], least=2) == [alone, beside]


@pytest.mark.parametrize("share", [None, 1.0, 0.95])
def test_little_other_work_is_not_worth_a_sentence(share):
    assert other_work(share) == ""


def test_much_other_work_is_told_in_percent():
    assert "had the CPU for 60 % of the time" in other_work(0.4)
