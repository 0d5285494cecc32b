"""What several commands ask for: models, methods, files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

import hvd_gradcomp
from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    GradiVeQCompressor,
    HybridCompressor,
    LGCCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)


def usual(scale: float = 1.0) -> list[Compressor]:
    """Every method with settings at which it is usual.

    Args:
        scale: root mean square of the gradients. Methods with a threshold get one that about one
            element in 560 of noise of that size passes.
    """
    return [
        FP16Compressor(),
        VarianceCompressor(alpha=4.3),
        HybridCompressor(tau=_rounded(0.1 * scale), alpha=11.9),
        StromCompressor(tau=_rounded(19.1 * scale)),
        EGCCompressor(K=1024),
        DGCCompressor(density=0.001),
        SparseGDCompressor(density=0.001),
        GradientDroppingCompressor(ratio=0.99),
        ScaleComCompressor(density=0.001),
        QSGDCompressor(bits=4),
        TernGradCompressor(),
        OneBitCompressor(),
        GradiVeQCompressor(ratio=8, sample_steps=200),
        LGCCompressor("ring_allreduce"),
        LGCCompressor("parameter_server"),
    ]


def _rounded(threshold: float) -> float:
    """To three digits, and above zero."""
    return float(f"{max(threshold, 1e-30):.3g}")


def parsed(text: str) -> Compressor:
    """The compressor that an expression makes.

    Raises:
        click.BadParameter: it makes none, or its settings are out of range.
    """
    try:
        made = eval(text, dict(vars(hvd_gradcomp)))  # the user's own command line
    except Exception as error:
        raise click.BadParameter(f"{text!r}: {error}") from error
    if not isinstance(made, Compressor):
        raise click.BadParameter(
            f"{text!r} is no compressor; write it as in Python, such as 'QSGDCompressor(bits=4)'"
        )
    return made


def _methods(
    ctx: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> list[Compressor]:
    del ctx, parameter
    return [parsed(text) for text in texts]


def with_methods(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--method`, again and again; all of them by default."""
    return click.option(
        "-c",
        "--compression",
        "compressors",
        multiple=True,
        callback=_methods,
        metavar="COMPRESSOR",
        help='As in Python, such as "DGCCompressor(density=0.001)"; can be given several times. '
        "Default: every method with usual settings.",
    )(command)


def with_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--model`."""
    return click.option(
        "-m",
        "--model",
        "model_name",
        default="resnet50",
        show_default=True,
        metavar="MODEL",
        help="resnet50, vgg16, bert-base, lstm; or module:factory, a function of your own that "
        "returns a torch.nn.Module, or (module, loss) where loss() returns the loss of a batch.",
    )(command)


def with_files(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json` and `--png`."""
    path = click.Path(dir_okay=False, path_type=Path)
    command = click.option("--json", "json_path", type=path, help="Write all figures here.")(
        command
    )
    return click.option("--png", "png_path", type=path, help="Draw them here.")(command)


def check_png(path: Path | None) -> None:
    """Before anything is measured, that it can be drawn.

    Raises:
        click.ClickException: matplotlib is not installed.
    """
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException("--png needs matplotlib: pip install matplotlib") from error


def started() -> Any:
    """Horovod for PyTorch, running, quiet but for errors.

    Raises:
        click.ClickException: it does not import; `doctor` says why.
    """
    try:
        import horovod.torch as horovod
    except Exception as error:
        raise click.ClickException(
            f"Horovod for PyTorch does not import: {error}. `hvd-gradcomp doctor` says what is "
            "missing and what to do"
        ) from error
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    horovod.init()
    return horovod


def write_json(path: Path | None, content: Any) -> None:
    """In a folder that is made where there is none; nowhere without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Text to the left, figures to the right."""
    alike = ("left", *["right"] * (len(head) - 1))
    return str(tabulate(list(rows), head, colalign=alike, disable_numparse=True))
