"""Settings that the code reads, found as attributes of recipe sections.

An attribute's name isn't enough, because names such as `device` are common. An expression's section is therefore
inferred from annotations, from the field that it was read from, and from assignments in the same module.
"""

import ast
import functools

from pydantic import BaseModel

from pretrain.config import Cadence, RunConfig, Shards
from pretrain.recipe import sections_in
from support.project import ROOT

Fields = dict[str, dict[str, str | None]]
"""{section: {field: the field's section, or None for a value}}."""
SHARED = {base.__name__: tuple(section.__name__ for section in base.__subclasses__()) for base in (Cadence, Shards)}
"""{base section: its subclasses}. A function that takes a base section can be called with any subclass."""

BINDING = (ast.arg, ast.AnnAssign, ast.Assign, ast.NamedExpr, ast.For, ast.comprehension)


def fields_of(schema: type[BaseModel] = RunConfig) -> Fields:
    """Returns the fields of a section and of its nested sections."""
    fields: Fields = {schema.__name__: {}}
    for name, field in schema.model_fields.items():
        inner = sections_in(field.annotation)
        fields[schema.__name__][name] = inner[0].__name__ if inner else None
        if inner:
            fields |= fields_of(inner[0])
    return fields


class SettingReads:
    """The settings that a module reads.

    Args:
        tree: the module's syntax tree.
        fields: the fields of all sections.
        returns: {function or property: section that it returns}, for the whole package.
        takers: {function: base sections among its parameters}, for the whole package.
    """

    def __init__(self, tree: ast.Module, fields: Fields, returns: dict[str, str], takers: dict[str, set[str]]):
        self.fields, self.returns = fields, returns
        self.holders: dict[str, set[str]] = {}
        for of in fields.values():
            for field, section in of.items():
                self.holders.setdefault(field, set()).update({section} - {None})
        self.names: dict[str, set[str]] = {}
        nodes = list(ast.walk(tree))
        binding = [node for node in nodes if isinstance(node, BINDING)]
        while True:  # names can be assigned from other names
            known = sum(map(len, self.names.values()))
            for node in binding:
                self._learn(node)
            if known == sum(map(len, self.names.values())):
                break
        self.found = {
            (section, node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            for section in self._sections(node.value)
            if node.attr in fields[section]
        }
        self.found |= {
            (section, field)
            for node in nodes
            if isinstance(node, ast.Call)
            for called in (node.func, *node.args)  # an argument can be a function to call with the others
            for shared in takers.get(getattr(called, "attr", getattr(called, "id", "")), ())
            for section in set().union(*map(self._sections, node.args)) & set(SHARED[shared])
            for field in fields[shared]
        }

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg) and node.annotation:
            for section in sections_named(node.annotation, self.fields):
                self.names.setdefault(node.arg, set()).add(section)
        elif isinstance(node, ast.AnnAssign):
            self._assign(node.target, sections_named(node.annotation, self.fields))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.NamedExpr | ast.For | ast.comprehension):
            self._bind(node.target, node.value if isinstance(node, ast.NamedExpr) else node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, of in zip(target.elts, value.elts, strict=True):
                self._bind(one, of)
        else:
            self._assign(target, self._sections(value))

    def _assign(self, target: ast.expr, sections: set[str]) -> None:
        name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
        if name and sections:
            self.names.setdefault(name, set()).update(sections)

    def _sections(self, node: ast.expr) -> set[str]:
        """Returns the sections that an expression can refer to."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            named = {self.returns[node.attr]} if node.attr in self.returns else set()
            return named | self.holders.get(node.attr, set()) | self.names.get(node.attr, set())
        if isinstance(node, ast.Subscript):
            return self._sections(node.value)
        if isinstance(node, ast.Call):
            return self._sections(node.func)
        if isinstance(node, ast.BoolOp):
            return set().union(*map(self._sections, node.values))
        if isinstance(node, ast.IfExp):
            return self._sections(node.body) | self._sections(node.orelse)
        return set()


def sections_named(annotation: ast.expr | None, fields: Fields) -> set[str]:
    """Returns the sections in an annotation such as `Optim`, `config.Optim | None` or `list[Source]`."""
    if annotation is None:
        return set()
    parts = list(ast.walk(annotation))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return names & fields.keys()


@functools.cache
def signatures() -> tuple[Fields, dict[str, str], dict[str, set[str]]]:
    """Returns SettingReads' arguments (fields, returns, takers) for the whole package."""
    fields = fields_of() | fields_of(Cadence) | fields_of(Shards)
    trees = [ast.parse(path.read_text()) for path in ROOT.glob("pretrain*/**/*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    returns = {f.name: section for f in functions for section in sections_named(f.returns, fields)}
    takers = {
        f.name: shared
        for f in functions
        if (shared := {s for arg in f.args.args for s in sections_named(arg.annotation, fields)} & SHARED.keys())
    }
    return fields, returns, takers


@functools.cache
def settings_read(source: str) -> set[tuple[str, str]]:
    """Returns (section, field) for every setting that a module reads, given its source."""
    return SettingReads(ast.parse(source), *signatures()).found
