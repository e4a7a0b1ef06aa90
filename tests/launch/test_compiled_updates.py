"""Where the compiled loops of large updates are kept, by programs that begin without any."""

import os

import pytest
from internals import compiled

PROGRAM = """
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(200_000, np.float32))
    optimizer = hs.optimizers.Adam(0.5)
for _ in range(3):
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(w.shape, np.float32), w)]))
print(w.numpy().tobytes().hex()[:16])
"""


@pytest.mark.skipif(compiled.compiler() is None, reason="there is no C compiler")
@pytest.mark.parametrize("ranks", [None, 3])
def test_one_process_compiles_and_the_others_wait(launch, tmp_path, ranks):
    results = []
    for setting, libraries in (("1", 1), ("1", 1), ("0", 1)):
        env = {"XDG_CACHE_HOME": os.fspath(tmp_path / "cache"), "HPCSTRAT_COMPILE": setting}
        results.append(launch(PROGRAM, ranks, env=env).stdout)
        assert len(list((tmp_path / "cache" / "hpcstrat").glob("*.so"))) == libraries
    assert len(set(results)) == 1 and results[0]


def test_forbidden_from_the_start(launch, tmp_path):
    env = {"XDG_CACHE_HOME": os.fspath(tmp_path / "cache"), "HPCSTRAT_COMPILE": "0"}
    launch(PROGRAM, 2, env=env)
    assert not (tmp_path / "cache").exists()


def test_a_setting_that_means_nothing(launch):
    result = launch(PROGRAM, 2, env={"HPCSTRAT_COMPILE": "perhaps"})
    assert result.status != 0 and "HPCSTRAT_COMPILE is 'perhaps'; it must be 1 or 0" in result.stderr
