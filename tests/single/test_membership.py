"""Ranks a commit apart, and what is said of one that left; a world of them in one process."""

from __future__ import annotations

import logging
import threading

import pytest

from hvd_gradcomp.runtime.elastic import Lost, Membership, RankState


class Values:
    """Stands for Horovod's state: one value that all share, and one of its own."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.shared = self.residual = 0.0
        self.saved = (0.0, 0.0)

    def commit(self):
        self.save()

    def save(self):
        self.saved = (self.shared, self.residual)

    def restore(self):
        self.shared, self.residual = self.saved

    def sync(self):
        self.shared = self._gather(self.shared)[0]


class Rank(Membership, Values):
    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.begin()

    def _gather(self, item):
        return self.world.gather(self.rank, item)

    def _place(self):
        return self.rank, 0

    def _squares(self):
        return self.residual**2

    def _committed(self):
        return self.saved

    def _recommit(self, copies):
        self.saved = copies

    def _forget(self):
        self.residual = 0.0

    def _resize(self):
        pass


class World:
    """Threads in lockstep."""

    def run(self, ranks, program):
        self.barrier, self.items = threading.Barrier(len(ranks), timeout=10), [None] * len(ranks)
        self.errors = []
        for place, rank in enumerate(ranks):
            rank.rank = place
        threads = [threading.Thread(target=self._one, args=(rank, program)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.errors

    def _one(self, rank, program):
        try:
            program(rank)
        except Exception as error:
            self.errors.append(str(error))

    def gather(self, rank, item):
        self.items[rank] = item
        self.barrier.wait()
        values = list(self.items)
        self.barrier.wait()
        return values


def advanced(rank):
    """A step: what is shared grows by what all see, what is kept by what is the rank's."""
    rank.shared += 1.0
    rank.residual += 3.0 + rank.rank


def seat(rank):
    return RankState(rank._process, rank.rank, rank._host, 0, rank._commits, rank._squares())


def test_ranks_a_commit_apart_go_back_to_the_one_they_share(caplog):
    world = World()
    ranks = [Rank(world, place) for place in range(3)]
    assert not world.run(ranks, lambda rank: rank.sync())
    for _ in range(2):
        assert not world.run(ranks, lambda rank: (advanced(rank), rank.commit()))
    committed = [rank.saved for rank in ranks]
    for rank in ranks:
        advanced(rank)
    # Rank 1 heard from all and saved; rank 2 was still waiting when rank 0 died.
    ranks[1]._record_members([seat(rank) for rank in ranks])
    ranks[1].save()
    for rank in ranks[1:]:
        rank.restore()
    assert ranks[1].shared == ranks[2].shared + 1
    survivors = ranks[1:]
    with caplog.at_level(logging.WARNING, "hvd_gradcomp"):
        assert not world.run(survivors, lambda rank: rank.sync())
    assert [rank.saved for rank in survivors] == committed[1:]
    assert [(rank.shared, rank.residual) for rank in survivors] == committed[1:]
    for rank in survivors:
        assert rank.lost == [Lost(0, 6.0)]
    assert len(caplog.records) == 1
    assert "rank 0 (" in caplog.text and "a residual of norm 6 (of 14.14 in all)" in caplog.text


def test_one_that_joins_begins_with_nothing_of_its_own():
    world = World()
    old = Rank(world, 0)
    assert not world.run([old], lambda rank: rank.sync())
    assert not world.run([old], lambda rank: (advanced(rank), rank.commit()))
    new = Rank(world, 0)
    new.residual = 5.0  # from a checkpoint, say: the others have gone on since
    assert not world.run([old, new], lambda rank: rank.sync())
    assert (new.shared, new.residual, old.shared, old.residual) == (1.0, 0.0, 1.0, 3.0)
    assert old.lost == new.lost == []


def test_at_the_start_all_keep_what_they_loaded():
    world = World()
    ranks = [Rank(world, place) for place in range(2)]
    ranks[1].residual = 5.0
    assert not world.run(ranks, lambda rank: rank.sync())
    assert ranks[1].residual == 5.0


@pytest.mark.parametrize("ahead", [0, 1])
def test_commits_of_one_rank_alone_are_an_error_on_all(ahead):
    world = World()
    ranks = [Rank(world, place) for place in range(2)]
    assert not world.run(ranks, lambda rank: rank.sync())
    for _ in range(2):
        ranks[ahead].save()
    errors = world.run(ranks, lambda rank: rank.sync())
    assert len(errors) == 2 and all("call state.commit() on all ranks" in e for e in errors)
