"""Each core module is covered, every branch, by its own test file: `python -m tests.own_coverage`.

A module that only other modules' tests reach has rules that nobody stated. The data of each run lie
in a temporary directory, so a `.coverage` of the whole suite stays as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headrace"
CORE = ("errors", "ids", "geometry", "plan", "coverage")
PACKAGES = ("messages", "protocol")
TIMEOUT_S = 120


def core_modules() -> list[Path]:
    """The modules of the sans-IO core, in the order of their imports, then by name."""
    inside = [path for name in PACKAGES for path in sorted((SOURCE / name).glob("[!_]*.py"))]
    return [SOURCE / f"{name}.py" for name in CORE] + inside


def own_tests(module: Path) -> Path:
    """The one test file of a module; tests/unit mirrors src."""
    place = module.relative_to(SOURCE)
    return ROOT / "tests" / "unit" / place.with_name(f"test_{place.name}")


def uncovered(module: Path) -> str:
    """What of a module its own tests leave out, in words; empty if nothing."""
    tests = own_tests(module)
    if not tests.exists():
        return f"has no {tests.relative_to(ROOT)}"
    with tempfile.TemporaryDirectory() as place:
        data, report = f"--data-file={place}/data", Path(place, "report.json")
        name = ".".join(module.relative_to(SOURCE.parent).with_suffix("").parts)
        measure = ["run", "--branch", data, f"--source={name}", "-m", "pytest", "-q", str(tests)]
        for command in (measure, ["json", "-q", data, "-o", str(report)]):
            failure = _run("-m", "coverage", *command)
            if failure:
                return failure
        (found,) = json.loads(report.read_text())["files"].values()
    lines = [str(line) for line in found["missing_lines"]]
    branches = [f"{start}->{stop}" for start, stop in found["missing_branches"]]
    if not lines and not branches:
        return ""
    percent = found["summary"]["percent_covered_display"]
    return f"{percent} %, missing {', '.join([*lines, *branches])}"


def main() -> int:
    """Print one line per module; 1 if one of them is below 100 %."""
    short = 0
    modules = core_modules()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for module, missing in zip(modules, pool.map(uncovered, modules), strict=True):
            print(f"{module.relative_to(SOURCE)!s:24} {missing or '100 %'}", flush=True)
            short += bool(missing)
    return 1 if short else 0


def _run(*command: str) -> str:
    """Run Python in the repository; returns the end of its output if it failed, else nothing."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return f"failed: {done.stdout[-2000:].strip()}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
