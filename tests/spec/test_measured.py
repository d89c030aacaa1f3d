"""Measured times in a job file: what is read, and what is refused on which line."""

import pytest

from farpipe.errors import InputError
from farpipe.spec import Measured, parse_job
from job_files import PLAIN

LAYER = """
[[measured]]
device = "h100"
microbatch_size = 2
num_layers = 8
forward = "20 ms"
backward = "40 ms"
"""
HEAD = """
[[measured]]
device = "h100-sxm"
part = "head"
microbatch_size = 1
forward = "2 ms"
input_grad = "1500 us"
weight_grad = "0 s"
"""


def test_times_are_read_in_seconds_and_devices_by_their_whole_name():
    layer, head = parse_job(PLAIN + LAYER + HEAD).measured
    assert layer == Measured(device="h100-sxm", microbatch_size=2, num_layers=8, forward_s=0.02, backward_s=0.04)
    assert (head.part, head.forward_s, head.input_grad_s, head.weight_grad_s) == ("head", 0.002, 0.0015, 0.0)


def line_of(text, beginning):
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(beginning))


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        (
            'device = "h100"',
            'device = "a100"',
            r"measured\[0\].device: no site has the device 'a100-",
            'device = "a100',
        ),
        (
            'forward = "20 ms"',
            "forward = 20",
            r"measured\[0\].forward: expected a quantity",
            "forward = 20",
        ),
        ('forward = "20 ms"', 'forward = "0 s"', "measured\\[0\\].forward: must be more than zero", 'forward = "0 s"'),
        ('backward = "40 ms"', "", "give either backward, or both input_grad and weight_grad", "[[measured]]"),
        ('backward = "40 ms"', 'input_grad = "4 ms"', "give either backward, or both", "[[measured]]"),
        ('backward = "40 ms"', 'backwards = "40 ms"', "did you mean 'backward'", "backwards"),
        ("num_layers = 8", "num_layers = 0", "num_layers", "num_layers = 0"),
        ("num_layers = 8", 'part = "head"\nnum_layers = 8', "the head has no layers", "num_layers = 8"),
        ("num_layers = 8", 'part = "head"', "nothing is measured of a layer of 'h100-sxm'", 'part = "head"'),
        ("microbatch_size = 2\n", "", "measured\\[0\\].microbatch_size: missing", "[[measured]]"),
        ('backward = "40 ms"', f'backward = "40 ms"{LAYER}', "the layer of 'h100-sxm' is given twice", None),
    ],
)
def test_what_is_wrong_is_told_with_its_line(old, new, message, line):
    assert old in LAYER
    text = PLAIN + LAYER.replace(old, new, 1)
    with pytest.raises(InputError, match=message) as error:
        parse_job(text)
    if line is not None:
        assert str(error.value).endswith(f"(line {line_of(text, line)})")


def test_times_of_one_device_do_not_go_with_a_pinned_tensor_degree():
    with pytest.raises(InputError, match=r"times are those of one device, and layout\.tensor is 8"):
        parse_job(PLAIN.replace("[layout]\n", "[layout]\ntensor = 8\n") + LAYER)


def test_a_request_on_another_cluster_takes_only_what_was_measured_of_its_devices():
    job = parse_job(PLAIN + LAYER)
    other = parse_job(PLAIN.replace('"h100"', '"a100-80gb"'))
    assert job.request.on(job.cluster).measured == job.measured
    assert job.request.on(other.cluster).measured == ()
