"""How ranks find out that an exchange may end: laws over ranks with gradients in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader

pytest.importorskip("torch")
step_sync = pytest.importorskip("hvd_gradcomp.torch.reduce.step_sync")
ABSENT = StepHeader(Kind.ABSENT)
LAYERS = 4
NAMES = [f"layer{i}" for i in range(LAYERS)]


@st.composite
def steps_of_a_rank(draw):
    """Which layers each backward of a step brings; a layer comes once or not at all."""
    order = draw(st.permutations(range(LAYERS)))
    brought = order[: draw(st.integers(0, LAYERS))]
    cuts = sorted(draw(st.lists(st.integers(0, len(brought)), max_size=2)))
    edges = [0, *cuts, len(brought)]
    backwards = [set(brought[a:b]) for a, b in zip(edges, edges[1:])]
    return [backward for backward in backwards if backward]


def codes(rank):
    return tuple(
        step_sync.LATE
        if i in rank["late"]
        else step_sync.HERE * (i in rank["taken"] or rank["ended"])
        for i in range(LAYERS)
    )


def run_step(scripts, states):
    """One step on all ranks; what was taken and what came late, by rank."""
    ranks = [
        {"left": list(s), "taken": set(), "late": set(), "ended": False, "last": False}
        for s in scripts
    ]
    lates = [set() for _ in scripts]
    for state in states:
        state.begin()
    for _ in range(2 * LAYERS + 3):
        for rank in ranks:  # each goes on to its next round: the end of a backward, or `step`
            if not rank["left"]:
                rank["last"] = True
                continue
            brought = rank["left"].pop(0)
            rank["late" if rank["ended"] else "taken"] |= brought
        messages = [message(codes(r), step=7, last=r["last"], ended=r["ended"]) for r in ranks]
        heads = [word.header for word in messages]
        plain = step_sync.all_plain(heads)
        assert plain == all(word.layers == (step_sync.HERE,) * LAYERS for word in messages)
        assert step_sync.read(heads, [word.layers for word in messages]) == messages
        late_layers = [state.receive(messages, NAMES, range(len(ranks))) for state in states]
        assert all(one == late_layers[0] for one in late_layers) and all(
            s == states[0] for s in states
        )
        assert set(late_layers[0]) == set().union(*(r["late"] for r in ranks))
        for rank, late in zip(ranks, lates):
            assert not late & rank["late"], "nothing is added twice"
            late |= rank["late"]
            rank["late"] = set()
            rank["ended"] = states[0].ended
        if states[0].closed:
            break
    assert states[0].closed, "nobody waits for ever"
    for rank, late, script in zip(ranks, lates, scripts):
        assert not rank["left"], "no gradient comes behind the last round"
        assert rank["taken"] | late == set().union(set(), *script), "no gradient is lost"
        assert not rank["taken"] & late
    return lates


@settings(deadline=None)
@given(st.lists(steps_of_a_rank(), min_size=1, max_size=4), st.integers(1, 3))
def test_all_ranks_agree_and_lose_nothing(scripts, steps):
    states = [step_sync.StepSync() for _ in scripts]
    for _ in range(steps):
        run_step(scripts, states)


@settings(deadline=None)
@given(steps_of_a_rank(), st.integers(1, 4))
def test_what_came_late_on_all_ranks_is_awaited_from_then_on(script, size):
    states = [step_sync.StepSync() for _ in range(size)]
    first = run_step([script] * size, states)
    assert any(first) == (len(script) > 1)
    assert not any(run_step([script] * size, states))


def test_ranks_with_everything_need_one_round_of_headers():
    state = step_sync.StepSync()
    messages = [message((step_sync.HERE,) * LAYERS)] * 2
    assert step_sync.all_plain([w.header for w in messages])
    assert state.receive(messages, NAMES, [0, 1]) == []
    assert state.ended and state.closed


def test_a_rank_that_has_joined_lacks_nothing():
    """Horovod lets it add zeros to what the others say."""
    lacking = word(codes={2: 0})
    heads, layers = [lacking.header, ABSENT], [lacking.layers, [0] * LAYERS]
    state = step_sync.StepSync()
    assert not step_sync.all_plain(heads) and step_sync.all_plain([word().header, ABSENT])
    assert state.receive(step_sync.read(heads, layers), NAMES, [0, 1]) == []
    assert state.ended and state.ragged and not state.mixed and not state.closed
    last = word(codes={2: 0}, last=True, ended=True)
    assert state.receive(step_sync.read([last.header, ABSENT], layers), NAMES, [0, 1]) == []
    assert state.closed


def test_sums_that_differ_are_an_error_on_all_ranks():
    messages = [word(digest=digest) for digest in (5, 0, 5, 6)]
    with pytest.raises(
        step_sync.PayloadError, match=r"not the same on rank 3 as on the other ranks"
    ):
        step_sync.StepSync().receive(messages, NAMES, range(4))
    assert step_sync.StepSync().receive(messages[:3], NAMES, range(3)) == []


def message(layers, *, step=3, last=False, ended=False, digest=0):
    kind = Kind.REDUCED if ended else Kind.STEP
    return step_sync.SyncMessage.of(kind, step, layers, last=last, digest=digest)


def word(codes=(), **changes):
    layers = [step_sync.HERE] * LAYERS
    for layer, code in dict(codes).items():
        layers[layer] = code
    return message(layers, **changes)


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (word(step=4), OutOfStepError, "rank 0 in step 3, rank 1 in step 4"),
        (word(ended=True), OutOfStepError, "rank 0(, 2)? has begun another step"),
        (
            word(codes={2: step_sync.HERE | step_sync.CHANGED}),
            step_sync.GradientChangedError,
            "the gradient of layer2 was changed on rank 1 before it was reduced",
        ),
    ],
    ids=["step", "ended", "changed"],
)
def test_what_cannot_be_honoured_is_named(other, error, text):
    for messages in ([word(), other], [word(), other, word()]):
        with pytest.raises(error, match=text):
            step_sync.StepSync().receive(messages, NAMES, [0, 1, 2])


def test_a_change_behind_the_end_counts_only_where_ranks_differ():
    state = step_sync.StepSync()
    state.receive([word(), word(codes={0: 0})], NAMES, [0, 1])
    changed = word(last=True, ended=True, codes={1: step_sync.HERE | step_sync.CHANGED})
    assert state.receive([changed, changed], NAMES, [0, 1]) == [] and state.closed
    mixed = step_sync.StepSync()
    mixed.receive([word(), word(last=True, codes={0: 0})], NAMES, [0, 1])
    assert mixed.ended and mixed.mixed and mixed.closed, "who has called step waits for nobody"
    with pytest.raises(step_sync.GradientChangedError, match="called step"):
        mixed.receive([changed, word(last=True, ended=True)], NAMES, [0, 1])
