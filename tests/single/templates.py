"""Every message that the library can raise, warn of or end a job with, as its source has it."""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

SAYERS = {"warn": 0, "warn_together": 0, "end_job": 0, "say": 0, "exit": 0, "error": 0, "_verdict": 1, "Fault": 1}
"""What says something besides `raise`, with the place of the text among its arguments."""
ANSWERS = ("why_not", "_failure")
"""Functions whose result, where it is a text, ends a message."""

Texts: TypeAlias = "list[str]"

_FIELD = re.compile(r"\{(?!([\w.]+\.)?_?call\})[^{}]*\}")  # what is passed on, or is of another `call`


class Message(NamedTuple):
    """One text.

    Attributes:
        place: file and line.
        says: the exception's class, or the function that says it.
        text: the template; what is filled in stands in braces, as the source has it.
    """

    place: str
    says: str
    text: str


class Source:
    """One file of the package.

    Args:
        path: the file's, for messages.
        text: what it contains.
        constants: texts that files import from each other, by name.
    """

    def __init__(self, path: str, text: str, constants: Mapping[str, ast.expr] | None = None) -> None:
        self._path = path
        self._constants = constants or {}
        self.tree = ast.parse(text)
        self._scopes = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def messages(self) -> Iterator[Message]:
        """All that is said in this file."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found = self._raised(node.exc, {})
            elif isinstance(node, ast.Call) and last_name(node.func) in SAYERS and node.args:
                found = [(last_name(node.func), self.texts(node.args[SAYERS[last_name(node.func)]]))]
            elif isinstance(node, ast.Return) and node.value is not None and self._function_of(node) in ANSWERS:
                found = [("return", [text for text in self.texts(node.value) if text])]
            else:
                continue
            for says, texts in found:
                yield from (Message(self.place(node), says, text) for text in texts)

    def place(self, node: ast.AST) -> str:
        return f"{self._path}:{getattr(node, 'lineno', 0)}"

    def _raised(self, error: ast.expr, known: Mapping[str, Texts]) -> Iterator[tuple[str, Texts]]:
        """The class of an error and its texts; `known` are those of the parameters of the function it stands in."""
        if isinstance(error, ast.Name) and (made := self._assigned(error)):
            for one in made:
                yield from self._raised(one, known)
        elif isinstance(error, ast.IfExp):
            yield from self._raised(error.body, known)
            yield from self._raised(error.orelse, known)
        elif not isinstance(error, ast.Call):
            yield last_name(error), [""]
        elif (helper := self._functions.get(last_name(error.func))) is not None:
            for node in ast.walk(helper):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield from self._raised(node.value, self._passed(error, helper, known))
        else:
            # An OSError's text comes behind its number.
            text = error.args[min(1, len(error.args) - 1)] if error.args else ast.Constant("")
            yield last_name(error.func), self.texts(text, known)

    # ---- what an expression can be as a text

    def texts(self, node: ast.expr, known: Mapping[str, Texts] | None = None, depth: int = 0) -> Texts:
        """All templates that an expression can be; `depth` of names within names."""
        known = known or {}
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return _joined([self.texts(part, known, depth) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value, known, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self.texts(node.left, known, depth), self.texts(node.right, known, depth)])
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, known, depth), *self.texts(node.orelse, known, depth)]
        inner: list[ast.expr] = []
        if isinstance(node, ast.Name):
            if node.id in known:
                return known[node.id]
            inner = self._assigned(node)
        elif isinstance(node, ast.Call) and (helper := self._functions.get(last_name(node.func))) is not None:
            known = self._passed(node, helper, known)
            inner = [one.value for one in ast.walk(helper) if isinstance(one, ast.Return) and one.value is not None]
        found = [text for one in inner if _is_text(one) and depth < 4 for text in self.texts(one, known, depth + 1)]
        return found or [f"{{{ast.unparse(node)}}}"]

    def _passed(self, call: ast.Call, helper: ast.FunctionDef, known: Mapping[str, Texts]) -> dict[str, Texts]:
        """The texts that the parameters of a function get in a call."""
        names = [argument.arg for argument in helper.args.args if argument.arg != "self"]
        return {name: self.texts(value, known) for name, value in zip(names, call.args, strict=False)}

    def _assigned(self, name: ast.Name) -> list[ast.expr]:
        """What this name is set to: in the function that it stands in, else in the file."""
        scope: ast.AST = name
        while scope in self._scopes:
            scope = self._scopes[scope]
            if isinstance(scope, ast.FunctionDef | ast.Module):
                found = [
                    node.value
                    for node in ast.walk(scope)
                    if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                    if isinstance(target, ast.Name) and target.id == name.id and self._is_in(node, scope)
                ]
                if found or (isinstance(scope, ast.FunctionDef) and name.id in _parameters(scope)):
                    return found
        return [self._constants[name.id]] if name.id in self._constants else []

    def _is_in(self, node: ast.AST, scope: ast.AST) -> bool:
        """Whether a statement is the file's own, or of a function whose names all stand in it."""
        return isinstance(scope, ast.FunctionDef) or self._scopes[node] is scope

    def name_of(self, function: ast.FunctionDef) -> str:
        """What it is called by: its own name, or its class's where it makes one."""
        scope = self._scopes[function]
        return scope.name if isinstance(scope, ast.ClassDef) and function.name == "__init__" else function.name

    def _function_of(self, node: ast.AST) -> str:
        while node in self._scopes:
            node = self._scopes[node]
            if isinstance(node, ast.FunctionDef):
                return node.name
        return ""


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def calls(files: "Sequence[Source]") -> Iterator[tuple[str, str]]:
    """Place and template of what any variable, attribute or parameter gets that is named `call`."""
    places: dict[str, set[int]] = {}
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef):
                names = [name for name in _parameters(node) if name != "self"]
                if "call" in names:
                    places.setdefault(file.name_of(node), set()).add(names.index("call"))
    for file in files:
        for node in ast.walk(file.tree):
            found = []
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found = [node.value for target in targets if last_name(target) in ("call", "_call")]
            elif isinstance(node, ast.Call):
                found = [keyword.value for keyword in node.keywords if keyword.arg == "call"]
                found += [node.args[i] for i in places.get(last_name(node.func), ()) if i < len(node.args)]
            for value in found:
                yield from ((file.place(value), text) for text in file.texts(value) if not _FIELD.fullmatch(text))


def sources(package: Path) -> list[Source]:
    """All files of a package."""
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    constants = {
        target.id: node.value
        for text in texts.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and _is_text(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    }
    return [Source(str(path.relative_to(package.parent)), text, constants) for path, text in texts.items()]


def _joined(parts: Sequence[Texts]) -> Texts:
    return ["".join(choice) for choice in itertools.product(*parts)]


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) or _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
