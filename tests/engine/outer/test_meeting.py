"""Who is there and which worlds are formed, by the rules alone."""

import dataclasses

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.outer.meeting import ALIVE_S, NEAR_STEPS, START_S, Meeting, Offer, Status

NOW = 100.0


def meetings(*steps, waiting=True, start_s=0.0, run="r"):
    """A Meeting of every site, each with these steps done; all have heard of all."""
    found = [Meeting(own, len(steps), run, start_s) for own in range(len(steps))]
    for meeting, step in zip(found, steps, strict=True):
        meeting.ready(NOW)
        meeting.report(step=step, waiting=waiting)
    talk(found)
    return found


def talk(found, now_s=NOW + 1):
    for meeting in found:
        for other, its in enumerate(found):
            if other != meeting._own:
                meeting.hear(other, its.own, now_s)


def offers(found, now_s=NOW + 1.5):
    return [meeting.propose(now_s) for meeting in found]


def entered(meeting, offer):
    meeting.report(world=offer.world, number=offer.number, members=offer.members, waiting=False)


def test_sites_that_start_begin_together():
    found = meetings(0, 0, 0)
    offer, *others = offers(found)
    assert others == [None, None]
    assert offer.members == (0, 1, 2)
    assert offer.giver == 0
    assert offer.is_together


def test_the_site_furthest_on_gives():
    offer = offers(meetings(3, 7, 5))[1]
    assert offer.giver == 1
    assert offer.steps == (3, 7, 5)
    assert not offer.is_together


def test_sites_that_start_wait_for_those_that_are_not_there_yet():
    found = [Meeting(own, 3, "r") for own in range(3)]
    for meeting in found[:2]:
        meeting.ready(NOW)
        meeting.report(step=0, waiting=True)
    talk(found)
    assert offers(found) == [None, None, None]
    late = NOW + START_S + 1
    talk(found, late)
    assert offers(found, late)[0].members == (0, 1)


def test_a_site_that_returns_is_offered_a_world_with_those_that_went_on():
    found = meetings(9, 9, 0)
    first = Offer("w", 4, (0, 1), 0, (9, 9), (True, True))
    for meeting in found[:2]:
        entered(meeting, first)
    talk(found)
    assert offers(found) == [None, None, None], "the others may not have said yet that they are in it"
    talk(found, NOW + 3)
    offer, *others = offers(found, NOW + 3.5)
    assert others == [None, None]
    assert offer.number > first.number
    assert offer.waiting == (False, False, True)


def test_nothing_is_offered_in_one_world():
    found = meetings(9, 9)
    offer = Offer("w", 1, (0, 1), 0, (9, 9), (True, True))
    for meeting in found:
        entered(meeting, offer)
    talk(found)
    assert offers(found) == [None, None]


def test_a_site_that_is_silent_is_not_there():
    found = meetings(4, 4)
    assert offers(found, NOW + 1 + ALIVE_S + 0.1) == [None, None]
    assert [*found[0].reached(NOW + 1 + ALIVE_S + 0.1)] == [0]


def test_the_next_offer_comes_only_after_the_first_has_failed():
    found = meetings(4, 4)
    offer = offers(found)[0]
    assert offers(found, NOW + 5)[0] is None
    found[0].fail(offer.world)
    talk(found, NOW + 5)
    again = offers(found, NOW + 5.5)[0]
    assert again.number > offer.number
    assert again.world != offer.world


def test_a_world_that_was_entered_and_broke_is_followed_by_another():
    found = meetings(4, 4)
    offer = offers(found)[0]
    found[1].take(offer)
    for meeting in found:
        entered(meeting, offer)
        meeting.report(world="", members=())
    found[1].report(step=0, waiting=True)
    talk(found, NOW + 5)
    assert offers(found, NOW + 5.5)[0].waiting == (False, True)


def test_a_site_far_behind_in_another_world_starts_again_and_is_offered_nothing_before():
    found = meetings(20, 20 - NEAR_STEPS - 1, waiting=False)
    assert [meeting.is_behind(NOW + 1) for meeting in found] == [False, True]
    assert offers(found) == [None, None]


def test_sites_that_were_cut_off_and_are_as_far_meet_without_starting_again():
    found = meetings(20, 20 - NEAR_STEPS, waiting=False)
    assert not any(meeting.is_behind(NOW + 1) for meeting in found)
    assert offers(found)[0].waiting == (False, False)


def test_a_site_begins_alone_only_where_none_is_with_it_or_ahead():
    alone, other = meetings(3, 5)
    assert not alone.may_begin(NOW + 1.5)
    other.report(step=1, waiting=False)
    talk([alone, other])
    assert alone.may_begin(NOW + 1.5)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_an_old_epoch_is_refused(number):
    meeting, _ = meetings(3, 5)
    meeting.report(number=4)
    with pytest.raises(RunError, match="epoch"):
        meeting.take(Offer("w", number, (0, 1), 1, (3, 5), (True, True)))


def test_another_run_is_refused():
    meeting, _ = meetings(3, 5)
    with pytest.raises(RunError, match="another run"):
        meeting.hear(1, dataclasses.replace(meeting.own, run="other"), NOW)


@pytest.mark.parametrize("kind", [Status, Offer])
def test_what_makes_no_sense_is_refused(kind):
    with pytest.raises(RunError, match="can't be read"):
        kind.from_data({"members": "x", "steps": []})


def test_statuses_and_offers_survive_the_journey():
    offer = offers(meetings(3, 7, 5))[1]
    assert Offer.from_data(offer.to_data()) == offer
    status = Status("r", 3, False, "w", 2, (0, 2))
    assert Status.from_data(status.to_data()) == status
