"""How ranks find out that they wait for each other: laws over what each has asked for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.runtime import stall_inspector

SETS = {0: (0, 1, 2), 1: (0, 1), 2: (1, 2)}
NAMES = ("a", "b", "gradcomp.0.end")


def pending_op(name, number=0):
    return stall_inspector.PendingOp(name, SimpleNamespace(process_set_id=number), lambda: False)


of_a_rank = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(sorted(SETS))), min_size=1, max_size=4
)


@settings(deadline=None)
@given(st.lists(st.none() | of_a_rank, min_size=3, max_size=3))
def test_ranks_are_stuck_if_nothing_is_asked_for_by_all_that_it_is_for(ranks):
    reports = {}
    for rank, one in enumerate(ranks):
        numbers = [0] * stall_inspector._REPORT_SIZE
        if one is not None:
            numbers = stall_inspector.pack_report([pending_op(*pair) for pair in one])
        reports[rank] = stall_inspector.parse_report(numbers)
        assert (reports[rank] is None) == (one is None), "one that has joined says nothing"
    wanted = {pair for one in ranks for pair in one or ()}
    can_come = any(
        all(ranks[rank] is None or (name, number) in ranks[rank] for rank in SETS[number])
        for name, number in wanted
    )
    assert stall_inspector.is_deadlocked(reports, SETS) == (
        any(r is not None for r in ranks) and not can_come
    )


def test_a_rank_that_does_not_wait_or_cannot_tell_all_is_not_stuck():
    waits = stall_inspector.parse_report(stall_inspector.pack_report([pending_op("a")]))
    busy = stall_inspector.parse_report(stall_inspector.pack_running())
    many = stall_inspector.parse_report(
        stall_inspector.pack_report([pending_op(f"a{i}") for i in range(100)])
    )
    assert not stall_inspector.is_deadlocked({0: waits, 1: busy, 2: waits}, SETS)
    assert not stall_inspector.is_deadlocked({0: many, 1: many, 2: waits}, SETS)
    assert not stall_inspector.is_deadlocked(
        {0: waits, 1: stall_inspector.parse_report(stall_inspector.pack_report([pending_op("b")]))},
        SETS,
    )
    assert many.text.endswith("a98, a99 and 98 more")


class Ranks:
    """Two ranks whose sums are formed here."""

    def __init__(self):
        self.contributions = {}
        self.watches = [
            stall_inspector.StallChannel(
                SimpleNamespace(process_set_id=0, size=lambda: 2, rank=lambda r=r: r, ranks=[0, 1]),
                lambda x, name, _, r=r: self.give(r, torch.tensor(x)),
                lambda: {0: (0, 1)},
            )
            for r in range(2)
        ]
        self.rounds = [0, 0]

    def give(self, rank, x):
        number = self.rounds[rank]
        self.rounds[rank] += 1
        parts = self.contributions.setdefault(number, {})
        parts[rank] = x
        return SimpleNamespace(
            ready=lambda: len(parts) == 2, wait=lambda: torch.stack(list(parts.values())).sum(0)
        )


def test_what_was_told_twice_by_all_is_raised_by_all():
    ranks = Ranks()
    first, second = ranks.watches
    for _ in range(2):  # the first rank waits for long, and nothing follows from that
        first.check([pending_op("a")])
    for look in range(4):
        for watch, name in ((first, "a"), (second, "b")):
            if look < 3:
                try:
                    watch.check([pending_op(name)])
                except stall_inspector.DeadlockError as error:
                    assert "rank 0 waits for a; rank 1 waits for b" in str(error)
                    assert not watch.pending
                    ranks.raised = getattr(ranks, "raised", 0) + 1
    assert ranks.raised == 2


def test_a_word_that_is_old_by_then_raises_nothing():
    ranks = Ranks()
    first, second = ranks.watches
    for step in range(6):  # what one has waited for has come by the time that the other tells
        first.check([pending_op(f"a{step}")])
        second.check([pending_op(f"b{step}")])


def test_a_word_of_one_rank_is_brought_to_its_end():
    ranks = Ranks()
    ranks.watches[0].check([pending_op("a")])
    assert ranks.watches[0].pending and not ranks.watches[1].pending
    ranks.watches[1].complete()
    ranks.watches[0].complete()
    assert not any(watch.pending for watch in ranks.watches)
