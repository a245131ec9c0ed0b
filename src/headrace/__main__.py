"""`python -m headrace` and the `headrace` script: the command line, or what it lacks."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages say in one sentence how to get them, exit 2."""
    try:
        from headrace.cli import main as run
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "headrace":
            raise  # a broken installation of ours, which no extra would mend
        print(
            f"headrace: the command line needs {exc.name}, which is not installed; "
            "run: pip install 'headrace[cpu]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
