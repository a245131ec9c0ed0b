"""The command line: `headrace run | models | doctor | bench`, and what a mistake comes to."""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError

from headrace.cli.bench import bench_app
from headrace.cli.doctor import doctor
from headrace.cli.models import models_app
from headrace.cli.run import run
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from headrace.version import VERSION

app = App(
    name="headrace",
    help="Stream the KV cache of a request into a decoder while its prefill is still running.",
    version=VERSION,
    suppress_keyboard_interrupt=False,
)
app.command(run)
app.command(doctor)
app.command(models_app)
app.command(bench_app)

MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130


def main(arguments: list[str] | None = None) -> None:
    """Run one command; exits 2 for a user's mistake, 1 for a failure, with one sentence."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    spelled = ["--stdin" if argument == "-" else argument for argument in arguments]
    try:
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
    return status if isinstance(status, int) else 0


def _complain(text: str, status: int) -> int:
    print(f"headrace: {text}", file=sys.stderr)
    return status
