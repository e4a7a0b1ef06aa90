"""The cells of docs/notebooks.md in Jupyter's kernel and ipyparallel's engines, and faults."""

import importlib.util
import os
import re
import time

import pytest
from documents import BLOCKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ipyparallel") is None,
        reason="ipyparallel is not installed: pip install '.[notebooks]'",
    ),
    pytest.mark.timeout(300),
]
CELLS = [block for block in BLOCKS["docs/notebooks.md"] if block.language == "python"]
IN_KERNEL, CLUSTER, IN_ENGINES = CELLS


class Notebook:
    """A kernel, in which cells run one after another."""

    def __init__(self, folder, **environment):
        start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel
        own = {"IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
        self._manager, self._client = start_new_kernel(
            env={**os.environ, **environment, **own}, cwd=str(folder)
        )

    def run(self, code):
        """What the cell shows, without colours; an error last, as `Name: text`."""
        shown = []

        def note(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                shown.append(f"{content['ename']}: {content['evalue']}")

        self._client.execute_interactive(code, output_hook=note, timeout=100)
        return re.sub("\x1b\\[[0-9;]*m", "", "\n".join(shown))

    def end(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel()


@pytest.fixture
def notebook(tmp_path):
    started = []

    def start(**environment):
        started.append(Notebook(tmp_path, **environment))
        return started[0]

    yield start
    for one in started:
        one.run("cluster.stop_cluster_sync() if 'cluster' in globals() else None")
        one.end()


def outputs(shown, engine):
    """What an engine has printed."""
    return re.findall(rf"^\[stdout:{engine}\] (.*)$", shown, re.MULTILINE)


def run_until_all_have_printed(cells, code):
    """What the cell shows, once it shows lines of all three engines.

    On a busy machine ipyparallel ends a cell before all that the engines print has come.
    """
    shown = ""
    for _ in range(5):
        shown = cells.run(code)
        if all(outputs(shown, engine) for engine in range(3)):
            return shown
    raise AssertionError(f"no output of some engines: {shown}")


def test_one_replica(notebook):
    cells = notebook()
    assert cells.run(IN_KERNEL.text) + "\n" == IN_KERNEL.output.text
    shown = cells.run("print(hs.size())\nstrategy.run(lambda: 1 / 0)\n")
    assert "1\n" in shown and "ZeroDivisionError: division by zero" in shown
    shown = cells.run(
        "print('line', end='')\nint(strategy.reduce('SUM', strategy.run(lambda: 2), axis=None))"
    )
    assert shown == "line\n2"


# ipyparallel learns of each engine's end separately, and so not at once.
ARE_GONE = """
import time
end = time.monotonic() + 30
while engines.ids and time.monotonic() < end:
    time.sleep(0.1)
engines.ids == []
"""


def test_engines(notebook):
    cells = notebook(HPCSTRAT_STALL_SECONDS="2", HPCSTRAT_TIMEOUT_SECONDS="5")
    cells.run(CLUSTER.text)
    assert IN_ENGINES.output.text.strip() in cells.run(IN_ENGINES.text)
    assert cells.run("float(engines[0]['total'])") == "21.0"

    # The gate works in later cells too, though IPython replaces the stream's `write` in each.
    program = "print('top', hs.rank())\nnone = strategy.run(lambda: print('replica', hs.rank()))"
    for _ in range(2):
        shown = run_until_all_have_printed(cells, f"%%px\n{program}")
        assert [outputs(shown, rank)[-1] for rank in (1, 2)] == ["replica 1", "replica 2"]
        assert "top 0" in shown and "replica 0" in shown
        assert "top 1" not in shown and "top 2" not in shown

    # Engines without work are not missing ranks.
    time.sleep(7)
    assert "ValueError: on all" in cells.run(
        "%%px\nstrategy.run(lambda: (_ for _ in ()).throw(ValueError('on all')))"
    )
    assert outputs(cells.run("%%px\nprint(hs.any_rank(hs.rank() == 2))"), 0) == ["True"]

    shown = cells.run("%%px\nif hs.rank() == 1:\n    raise ValueError('on one')\nhs.barrier()")
    assert "ranks 0, 2: waiting in call" in shown
    assert re.search(r"barrier\(\), at In\[\d+\]:3 in <module>", shown)
    assert cells.run(ARE_GONE) == "True"  # their last words may come too late to be shown

    cells.run("cluster.restart_engines_sync()\nengines.wait_for_engines(3)")
    assert IN_ENGINES.output.text.strip() in cells.run(IN_ENGINES.text)
    one_fails = "strategy.run(lambda: 1 / 0 if hs.rank() == 1 else 1)"
    cells.run(f"%%px\nresult = {one_fails}")
    cells.run("%%px\nhs.barrier()")
    assert cells.run(ARE_GONE) == "True"
