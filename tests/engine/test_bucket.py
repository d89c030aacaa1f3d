"""The newest checkpoint in a bucket: a folder, and a real S3 server where moto and s3fs are installed."""

import time

import pytest

from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec import Training
from farpipe.engine.checkpoint.bucket import Store, ToBucket, brought
from farpipe.engine.checkpoint.fetch import await_all
from farpipe.engine.checkpoint.folders import folder_of, url_of
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.launch.directory import choose_run_dir
from in_process import run_ranks
from small_models import LLAMA
from trainings import losses, make_run, metrics, train

OPTIONS = {"model": LLAMA, "checkpoint_every_steps": 2, "num_steps": 8, "warmup_steps": 3, "decay": "cosine"}


@pytest.fixture(scope="module")
def s3_server():
    """Its address."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(params=["file", "s3"])
def bucket(request, tmp_path, monkeypatch):
    """URL of an empty one."""
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = f"runs-{abs(hash(str(tmp_path)))}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}/small"


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(make_run(text_file, **OPTIONS), run_dir)
    return losses(run_dir)


@pytest.mark.parametrize("mirror", [False, True])
def test_the_newest_checkpoint_is_in_the_bucket_and_a_run_elsewhere_goes_on_from_it(
    mirror, bucket, text_file, undisturbed, tmp_path
):
    half = {"num_steps": 4, "decay_steps": 8}
    train(make_run(text_file, bucket=bucket, mirror=mirror, **OPTIONS | half), tmp_path / "run")
    store = Store(bucket)
    assert store.newest() == 4
    assert store._steps() == [4], "older ones are removed"
    elsewhere = choose_run_dir(tmp_path / "elsewhere", brought(bucket, tmp_path / "elsewhere"))
    assert elsewhere.resume == str(folder_of(tmp_path / "elsewhere" / ".bucket", 4))
    assert Manifest.load(folder_of(tmp_path / "elsewhere" / ".bucket", 4)).step == 4
    run = make_run(text_file, run_fields={"resume": elsewhere.resume}, **OPTIONS)
    train(run, tmp_path / "elsewhere")
    assert losses(tmp_path / "elsewhere") == undisturbed[4:]


def test_metrics_name_the_step_that_the_bucket_has(bucket, text_file, tmp_path, capsys):
    train(make_run(text_file, bucket=bucket, **OPTIONS | {"num_steps": 40}), tmp_path / "run")
    found = [line["mirrored"][bucket] for line in metrics(tmp_path / "run") if "mirrored" in line]
    assert found == sorted(found)
    assert f"mirrored: step 40 ({bucket})" in capsys.readouterr().err


def test_a_copy_that_was_cut_off_is_no_checkpoint_and_is_gone_on_with(bucket, text_file, tmp_path):
    train(make_run(text_file, bucket=bucket, **OPTIONS | {"num_steps": 4}), tmp_path / "run")
    store, folder = Store(bucket), folder_of(tmp_path / "run" / "checkpoints", 4)
    store._files.rm_file(store._at(4, "manifest.json"))
    assert store.newest() is None
    with pytest.raises(InputError, match="no whole checkpoint"):
        store.bring(tmp_path / "there")
    first, second = Manifest.load(folder).files
    store._files.pipe_file(store._at(4, second.name), b"half of it")
    assert store._has(4, first)
    assert not store._has(4, second)
    for entry in (first, second):
        store.put(folder, 4, entry)
    store.put_manifest(folder, 4)
    there = store.bring(tmp_path / "there")
    assert (there / second.name).read_bytes() == (folder / second.name).read_bytes()


def test_an_older_file_that_was_not_copied_does_not_end_the_wait_for_the_newest(text_file, tmp_path, monkeypatch):
    train(make_run(text_file, **OPTIONS | {"num_steps": 4}), tmp_path / "run")
    put_manifest = Store.put_manifest
    monkeypatch.setattr(Store, "put_manifest", lambda *arguments: (time.sleep(0.5), put_manifest(*arguments)))

    def copy(peers):
        copies = ToBucket(f"file://{tmp_path}/bucket", peers, tmp_path / "run" / "checkpoints")
        if peers.rank == 0:
            copies._take({"step": 2, "problem": "it is gone"})
        copies.start()
        while not copies.is_settled:
            time.sleep(0.01)
        await_all(peers, "settled")
        if peers.rank == 0:
            copies.await_manifest()
        found = copies.news()
        peers.exchange("copied", b"", waiting_for="the others")
        copies.end()
        return found

    assert run_ranks(2, copy)[0] == ({f"file://{tmp_path}/bucket": 4}, ["not copied: it is gone"])


def test_a_damaged_copy_is_refused(bucket, text_file, tmp_path):
    train(make_run(text_file, bucket=bucket, **OPTIONS | {"num_steps": 2}), tmp_path / "run")
    store = Store(bucket)
    place = store._at(2, "rank-1.safetensors")
    data = bytearray(store._files.cat_file(place))
    data[-5] ^= 4
    store._files.pipe_file(place, bytes(data))
    with pytest.raises(InputError, match="damaged"):
        store.bring(tmp_path / "there")
    assert not (tmp_path / "there" / "step-2" / "manifest.json").exists()


def test_a_bucket_that_can_not_be_reached_is_told_and_the_training_goes_on(text_file, undisturbed, tmp_path):
    (tmp_path / "file").write_text("no folder")
    url = f"file://{tmp_path}/file/bucket"
    train(make_run(text_file, bucket=url, **OPTIONS), tmp_path / "run")
    assert losses(tmp_path / "run") == undisturbed
    warnings = [text for line in metrics(tmp_path / "run") for text in line.get("warnings", ())]
    assert any("not copied" in text and url in text for text in warnings), warnings


def test_urls_are_told_from_paths(tmp_path):
    from pathlib import Path

    assert url_of(Path("s3://name/folder")) == "s3://name/folder"
    assert url_of("gs://name") == "gs://name"
    assert url_of(tmp_path) is url_of("runs/last") is url_of("C:/x") is None


def test_impossible_buckets_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="s3://name/folder"):
        Training(sequence_length=8, global_batch=8, bucket="name/folder")
    with pytest.raises(InputError, match="nonsense://x: "):
        Store("nonsense://x")
    with pytest.raises(UsageError, match="--run-dir"):
        brought("s3://name/folder", None)
