"""`headrace bench`: one command per claim, each with its raw rows."""

from __future__ import annotations

from cyclopts import App

from headrace.cli.bench.batch import batch_command
from headrace.cli.bench.curve import curve_command
from headrace.cli.bench.faults import faults_command
from headrace.cli.bench.imports import imports_command
from headrace.cli.bench.lane import lane_command
from headrace.cli.bench.load import load_command
from headrace.cli.bench.message import message_command
from headrace.cli.bench.peers import peers_command
from headrace.cli.bench.plot import plot_command
from headrace.cli.bench.prefix import prefix_command
from headrace.cli.bench.rngd import rngd_command
from headrace.cli.bench.scale import scale_command
from headrace.cli.bench.serve import serve_command
from headrace.cli.bench.ttft import ttft_command
from headrace.cli.bench.vllm import vllm_command

bench_app = App(name="bench", help="Measure the hand-off; rows go to --out as JSON lines.")
bench_app.command(curve_command, name="curve")
bench_app.command(ttft_command, name="ttft")
bench_app.command(load_command, name="load")
bench_app.command(lane_command, name="lane")
bench_app.command(message_command, name="message")
bench_app.command(scale_command, name="scale")
bench_app.command(peers_command, name="peers")
bench_app.command(plot_command, name="plot")
bench_app.command(faults_command, name="faults")
bench_app.command(imports_command, name="imports")
bench_app.command(batch_command, name="batch")
bench_app.command(prefix_command, name="prefix")
bench_app.command(rngd_command, name="rngd")
bench_app.command(serve_command, name="serve")
bench_app.command(vllm_command, name="vllm")
