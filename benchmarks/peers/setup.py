"""Make the environments of the peers that `headrace bench peers` measures against.

    python benchmarks/peers/setup.py [--root DIRECTORY] [torch] [nixl] [mooncake] [zmq]

One new virtual environment each, under `peers` in headrace's cache directory unless told otherwise,
with the pinned packages of `requirements/`. Nothing else is changed: a library that a peer wants
from the system is unpacked into its environment. A directory that this script did not make is
refused. Needs the standard library only; run it with the Python that is to run the peers, 3.11 or
3.12.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
FAMILIES = ("torch", "nixl", "mooncake", "zmq")
MARKER = "headrace-peer.json"
MADE_BY = "headrace benchmarks/peers/setup.py"
DEBIAN_LIBRARIES = {
    "mooncake": ("libibverbs.so.1", ("libibverbs1", "libnl-3-200", "libnl-route-3-200")),
}
"""What a peer loads from the system, and the Debian packages that hold it."""

PROBES = {
    "torch": "import torch, numpy; assert torch.version.cuda is None, 'a CUDA build of torch'",
    "nixl": "import nixl_cu12._api",
    "mooncake": "import mooncake.engine",
    "zmq": "import zmq; assert zmq.has('ipc')",
}


class SetupRefused(Exception):
    """An environment cannot be made; the text says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=default_root())
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    asked = parser.parse_args()
    families = asked.families or list(FAMILIES)
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"no peer family is called {', '.join(sorted(unknown))}")
    failed = 0
    for family in families:
        try:
            print(f"{family}: {make(asked.root.absolute() / family, family)}", flush=True)
        except (SetupRefused, OSError, subprocess.SubprocessError) as exc:
            print(f"{family}: {exc}", file=sys.stderr, flush=True)
            failed = 1
    return failed


def default_root() -> Path:
    """Where `headrace bench peers` looks for the environments, if not told otherwise."""
    if named := os.environ.get("HEADRACE_CACHE"):
        return Path(named).expanduser().absolute() / "peers"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "headrace" / "peers"


def make(directory: Path, family: str) -> str:
    """Make one environment, or find it made as asked; returns what was done."""
    requirements = REQUIREMENTS / f"{family}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    found = marker_of(directory)
    if found.get("complete") and found.get("requirements_sha256") == digest:
        return f"{directory} is there"
    if directory.exists():
        shutil.rmtree(directory)  # ours by its marker: cut short, or of other pins
    directory.mkdir(parents=True)
    facts = {"made_by": MADE_BY, "family": family, "requirements_sha256": digest}
    write_marker(directory, facts)
    venv.create(directory, with_pip=True)
    refuse_cuda(directory, requirements)
    run([*pip(directory), "install", "--no-deps", "-r", str(requirements)])
    needed = system_libraries(directory, family)
    python = [str(directory / "bin" / "python"), "-c", PROBES[family]]
    run(python, env={**os.environ, **needed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    write_marker(directory, {**facts, "env": needed, "complete": True})
    return f"made {directory}"


def marker_of(directory: Path) -> dict[str, Any]:
    """The marker of an environment that this script made; empty if nothing is there."""
    if not directory.exists():
        return {}
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        marker = None
    if not isinstance(marker, dict) or marker.get("made_by") != MADE_BY:
        raise SetupRefused(
            f"{directory} exists and was not made by this script; move it away, or give another "
            "--root"
        )
    return marker


def write_marker(directory: Path, facts: dict[str, Any]) -> None:
    """Write the marker; `complete` is in it only once all is installed and imports."""
    (directory / MARKER).write_text(json.dumps(facts, indent=1) + "\n")


def refuse_cuda(directory: Path, requirements: Path) -> None:
    """Refuse before anything big is fetched if the index would give torch's CUDA build."""
    wanted = [line for line in requirements.read_text().split() if line.startswith("torch==")]
    for pin in wanted:
        plan = ["install", "--no-deps", "--dry-run", "--quiet", "--report", "-", pin]
        report = json.loads(run([*pip(directory), *plan]))
        needs = report["install"][0]["metadata"].get("requires_dist", [])
        if any(need.startswith(("nvidia-", "cuda-", "triton")) for need in needs):
            raise SetupRefused(
                f"the package index gives the CUDA build of {pin}, several GB that no row needs; "
                "let pip find the CPU build, for example with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
            )


def system_libraries(directory: Path, family: str) -> dict[str, str]:
    """Unpack what the system does not have into the environment; returns the variables to set."""
    if family not in DEBIAN_LIBRARIES:
        return {}
    library, packages = DEBIAN_LIBRARIES[family]
    try:
        ctypes.CDLL(library)
    except OSError:
        pass
    else:
        return {}
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise SetupRefused(f"{family} needs {library}; install it, then run this again")
    unpacked = directory / "system"
    unpacked.mkdir()
    run(["apt-get", "download", *packages], cwd=unpacked)
    for archive in sorted(unpacked.glob("*.deb")):
        run(["dpkg-deb", "-x", str(archive), str(unpacked)])
        archive.unlink()
    holders = {str(path.parent) for path in unpacked.rglob("*.so.*")}
    return {"LD_LIBRARY_PATH": ":".join(sorted(holders))}


def pip(directory: Path) -> list[str]:
    """The command of an environment's own pip."""
    return [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run one command and return what it printed; what it said is in the refusal if it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise SetupRefused(f"`{' '.join(command[:6])} ...` failed: {said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
