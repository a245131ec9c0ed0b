"""Making a vendor's environment, with the vendor's packages as the user's own pip finds them.

All that it writes lies in the environment's directory, pip's temporary files too. One that was
begun and not finished, by whatever end, is emptied and made anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.engine.convert import last_line
from headrace.engine.environments import (
    FRESH_MARKER,
    LOCK,
    LOOK_TIMEOUT_S,
    MARKER,
    PACKAGE,
    Recipe,
    check_directory,
    extra_in,
    interpreter_in,
    is_installed,
)
from headrace.errors import HeadraceError, Refused
from headrace.version import VERSION

LOG: Final = "setup.log"
POLL_S: Final = 0.5

_TEMPORARY = "temporary"
_ELSEWHERE = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIREMENT", "PIP_EDITABLE"),
    *("PIP_PYTHON", "PIP_DRY_RUN", "PIP_NO_DEPS"),
)
"""Variables that would have pip take from, or install to, another place, or install less."""

_REQUIRED = """
import re, sys
from importlib.metadata import requires
path, package, *left_out = sys.argv[1:]
def name(line):
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", line)[0]).lower()
with open(path, "w") as file:
    print(*(line for line in requires(package) or () if name(line) not in left_out),
          sep="\\n", file=file)
"""
"""Run there: writes what a package requires, whose markers pip evaluates."""


def make(
    recipe: Recipe,
    directory: Path,
    python: str,
    *,
    told: Callable[[str], None] = lambda line: None,
    began: Callable[[str], None] | None = None,
    prove: Callable[[str], None] = lambda interpreter: None,
) -> str:
    """Make the environment unless it is complete, and return its interpreter.

    `told` gets what is done now, a line at a time. `began` gets the steps among that, if given.
    `prove` gets the interpreter when all is installed; what it raises leaves the environment
    unfinished.

    Raises:
        Refused: the directory is not ours or another setup is at work in it.
        HeadraceError: a step failed.
    """
    check_directory(recipe, directory)
    directory.mkdir(parents=True, exist_ok=True)
    interpreter = str(interpreter_in(directory))
    with _locked(directory) as lock:
        steps = _Steps(directory, lock, told, told if began is None else began)
        installed = is_installed(recipe, directory)
        extra = extra_in(directory) if installed else ()
        lacking = tuple(each for each in recipe.extra if each not in extra)
        facts = {**_facts(recipe), "extra": [*extra, *lacking]}
        _write_marker(directory, {**facts, "complete": False})
        if not installed:
            _empty(directory)
            _install(recipe, python, steps)
        if lacking:
            steps.pip(*lacking)
        link = _link(interpreter)
        prove(interpreter)
        shutil.rmtree(directory / _TEMPORARY, ignore_errors=True)
        _write_marker(directory, {**facts, "complete": True, "link": str(link)})
    return interpreter


def give_up(recipe: Recipe, directory: Path) -> None:
    """Have an environment that is broken count as none, so that the next `make` makes it anew.

    Raises:
        Refused: the directory is not ours or another setup is at work in it.
    """
    check_directory(recipe, directory)
    with _locked(directory):
        _write_marker(directory, {**_facts(recipe), "complete": False})


def _facts(recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "requirements": list(recipe.named),
        "headrace": VERSION,
    }


def _install(recipe: Recipe, python: str, steps: _Steps) -> None:
    steps.began("making the environment")
    steps.run("venv", [python, "-m", "venv", str(steps.directory)])
    steps.pip(*recipe.requirements)
    if not recipe.package:
        return
    steps.pip("--no-deps", recipe.package)
    required = steps.temporary / "required"
    arguments = [str(required), recipe.package.partition("==")[0], *recipe.left_out]
    steps.run("python", [str(interpreter_in(steps.directory)), "-I", "-c", _REQUIRED, *arguments])
    # Named again, they hold their versions against what the package requires.
    what = f"what {recipe.package} requires, without {', '.join(recipe.left_out)}"
    steps.pip("--no-warn-conflicts", *recipe.requirements, *("-r", str(required)), what=what)
    if recipe.alias:
        _write_alias(recipe.alias, _site(str(interpreter_in(steps.directory))))


def _write_alias(alias: str, site: Path) -> None:
    name, _, version = alias.partition("==")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("headrace\n")


@dataclass(frozen=True)
class _Steps:
    """The steps of a setup, each a child that logs into the directory."""

    directory: Path
    lock: int
    told: Callable[[str], None]
    began: Callable[[str], None]

    @property
    def temporary(self) -> Path:
        return self.directory / _TEMPORARY

    def pip(self, *arguments: str, what: str = "") -> None:
        """Have the environment's own pip install something."""
        named = [each for each in arguments if not each.startswith("-")]
        self.began(f"installing {what or ', '.join(named)}")
        pip = [
            *(str(interpreter_in(self.directory)), "-m", "pip", "install", "--no-input"),
            "--no-cache-dir",  # the cache lies outside of the directory
            "--only-binary=:all:",  # a source distribution would run its build
            *("--disable-pip-version-check", "--progress-bar=off"),
        ]
        self.run("pip", [*pip, *arguments])

    def run(self, step: str, command: list[str]) -> None:
        """Run a step and tell the last line of its log as it grows.

        The child inherits the lock: should this process be killed, nobody else begins in the
        directory before its last child has ended.
        """
        self.temporary.mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        env["TMPDIR"] = str(self.temporary)  # gigabytes, and /tmp is often of memory
        log_path = self.directory / LOG
        with (
            log_path.open("wb") as log,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(self.lock,),
            ) as child,
        ):
            try:
                while (status := _wait(child)) is None:
                    self.told(last_line(log_path))
            finally:
                child.kill()  # without effect once it has ended; else the setup was interrupted
        if status != 0:
            raise _failure(step, log_path)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _failure(step: str, log_path: Path) -> HeadraceError:
    log = log_path.read_text(errors="replace")
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    said = errors[-1].removeprefix("ERROR:").strip() if errors else last_line(log_path)
    return HeadraceError(
        f"{step} failed: {said} (all it said is in {log_path}); run the setup again when that is "
        "mended"
    )


def _link(interpreter: str) -> Path:
    """Link this headrace, and nothing beside it, into the environment: one version on both sides.

    A path file would make all that lies beside it importable there, a foreign torch for one.
    """
    link = _site(interpreter) / PACKAGE.name
    if link.is_dir() and not link.is_symlink():  # somebody's pip installed one there
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(PACKAGE.resolve(), target_is_directory=True)
    return link


def _site(interpreter: str) -> Path:
    """Where an environment's packages lie."""
    ask = [interpreter, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=LOOK_TIMEOUT_S)
    if done.returncode:
        raise HeadraceError(f"{interpreter} does not run: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip())


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Refused(
                f"another setup is at work in {directory}; wait until it has ended, then run this "
                "again"
            ) from exc
        yield lock
    finally:
        os.close(lock)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name in (MARKER, LOCK):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write_marker(directory: Path, facts: dict[str, Any]) -> None:
    fresh = directory / FRESH_MARKER
    with fresh.open("w") as file:
        json.dump(facts, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / MARKER)
