"""Wrong uses: each raises its error at once on every rank, and the next correct call works."""

import contextlib
import re

import misuse
import numpy as np
import pytest
from adamax import Adamax
from internals import device_update, ranks_in_words
from misuse import ONES, RANK, Env, N, cases_of
from public_api import begins_with_a_call
from strategies import STRATEGIES

import hpcstrat as hs

OF_ANOTHER = ("inhomogeneous", "cannot travel")  # NumPy's and pickle's error is the cause

several = pytest.mark.mpi(min_size=2)  # one rank cannot differ from another


CENTRAL, MIRRORED = (
    pytest.mark.parametrize("env", [kind], indirect=True)
    for kind in (hs.CentralStorageStrategy, hs.MirroredStrategy)
)


@pytest.fixture(scope="module", params=STRATEGIES)
def env(request, place):
    with place.make(request.param) as strategy, place.make(request.param) as other:
        yield Env(place, strategy, other)


@pytest.fixture(autouse=True)
def _works(env):
    yield
    env.works()


@contextlib.contextmanager
def named(case):
    """Names the case in what fails in the block."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"the case is {case}") from error


def error_of(env, case, odd, inside):
    """The error of a case, wrong where `odd`, if it states the facts."""
    with pytest.raises(case.error) as caught:
        env.run(case.program, odd, inside)
    error = caught.value
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert [fact for fact in case.facts if fact not in text] == [], text
    assert error.__cause__ is None or case.facts[-1] in OF_ANOTHER, "a chain of errors"
    return error


def check(env, table, inside=False, of_a_call: bool | None = True):
    """Checks a table's cases, on all ranks and, where they say how, on one rank alone."""
    for case in cases_of(table):
        with named(case):
            error = error_of(env, case, True, inside)
            assert of_a_call is None or begins_with_a_call(str(error)) == of_a_call
            for odd in sorted({0, N - 1}) if "odd" in case.program and N > 1 else ():
                error = error_of(env, case, RANK == odd, inside)
                assert RANK == odd or f"found by rank {odd}" in str(error)
            assert env.is_unchanged()


def check_different(env, table, inside=False):
    """Checks cases that are right on each rank but not alike: all ranks raise, and name each call."""
    for case in cases_of(table):
        for odd in range(N):
            with named(case):
                text = str(error_of(env, case, RANK == odd, inside))
                others = ranks_in_words([rank for rank in range(N) if rank != odd])
                assert f"rank {odd}" in text and others in text
                if "must make the same call" in text:  # later checks name shapes
                    assert len(re.findall(r", at \S+\.py:\d+ ", text)) == 2
        assert env.is_unchanged()


@CENTRAL
def test_across_replicas(env):
    check(env, misuse.ACROSS)


@MIRRORED
def test_in_a_replica(env):
    check(env, misuse.INSIDE, inside=True)


@CENTRAL
def test_errors_of_other_code(env):
    check(env, misuse.NOT_OF_A_CALL, of_a_call=False)


@several
@CENTRAL
def test_ranks_that_differ_across_replicas(env):
    check_different(env, misuse.DIFFERENT)


@several
@MIRRORED
def test_ranks_that_differ_in_a_replica(env):
    check_different(env, misuse.DIFFERENT_INSIDE, inside=True)


@several
@MIRRORED
def test_a_search_over_learning_rates_is_shown_the_way(env):
    """If only numbers differ. With other differences it would be misleading."""
    optimizer = hs.optimizers.SGD(0.5 + RANK)
    with pytest.raises(hs.ReplicaMismatchError) as one:
        env.s.run(lambda: optimizer.apply_gradients([(env.here(ONES), env.v)]))
    for fact in ("apply_gradients", "learning_rate=0.5", "To train a model on each rank"):
        assert fact in str(one.value)
    with pytest.raises(hs.ReplicaMismatchError) as other:
        env.s.reduce("MAX" if RANK else "SUM", env.each(ONES), None)
    assert "To train" not in str(other.value)


@CENTRAL
@pytest.mark.parametrize("place", ["CPU"], indirect=True)
@pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")
def test_masked_arrays_are_refused(env):
    """By their class: an array in which nothing is masked today may have a mask tomorrow."""
    masked = np.ma.array([1, 1e20], np.float32, mask=[False, True])
    plain = np.ones(2, np.float32)
    alone = misuse.MASKED_ALONE.split("\n")
    for program in filter(None, misuse.MASKED.split("\n") + alone):
        with named(program):
            for value in (masked, np.ma.array(plain), np.ma.array(plain, mask=False)):
                with pytest.raises(TypeError, match="masked array.* mask would be lost") as caught:
                    env.run(program, True, x=value)
                assert begins_with_a_call(str(caught.value))
            if N > 1 and program not in alone:
                with pytest.raises(
                    (TypeError, hs.ReplicaMismatchError), match="masked array|make the same call"
                ):
                    env.run(program, True, x=masked if RANK == N - 1 else plain)
            assert env.is_unchanged()
            env.run(program, True, x=plain)
            env.names["two"].assign(np.zeros(2))


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_arrays_on_a_gpu_where_replicas_compute_on_the_cpu(env, place):
    env.names["away"] = place.xp.asarray(ONES)
    with type(env.s)(["CPU:0"] * N) as strategy:
        env.names["cpu"] = strategy
        check(env, misuse.ON_A_GPU.replace("away()", "(away if odd else ONES)"))
        assert strategy.reduce("SUM", strategy.run(lambda: ONES), None).tolist() == [N] * 3


@several
@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_arrays_on_the_gpu_of_some_ranks_only(env, place):
    here = place.xp.asarray(ONES)
    for even, odd in [([here], [ONES]), ([here, ONES], [ONES, here]), ([here, here], [here, ONES])]:
        env.names |= {"even": even, "other_place": odd}
        check_different(
            env, misuse.DIFFERENT_PLACES.replace("somewhere()", "(other_place if odd else even)")
        )


@several
@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_ranks_that_would_share_a_gpu(env, place, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(
        RuntimeError, match=rf"ranks 0.* would compute on one GPU, 1 for {N} ranks; .*share-gpu"
    ):
        type(env.s)([place.devices[0]] * N)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_what_orders_numbers_takes_no_complex_ones(env, place):
    def clipped():
        return hs.optimizers.SGD(0.5, clipvalue=0.25, name="mine")

    for make, dtype, facts in (
        (lambda: hs.optimizers.Lion(0.5), "c8", "numpy.sign of elements.* of complex64"),
        (lambda: Adamax(0.5), "c8", "numpy.absolute, numpy.maximum of elements.* of complex64"),
        (clipped, "c16", "mine.apply_gradients: .*clipvalue takes .*maximum, .*minimum"),
        (clipped, "rows", "numpy.maximum, numpy.minimum.* of complex64"),
    ):
        optimizer, is_sparse = make(), dtype == "rows"
        real = env.variable(np.full((900, 5), 2, np.float32))
        v = env.variable(np.full((900, 5), 2, "c8" if is_sparse else dtype))
        gradient = place.xp.ones(v.shape, v.dtype)
        if is_sparse:
            gradient = hs.IndexedSlices(gradient[:2], place.xp.asarray([3, 1]))
        pairs = [(place.xp.ones(v.shape, np.float32), real), (gradient, v)]
        with pytest.raises(TypeError, match=facts):
            env.s.run(lambda optimizer=optimizer, pairs=pairs: optimizer.apply_gradients(pairs))
        assert optimizer.iterations == 0 and (real.numpy() == v.numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_kernel_that_does_not_compile_on_one_rank(env, place, is_sparse, monkeypatch):
    v, optimizer = env.variable(np.full((900, 5), 2, np.float32)), hs.optimizers.SGD(0.5)
    gradient = place.xp.ones((900, 5), np.float32)
    if is_sparse:
        gradient = hs.IndexedSlices(gradient[:2], place.xp.asarray([3, 1]))

    def step():
        env.s.run(lambda: optimizer.apply_gradients([(gradient, v)]))

    def fail(*_, **__):
        raise RuntimeError("it does not compile")

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(device_update, "update_kernel", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it does not compile"):
                step()
            assert optimizer.iterations == 0 and (v.numpy() == 2).all()
    step()
    expected = np.full((900, 5), 2.0)
    expected[[3, 1] if is_sparse else slice(None)] -= 0.5 * N
    np.testing.assert_allclose(v.numpy(), expected)
    assert optimizer.iterations == 1
