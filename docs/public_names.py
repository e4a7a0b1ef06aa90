"""Shows what is public on the pages of the reference: an extension of griffe, which reads the code.

Public is what a page has a `:::` for. Private bases give way to those of theirs that are public,
private aliases of types to what they stand for, and a constructor that takes private objects is
not shown.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from typing import Any

import griffe

PAGES = pathlib.Path(__file__).parent / "api"
INSTEAD = {
    "Array": "Array",
    "ClusterResolver": "ClusterResolver",
    "DatasetIterator": "Iterator[Any]",
    "DistributeOptions": "Any",
    "LearningRate": "float | Callable[..., float]",
    "MaybeNone": "None",
    "OptimizerVariable": "OptimizerVariable",
    "Scope": "AbstractContextManager[hpcstrat.Strategy]",
    "VariableReference": "VariableReference",
}
"""What is shown for private names. For aliases of types that are not here their value is."""


class PublicNames(griffe.Extension):
    """Changes the tree that griffe made of the package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replaces what is private in bases and signatures."""
        self.package = pkg
        self.public: dict[str, str] = {}
        for page in PAGES.glob("*.md"):
            for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
                self.public |= {self.find(name).canonical_path: name, name: name}
        classes = [self.find(path) for path in self.public if self.find(path).is_class]
        for cls in classes:
            self.hide_constructor(cls)
        for cls in classes:
            self.hide_bases(cls)
        self.replace_in(pkg)

    def find(self, path: str) -> Any:
        """What the package has at a path."""
        thing = self.package[path.partition(".")[2]]
        return thing.final_target if thing.is_alias else thing

    def is_private(self, path: str) -> bool:
        """Whether a name is of the package, but on no page."""
        return path.startswith("hpcstrat.") and "._" in path and path not in self.public

    def hide_constructor(self, cls: griffe.Class) -> None:
        """Removes a constructor that takes objects of private classes, as programs have none."""
        while (constructor := cls.all_members.get("__init__")) and any(
            self.is_private(path := name.canonical_path) and self.find(path).is_class
            for parameter in constructor.parameters
            for name in names_in(parameter.annotation)
        ):
            del self.find(constructor.canonical_path).parent.members["__init__"]

    def hide_bases(self, cls: griffe.Class) -> None:
        """Leaves public bases, and keeps what a class inherits from the others."""
        inherited = cls.inherited_members
        bases = self.public_bases(cls)
        above = {
            base.path for path in bases if path in self.public for base in self.find(path).mro()
        }
        cls.bases = [base for path, base in bases.items() if path not in above]
        left = cls.inherited_members
        for name, member in inherited.items():
            if name not in left or left[name].target_path != member.target_path:
                cls.members[name] = member

    def public_bases(self, cls: griffe.Class) -> dict[str, Any]:
        """The bases of a class by their paths, and instead of each private one its bases."""
        bases: dict[str, Any] = {}
        for base in cls.bases:
            path = base if isinstance(base, str) else base.canonical_path
            if self.is_private(path):
                bases |= self.public_bases(self.find(path))
            elif path != "abc.ABC":
                bases[path] = self.shown(base)
        return bases

    def replace_in(self, thing: Any) -> None:
        """Replaces private names in the annotations of all that is in a module or class."""
        for member in thing.members.values():
            if member.is_alias:
                continue
            if member.is_function:
                for function in member, *(member.overloads or ()):
                    function.returns = self.shown(function.returns)
                    for parameter in function.parameters:
                        parameter.annotation = self.shown(parameter.annotation)
                        parameter.default = self.shown(parameter.default)
            elif member.is_attribute:
                member.annotation = self.shown(member.annotation)
                if "dataclass" in thing.labels:  # a default of the constructor
                    member.value = self.shown(member.value)
            else:
                self.replace_in(member)

    def shown(self, expression: Any) -> Any:
        """The same expression with public names."""
        if isinstance(expression, griffe.ExprName | griffe.ExprAttribute):
            return self.shown_name(expression, expression.canonical_path)
        if isinstance(expression, list | tuple):
            return [self.shown(part) for part in expression]
        if isinstance(expression, griffe.ExprCall) and self.is_private(expression.canonical_path):
            return self.shown(expression.arguments[0])  # the default of a dataclass's field
        if isinstance(expression, griffe.Expr):
            for field in dataclasses.fields(expression):
                setattr(expression, field.name, self.shown(getattr(expression, field.name)))
        return expression

    def shown_name(self, name: Any, path: str) -> Any:
        """What stands for a name in a signature."""
        above, _, short = path.rpartition(".")
        if path in self.public:
            module, _, public = self.public[path].rpartition(".")
            return griffe.ExprName(
                public, self.package[module.partition(".")[2]] if "." in module else self.package
            )
        if above in self.public:
            return f"{above.rpartition('.')[2]}.{short}"  # of an enumeration
        if not self.is_private(path):
            return name
        if short in INSTEAD:
            return self.parsed(INSTEAD[short], self.package)
        thing = self.find(path)
        if thing.is_attribute and str(thing.value).startswith("TypeVar"):
            return short.strip("_")
        if thing.is_attribute and str(thing.annotation) == "TypeAlias":
            return self.parsed(str(thing.value), thing.parent)
        return name

    def parsed(self, text: str, scope: griffe.Module) -> Any:
        """An expression of code, or of code in quotes."""
        code = ast.parse(text, mode="eval").body
        return self.shown(griffe.safe_get_annotation(code, scope, parse_strings=True))


def names_in(expression: Any) -> list[griffe.ExprName]:
    """The names in an expression."""
    if not isinstance(expression, griffe.Expr):
        return []
    parts = [expression, *expression.iterate(flat=True)]
    return [part for part in parts if isinstance(part, griffe.ExprName)]
