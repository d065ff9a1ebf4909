"""``onnxamp bench``."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import click

from onnxamp._batch import Packages, files_below
from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._bench.generating import bench_decoders
from onnxamp._cli.common import (
    Given,
    flag_of,
    given_prompts,
    given_samples,
    show,
    typed_options,
)
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._report.bench import bench_report, generation_report
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.decoder import Decoder, reads_prompts

_OF_RUNS = frozenset({"batches", "tf32", "nhwc", "cuda_graph", "no_profile", "inputs"})
"""Options for models that run once, and generate nothing."""


def run(given: Given) -> None:
    """Run ``onnxamp bench``."""
    if given.prompts or any(path.is_dir() for path in given.models):
        _bench_decoders(given)
        return
    if "tokens" in typed_options():
        raise ArgumentError(
            "--tokens is for folders of language models, and for decoders with --prompts."
        )
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
    show(given, partial(bench_report, report), "bench", lambda: {"report": report})


def _bench_decoders(given: Given) -> None:
    """Time decoders, and those of folders, while they generate text.

    Raises:
        ArgumentError: an option is for models that run once, or a folder holds no decoder, or several.
    """
    for name in sorted(_OF_RUNS & typed_options()):
        raise ArgumentError(
            f"{flag_of(name)} is for models that run once: decoders generate text here."
        )
    models = [_decoder(path) if path.is_dir() else path for path in given.models]
    with progress_bar(quiet=given.quiet) as progress:
        report = bench_decoders(
            models,
            prompts=given_prompts(given),
            count=given.tokens,
            provider=given.provider,
            dims=given.dims,
            seed=given.seed,
            seconds=given.seconds,
            threads=given.threads,
            told=partial(progress, "generating"),
        )
    show(
        given,
        partial(generation_report, report),
        "bench generation",
        lambda: {"report": report},
    )
    if any(one.nans for one in report.runs):
        raise click.exceptions.Exit(1)


def _decoder(folder: Path) -> Path:
    """Return the decoder of a folder.

    Raises:
        ArgumentError: there is none, or several.
    """
    packages = Packages(folder)
    homes = defaultdict[Path, dict[Path, tuple[int, bool]]](dict)
    for path in files_below(folder):
        if path.suffix == ".onnx" and reads_prompts(model := Model.read(path)):
            package = packages.of(path)
            home = path.parent if package is None else package.folder
            rank = 0 if package is None else package.kind.rank(path)
            homes[home][path] = rank, not Decoder.of(model).flags
    # If a network exists in several types, only the most precise one is used; of its decoders, the merged one.
    found = [
        path
        for ranks in homes.values()
        for path, rank in ranks.items()
        if rank == min(ranks.values())
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArgumentError(f"{str(folder)!r} holds no decoder with caches.")
    names = ", ".join(path.relative_to(folder).as_posix() for path in found)
    raise ArgumentError(
        f"{str(folder)!r} holds several decoders; name the file of one: {names}."
    )
