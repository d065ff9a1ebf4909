"""``onnxamp bench``."""

from functools import partial

from onnxamp._cli.common import Given, given_samples, show
from onnxamp._numerics.speed.bench import BenchOptions, bench_models
from onnxamp._report.bench import bench_report
from onnxamp._report.progress import progress_bar


def run(given: Given) -> None:
    """Run ``onnxamp bench``."""
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
                profile=given.profile,
            ),
            told=partial(progress, "timing"),
        )
    show(given, partial(bench_report, report), "bench", lambda: {"report": report})
