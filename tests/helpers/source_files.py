"""Python files of the tree, as the rules of test_tidy.py look at them: read once, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar, cast

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS: tuple[type[Function], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class File:
    """One Python file; `module` is its dotted name if it lies in src, else empty."""

    path: str
    module: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.source)

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """The nodes of the tree that are of these kinds, one kind after another."""
        of_kinds = _sorted_nodes(self.source)
        for kind in kinds:
            yield from cast(list[Node], of_kinds.get(kind, []))

    @property
    def part(self) -> str:
        """The top-level module or folder."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else parts[0]


@lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    """The tree of a source, which all rules look at in turn."""
    return ast.parse(source)


@lru_cache(maxsize=1)
def _sorted_nodes(source: str) -> dict[type[ast.AST], list[ast.AST]]:
    """The nodes of a source by their kind, which takes longer to list than to look at. `ast.walk`
    would take three times as long."""
    nodes: list[ast.AST] = [_parsed(source)]
    of_kinds: dict[type[ast.AST], list[ast.AST]] = {}
    for node in nodes:  # It grows meanwhile.
        of_kinds.setdefault(type(node), []).append(node)
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [inner for inner in value if isinstance(inner, ast.AST)]
    return of_kinds


@dataclass(frozen=True, slots=True)
class Outline:
    """What is kept of a file, so that it is not read again: lines and names of its imports, and the
    names of its classes."""

    imports: tuple[tuple[int, str], ...]
    classes: tuple[str, ...]


@cache
def outline(file: File) -> Outline:
    """Imports inside functions are told, too. `from a import b` gives a.b: b may be a module."""
    imports = [
        *((node.lineno, alias.name) for node in file.nodes(ast.Import) for alias in node.names),
        *(
            (node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}")
            for node in file.nodes(ast.ImportFrom)
            for alias in node.names
        ),
    ]
    return Outline(tuple(imports), tuple(made.name for made in file.nodes(ast.ClassDef)))
