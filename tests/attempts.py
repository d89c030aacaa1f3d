"""Measurements on a machine that also does other things: two of three have to be right, and all are shown."""


def assert_two_of_three(attempt, is_right):
    """`attempt(index)` is made until two are right or two are wrong; the last right one is given back."""
    right, wrong = [], []
    for index in range(3):
        result = attempt(index)
        (right if is_right(result) else wrong).append(result)
        assert len(wrong) < 2, f"two measurements are out: {wrong}; right: {right}"
        if len(right) == 2:
            break
    return right[-1]
