"""Options that commands share: models, methods, files."""

from __future__ import annotations

import ast
import importlib
import logging
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import hvd_gradcomp
from hvd_gradcomp.algorithms.combined.local_steps import EIGHTH
from hvd_gradcomp.cli import launching, style
from hvd_gradcomp.cli.output import in_folder, with_json, writing
from hvd_gradcomp.core import registry
from hvd_gradcomp.core.installation import build
from hvd_gradcomp.core.suggestions import did_you_mean, unknown_parameters
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.methods import ExchangeMethod, Local, Momentum
from hvd_gradcomp.tuning import fewer_exchanges

if TYPE_CHECKING:
    from hvd_gradcomp.tuning.job import Job

WIDTH = 80  # columns of a terminal
NAMES = 19  # columns for a row's name

_MAKERS: dict[str, Callable[..., Any]] = {  # besides the compressor classes
    "OuterSGD": hvd_gradcomp.OuterSGD,
    "after": hvd_gradcomp.after,
    "balanced": hvd_gradcomp.balanced,
    "local": Local,
    "momentum": Momentum,
    "partition": hvd_gradcomp.partition,
    "robust": hvd_gradcomp.robust,
    "role": hvd_gradcomp.role,
    "smaller": hvd_gradcomp.smaller,
}


def usual(scale: float = 1.0) -> dict[str, Compressor]:
    """Return this package's methods by short name, with usual settings.

    Those that end in "-coded" send the same elements in fewer bytes, for slow links;
    "chunked-topk-denser" is for local steps.

    Args:
        scale: root mean square of the gradients, the unit of thresholds: Hybrid's is a tenth of
            it, and about one element in 560 of noise of that size passes Strom's.
    """
    return {
        "fp16": hvd_gradcomp.FP16Compressor(),
        "variance": hvd_gradcomp.VarianceCompressor(alpha=2.0),
        "variance-coded": hvd_gradcomp.VarianceCompressor(alpha=2.0, capacity="latest"),
        "hybrid": hvd_gradcomp.HybridCompressor(tau=_rounded(0.1 * scale), alpha=2.0),
        "strom": hvd_gradcomp.StromCompressor(tau=_rounded(19.1 * scale)),
        "egc": hvd_gradcomp.EGCCompressor(K=1024),
        "dgc": hvd_gradcomp.DGCCompressor(density=0.001),
        "sparse-gd": hvd_gradcomp.SparseGDCompressor(density=0.001),
        "sparse-gd-coded": hvd_gradcomp.SparseGDCompressor(density=0.001, values="int4"),
        "gradient-dropping": hvd_gradcomp.GradientDroppingCompressor(ratio=0.99),
        "scalecom": hvd_gradcomp.ScaleComCompressor(),
        "qsgd": hvd_gradcomp.QSGDCompressor(bits=4),
        "terngrad": hvd_gradcomp.TernGradCompressor(),
        "onebit": hvd_gradcomp.OneBitCompressor(),
        "bf16": hvd_gradcomp.BF16Compressor(),
        "fp8": hvd_gradcomp.FP8Compressor(),
        "int8": hvd_gradcomp.Int8Compressor(),
        "chunked-topk": hvd_gradcomp.ChunkedTopKCompressor(),
        "chunked-topk-denser": EIGHTH,
        "ok-topk": hvd_gradcomp.OkTopKCompressor(),
        "powersgd": hvd_gradcomp.PowerSGDCompressor(),
        "acp-sgd": hvd_gradcomp.ACPSGDCompressor(),
        "demo": hvd_gradcomp.DeMoCompressor(),
        "random-k": hvd_gradcomp.RandomKCompressor(),
        "ef-signsgd": hvd_gradcomp.EFSignSGDCompressor(),
        "signum": hvd_gradcomp.SignumCompressor(),
        "natural": hvd_gradcomp.NaturalCompressor(),
        "gradiveq": hvd_gradcomp.GradiVeQCompressor(ratio=8),
        "lgc": hvd_gradcomp.LGCCompressor("ring_allreduce"),
        "lgc-server": hvd_gradcomp.LGCCompressor("parameter_server"),
    }


def usual_in_step() -> dict[str, ExchangeMethod]:
    """Return the methods beside compressors of gradients by short name, with usual settings."""
    int8 = fewer_exchanges.INT8_EVERY_15
    return {
        "local-int8": Local(int8.compressor, every=int8.every),
        "local-chunked-topk": Local(),
        "momentum-onebit": Momentum(hvd_gradcomp.OneBitCompressor()),
    }


def _rounded(threshold: float) -> float:
    """Round to three digits, and above zero."""
    return float(f"{max(threshold, 1e-30):.3g}")


def chosen(texts: Sequence[str], scale: float = 1.0) -> list[ExchangeMethod]:
    """Parse the methods on the command line: short names, or Python code; by default all.

    All means those of this package, and those that installed packages declare.

    Args:
        texts: of the command line.
        scale: see `usual`.

    Raises:
        click.BadParameter: a text does not name a method, or its settings are out of range.
    """
    builtin: dict[str, Any] = {**usual(scale), **usual_in_step()}
    items = [
        builtin.get(text) or (registry.load(text) if text in _declared() else _parsed(text))
        for text in texts or _names()
    ]
    if texts and None in items:
        raise click.BadParameter(f"{texts[items.index(None)]!r} cannot be used, as said above")
    return [
        item if isinstance(item, ExchangeMethod) else ExchangeMethod(item)
        for item in items
        if item is not None
    ]


@lru_cache(maxsize=1)
def _declared() -> list[str]:
    """Return short names of other packages' methods, without those that clash with ours."""
    builtin = usual()
    for short, point in registry.declared().items():
        if short in builtin:
            registry.leave_out(point, "hvd_gradcomp has one by that name")
    return [short for short in registry.declared() if short not in builtin]


def _names() -> list[str]:
    """Return all short names."""
    return [*usual(), *usual_in_step(), *_declared()]


def _parsed(text: str) -> Compressor | ExchangeMethod:
    try:
        made = _made(ast.parse(text.strip(), mode="eval").body)
    except (_NotWritten, SyntaxError, RecursionError, MemoryError):
        made = None
    except Exception as error:
        raise click.BadParameter(f"{_short(text)}: {error}") from error
    if not isinstance(made, (Compressor, ExchangeMethod)):
        nearest = _nearest(text)
        raise click.BadParameter(
            f"{_short(text)} is no compressor{nearest or '.'} Give one of {', '.join(_names())}, "
            "or write one as in Python, of names, numbers and texts, such as "
            "'QSGDCompressor(bits=4)' or 'local(Int8Compressor(), every=15)'"
        )
    return made


def _nearest(text: str) -> str:
    """Return the name nearest to the first one in a text that is not known; see `did_you_mean`."""
    makers = [*_MAKERS, *(name for name in registry.known() if name in vars(hvd_gradcomp))]
    if "(" not in text:
        return did_you_mean(text.strip(), [*_names(), *makers])
    called = re.findall(r"(\w+)\(", text)
    return next((did_you_mean(name, makers) for name in called if name not in makers), "")


class _NotWritten(Exception):  # noqa: N818 - it never leaves this module
    """Text is not a call that creates a compressor."""


def _made(node: ast.expr) -> Any:
    """Evaluate calls of compressor classes and makers with literals. Nothing else runs."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        maker = _MAKERS.get(name) or registry.find(name)
        if maker is None:
            raise _NotWritten
        if any(keyword.arg is None for keyword in node.keywords):
            raise _NotWritten
        arguments = [_made(one) for one in node.args]
        named = {str(keyword.arg): _made(keyword.value) for keyword in node.keywords}
        error = unknown_parameters(maker, named)
        if error:
            raise ValueError(error)
        return maker(*arguments, **named)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_made(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_made, node.values)))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_made(one) for one in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _NotWritten from None


def _short(text: str) -> str:
    return repr(text if len(text) < 200 else f"{text[:200]}...")


def _checked(ctx: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> Sequence[str]:
    chosen(texts)
    return texts


def with_methods(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--compression`, which may be repeated; by default every method."""
    return click.option(
        "-c",
        "--compression",
        "texts",
        multiple=True,
        callback=_checked,
        metavar="COMPRESSOR",
        help="Compressor with usual settings, such as dgc, or written as in Python, such as "
        '"DGCCompressor(density=0.01)"; or "local(Int8Compressor(), every=15)" for LocalSteps, '
        '"momentum(OneBitCompressor())" for MomentumExchange. Can be given several times. '
        f"Default: {', '.join(_names())}.",
    )(command)


def with_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--model`."""
    return click.option(
        "-m",
        "--model",
        "model_name",
        default="resnet50",
        show_default=True,
        metavar="MODEL",
        help="resnet50, vgg16, bert-base, lstm; or module:factory, a function of your own that "
        "returns a torch.nn.Module, or (module, loss) where loss() returns the loss of a batch, "
        "or (module, loss, optimizer).",
    )(command)


def with_shards(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--shards`."""
    return click.option(
        "--shards",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Ranks, neighbours such as those of a host, that shard the model by fully_shard "
        "(FSDP2): what travels between hosts is each rank's shard. Over torch.distributed.",
    )(command)


def with_preview(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--preview`."""
    return click.option(
        "--preview/--no-preview",
        default=True,
        show_default=True,
        help="Begin with one round of a few methods: a rough answer, and how long the rest takes.",
    )(command)


def with_files(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` and `--png`."""
    kind = click.Path(dir_okay=False, path_type=Path)
    drawn = click.option(
        "--png",
        "png_path",
        type=kind,
        callback=in_folder,
        help="Draw a figure into this file: png, svg or pdf.",
    )
    return with_json(drawn(command))


def check_png(path: Path | None) -> None:
    """Check, before any measurement, that the figure can be drawn.

    Raises:
        click.ClickException: matplotlib is not installed, or the file type is not supported.
    """
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException("--png needs matplotlib: pip install matplotlib") from error
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"--png: {path} ends in none of .png, .svg, .pdf")


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield axes of a figure in inches, and save it at exit; see `hvd_gradcomp.cli.style`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context(style.SETTINGS):
        figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        yield axes
        with writing(path):
            figure.savefig(path)
        pyplot.close(figure)


def job(shards: int = 1) -> Job:
    """Return the job that this process is a rank of; it ends with the command.

    Without a launcher the process is a rank that nobody else is with. This package logs only
    errors until then.

    Args:
        shards: of a model, each on another rank.

    Raises:
        click.ClickException: PyTorch, or Horovod under its own launcher, does not import.
        click.UsageError: these ranks do not shard a model.
    """
    if shards > 1 and launching.launcher() == "Horovod":
        raise click.UsageError("--shards is of fully_shard, whose ranks torchrun starts: see --ddp")
    context = click.get_current_context()
    logger = logging.getLogger("hvd_gradcomp")
    context.call_on_close(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.ERROR)
    if launching.launcher() == "Horovod":
        made = _horovod_job()
    else:
        try:
            over_c10d = importlib.import_module("hvd_gradcomp.tuning.over_c10d")
        except ImportError as error:
            raise click.ClickException(
                f"this command measures on PyTorch, which does not import: {error}"
            ) from error
        try:
            made = over_c10d.TorchJob(shards)
        except ValueError as error:
            raise click.UsageError(f"--shards: {error}") from error
    context.call_on_close(made.close)
    return made


def _horovod_job() -> Job:
    try:
        made: Job = importlib.import_module("hvd_gradcomp.tuning.over_horovod").HorovodJob()
    except Exception as error:
        raise click.ClickException(
            "horovodrun or mpirun has started this rank, and Horovod for PyTorch does not "
            f"import: {error}. `{build()}` installs it; torchrun starts ranks without it"
        ) from error
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table of `WIDTH` columns: names on the left, wrapped at `NAMES`, then figures.

    >>> print(table(["method", "ms"], [["DGC()", "1.23"], ["GradiVeQ(ratio=8, bits=4)", "4"]]))
    method               ms
    -----------------  ----
    DGC()              1.23
    GradiVeQ(ratio=8,     4
    bits=4)
    """
    cells = [[cell.split("\n") for cell in (_narrow(name), *rest)] for name, *rest in rows]
    top = [cell.split("\n") for cell in head]
    deep = max(map(len, top))
    top = [[""] * (deep - len(cell)) + cell for cell in top]
    widths = [max(map(len, chain.from_iterable(column))) for column in zip(top, *cells)]

    def lines(row: Sequence[Sequence[str]]) -> Iterator[str]:
        for name, *rest in zip_longest(*row, fillvalue=""):
            right = (text.rjust(width) for text, width in zip(rest, widths[1:]))
            yield "  ".join((name.ljust(widths[0]), *right)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*lines(top), rule, *chain.from_iterable(map(lines, cells))])


def _narrow(name: str) -> str:
    """Wrap a name, preferably after brackets, commas and equals signs."""
    lines = [""]
    for piece in re.findall(r"[^(=, ]+[(=, ]*", name):
        if lines[-1] and len(f"{lines[-1]}{piece}".rstrip()) > NAMES:
            lines.append("")
        lines[-1] += piece
    return "\n".join(part for line in lines for part in textwrap.wrap(line, NAMES))


def figure(value: float) -> str:
    """Format a number with three digits, in five columns.

    >>> [figure(x) for x in (0.0, 0.0123, 1.234, 12.34, 9579.0, 12345.6, 123456.0, 1234567.0)]
    ['0.00', '0.01', '1.23', '12.3', '9579', '12.3k', '123k', '1.23M']
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(0.9995 * size, 9_999.5) and math.isfinite(value):
            return f"{figure(value / size)}{unit}"
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def wrapped(text: str) -> str:
    """Wrap text at `WIDTH` columns."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def between(low: float, high: float) -> str:
    """Format a range; a single figure if both ends read alike."""
    return figure(low) if figure(low) == figure(high) else f"{figure(low)}-{figure(high)}"


def moments_used(ways: Iterable[str], source: str) -> list[str]:
    """Name the source of Variance's and Hybrid's second moments; empty if neither was measured.

    >>> moments_used(["DGC()"], "step"), moments_used(["DGC()", "Variance(alpha=2.0)"], "sample")
    ([], ['Variance and Hybrid: with per-sample moments, as the factory tracks them.'])
    """
    if not any(name in method for method in ways for name in ("Variance(", "Hybrid(")):
        return []
    known = {
        "sample": "with per-sample moments, as the factory tracks them.",
        "step": "with moments of the step, as without hvd.track_moments.",
    }
    return [wrapped(f"Variance and Hybrid: {known[source]}")]
