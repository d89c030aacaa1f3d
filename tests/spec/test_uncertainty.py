"""Ranges around the figures of a job, in the file and on the command line."""

import pytest

from farpipe.errors import InputError, UsageError
from farpipe.spec import Uncertainty, parse_job, parse_uncertainty
from job_files import PLAIN


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("links=20%,compute=5%", (0.2, 0.05)),
        ("compute=0.1", (0.0, 0.1)),
        (" links = 0 ", (0.0, 0.0)),
        ("links=99.9%", (0.999, 0.0)),
    ],
)
def test_shares_are_read_with_and_without_percent(text, shares):
    found = parse_uncertainty(text)
    assert (found.links, found.compute) == pytest.approx(shares)
    assert bool(found) == any(shares)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link=20%", "did you mean 'links'"),
        ("", "expected shares such as"),
        ("20%", "expected shares such as"),
        ("links", "links is a share"),
        ("links=100%", "from 0 to below 1"),
        ("links=-1%", "from 0 to below 1"),
        ("links=nan", "from 0 to below 1"),
        ("links=1e400", "from 0 to below 1"),
        ("links=5%,links=6%", "given twice"),
        ("links=5%,", "expected shares such as"),
    ],
)
def test_what_is_no_share_is_named(text, words):
    with pytest.raises(UsageError, match=words):
        parse_uncertainty(text)


def test_a_job_may_say_so_itself():
    job = parse_job(f"{PLAIN}\n[uncertainty]\nlinks = 0.2\n")
    assert job.uncertainty == Uncertainty(links=0.2)
    assert job.request.on(job.cluster).uncertainty == job.uncertainty
    assert not parse_job(PLAIN).uncertainty


def test_a_share_of_one_and_more_is_refused_in_a_job():
    with pytest.raises(InputError, match=r"uncertainty\.links: must be less than 1"):
        parse_job(f"{PLAIN}\n[uncertainty]\nlinks = 20\n")
