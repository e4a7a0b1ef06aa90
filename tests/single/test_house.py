"""The rules for the places and names of files."""

import ast
import pathlib
from collections import Counter

from public_api import PUBLIC_MODULES

PACKAGE = pathlib.Path(__file__).parents[2] / "hpcstrat"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = {
    "_start.py",
    "__init__.py",
    "__main__.py",
    "_info.py",
    "_program.py",
    "_run.py",
    "losses.py",
    "torch.py",
}


def is_private(folder):
    return any(part.startswith("_") for part in folder.relative_to(PACKAGE).parts)


def test_the_root_has_the_public_door_alone():
    assert {path.name for path in PACKAGE.glob("*.py")} == ROOT


def test_a_folder_is_public_or_private_as_a_whole():
    """Each file of a public folder is `_x.py`, except `__init__.py` and other public modules."""
    public = {pathlib.Path(str(module.__file__)) for module in PUBLIC_MODULES}
    inside = [path for path in {*FILES} - public if path.parent != PACKAGE]
    inside = [path for path in inside if path.name != "__init__.py"]
    assert [path for path in inside if path.name.startswith("_") == is_private(path.parent)] == []
    missing = {path.parent for path in inside if not (path.parent / "__init__.py").exists()}
    assert missing == set()


def test_a_class_name_is_unique():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert names["Variable"] == 1
    assert [name for name, count in names.items() if count > 1] == []
