"""The ported programs of examples/ported print what the originals print, on any number of ranks."""

import importlib.util
import pathlib
import re
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ported"
ENV = {
    "OMP_NUM_THREADS": "1",
    # On GPUs JAX would take all memory, and round factors to 10 bits.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Port(NamedTuple):
    """A folder of `examples/ported`, with `before.py`, `after.py` and perhaps `picture.py`."""

    name: str
    rel: float  # how far the printed numbers may be apart, relatively
    abs: float  # and absolutely, for numbers near zero
    why: str  # the reason for that
    # A module without which neither program runs, and which chooses where `before.py` computes;
    # else it takes `--gpu`. If `before.py` needs a package that the tests do not install, what it
    # printed is in `before.txt`, below a line with the version.
    needs: str | None = None
    few: tuple[str, ...] = ()  # options with which there is less data than four replicas

    def path(self, name):
        return FOLDER / self.name / name


SIX, NINE = "six decimals are printed; ", "nine decimals are printed; "
ORDER = "the sums' order differs"
PORTS = [
    Port("kmeans", 1e-6, 2e-6, SIX + ORDER, few=("--num", "1")),
    Port("gmm", 1e-6, 2e-6, SIX + ORDER),
    Port("cg", 2e-3, 1e-13, "four digits, of an error that rounding changes", few=("--num", "3")),
    Port("monte_carlo", 0.3, 0, "four standard errors of an error that samples show"),
    Port("jacobi", 0, 0, "each point is computed by the same operations", "mpi4py"),
    Port("matrix_product", 1e-12, 2e-9, NINE + ORDER, "mpi4py", ("--shape", "3", "2", "2")),
    Port("molecular_dynamics", 0, 2e-9, NINE + ORDER),
    Port("tf_custom_training", 1e-4, 2e-5, "92 steps in 32 bits, and Adam divides by small ones"),
    Port("torch_ddp_series", 1e-5, 2e-6, SIX + "256 steps in 32 bits to one minimum", "torch"),
    Port("torch_gpt", 0, 2e-6, SIX + "200 steps in 64 bits", "torch"),
    Port("jax_mnist", 1e-4, 2e-6, SIX + "96 steps in 32 bits", "jax"),
]
BY_NAME = {port.name: port for port in PORTS}


def original(place, port, options):
    """What the original prints: one process."""
    if port.path("before.txt").exists():
        return port.path("before.txt").read_text().partition("\n")[2]
    if place.has_gpus and port.needs is None:
        options = [*options, "--gpu"]
    result = place(port.path("before.py"), None, *options, env=ENV)
    assert result.status == 0
    return result.out


def check(place, port, ranks, options=()):
    """The port prints, on these numbers of ranks, what the original prints."""
    place.skip_unless_it_has(port.needs)
    before = original(place, port, options)
    expected = [float(number) for number in NUMBER.findall(before)]
    assert expected
    for number in place.choose(*ranks):
        result = place(port.path("after.py"), number, *options, env=ENV)
        assert (result.status, result.leftovers) == (0, [])
        assert "Warning" not in result.err
        assert NUMBER.sub("#", result.out) == NUMBER.sub("#", before)
        found = [float(number) for number in NUMBER.findall(result.out)]
        assert found == pytest.approx(expected, rel=port.rel, abs=port.abs), port.why


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_each_port_prints_what_the_original_prints(place, name):
    """Also where some replicas have no data. What an mpi4py program prints alone it prints on any."""
    port = BY_NAME[name]
    check(place, port, [None, 2, 3, 4])
    if port.few:
        check(place, port, [4], port.few)
    if port.needs == "mpi4py":
        result = place(port.path("before.py"), 3, env=ENV)
        assert (result.status, result.out, result.leftovers) == (0, original(place, port, []), [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, port in BY_NAME.items() if port.path("picture.py").exists()]
)
def test_pictures_of_the_gallery(launch, name, tmp_path):
    """docs/gallery has two of each, light and dark; the gallery's command draws it again."""
    for module in ("matplotlib", BY_NAME[name].needs or "numpy"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    pictures = sorted((ROOT / "docs" / "gallery").glob(f"ported-{name}-*"))
    assert [path.stem.rpartition("-")[2] for path in pictures] == ["dark", "light"]
    drawn = tmp_path / f"drawn{pictures[0].suffix}"
    result = launch(FOLDER / "draw.py", 4, name, drawn, env=ENV)
    assert (result.status, result.leftovers) == (0, []) and "Warning" not in result.err
    assert drawn.stat().st_size > 1000


def test_the_table_has_every_port():
    names = sorted(path.parent.name for path in FOLDER.glob("*/after.py"))
    assert sorted(BY_NAME) == names
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\1/after\.py\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == names
