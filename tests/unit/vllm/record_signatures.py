"""Record the members and parameters of vLLM's connector classes, read from its source.

    python tests/unit/vllm/record_signatures.py VERSION DIRECTORY ...

takes pairs of a version and the directory of its package `vllm`, and prints the record that is
kept beside this file. Nothing of vLLM's is imported, and nothing but names is recorded.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CONNECTOR = "distributed/kv_transfer/kv_connector/v1"
CLASSES = {
    "KVConnectorBase_V1": f"{CONNECTOR}/base.py",
    "SupportsHMA": f"{CONNECTOR}/base.py",
    "KVConnectorRole": f"{CONNECTOR}/base.py",
    "KVConnectorMetadata": f"{CONNECTOR}/base.py",
    "KVConnectorWorkerMetadata": f"{CONNECTOR}/base.py",
    "KVConnectorTransferResults": f"{CONNECTOR}/base.py",
    "KVConnectorStats": f"{CONNECTOR}/metrics.py",
    "KVConnectorPromMetrics": f"{CONNECTOR}/metrics.py",
}


def parameters_of(function: ast.FunctionDef) -> list[str]:
    """Names in order; `=` after one that has a default, `*` or `**` before one that takes more."""
    spec = function.args
    plain = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    first_default = len(plain) - len(spec.defaults)
    found = [name + "=" * (at >= first_default) for at, name in enumerate(plain)]
    if spec.vararg or spec.kwonlyargs:
        found.append(f"*{spec.vararg.arg if spec.vararg else ''}")
    for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        found.append(arg.arg + "=" * (default is not None))
    if spec.kwarg:
        found.append(f"**{spec.kwarg.arg}")
    return found


def member_of(function: ast.FunctionDef) -> str:
    """Its kind, `abstract` if it must be implemented, and its parameters, as one line."""
    marks = {ast.unparse(mark) for mark in function.decorator_list}
    kinds = [kind for kind in ("classmethod", "staticmethod", "property") if kind in marks]
    kind = kinds[0] if kinds else "method"
    how = f"abstract {kind}" if "abstractmethod" in marks else kind
    return f"{how}: {', '.join(parameters_of(function))}"


def class_of(node: ast.ClassDef) -> dict[str, Any]:
    """The members, and the fields that are annotated or set in the class's body."""
    methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
    names = [
        name.id
        for each in node.body
        if isinstance(each, (ast.AnnAssign, ast.Assign))
        for name in ([each.target] if isinstance(each, ast.AnnAssign) else each.targets)
        if isinstance(name, ast.Name)
    ]
    return {"fields": names, "members": {each.name: member_of(each) for each in methods}}


def record(package: Path) -> dict[str, Any]:
    """All of `CLASSES` in one vLLM."""
    found = {}
    for name, path in CLASSES.items():
        tree = ast.parse((package / path).read_text())
        nodes = (node for node in tree.body if isinstance(node, ast.ClassDef))
        found[name] = class_of(next(node for node in nodes if node.name == name))
    return found


def main(arguments: list[str]) -> None:
    versions = zip(arguments[::2], arguments[1::2], strict=True)
    print(json.dumps({version: record(Path(path)) for version, path in versions}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
