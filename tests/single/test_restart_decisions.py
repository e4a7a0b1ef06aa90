"""Whether the launcher restarts ranks, with how many and after which pause: by how they ended."""

import hypothesis
import hypothesis.strategies as st
import pytest
from internals import Decision, Ended, Note, Policy, State, decide

KILLED, SEGFAULT = 9, 139


def ended(status, step=0, did_steps=False, text=None, state=State.FAILED, **more):
    failure = None if text is None else Note(0, 1, state, 1.0, text)
    return Ended(status, 4, step, did_steps, failure, None, **more)


def histories(policy, ends):
    """What has happened after each end, with the ranks that were decided before."""
    history = []
    ranks = policy.ranks
    for end in ends:
        history.append(end._replace(ranks=ranks))
        yield history
        ranks = decide(policy, history).ranks


def brief(decision):
    """The number of ranks and the pause, or why there is no restart."""
    return (decision.ranks, decision.pause) if decision.ranks else decision.why


DONE = ended(0)
DIED = ended(KILLED)
DIED_AT_5 = ended(KILLED, 5, True)
ENDED_AT_5 = ended(1, 5, True)
EXITED = ended(1)
RAISED = ended(1, text="OutOfMemoryError: the driver still takes a killed context down, at x.py:1")
ASKED = "the ranks were asked to end, and have saved"
FAILED_EARLY = "it failed before it had done a step"
FAILED_AGAIN = "it has failed in the same way at the same step before"
ENDED_TWICE = "it has ended twice before it had done a step"
ENDED_OFTEN = "it has ended {} times in a row before it had done a step"
RESTARTED = "it has been restarted 3 times (--restarts)"


def raised(text, step, did_steps=True):
    return ended(1, step, did_steps, f"ValueError: {text}, at x.py:7 in step")


FOUR = Policy(4, 3, 4)
OFTEN = Policy(4, 9, 4)

# The policy, how one start after another ends, and what is decided each time.
CASES = {
    "what ends well": (FOUR, [DONE], [""]),
    "without --restarts": (Policy(4, 0, 4), [DIED_AT_5], [""]),
    "a rank leaves the others": (FOUR, [ended(1, 5, True, is_incomplete=True)], [(4, 0)]),
    "an exception with the name of an interrupt": (
        FOUR,
        [ended(1, 5, True, "KeyboardInterrupted: no, at x.py:3 in f")],
        [(4, 0)],
    ),
    "an exception with the name of a preemption": (
        FOUR,
        [ended(1, 5, True, "preempted_node: gone, at x.py:3 in f")],
        [(4, 0)],
    ),
    "interrupted": (
        FOUR,
        [ended(85, 5, True, "KeyboardInterrupt, at x.py:3 in f", State.INTERRUPTED)],
        ["a rank was interrupted"],
    ),
    "preempted": (FOUR, [ended(85, 5, True, "", State.PREEMPTED)], [ASKED]),
    "preempted on other hosts": (FOUR, [ended(75, 5, True, are_seen=False)], [ASKED]),
    "a signal to the launcher, and a kill": (
        FOUR,
        [ended(KILLED, 5, True, signal=15)],
        ["the launcher was sent SIGTERM"],
    ),
    "a signal to the launcher": (
        FOUR,
        [ended(1, 5, True, signal=2)],
        ["the launcher was sent SIGINT"],
    ),
    "a signal to the launcher in a pause": (
        FOUR,
        [DIED_AT_5, RAISED, RAISED._replace(signal=15)],
        [(4, 0), (4, 2), "the launcher was sent SIGTERM"],
    ),
    "dead ranks": (FOUR, [DIED_AT_5, ended(SEGFAULT, 5)], [(4, 0), (4, 0)]),
    "more deaths than restarts": (FOUR, [DIED_AT_5] * 4, [*[(4, 0)] * 3, RESTARTED]),
    "the same exception at the same step": (
        FOUR,
        [raised("3", 5), DIED_AT_5, raised("3", 5)],
        [(4, 0), (4, 0), FAILED_AGAIN],
    ),
    "the same exception at the same step, before one is done again": (
        FOUR,
        [raised("3", 5), raised("3", 5, did_steps=False)],
        [(4, 0), FAILED_AGAIN],
    ),
    "another exception, another step": (
        FOUR,
        [raised("3", 5), raised("4", 5), raised("3", 6)],
        [(4, 0), (4, 0), (4, 0)],
    ),
    "an exception before any step": (Policy(4, 3, 1), [raised("3", 0, False)], [FAILED_EARLY]),
    "an exception before any step, after a kill": (
        Policy(4, 3, 1),
        [DIED, raised("3", 0, False)],
        [(4, 0), FAILED_EARLY],
    ),
    "exceptions after steps": (
        OFTEN,
        [DIED_AT_5, *[RAISED] * 4],
        [(4, 0), (4, 2), (4, 4), (4, 8), ENDED_OFTEN.format(4)],
    ),
    "statuses after steps": (
        OFTEN,
        [DIED_AT_5, *[EXITED] * 4],
        [(4, 0), (4, 2), (4, 4), (4, 8), ENDED_OFTEN.format(4)],
    ),
    "pauses start again after steps": (
        OFTEN,
        [DIED_AT_5, RAISED, RAISED, DIED_AT_5, RAISED],
        [(4, 0), (4, 2), (4, 4), (4, 0), (4, 2)],
    ),
    "pauses start again after kills": (
        OFTEN,
        [ENDED_AT_5, RAISED, DIED, RAISED],
        [(4, 0), (4, 2), (4, 0), (4, 2)],
    ),
    "a GPU that is not free yet costs no rank": (
        Policy(4, 3, 1),
        [DIED_AT_5, RAISED, RAISED],
        [(4, 0), (4, 2), (4, 4)],
    ),
    "fewer ranks, for longer than there are pauses": (
        Policy(8, 9, 2),
        [DIED_AT_5, *[EXITED] * 7],
        [(8, 0), (7, 2), (6, 4), (5, 8), (4, 8), (3, 8), (2, 8), ENDED_OFTEN.format(7)],
    ),
    "two equal ends before a step": (FOUR, [EXITED, EXITED], [(4, 0), ENDED_TWICE]),
    "two different ends before a step": (
        FOUR,
        [EXITED, ended(3), ENDED_AT_5],
        [(4, 0), (4, 0), (4, 0)],
    ),
    "fewer ranks before two equal ends end it": (
        Policy(4, 9, 3),
        [EXITED, EXITED, EXITED],
        [(4, 0), (3, 0), ENDED_TWICE],
    ),
    "three kills before a step": (FOUR, [DIED] * 3, [(4, 0)] * 3),
    "fewer ranks, and all again after a step": (
        Policy(4, 9, 2),
        [*[DIED] * 5, DIED_AT_5, EXITED],
        [(4, 0), (3, 0), (2, 0), (2, 0), (2, 0), (4, 0), (3, 2)],
    ),
}


@pytest.mark.parametrize("policy, ends, decisions", CASES.values(), ids=CASES)
def test_what_is_decided(policy, ends, decisions):
    assert [brief(decide(policy, history)) for history in histories(policy, ends)] == decisions


# Launchers' numbers for INT and TERM; MPICH also returns 15 after an ABRT and the KILLs it sends.
@pytest.mark.parametrize("text", [None, ""])
@pytest.mark.parametrize("status", [75, 2, 130, 15, 143])
def test_what_was_not_asked_to_end_is_restarted_whatever_the_status(status, text):
    end = ended(status, 5, True, text, State.STARTED)
    assert decide(FOUR, [end]) == Decision(4)


failures = st.builds(
    Note,
    rank=st.integers(0, 3),
    process=st.just(1),
    text=st.sampled_from(["", "ValueError: 3", "ValueError: 4"]),
    time=st.just(1.0),
    # Mostly failures, so that histories become long.
    state=st.sampled_from([State.FAILED] * 8 + [State.INTERRUPTED, State.PREEMPTED]),
)
ends_of_a_start = st.builds(
    Ended,
    status=st.sampled_from([0, 1, 3, KILLED, SEGFAULT, 75] + [1, KILLED] * 3),
    ranks=st.just(0),
    step=st.integers(0, 3),
    did_steps=st.booleans(),
    failure=st.none() | failures,
    dead=st.none() | st.integers(0, 3),
    signal=st.sampled_from([0] * 15 + [15]),
    are_seen=st.booleans(),
)
policies = st.integers(1, 6).flatmap(
    lambda ranks: st.builds(Policy, st.just(ranks), st.integers(0, 12), st.integers(1, ranks))
)


@hypothesis.given(policies, st.lists(ends_of_a_start, min_size=1, max_size=20))
def test_whatever_happens_the_policy_is_kept(policy, ends):
    restarts = 0
    for history in histories(policy, ends):
        decision = decide(policy, history)
        assert decide(policy, tuple(history)) == decision
        if not decision.ranks:
            break
        restarts += 1
        assert restarts <= policy.restarts
        assert policy.min_ranks <= decision.ranks <= policy.ranks
        assert history[-1].status != 0 and history[-1].why_deliberate is None and not decision.why
