"""The Jinja that chat templates are written for: its sandbox, and the names it adds to Jinja's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_FORMAT: Final = 256


def sandbox(now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """An environment for one template; now: the present time in a format of strftime's."""

    def strftime_now(form: str) -> str:
        if len(form) > _MAX_FORMAT:
            raise SecurityError(f"a time format of {len(form)} characters")
        return now(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = strftime_now
    made.globals["namespace"] = _PlainNamespace
    return made


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012, which is how Jinja declares it

    def parse(self, parser: Parser) -> Node:
        begin = next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(begin.lineno)


class _PlainNamespace(Namespace):
    """Holds no names that begin with an underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template holds no {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: unlike Jinja's own, it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
