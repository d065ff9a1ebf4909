"""``onnxamp bench``."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._cli.common import errors_end_here, parse_dims, provider_of, provider_option
from onnxamp._errors import ArgumentError
from onnxamp._report.bench import bench_json, bench_report
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._runtime.samples import load_samples


@click.command("bench")
@click.argument("models", type=click.Path(path_type=Path), nargs=-1, required=True)
@provider_option
@click.option("--batch", "batches", metavar="N[,N...]", default="", help="Batch sizes [as the model says].")
@click.option("--dim", "dims", metavar="NAME=N", multiple=True,
              help="Size of a dynamic dimension of made-up inputs. Repeatable.")  # fmt: skip
@click.option("--inputs", metavar="PATH", help="Inputs instead of made-up ones; the first sample is used.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of made-up inputs.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
              help="How long each model is timed at each batch size.")  # fmt: skip
@click.option("--tf32/--no-tf32", default=True, show_default=True, help="CUDA: let float32 products use TF32.")
@click.option("--nhwc", is_flag=True, help="CUDA: let convolutions run in NHWC (prefer_nhwc).")
@click.option("--cuda-graph", is_flag=True, help="CUDA: record each run as a CUDA graph, and replay it.")
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU: threads of one op [as ONNX Runtime likes].")
@click.option("--no-profile", is_flag=True, help="Only time: no op times, memory and causes.")
@click.option("--json", "as_json", is_flag=True, help="Print the benchmark as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
@click.option("-v", "--verbose", is_flag=True, help="Print all op types; show tracebacks.")
def command(models: tuple[Path, ...], **options: Any) -> None:
    """Time MODELS in turns on the same inputs; the first is what the others are held to.

    Exit codes: 0 all ran; 1 one does not run, or not where it should; 2 wrong usage.
    """
    with errors_end_here(verbose=options["verbose"]):
        _bench(models, options)


def _bench(models: tuple[Path, ...], options: dict[str, Any]) -> None:
    if options["inputs"] and (options["dims"] or options["seed"]):
        raise ArgumentError("--inputs gives the inputs: --dim and --seed are for made-up ones.")
    wanted = BenchOptions(
        tf32=options["tf32"], nhwc=options["nhwc"], cuda_graph=options["cuda_graph"], threads=options["threads"],
        seconds=options["seconds"], profile=not options["no_profile"],
    )  # fmt: skip
    with progress_bar(quiet=options["quiet"]) as told:
        report = bench_models(
            *models, provider=provider_of(options), batches=_batches(options["batches"]),
            dims=parse_dims(options["dims"]), feeds=load_samples(options["inputs"])[0] if options["inputs"] else None,
            seed=options["seed"], options=wanted, told=partial(told, "timing"),
        )  # fmt: skip
    if options["as_json"] and not options["quiet"]:
        click.echo(bench_json(report))
    elif not options["quiet"]:
        print_report(bench_report(report), verbose=options["verbose"])


def _batches(text: str) -> list[int]:
    """``1,8,32`` as numbers.

    Raises:
        click.BadParameter: it is not of that form.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not of the form N,N,...", param_hint="--batch")
    return [int(part) for part in parts]
