"""Setting up an environment from the command line: what is said before, meanwhile and after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from headrace.cli.arguments import check_given
from headrace.engine import environments
from headrace.engine.environment_making import give_up, make
from headrace.engine.environments import Recipe
from headrace.errors import BackendUnavailable, HeadraceError

TOLD_COLUMNS: Final = 72

Look = Callable[[str], Sequence[str]]
"""Has an interpreter show that its environment can be used, and returns what is said of that.

Raises:
    BackendUnavailable: it cannot.
"""


def set_up(
    recipe: Recipe,
    look: Look,
    *,
    directory: str | None,
    python: str | None,
    dry_run: bool,
    remarks: Sequence[str] = (),
    tell_steps: bool = False,
) -> int:
    """Make an environment unless it is there and can be used; returns the exit status.

    remarks: said with what is going to be done. tell_steps: whether each step stays on the screen.
    """
    check_given("--directory", directory)
    check_given("--python", python)
    default = environments.default_directory(recipe)
    place = default if directory is None else Path(directory).expanduser().absolute()
    console = Console(stderr=True, highlight=False)
    environments.check_directory(recipe, place)
    if environments.is_complete(recipe, place):
        try:
            found = look(str(environments.interpreter_in(place)))
        except BackendUnavailable as exc:
            _say(console, f"{place} cannot be used and is made anew: {exc}")
        else:
            _say(console, f"{place} is complete", *found)
            return 0
        if not dry_run:
            give_up(recipe, place)
    python = python or sys.executable
    environments.check_writable(place)
    _announce(console, recipe, place, python, remarks)
    if dry_run:
        return 0
    interpreter, found = _make(console, recipe, look, place, python, tell_steps)
    _say(console, f"done: {interpreter}", *found)
    if place != default:
        _say(console, f"to have it found, set: {recipe.variable}={interpreter}")
    return 0


def _make(
    console: Console, recipe: Recipe, look: Look, place: Path, python: str, tell_steps: bool
) -> tuple[str, list[str]]:
    found: list[str] = []

    def prove(interpreter: str) -> None:
        try:
            found.extend(look(interpreter))
        except BackendUnavailable as exc:
            raise HeadraceError(f"all is installed, and it cannot be used: {exc}") from exc

    with console.status("making the environment") as status:
        interpreter = make(
            recipe,
            place,
            python,
            told=lambda line: status.update(Text(_short(line))),
            began=(lambda step: _say(console, step)) if tell_steps else None,
            prove=prove,
        )
    return interpreter, found


def _announce(
    console: Console, recipe: Recipe, directory: Path, python: str, remarks: Sequence[str]
) -> None:
    """Say what is going to be done, unless it has to be refused."""
    if environments.lacks_only_a_link(recipe, directory):
        _say(console, f"{directory} has all packages; only this headrace is linked into it.")
        return
    lacking = environments.lacking_extra(recipe, directory)
    if lacking and environments.is_installed(recipe, directory):
        _say(console, f"{directory} has all packages but {', '.join(lacking)}, which go into it.")
        return
    facts = environments.look_at(python)
    environments.check_python(recipe, facts)
    _say(console, *_announced(recipe, directory, facts), *remarks)
    environments.check_room(recipe, directory)


def _announced(recipe: Recipe, directory: Path, facts: environments.PythonFacts) -> list[str]:
    """What is going to be done, and how big it is."""
    python = ".".join(map(str, facts.version))
    return [
        f"{', '.join((*recipe.named, *recipe.extra))} and what they require go into {directory}, "
        f"made with {facts.path} ({python}).",
        f"About {recipe.download_nbytes / 1e9:.1f} GB are downloaded and "
        f"{recipe.disk_nbytes / 1e9:.1f} GB stay on disk, as measured on {recipe.measured_on}:",
        *(f"  {part}" for part in recipe.parts),
        f"{recipe.room_nbytes / 1e9:.1f} GB must be free meanwhile.",
    ]


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _short(line: str) -> str:
    return line if len(line) <= TOLD_COLUMNS else f"{line[: TOLD_COLUMNS - 3]}..."
