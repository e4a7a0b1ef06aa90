"""Where the compiled loops of large updates are cached, for programs that start without any."""

import os

import pytest
from internals import compiled
from slow import slow_but

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
@pytest.mark.parametrize("ranks, starts", slow_but([], [(2, 1), (None, 2), (3, 2)]))
def test_one_process_compiles_and_the_others_wait(launch, tmp_path, ranks, starts):
    """Unless that is forbidden; NumPy then returns the same bits, and nothing is cached."""
    compiler, folder, noted = (
        tmp_path / "compiler",
        tmp_path / "cache" / "hpcstrat",
        tmp_path / "noted",
    )
    compiler.write_text(f'#!/bin/sh\necho started >>{noted}\nexec {compiled.compiler()} "$@"\n')
    compiler.chmod(0o700)
    env = {"XDG_CACHE_HOME": os.fspath(tmp_path / "cache"), "CC": os.fspath(compiler)}
    forbidden = launch(PROGRAM, ranks, env=env | {"HPCSTRAT_COMPILE": "0"}).stdout
    assert forbidden and not folder.exists() and not noted.exists()
    for _ in range(starts):
        assert launch(PROGRAM, ranks, env=env | {"HPCSTRAT_COMPILE": "1"}).stdout == forbidden
        assert len(list(folder.glob("*.so"))) == 1
        assert noted.read_text() == "started\n"


@pytest.mark.parametrize("ranks", slow_but([None], [None, 2]))
def test_a_setting_that_means_nothing(launch, ranks):
    result = launch(PROGRAM, ranks, env={"HPCSTRAT_COMPILE": "perhaps"})
    assert (
        result.status != 0 and "HPCSTRAT_COMPILE is 'perhaps'; it must be 1 or 0" in result.stderr
    )
