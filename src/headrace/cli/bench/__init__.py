"""`headrace bench`: one command per claim, each with its raw rows."""

from __future__ import annotations

from cyclopts import App

from headrace.cli.bench.faults import faults_command
from headrace.cli.bench.routes import routes_command
from headrace.cli.bench.slab import control_command, slab_command

bench_app = App(name="bench", help="Measure the hand-off; rows go to --out as JSON lines.")
bench_app.command(control_command, name="control")
bench_app.command(slab_command, name="slab")
bench_app.command(faults_command, name="faults")
bench_app.command(routes_command, name="routes")
