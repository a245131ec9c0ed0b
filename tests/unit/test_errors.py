"""Errors: one family, none of which a broad builtin `except` would swallow."""

from __future__ import annotations

import inspect

import pytest

from headrace import errors
from headrace.errors import BackendUnavailable, HeadraceError, Refused

FAMILY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", FAMILY)
def test_each_error_derives_from_the_family_and_from_no_builtin_but_exception(
    kind: type[Exception],
) -> None:
    assert issubclass(kind, HeadraceError)
    builtin = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert builtin == [Exception, BaseException, object]


def test_no_two_errors_are_kinds_of_each_other() -> None:
    leaves = [kind for kind in FAMILY if kind is not HeadraceError]
    assert all(kind.__bases__ == (HeadraceError,) for kind in leaves)


def test_a_refusal_names_its_field() -> None:
    assert Refused("text", field="dtype").field == "dtype"
    assert (str(Refused("text")), Refused("text").field) == ("text", "")


def test_a_refusal_is_a_mistake_unless_it_says_that_something_is_short() -> None:
    assert not Refused("text").shortage
    assert Refused("text", shortage=True).shortage


def test_an_unavailable_backend_says_who_where_what_and_what_to_do() -> None:
    error = BackendUnavailable("rbln", "import", "torch_rbln", "not found", "Install it")
    assert str(error) == "rbln: import: torch_rbln: not found. Install it"
    assert (error.vendor, error.stage, error.probe) == ("rbln", "import", "torch_rbln")
    assert (error.detail, error.hint) == ("not found", "Install it")
