"""Who draws which micro-batch of a rank, and what happens to the work of those who are lost."""

import pytest

pytest.importorskip("diffusers")

from cosmos_app.wfm.disaggregated.orders import OrderBook
from cosmos_wfm import RolloutOrder


def order(step, place):
    return RolloutOrder(step=step, place=place, numbers=(place,), version=step)


def told(book):
    """Return everything that somebody is told to draw now, as who, step and place."""
    pairs = []
    while pair := book.next():
        pairs.append((pair[0], pair[1].step, pair[1].place))
    return pairs


def test_the_earliest_order_goes_to_who_has_been_free_for_longest():
    book = OrderBook()
    book.free("b")
    assert told(book) == []
    book.order([order(0, 0), order(0, 1), order(1, 0)])
    book.free("a")
    assert told(book) == [("b", 0, 0), ("a", 0, 1)]
    book.free("a")
    book.free("a")
    assert told(book) == [("a", 1, 0)]


def test_what_a_lost_one_drew_is_given_to_others_before_all_that_waits():
    book = OrderBook()
    book.order([order(0, 0), order(0, 1), order(0, 2), order(1, 0)])
    for who in ("a", "a", "b", "a"):
        book.free(who)
    assert told(book) == [("a", 0, 0), ("a", 0, 1), ("b", 0, 2), ("a", 1, 0)]
    assert book.bring(0, 0)
    book.order([order(1, 1)])
    book.free("b")
    book.free("b")
    assert told(book) == [("b", 1, 1)]

    assert book.lose("a") == 2  # what it had brought is not drawn again
    book.free("c")
    book.free("c")
    assert told(book) == [("b", 0, 1), ("c", 1, 0)]


def test_who_is_lost_while_it_is_free_is_told_nothing():
    book = OrderBook()
    book.free("a")
    assert book.lose("a") == 0
    book.order([order(0, 0)])
    assert told(book) == []


def test_what_nobody_was_told_to_draw_is_not_wanted():
    book = OrderBook()
    book.order([order(0, 0)])
    assert not book.bring(0, 0)
    book.free("a")
    assert told(book) == [("a", 0, 0)]
    assert book.bring(0, 0)
    assert not book.bring(0, 0)


def test_the_work_of_a_silent_one_goes_to_others_and_it_is_asked_again_once_it_speaks():
    book = OrderBook()
    book.order([order(0, 0), order(0, 1)])
    for who in ("a", "a", "a", "b"):
        book.free(who)
    assert told(book) == [("a", 0, 0), ("a", 0, 1)]
    assert book.suspend("a") == 2
    assert told(book) == [("b", 0, 0)]  # and not a, which is free
    assert book.suspend("a") == 0
    book.free("b")
    assert told(book) == [("b", 0, 1)]

    book.order([order(1, 0), order(1, 1)])
    assert told(book) == []
    book.wake("a")
    assert told(book) == [("a", 1, 0)]  # it was free for one more
    book.wake("a")
    assert told(book) == []


def test_what_a_silent_one_brings_is_taken_once_whoever_draws_it_now():
    book = OrderBook()
    book.order([order(0, 0), order(0, 1)])
    book.free("a")
    book.free("a")
    assert len(told(book)) == 2
    book.suspend("a")
    book.free("b")
    assert told(book) == [("b", 0, 0)]

    assert book.bring(0, 0)  # a's, which b is still drawing
    assert book.bring(0, 1)  # which nobody draws
    assert not book.bring(0, 0)
    book.free("b")
    assert told(book) == []


def test_a_silent_one_that_is_lost_is_not_asked_again():
    book = OrderBook()
    book.free("a")
    book.suspend("a")
    book.lose("a")
    book.wake("a")
    book.order([order(0, 0)])
    assert told(book) == []
