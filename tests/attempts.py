"""Measurements on a machine that also does other things, which can only make them worse: the best one tells."""


def assert_one_of_five(attempt, is_right):
    """`attempt(index)` is made until one is right, five times at most; that one is given back, else all are shown."""
    wrong = []
    for index in range(5):
        result = attempt(index)
        if is_right(result):
            return result
        wrong.append(result)
    raise AssertionError(f"five measurements are out: {wrong}")
