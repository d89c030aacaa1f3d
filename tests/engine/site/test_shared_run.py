"""Trainings whose replicas at a site share weights by FSDP2 (ZeRO-2 and 3), in real processes: those of one replica.

Replicas that are killed or stopped: test_faults_in_collectives.py.
"""

import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chosen import chosen
from farpipe.core.spec.publish import PublishSettings
from farpipe.engine.checkpoint.export import export_to_hugging_face
from farpipe.engine.launch.run import run
from farpipe.engine.publish.words import FILE_NAME
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.stages.self_check import one_thread
from publishing import subscription
from trainings import losses, make_run, train
from waiting import wait_until

pytestmark = pytest.mark.slow

SITES, OTHERS = ("site0", "site1"), ("site2", "site3")


@pytest.fixture
def make(model, text_file):
    """`make(homes, zero=..., num_steps=...)`: a training of replicas at `homes`, the sites of each."""

    def training(homes=(SITES,), num_steps=4, **options):
        fields = {"transport": TransportSettings(timeout_s=60), "emulate_links": False}
        spec = make_run(
            text_file,
            model=model,
            num_replicas=len(homes),
            num_steps=num_steps,
            method="zb-h1",
            run_fields=fields,
            checkpoint_every_steps=2,
            **options,
        )
        return spec.with_plan(model=model, replicas=homes)

    return training


@pytest.fixture
def alone(make, tmp_path):
    """Losses and norms of one replica."""
    with one_thread():
        train(make(), tmp_path / "alone")
    return losses(tmp_path / "alone")


def assert_close(found, expected):
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(("zero", "homes"), chosen([(3, (SITES,) * 2), (2, (SITES,) * 2 + (OTHERS,) * 2)], 0))
def test_replicas_that_share_weights_train_as_one(zero, homes, make, alone, tmp_path):
    run(make(homes, zero=zero), tmp_path / "shared")
    assert_close(losses(tmp_path / "shared"), alone)


def test_a_checkpoint_of_shared_weights_is_read_by_one_replica_and_back(make, alone, tmp_path):
    run(make((SITES,) * 2, zero=3, num_steps=2), tmp_path / "shared")
    with one_thread():
        train(make().model_copy(update={"resume": str(tmp_path / "shared")}), tmp_path / "rest")
        train(make(num_steps=2), tmp_path / "first")
    run(make((SITES,) * 2, zero=3).model_copy(update={"resume": str(tmp_path / "first")}), tmp_path / "again")
    assert_close(losses(tmp_path / "shared") + losses(tmp_path / "rest"), alone)
    assert_close(losses(tmp_path / "first") + losses(tmp_path / "again"), alone)
    assert export_to_hugging_face(tmp_path / "again", tmp_path / "exported") == 4


def test_published_versions_of_shared_weights_are_those_of_the_export(make, tmp_path):
    spec = make((SITES,) * 2, zero=3, num_steps=6, precision="bf16")
    folder, versions = tmp_path / "shared", []

    def subscribe():
        wait_until((folder / FILE_NAME).exists, "the training publishes", 200)
        with subscription(folder, patience_s=60.0) as found:
            versions.extend(found)

    thread = threading.Thread(target=subscribe)
    thread.start()
    run(spec.model_copy(update={"publish": PublishSettings(every_steps=2)}), folder)
    thread.join()
    assert versions[-1].step == export_to_hugging_face(folder, tmp_path / "exported", dtype="bfloat16") == 6
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_config(AutoConfig.for_model(**versions[-1].config), dtype=torch.bfloat16)
    versions[-1].load_into(found)
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other), name
