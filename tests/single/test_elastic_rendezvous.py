"""Agreement of processes that come and go on who trains together; threads stand for them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from hvd_gradcomp.cli import main
from hvd_gradcomp.torch.membership import rendezvous
from hvd_gradcomp.torch.membership.rendezvous import LeaveNotice, Rendezvous, RendezvousError

PATIENCE, TIMEOUT = 0.6, 3.0


@pytest.fixture
def store():
    return rendezvous.serve("localhost", 0)


def process(store, minimum=1, maximum=None, name="training", timeout=TIMEOUT):
    return Rendezvous(f"localhost:{store.port}", name, minimum, maximum, PATIENCE, timeout)


def meet(processes):
    """Let all meet at once; return what each has got, an error too."""

    def one(each):
        try:
            return each.meet()
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def died(one):
    """Stop its signs of life, and say nothing."""
    one._pulse.stop()


def test_all_have_the_same_list_and_ranks_stay_in_order(store):
    three = [process(store, maximum=3) for _ in range(3)]
    first = meet(three)
    assert first[0] == first[1] == first[2] and first[0].number == 1 and first[0].before == []
    assert set(first[0].processes) == {each.process for each in three}
    again = meet(three)
    assert {g.number for g in again} == {2} and again[0].processes == first[0].processes


def test_who_is_silent_is_left_out_soon(store):
    three = [process(store, maximum=3) for _ in range(3)]
    meet(three)
    died(three[1])
    begin = time.monotonic()
    outcomes = meet([three[0], three[2]])
    assert time.monotonic() - begin < TIMEOUT
    assert outcomes[0] == outcomes[1] and three[1].process not in outcomes[0].processes


def test_who_left_is_not_waited_for_and_finished_ranks_count(store):
    two = [process(store, minimum=2) for _ in range(2)]
    meet(two)
    two[0].leave(LeaveNotice(finished=True, handed_over=False, exchanges=[3]))
    (outcome,) = meet(two[1:])
    assert outcome.processes == [two[1].process] and outcome.before[:] != outcome.processes
    assert two[1].leave_notice(two[0].process) == LeaveNotice(True, False, [3])
    assert two[1].leave_notice(two[1].process) is None


def test_who_joins_is_seen_and_waits_for_those_that_train(store):
    two = [process(store, maximum=3) for _ in range(2)]
    meet(two)
    assert not two[0].called
    new = process(store, maximum=3)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new.meet)
        time.sleep(0.3)
        assert two[0].called and not joining.done()
        outcomes = meet(two)
        assert joining.result() == outcomes[0] and outcomes[0].processes[-1] == new.process
    late = process(store, maximum=3)  # there is no room
    (error,) = meet([late])
    assert "with no place to give as max_ranks=3" in error and not two[0].called


def test_two_that_come_late_do_not_begin_without_those_that_train(store):
    one = process(store, timeout=60.0)
    meet([one])
    for error in meet([process(store), process(store)]):
        assert "2 of at least 1 ranks have met" in error and one.process in error


def test_too_few_are_an_error_on_all(store):
    for error in meet([process(store, minimum=3) for _ in range(2)]):
        assert "2 of at least 3 ranks have met at localhost:" in error


def test_a_training_that_has_ended_does_not_begin_again(store):
    one = process(store)
    meet([one])
    one.leave(LeaveNotice(True, False, []))
    (error,) = meet([process(store)])
    assert "the training 'training' has ended" in error
    (other,) = meet([process(store, name="another")])
    assert other.number == 1


def test_a_store_that_is_gone(caplog):
    store = rendezvous.serve("localhost", 0)
    one = process(store, timeout=60.0)
    meet([one])
    del store
    assert not one.called and not one.called
    assert caplog.text.count("does not answer: training goes on") == 1
    (error,) = meet([one])
    assert "a meeting of the ranks failed: the rendezvous at localhost:" in error


def test_no_other_address_than_that_of_the_host_answers():
    store = rendezvous.serve("127.0.0.1", 0)
    socket.create_connection(("127.0.0.1", store.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1, port 29400: "),
        (("--host", "host.invalid"), "cannot listen on host.invalid, port 29400: "),
        (("--host", "localhost", "--port"), "cannot listen on localhost, port "),
        (("--port", "99999"), "99999 is not in the range"),
    ],
)
def test_what_cannot_be_listened_on_is_a_message(arguments, message, store):
    taken = [str(store.port)] if arguments[-1] == "--port" else []
    result = CliRunner().invoke(main, ["rendezvous", *arguments, *taken])
    assert result.exit_code and message in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("nowhere", "", 1, None, 1.0, 1.0), "takes 'host:port'"),
        (("localhost:0", "", 1, None, 1.0, 1.0), "takes 'host:port'"),
        (("localhost:99999", "", 1, None, 1.0, 1.0), "takes 'host:port'"),
        ((29400, "", 1, None, 1.0, 1.0), "takes 'host:port'"),
        (("localhost:1", "", 0, None, 1.0, 1.0), "min_ranks must be at least 1"),
        (("localhost:1", "", 3, 2, 1.0, 1.0), "max_ranks no less, got 3 and 2"),
        (("localhost:1", "", 1, None, 0.0, 1.0), "patience and timeout are positive"),
    ],
)
def test_what_is_impossible_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Rendezvous(*how)
