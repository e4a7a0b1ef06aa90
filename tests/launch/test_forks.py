"""Variables of a process that the program forks: they are its own."""

import pytest

PROGRAM = """
    import os, warnings
    import numpy as np
    import hpcstrat as hs

    warnings.filterwarnings("ignore", ".*use of fork.*")  # of Python 3.12 and later
    strategy = hs.MirroredStrategy(["CPU:0"] * hs.size())
    with strategy.scope():
        before = hs.Variable(np.ones(4))
    to_parent, to_child = os.pipe(), os.pipe()

    def send(pipe): os.write(pipe[1], b"x")
    def wait(pipe): assert os.read(pipe[0], 1) == b"x"

    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = hs.Variable(np.full(4, 7.0))
            send(to_parent)
            wait(to_child)  # the parent has made variables, too
            assert own.numpy().tolist() == [7.0] * 4
            own.assign(np.full(4, 8.0))
            assert own.numpy().tolist() == [8.0] * 4
            status = 0
        finally:
            os._exit(status)
    os.close(to_parent[1])  # so that the end of the child is seen
    wait(to_parent)
    with strategy.scope():
        after = hs.Variable(np.zeros(4))
    outside = hs.Variable(np.zeros(4))
    send(to_child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = [v.numpy().tolist() for v in (before, after, outside)]
    assert found == [[1.0] * 4, [0.0] * 4, [0.0] * 4], found
    after.assign(np.full(4, 2.0))
    assert after.numpy().tolist() == [2.0] * 4
    print("done")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_has_variables_of_its_own(launch, ranks):
    result = launch(PROGRAM, ranks, env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.stdout, result.stderr) == (0, ranks * "done\n", "")
