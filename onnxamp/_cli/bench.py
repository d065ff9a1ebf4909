"""``onnxamp bench``."""

from functools import partial

import click

from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._cli.common import FILE, Given, new_command, option, show
from onnxamp._cli.options import (
    custom_ops_option,
    given_samples,
    report_options,
    run_options,
)
from onnxamp._report.bench import bench_json, bench_report
from onnxamp._report.progress import progress_bar


def _batches(text: str) -> list[int]:
    """``1,8,32`` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not of the form N,N,...")
    return [int(part) for part in parts]


@new_command("bench")
@click.argument("models", type=FILE, nargs=-1, required=True)
@option(
    "--batch",
    "batches",
    metavar="N[,N...]",
    type=_batches,
    help="Batch sizes [the model's own].",
)
@custom_ops_option
@run_options(count=None)
@option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    help="How long to time each model at each batch size.",
)
@option(
    "--tf32/--no-tf32",
    default=True,
    help="CUDA: allow TF32 in float32 matrix products and convolutions.",
)
@option(
    "--nhwc", is_flag=True, help="CUDA: run convolutions in NHWC layout (prefer_nhwc)."
)
@option("--cuda-graph", is_flag=True, help="CUDA: capture a CUDA graph and replay it.")
@option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    show_default=False,
    help="CPU: threads per op [ONNX Runtime's default].",
)
@option(
    "--no-profile",
    is_flag=True,
    help="Measure latency only: no op times, memory use or causes.",
)
@report_options("benchmark", "op type", silent="Print nothing; use the exit code.")
def command(given: Given) -> None:
    """Time MODELS in turns on the same inputs, compare them with the first, and explain slowdowns.

    Of several --inputs the first sample is used.

    Exit codes: 0 all models ran; 1 a model does not run, or not on the provider; 2 wrong usage.
    """
    samples = given_samples(given)
    with progress_bar(quiet=given.quiet) as progress:
        report = bench_models(
            *given.models,
            provider=given.provider,
            batches=given.batches or (),
            dims=given.dims,
            feeds=None if samples is None else samples[0],
            seed=given.seed,
            options=BenchOptions(
                tf32=given.tf32,
                nhwc=given.nhwc,
                cuda_graph=given.cuda_graph,
                threads=given.threads,
                seconds=given.seconds,
                profile=not given.no_profile,
            ),
            told=partial(progress, "timing"),
        )
    show(given, partial(bench_report, report), partial(bench_json, report))
