"""Datasets of different lengths, cut to the length of the shortest."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.tensorflow.comm.horovod import gather_objects, takes_part
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER

_INFINITE, _NO_DATASET = int(tf.data.INFINITE_CARDINALITY), -3


def even_batches(
    dataset: tf.data.Dataset, process_set: Any = horovod.global_process_set
) -> tf.data.Dataset:
    """Bound a dataset so that all ranks have the same number of batches and end an epoch together.

    For `model.fit(hvd.even_batches(dataset), ...)` and custom loops; all ranks call it, for
    validation data as well if callbacks average its metrics. Rank 0 warns how many batches each
    rank leaves out in an epoch: those at the end, which shuffling changes. A dataset of unknown
    length is read once, to count its batches.

    Args:
        dataset: this rank's, of batches.
        process_set: the ranks that take part.

    Returns:
        The dataset, with as many batches as the rank that has fewest. On a rank that is not in the
        process set, and if all datasets are infinite, the dataset as it is.

    Raises:
        TypeError: on all ranks, if one of them gives no `tf.data.Dataset`.
        ValueError: on all ranks, if one of them has no batch.
    """
    if not takes_part(process_set):
        return dataset
    counts = gather_objects(_count(dataset), int, "gradcomp.batches", process_set)
    ranks = process_set.ranks or range(len(counts))

    def ranks_with(number: int) -> str:
        return ", ".join(str(rank) for rank, count in zip(ranks, counts) if count == number)

    if _NO_DATASET in counts:
        raise TypeError(
            f"even_batches takes a tf.data.Dataset, and rank {ranks_with(_NO_DATASET)} gives "
            "something else; with other data give fit the same steps_per_epoch= on all ranks"
        )
    finite = [count for count in counts if count != _INFINITE]
    if not finite:
        return dataset
    fewest = min(finite)
    if fewest == 0:
        raise ValueError(f"rank {ranks_with(0)} has no batch: give each rank a part of the data")
    dropped = [(rank, count - fewest) for rank, count in zip(ranks, counts) if count > fewest]
    if dropped and process_set.rank() == 0:
        LOGGER.warning(
            "even_batches: an epoch has %d batches, so it leaves out %s",
            fewest,
            ", ".join(f"{count} of rank {rank}" for rank, count in dropped),
        )
    return dataset if counts[process_set.rank()] == fewest else dataset.take(fewest)


def _count(dataset: Any) -> int:
    """Return the number of batches."""
    if not isinstance(dataset, tf.data.Dataset):
        return _NO_DATASET
    count = int(dataset.cardinality())
    if count == int(tf.data.UNKNOWN_CARDINALITY):
        count = int(dataset.reduce(tf.constant(0, tf.int64), lambda number, *_: number + 1))
    return count
