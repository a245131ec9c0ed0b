"""`headrace doctor`: what this machine has, what it lacks, and what to do about it.

It changes nothing and never fails itself: a probe that raises becomes a line of the report.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from msgspec import Struct
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from headrace import memory
from headrace.backends.load import DECODERS, SOURCES
from headrace.channel import socket_pair
from headrace.cli import atom_findings, rngd_findings, vllm_findings
from headrace.cli.findings import Finding, Status
from headrace.cli.imports import ELSEWHERE, ImportResult, Imports
from headrace.engine import capacity, models
from headrace.engine.atom.environment import SETUP
from headrace.engine.builtin import BUILTIN_MODELS
from headrace.errors import HeadraceError
from headrace.memory import MADV_POPULATE_WRITE, Slab
from headrace.runtime.worker import MESSAGES_PER_ATTEMPT, worst_progress_nbytes
from headrace.version import VERSION

SLAB_NBYTES: Final = 1 << 20

_MARKS: Final[dict[Status, tuple[str, str]]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "failed": ("FAILED", "bold red"),
}
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_NBYTES = 1 << 62  # cgroup v1 has a number near 2^63 for "none"
_INSTALL = "run: pip install 'headrace[cpu]'"
_RNGD_SETUP = "run: headrace rngd setup"


class Report(Struct, frozen=True):
    """What `--json` prints: `cpu_path` is whether a source and decoder on the CPU can run."""

    headrace: str
    cpu_path: bool
    verdict: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Probe:
    """How to look at one thing; `needed` if the CPU path cannot run without it."""

    name: str
    look: Callable[[], Finding]
    advice: str
    needed: bool = False


def doctor(
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print one JSON object instead.")
    ] = False,
) -> int:
    """Tell what this machine has and lacks; exits 0 when the CPU path can run, else 1."""
    report = examine()
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    return 0 if report.cpu_path else 1


def examine() -> Report:
    """Make every probe and judge the whole."""
    imports = Imports()
    probes = [*_machine_probes(), *_python_probes(imports), *_backend_probes(imports)]
    probes.append(
        Probe("models", _models, "check that HEADRACE_CACHE names a directory that you may read")
    )
    findings = [_try(probe) for probe in probes]
    missing = [
        finding.name
        for probe, finding in zip(probes, findings, strict=True)
        if probe.needed and finding.status == "failed"
    ]
    return Report(VERSION, not missing, _verdict(missing, findings), tuple(findings))


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or "no reason given").splitlines()[0]


def _try(probe: Probe) -> Finding:
    try:
        return probe.look()
    except HeadraceError as exc:  # its text says what to do
        return Finding(probe.name, "failed", _first_line(exc))
    except Exception as exc:  # the one place where any failure is an answer and not a fault
        found = f"{type(exc).__name__}: {_first_line(exc)}"
        return Finding(probe.name, "failed", found, probe.advice)


def _machine_probes() -> list[Probe]:
    linux = "use Linux 5.3 or newer, and a sandbox that allows "
    return [
        Probe("system", _system, "use Linux"),
        Probe("cpu", _cpu, "mount /proc"),
        Probe("memory", _memory, "mount /proc and /sys"),
        Probe("shared memory", _shared_memory, f"{linux}memfd_create and its seals", needed=True),
        Probe("pre-fault", _prefault, f"{linux}madvise"),
        Probe("huge pages", _huge_pages, "mount /sys"),
        Probe("pidfd", _pidfd, f"{linux}pidfd_open", needed=True),
        Probe("control socket", _control_socket, "raise net.core.wmem_max", needed=True),
    ]


def _system() -> Finding:
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = "a system without os-release"
    found, facts = f"{name}, {kernel}", {"kernel": platform.release()}
    if platform.system() != "Linux":
        return Finding(
            "system", "failed", found, "use Linux: nothing else has sealed memfds", facts
        )
    return Finding("system", "ok", found, facts=facts)


def _cpu() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    named = [
        line.partition(":")[2].strip()
        for line in _CPUINFO.read_text().splitlines()
        if line.startswith("model name")
    ]
    model = named[0] if named else platform.machine()  # Arm kernels name none
    facts = {"model": model, "usable": usable, "present": present}
    return Finding("cpu", "ok", f"{model}, {usable} of {present} cores usable", facts=facts)


def _memory() -> Finding:
    total, available = _total_nbytes(), capacity.available_nbytes()
    limit = min(_cgroup_limits(), default=None)
    found = f"{decimal(available)} available of {decimal(total)}"
    if limit is not None:
        found += f", cgroup limit {decimal(limit)}"
    facts = {"available_nbytes": available, "total_nbytes": total, "cgroup_limit_nbytes": limit}
    smallest = min(BUILTIN_MODELS.values(), key=lambda model: model.nbytes)
    needed = 2 * smallest.nbytes + capacity.MEMORY_MARGIN_NBYTES
    if available >= needed:
        return Finding("memory", "ok", found, facts=facts)
    advice = (
        f"source and decoder each hold the weights: {smallest.name} takes {decimal(needed)}; "
        "free memory or raise the container's limit"
    )
    return Finding("memory", "note", found, advice, facts)


def _total_nbytes() -> int:
    totals = [line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:")]
    return int(totals[0].split()[1]) * 1024


def _cgroup_limits() -> Iterator[int]:
    """The limits of the memory cgroups (v1 or v2) around this process, in bytes."""
    for line in _OWN_CGROUP.read_text().splitlines() if _OWN_CGROUP.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUP_ROOT, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _CGROUP_ROOT / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            file = root.joinpath(*parts[:depth], name)
            text = file.read_text().strip() if file.exists() else "max"
            if text != "max" and int(text) < _NO_LIMIT_NBYTES:
                yield int(text)


def _shared_memory() -> Finding:
    """Make a slab, map it a second time as a source does, and read there what is written here."""
    with (
        Slab.create(SLAB_NBYTES) as ours,
        Slab.attach(os.dup(ours.fd), SLAB_NBYTES) as theirs,
    ):
        ours.view[-1] = 1
        if theirs.view[-1] != 1:
            advice = "report this kernel and sandbox: nothing can be handed over here"
            return Finding("shared memory", "failed", "two mappings of one memfd differ", advice)
    found = f"a sealed memfd of {decimal(SLAB_NBYTES)} was made, mapped twice and shared"
    return Finding("shared memory", "ok", found)


def _prefault() -> Finding:
    with mmap.mmap(-1, SLAB_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        try:
            mapping.madvise(MADV_POPULATE_WRITE)
        except OSError as exc:
            found = f"no MADV_POPULATE_WRITE here: {exc.strerror}"
            advice = "pages are touched one by one, so starting takes longer; Linux 5.14 has it"
            return Finding("pre-fault", "note", found, advice)
    return Finding("pre-fault", "ok", "MADV_POPULATE_WRITE works")


def _huge_pages() -> Finding:
    modes = memory.hugepages()
    found = f"{modes.anonymous} (lanes), {modes.shared} (slabs), {modes.num_reserved} reserved"
    facts = {
        "anonymous": modes.anonymous,
        "shared": modes.shared,
        "num_reserved": modes.num_reserved,
    }
    if modes.anonymous in ("never", "absent"):
        advice = "lanes are of small pages, so their first touch takes longer; `madvise` is enough"
        return Finding("huge pages", "note", found, advice, facts)
    return Finding("huge pages", "ok", found, facts=facts)


def _pidfd() -> Finding:
    """Watch a child die: the proof that storage is reused on."""
    with subprocess.Popen(["/bin/sh", "-c", "read _"], stdin=subprocess.PIPE) as child:
        pidfd = os.pidfd_open(child.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            lives = not poll.poll(0)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            died = bool(poll.poll(5000))
        finally:
            os.close(pidfd)
    if lives and died:
        return Finding("pidfd", "ok", "a child's death is seen")
    found = "a pidfd does not tell a child's death"
    return Finding("pidfd", "failed", found, "use Linux 5.3 or newer, outside of emulation")


def _control_socket() -> Finding:
    nbytes = worst_progress_nbytes()
    for end in socket_pair(MESSAGES_PER_ATTEMPT, nbytes):
        end.close()
    found = f"SEQPACKET queues an attempt's {MESSAGES_PER_ATTEMPT} messages of {nbytes} bytes"
    facts = {"messages": MESSAGES_PER_ATTEMPT, "message_nbytes": nbytes}
    return Finding("control socket", "ok", found, facts=facts)


def _python_probes(imports: Imports) -> list[Probe]:
    return [
        Probe("python", _python, "use Python 3.11 or newer"),
        Probe("torch", partial(_torch, imports), _INSTALL, needed=True),
        Probe("transformers", partial(_transformers, imports), _INSTALL, needed=True),
    ]


def _python() -> Finding:
    versions = {"python": platform.python_version(), "msgspec": msgspec.__version__}
    found = f"{versions['python']} ({sys.executable}), msgspec {versions['msgspec']}"
    return Finding("python", "ok", found, facts=versions)


def _torch(imports: Imports) -> Finding:
    torch = imports.result("torch")
    if torch.error:
        return _not_imported("torch", torch)
    cuda = imports.result("cuda")
    devices: list[str] = cuda.facts.get("devices", [])
    seen = f"CUDA {cuda.error}" if cuda.error else ", ".join(devices) or "no CUDA device"
    found = f"{torch.facts['version']}, {torch.facts['threads']} threads, {seen}"
    return Finding("torch", "ok", found, facts={**torch.facts, "cuda": devices})


def _transformers(imports: Imports) -> Finding:
    result = imports.result("transformers")
    if result.error:
        return _not_imported("transformers", result)
    return Finding("transformers", "ok", str(result.facts["version"]), facts=result.facts)


def _not_imported(name: str, result: ImportResult) -> Finding:
    """Tell what is missing from what is broken: both are cured, but not by the same command."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding(name, "failed", f"not installed in {sys.prefix}", _INSTALL)
    found = f"{installed} is installed, but: {result.error}"
    advice = f"see what `{sys.executable} -c 'import {name}'` says, or reinstall it"
    return Finding(name, "failed", found, advice, {"version": installed})


def _backend_probes(imports: Imports) -> list[Probe]:
    """One probe for each name that `--source` and `--decoder` know, and one for a vendor's card."""
    here = [
        Probe(
            f"{role} {name}",
            partial(_backend, imports, f"{role} {name}", spec),
            _INSTALL,
            needed=(role, name) in (("source", "torch"), ("decoder", "cpu")),
        )
        for role, known in (("source", SOURCES), ("decoder", DECODERS))
        for name, spec in known.items()
        if name not in ELSEWHERE
    ]
    return [
        *here,
        Probe("source rngd", rngd_findings.find_environment, _RNGD_SETUP),
        Probe("rngd card", rngd_findings.find_card, _RNGD_SETUP),
        Probe(vllm_findings.ENVIRONMENT, vllm_findings.find_environment, vllm_findings.ADVICE),
        Probe(atom_findings.ENVIRONMENT, atom_findings.find_environment, SETUP),
        Probe(atom_findings.CARD, atom_findings.find_card, SETUP),
    ]


def _backend(imports: Imports, name: str, spec: str) -> Finding:
    module = spec.partition(":")[0]
    result = imports.result(module)
    if result.error:
        return Finding(name, "failed", f"unavailable: {result.error}", _INSTALL)
    if name.endswith(" cuda") and not imports.result("cuda").facts.get("devices"):
        return Finding(name, "ok", "installed, and there is no CUDA device here to run it on")
    return Finding(name, "ok", "available")


def _models() -> Finding:
    root = models.cache_root()
    pulled = [status.model.name for status in models.list_models() if status.pulled]
    facts = {"pulled": pulled, "cache": str(root)}
    if pulled:
        return Finding("models", "ok", f"{', '.join(pulled)} in {root}", facts=facts)
    smallest = min(BUILTIN_MODELS.values(), key=lambda model: model.nbytes).name
    return Finding(
        "models", "note", f"none pulled in {root}", f"run: headrace models pull {smallest}", facts
    )


def _verdict(missing: list[str], findings: Iterable[Finding]) -> str:
    if missing:
        return f"the CPU path cannot run here yet: {', '.join(missing)}"
    notes = [finding.name for finding in findings if finding.status != "ok"]
    return "the CPU path can run" + (f"; see also: {', '.join(notes)}" if notes else "")


def _print(report: Report) -> None:
    console = Console()
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        mark, style = _MARKS[finding.status]
        line = Text.assemble(f"{finding.name:<{width}}  ", (f"{mark:<6}", style), "  ")
        console.print(line.append(finding.found), soft_wrap=True)
        if finding.advice:
            console.print(Text(" " * (width + 10) + finding.advice), soft_wrap=True)
    style = "bold green" if report.cpu_path else "bold red"
    console.print(Text(report.verdict, style), soft_wrap=True)
