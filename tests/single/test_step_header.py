"""Headers that ranks compare before they act: the same error on all of them, or none."""

from __future__ import annotations

import pytest

from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import SIZE, Kind, StepHeader, compare, values

STEP = StepHeader(Kind.STEP, step=3)
REDUCED = StepHeader(Kind.REDUCED, step=3)
VERIFY = StepHeader(Kind.VERIFY)
EXCHANGE = StepHeader(Kind.EXCHANGE, step=2, part=1, clock=8)
REQUESTED = EXCHANGE._replace(kind=Kind.REQUESTED_EXCHANGE)
JOINED = StepHeader(Kind.JOINED, step=3)
ABSENT = StepHeader(*[0] * SIZE)


@pytest.mark.parametrize(
    "headers",
    [
        [STEP, STEP],
        [STEP, STEP._replace(fault=1, flags=5, settings=7, digest=9)],
        [STEP._replace(policy=1), JOINED, ABSENT],
        [ABSENT, ABSENT],
        [VERIFY, VERIFY],
        [REQUESTED, REQUESTED._replace(clock=9)],
    ],
)
def test_ranks_at_the_same_place_have_no_error(headers):
    assert compare(dict(enumerate(headers))) is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (STEP._replace(step=4), "different steps: rank 0 in step 3, rank 5 in step 4. Load the"),
        (JOINED._replace(step=4), "different steps: rank 0 in step 3, rank 5 in step 4. Load the"),
        (STEP._replace(policy=1), "only some of the ranks use a GradScaler: .* with a GradScaler."),
        (REDUCED, "rank 0 has begun another step, while other ranks still are to call step"),
        (VERIFY, "rank 5 calls verify, and the other ranks are in backward"),
        (EXCHANGE, "different exchanges: .* after 8 steps, with 2 exchanges before it. Call step"),
    ],
)
def test_ranks_at_different_places_are_listed(other, text):
    error = compare({0: STEP, 5: other})
    assert isinstance(error, OutOfStepError)
    with pytest.raises(OutOfStepError, match=text):
        raise error


def test_local_steps_count_unless_a_schedule_leaves_that_open():
    later = EXCHANGE._replace(clock=9)
    assert "rank 1 after 9 steps" in str(compare({0: EXCHANGE, 1: later}))
    assert compare({0: EXCHANGE, 1: later}, clocks=False) is None
    assert "steps in exchange()" in str(compare({0: EXCHANGE, 1: REQUESTED}))


def test_values_are_of_ranks_that_take_part_and_have_one():
    headers = dict(enumerate([STEP._replace(digest=7), STEP, JOINED._replace(digest=8), ABSENT]))
    assert values(headers, "digest") == {0: 7}
