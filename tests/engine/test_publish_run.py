"""Weights out of real trainings: what subscribers get is what checkpoints of the same steps have, to the last bit."""

import threading
from functools import partial

import pytest
import torch

from farpipe.core.spec.publish import PublishSettings
from farpipe.engine.publish.publisher import Publisher
from farpipe.engine.publish.words import FILE_NAME
from farpipe.engine.transport import TransportConfig
from publishing import equal, subscription
from small_models import GPT, LLAMA, TIED
from trainings import checkpoints, make_run, state, train
from waiting import wait_until

EVERY = 3


def versions_of(run, run_dir, num_versions=3):
    """The versions that a subscriber gets from a training, which goes on until it has that many."""
    has_enough, errors = threading.Event(), []
    make = partial(Publisher, config=TransportConfig())

    def trains():
        try:
            train(run, run_dir, make_publisher=make, stop=has_enough.is_set)
        except Exception as error:
            errors.append(str(error))

    thread = threading.Thread(target=trains)
    thread.start()
    try:
        wait_until(lambda: (run_dir / FILE_NAME).exists() or errors, "the training publishes")
        with subscription(run_dir) as found:
            versions = [found.next(60) for _ in range(num_versions)]
    finally:
        has_enough.set()
        thread.join()
    assert errors == [] or "stopped by SIGTERM" in errors[0]
    return versions


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"model": TIED, "precision": "bf16"}, torch.bfloat16),
        ({"model": GPT, "placement": (0, 1, 2), "precision": "bf16"}, torch.bfloat16),
        ({"model": LLAMA, "num_replicas": 2, "precision": "bf16", "zero": 1}, torch.bfloat16),
        ({"model": TIED, "num_replicas": 2, "precision": "bf16"}, torch.bfloat16),
        ({"model": TIED, "precision": "fp32"}, torch.float32),
    ],
)
def test_versions_are_the_weights_of_their_steps(tmp_path, options, dtype):
    (tmp_path / "text").write_text("hello world, this is a text. " * 100)
    keys = {"num_steps": 3000, "checkpoint_every_steps": EVERY, "keep_checkpoints": 2000}
    publish = {"publish": PublishSettings(every_steps=EVERY)}
    run = make_run(tmp_path / "text", run_fields=publish, **keys, **options)
    versions = versions_of(run, tmp_path / "run")
    written = checkpoints(tmp_path / "run")
    for version in versions:
        assert version.step in written
        found = state(tmp_path / "run", run, version.step)
        weights = {name.removeprefix("weight/"): v for name, v in found.items() if name.startswith("weight/")}
        shapes = {name: tensor.shape for name, tensor in version._received.tensors.items()}
        assert equal(version, {name: w.to(dtype).view(shapes[name]) for name, w in weights.items()})
    assert all(version.num_changed is not None for version in versions[1:])
    assert len({version.step for version in versions}) == len(versions)
