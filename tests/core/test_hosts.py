"""To whom a token is sent."""

import pytest

from farpipe.core.hosts import keeps_secrets


@pytest.mark.parametrize("url", ["https://ray.bern", "http://127.0.0.1:8265", "http://localhost", "http://[::1]:80/x"])
def test_a_token_crosses_no_network_in_the_clear(url):
    assert keeps_secrets(url)


@pytest.mark.parametrize(
    "url",
    ["http://ray.bern", "http://localhost@ray.bern", "http://127.0.0.1.ray.bern", "ftp://127.0.0.1", "", "http://"],
)
def test_nor_goes_to_who_only_looks_like_this_machine(url):
    assert not keeps_secrets(url)
