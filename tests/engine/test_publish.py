"""Weights out: subscribers get every bit, come and go as they like, and skip what they are too slow for."""

import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import load_job
from farpipe.engine.publish import publisher, source
from farpipe.engine.publish.coding import BLOCK_ELEMENTS, HEAD_BYTES, CodingError, Decoder, blocks
from farpipe.engine.publish.pieces import assembled, expect_whole
from farpipe.engine.publish.version import PartForm, PieceForm, Shelf, Version
from farpipe.engine.publish.words import FILE_NAME, TOKEN_VARIABLE
from farpipe.engine.transport import TransportConfig, meeting
from farpipe.engine.transport.free_rate import LEAST_SHARE, FreeRate
from farpipe.engine.transport.pair import dial
from proxies import Proxy
from publishing import Training, equal, subscription, training
from transports import tls_files
from waiting import wait_until

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "rollouts" / "job.toml"


def decoded(data, like, old):
    values = np.empty_like(like)
    decoder = Decoder(values, old)
    for start in range(0, len(data), 1000):
        decoder.take(data[start : start + 1000])
    assert decoder.is_done
    return values, decoder.num_changed


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), st.integers(0, 1 << 30))
def test_what_is_decoded_is_what_was_coded(dtype, count, share, seed):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
    new = np.where(rng.random(count) < share, old + rng.integers(0, 1 << 15, count).astype(dtype), old)
    values, num_changed = decoded(b"".join(blocks(new, old)), new, old)
    assert (values == new).all()
    assert num_changed == (new != old).sum() or len(b"".join(blocks(new, old))) >= new.nbytes
    values, num_changed = decoded(b"".join(blocks(new, None)), new, None)
    assert (values == new).all()
    assert num_changed == count


def test_few_changes_take_little_more_than_the_choice_of_their_places():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, 2 * BLOCK_ELEMENTS + 5).astype(np.uint16)
    for share in (0.001, 0.01, 0.1):
        changed = rng.random(len(old)) < share
        new = np.where(changed, old + rng.choice([-1, 1], len(old)), old).astype(np.uint16)
        entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share) + share  # and a bit for each sign
        data = b"".join(blocks(new, old))
        assert 8 * len(data) / len(old) < 1.25 * entropy
        assert (decoded(data, new, old)[0] == new).all()


def test_damaged_and_foreign_bytes_are_refused_before_memory_is_taken():
    old = np.arange(1000, dtype=np.uint16)
    new = old + (old % 7 == 0)
    data = b"".join(blocks(new, old))
    refused = 0
    for place in range(len(data)):
        try:
            values, _ = decoded(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :], new, old)
        except (CodingError, AssertionError):
            refused += 1
        else:  # the digest finds that one
            assert (values != new).any() or place < HEAD_BYTES
    assert refused > HEAD_BYTES // 2
    with pytest.raises(CodingError, match="no block of 1000 weights"):
        Decoder(np.empty(1000, np.uint16), old).take(b"".join(blocks(np.tile(new, 2), None)))
    with pytest.raises(CodingError, match="coded beside other weights"):
        Decoder(np.empty(1000, np.uint16), None).take(data)


def run_piece(name, shape, start, count):
    return PieceForm(name=name, shape=shape, offset=(start,), sizes=(count,))


def test_tensors_are_put_together_from_runs_and_boxes():
    whole = np.arange(60, dtype=np.uint32)
    box = PieceForm(name="w", shape=(5, 12), offset=(2, 3), sizes=(3, 9))
    pieces = [run_piece("w", (5, 12), 0, 27), box, PieceForm(name="w", shape=(5, 12), offset=(2, 0), sizes=(3, 3))]
    flat = np.concatenate(
        [whole[:27], whole.reshape(5, 12)[2:, 3:].reshape(-1), whole.reshape(5, 12)[2:, :3].reshape(-1)]
    )
    form = PartForm(weight_type="float32", pieces=tuple(pieces))
    expect_whole([form], "here")
    found = assembled([(form, Version(1, flat))])["w"]
    assert (found.view(torch.uint32).numpy().reshape(-1) == whole).all()


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([run_piece("w", (5, 12), 0, 59)], "no process publishes .* of w"),
        ([run_piece("w", (5, 12), 0, 61)], "the pieces of w do not fit together"),
        ([run_piece("w", (5, 12), 0, 30), run_piece("w", (6, 10), 30, 30)], "the pieces of w do not fit"),
        ([], "publishes no weights"),
    ],
)
def test_pieces_that_are_no_whole_model_are_refused(pieces, why):
    with pytest.raises(InputError, match=why):
        expect_whole([PartForm(weight_type="float32", pieces=tuple(pieces))], "here")


def test_a_version_stays_until_all_who_were_told_have_asked_for_it():
    shelf = Shelf(patience_s=0.2)
    shelf.put(Version(1, np.zeros(1, np.uint16)))
    assert shelf.may_change
    assert shelf.tell("one", -1) == 1
    assert shelf.tell("one", 1) is None
    assert not shelf.may_change
    shelf.settled("one")
    assert shelf.may_change
    shelf.tell("two", -1)
    wait_until(lambda: shelf.may_change, "patience ends")


def test_a_version_is_kept_as_long_as_somebody_has_it():
    shelf, first = Shelf(), Version(1, np.zeros(1, np.uint16))
    shelf.put(first)
    for step in (2, 3, 4):
        shelf.put(Version(step, np.full(1, step, np.uint16)))
    assert shelf.find(1, first.sha256) is first
    assert shelf.find(1, "0" * 64) is None
    assert shelf.take(2, 0.0) is None
    assert shelf.take(3, 0.0).step == 3
    del first
    assert shelf.take(1, 0.0) is None


def test_the_rate_is_a_share_of_what_steps_leave():
    rate = FreeRate(1000.0, 300.0, 0.5, num_senders=2)
    assert rate.bytes_per_s == LEAST_SHARE * 1000 / 2  # before the first step
    rate.step_took(1.0)
    assert rate.bytes_per_s == pytest.approx(0.5 * 700 / 2)
    for _ in range(50):
        rate.step_took(0.2)
    assert rate.bytes_per_s == LEAST_SHARE * 1000 / 2  # steps leave nothing
    rate.no_steps()
    assert rate.bytes_per_s == 500
    assert FreeRate(None, 300.0, 0.5).bytes_per_s is None
    fast = FreeRate(1e6, 0.0, 0.5)
    begin_s = time.monotonic()
    for _ in range(20):
        time.sleep(fast.turn(5_000))
    assert time.monotonic() - begin_s > 0.15


def test_a_subscriber_gets_all_then_what_has_changed(tmp_path):
    with training(tmp_path) as published, subscription(tmp_path) as found:
        published.step(0)
        first = found.next(30)
        assert (first.step, first.num_changed) == (1, None)
        assert equal(first, published.published())
        published.step(1, share=0.01)
        second = found.next(30)
        assert second.step == 2
        assert 0 < second.num_changed < 60
        assert second.wire_bytes < second.whole_bytes / 4 < first.wire_bytes / 4
        assert equal(second, published.published())
        assert not equal(first, published.published())  # it still has its own bits
        assert found.latest() is None
        published.finish()
        assert found.next(30) is None


def test_one_who_comes_late_gets_all_and_one_who_is_slow_skips(tmp_path):
    with training(tmp_path, num_processes=1) as published, subscription(tmp_path) as early:
        published.step(0)
        assert early.next(30).step == 1
        for step in range(1, 6):
            published.step(step)
        wait_until(lambda: early._subscription._step == 6, "the newest is here")
        newest = early.next(30)
        assert newest.step == 6
        assert equal(newest, published.published())
        with subscription(tmp_path) as late:
            assert equal(late.next(30), published.published())


def test_float32_masters_are_published_where_they_are_asked_for(tmp_path):
    with training(tmp_path, master_weights=True) as published, subscription(tmp_path) as found:
        published.step(0)
        assert equal(found.next(30), published.published(torch.float32))


def test_a_subscriber_that_hangs_holds_up_no_step(tmp_path, monkeypatch):
    hangs, receive = threading.Event(), source.Source.receive

    def late(self):
        hangs.wait(60)
        return receive(self)

    monkeypatch.setattr(source.Source, "receive", late)
    with training(tmp_path) as published, subscription(tmp_path) as found:
        for step in range(6):
            published.step(step)
        assert published.publishers[0]._served.shelf.newest.step == 6
        hangs.set()
        first = found.next(60)
        if first.step < 6:
            assert (newest := found.next(60)).step == 6  # the versions between are skipped
        else:
            newest = first
        assert equal(newest, published.published())


def test_the_keys_of_a_job_are_read_and_refused_where_they_can_t_work():
    job = load_job(RECIPE)
    assert (job.publish.every_steps, job.publish.share) == (10, 0.8)
    assert load_job(RECIPE, {"publish.every_steps": 3}).publish.every_steps == 3
    with pytest.raises(InputError, match="sites that may leave do not publish"):
        load_job(RECIPE, {"training.elastic": True, "layout.replicas": "across"})
    with pytest.raises(InputError, match=r"publish\.share"):
        load_job(RECIPE, {"publish.share": 1.5})


@pytest.fixture
def proxy(monkeypatch):
    between, introduce = Proxy(), meeting.introduce

    def introduce_through_proxy(rank, *args):
        ranks = introduce(rank, *args)
        return [r if i == rank else r._replace(address=between.route(r.address)) for i, r in enumerate(ranks)]

    monkeypatch.setattr(meeting, "introduce", introduce_through_proxy)
    yield between
    between.close()


def test_a_link_that_breaks_again_and_again_delays_and_harms_nothing(tmp_path, proxy):
    with training(tmp_path) as published, subscription(tmp_path) as found:
        proxy.mean_bytes = 10_000
        step = 0
        while proxy.num_cuts < 6:
            published.step(step)
            weights = found.next(60)
            assert (weights.step, equal(weights, published.published())) == (step + 1, True)
            step += 1
        proxy.mean_bytes = None


def test_after_a_long_cut_a_new_session_goes_on_beside_the_newest_version(tmp_path, proxy, monkeypatch):
    for module in (publisher, source):
        monkeypatch.setattr(module, "OUTAGE_S", 1.0)
    with training(tmp_path) as published, subscription(tmp_path, patience_s=60.0) as found:
        published.step(0)
        assert found.next(30).step == 1
        session = found._subscription._sources[0]
        proxy.blocked = True
        proxy.cut_all()
        wait_until(lambda: found._subscription._sources[:1] != [session], "the session is given up")
        proxy.blocked = False
        published.step(1, share=0.01)
        weights = found.next(60)
        assert weights.step == 2
        assert weights.num_changed is not None
        assert equal(weights, published.published())


def test_a_damaged_version_is_fetched_again_as_a_whole(tmp_path, monkeypatch):
    with training(tmp_path) as published, subscription(tmp_path) as found:
        published.step(0)
        assert found.next(30).num_changed is None
        chunk, damaged = source.Source._chunk, []

        def damage(self, step, number):
            data = chunk(self, step, number)
            if data and not damaged:
                damaged.append(step)
                return memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
            return data

        monkeypatch.setattr(source.Source, "_chunk", damage)
        published.step(1)
        weights = found.next(30)
        assert damaged == [2]
        assert weights.num_changed is None
        assert equal(weights, published.published())


def test_what_stays_damaged_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "digest", lambda values: "0" * 64)
    with training(tmp_path, num_processes=1) as published, subscription(tmp_path) as found:
        published.step(0)
        with pytest.raises(InputError, match=r"is not what was published \(3 times in a row\)"):
            found.next(60)


def test_a_training_that_starts_again_is_found_and_another_one_refused(tmp_path):
    first = Training(tmp_path)
    with subscription(tmp_path) as found:
        first.step(0)
        assert found.next(30).step == 1
        first.close()
        with training(tmp_path) as again:
            again.whole = first.whole
            again.step(0)
            again.step(1)
            weights = found.next(30)
            assert weights.step == 2
            assert equal(weights, again.published())
        seed = {"training": first.run.plan.training.model_copy(update={"seed": 1})}
        with (
            training(tmp_path, change=lambda run: run.with_plan(**seed)),
            pytest.raises(InputError, match="different training"),
        ):
            found.next(30)


def test_strangers_are_turned_away(tmp_path, monkeypatch):
    with training(tmp_path, max_subscribers=1) as published:
        words = json.loads((tmp_path / FILE_NAME).read_text())
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
        with subscription(words["address"], token="wrong") as found, pytest.raises(RunError, match="this run's token"):
            found.next(30)
        with pytest.raises(InputError, match=TOKEN_VARIABLE):
            subscription(words["address"])
        monkeypatch.setenv(TOKEN_VARIABLE, words["token"])
        with subscription(words["address"]) as found:
            published.step(0)
            assert found.next(30).step == 1
            with subscription(tmp_path) as second, pytest.raises(RunError, match=r"publish\.max_subscribers"):
                second.next(30)
        with subscription(tmp_path, max_bytes=100) as found, pytest.raises(InputError, match="the limit is 100 B"):
            found.next(30)


def test_nonsense_ends_its_session_alone(tmp_path):
    with training(tmp_path) as published, subscription(tmp_path) as found:
        published.step(0)
        assert found.next(30).step == 1
        words = json.loads((tmp_path / FILE_NAME).read_text())
        host, port = words["address"].split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with dial((host, int(port)), None, words["token"].encode(), source.Purpose(0, 1, None)) as sock:
            sock.sendall((1 << 30).to_bytes(4, "little"))
        published.step(1)
        assert found.next(30).step == 2


def test_with_certificates_both_sides_are_who_they_say(tmp_path):
    ours, theirs, _ = tls_files(tmp_path, ("site0", "rollouts", "site1"))
    with training(tmp_path, num_processes=1, config=TransportConfig(tls=ours)) as published:
        published.step(0)
        folder = theirs.certificate.parent
        with subscription(tmp_path, certs=folder, site="rollouts") as found:
            assert equal(found.next(30), published.published())
        with subscription(tmp_path, patience_s=1.0) as found, pytest.raises(RunError, match="no connection"):
            found.next(30)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:0", "host:99999"])
def test_a_source_that_is_none_is_refused(address):
    with pytest.raises(InputError, match="expected HOST:PORT"):
        subscription(address, token="x")


def test_a_run_that_publishes_nothing_says_so(tmp_path):
    with pytest.raises(InputError, match=r"a run whose job has \[publish\] writes it"):
        subscription(tmp_path)
