"""The command line: its commands, and what a mistake comes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import fields

from cyclopts import App, CycloptsError

from headrace.cli.arguments import check_text
from headrace.cli.atom import atom_app
from headrace.cli.bench import bench_app
from headrace.cli.check import check
from headrace.cli.config import config_app
from headrace.cli.doctor import doctor
from headrace.cli.models import models_app
from headrace.cli.owner import owner_app
from headrace.cli.proxy import proxy
from headrace.cli.rngd import rngd_app
from headrace.cli.run import run
from headrace.cli.run_options import RunOptions
from headrace.cli.serve import serve
from headrace.cli.trace import trace
from headrace.cli.vllm_env import vllm_env
from headrace.engine.capacity import MORE_MEMORY
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from headrace.version import VERSION

app = App(
    name="headrace",
    help="Stream the KV cache of a request into a decoder while its prefill is still running.",
    version=VERSION,
    suppress_keyboard_interrupt=False,
)
app.command(run)
app.command(serve)
app.command(proxy)
app.command(config_app)
app.command(trace)
app.command(check)
app.command(doctor)
app.command(owner_app)
app.command(models_app)
app.command(rngd_app)
app.command(vllm_env)
app.command(atom_app)
app.command(bench_app)

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130


def main(arguments: list[str] | None = None) -> None:
    """Run one command; exits 2 for a user's mistake, 1 for a failure, with one sentence."""
    _fill_standard_descriptors()
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    try:
        check_text(arguments)
        spelled = list(_spelled(arguments)) if arguments[:1] == ["run"] else arguments
        status = app(spelled, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as exc:
        return _complain(str(exc).splitlines()[0], MISTAKE)
    except (Refused, BackendUnavailable) as exc:
        return _complain(str(exc), MISTAKE)
    except HeadraceError as exc:
        return _complain(f"{exc}", FAILURE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return FAILURE
    except MemoryError:
        return _complain(f"too little memory. {MORE_MEMORY}", FAILURE)
    except (OSError, UnicodeError) as exc:  # a full disk, an output that cannot spell the text
        return _complain(str(exc), FAILURE)
    return status if isinstance(status, int) else 0


def _spelled(arguments: list[str]) -> Iterator[str]:
    """Spell a lone `-` as the parser takes it: --stdin, or `=-` if it is an option's value."""
    valueless = {"--stdin", "--no-stdin", "--help", "--version"}
    for field in fields(RunOptions):
        if field.type == "bool":
            flag = field.name.replace("_", "-")
            valueless |= {f"--{flag}", f"--no-{flag}"}
    waiting: str | None = None  # an option that takes a value
    for argument in arguments:
        if waiting is not None:
            yield from (f"{waiting}=-",) if argument == "-" else (waiting, argument)
            waiting = None
        elif argument == "-":
            yield "--stdin"
        elif argument.startswith("--") and "=" not in argument and argument not in valueless:
            waiting = argument
        else:
            yield argument
    if waiting is not None:
        yield waiting


def _complain(text: str, status: int) -> int:
    print(f"headrace: {' '.join(text.splitlines())}", file=sys.stderr)
    return status


def _fill_standard_descriptors() -> None:
    """Open what was closed of 0 to 2, or a channel's end would land there and be lost at exec."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
