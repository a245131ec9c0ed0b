"""Raw rows as JSON lines, the stamp that each run begins with, and medians with their spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import Refused
from headrace.version import VERSION

PACKAGES = ("msgspec", "torch", "transformers", "numpy", "matplotlib")


class Spread(NamedTuple):
    """A median with the 10th and 90th percentile and the number of samples."""

    median: float
    p10: float
    p90: float
    samples: int

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.p10:.3g}, {self.p90:.3g}] n={self.samples}"


def spread(samples: Sequence[float]) -> Spread:
    """Median, p10 and p90 of at least one sample."""
    return Spread(
        statistics.median(samples), percentile(samples, 10), percentile(samples, 90), len(samples)
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    rank = max(0, min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1))))
    return ordered[rank]


def write_rows(path: Path | None, claim: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write the run's stamp and all its rows to `path`, replacing what was there."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"claim": claim, "stamp": stamp()}), *map(json.dumps, rows)]
    path.write_text("\n".join(lines) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, without its stamps; a last line that was cut short is left out.

    Raises:
        Refused: it is no file of rows.
    """
    return [line for line in _read_lines(path) if "stamp" not in line]


class RowFile:
    """A file that grows row by row, so that a run that was cut short can be gone on with.

    Each run writes its stamp, with its settings, before its first row, and each row tells the
    number of its `run`. What identifies a row are the values of `key`; a row that tells why
    something was `skipped` stands for no measured one.
    """

    def __init__(
        self,
        path: Path | None,
        claim: str,
        key: Sequence[str],
        *,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        """With `resume`, the rows that are there are kept, but for those that were skipped; else
        they are replaced. `settings`: what the rows depend on beside their key.

        Raises:
            Refused: the file to go on with holds the rows of another claim or of other settings, or
            no rows.
        """
        self._path, self._claim, self._key = path, claim, tuple(key)
        self._settings = json.loads(json.dumps(dict(settings or {})))
        self._stamped = False
        self._run = 0
        self.rows: list[dict[str, Any]] = []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._take_up(path)
        else:
            path.write_text("")

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        """Whether a row with the same key was measured."""
        key = self._key_of(row)
        return any(key == self._key_of(each) for each in self.rows if "skipped" not in each)

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row and write it out; returns it as it was written."""
        row = {**row, "run": self._run}
        self.rows.append(row)
        if self._path is None:
            return row
        lines = [row]
        if not self._stamped:
            about = {"claim": self._claim, "settings": self._settings, "stamp": stamp()}
            lines.insert(0, about)
            self._stamped = True
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return row

    def _take_up(self, path: Path) -> None:
        lines = _read_lines(path)
        stamps = [line for line in lines if "stamp" in line]
        claims = {line["claim"] for line in stamps}
        if claims - {self._claim}:
            raise Refused(f"{path} holds rows of {', '.join(sorted(claims))}, not {self._claim}")
        for line in stamps:
            self._check_settings(path, line.get("settings", {}))
        self._run = len(stamps)
        lines = [line for line in lines if "skipped" not in line]
        self.rows = [line for line in lines if "stamp" not in line]
        whole = path.with_name(f"{path.name}.new")
        whole.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(whole, path)

    def _check_settings(self, path: Path, theirs: Mapping[str, Any]) -> None:
        names = [*self._settings, *(name for name in theirs if name not in self._settings)]
        for name in names:
            was, now = theirs.get(name), self._settings.get(name)
            if was != now:
                raise Refused(
                    f"{path} was measured with {name} {was} and this run has {now}; "
                    "go on with the same, or name another file"
                )

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._key)


def pairs(
    rows: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]], *names: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Rows with the other row that has the same values of `names` and is of the same run."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (row.get("run", 0), *(row[name] for name in names))

    by_key = {key(other): other for other in others}
    return [(row, by_key[key(row)]) for row in rows if key(row) in by_key]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    texts = path.read_text().splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as exc:
            if number == len(texts):  # a run that was killed while it wrote
                break
            raise Refused(f"{path} line {number} is no row of a benchmark: {exc}") from exc
        if not isinstance(line, dict):
            raise Refused(f"{path} line {number} is no row of a benchmark")
        lines.append(line)
    return lines


def stamp() -> dict[str, Any]:
    """Commit, dirty flag, machine, versions and load of this moment."""
    return {
        "headrace": VERSION,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load": os.getloadavg(),
    }


def cpu_model() -> str:
    """The CPU's own name, or the architecture where it has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def busy_share(seconds: float = 0.2) -> float:
    """The share of all CPU time that was not idle during `seconds`: the run's own idle check."""
    before = _cpu_ticks()
    time.sleep(seconds)
    after = _cpu_ticks()
    total = sum(after) - sum(before)
    idle = (after[3] + after[4]) - (before[3] + before[4])
    return 1 - idle / total if total else 0.0


def _cpu_ticks() -> list[int]:
    with open("/proc/stat") as lines:
        return [int(field) for field in lines.readline().split()[1:9]]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except OSError:
        return ""
    return done.stdout.strip()
