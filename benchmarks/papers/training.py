"""One training of one row, on all ranks of a job."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvd_gradcomp
import hvd_gradcomp.torch as hvd
from benchmarks.moments import GPT
from benchmarks.papers import data
from benchmarks.papers.hook import PowerSGDHook
from benchmarks.papers.models import vgg
from benchmarks.papers.parts import BATCH, Result, Row, Scale
from benchmarks.papers.watching import WATCHES
from examples.digits import shard
from examples.pytorch.char_lstm import ALPHABET, CharacterModel, loss_of

HELD_OUT = 1000  # images at the end of the 60,000, for learning curves and rates
LOOKS = 10  # at them in a training
NOTES = 50  # of the training's loss
WIDTH = 128  # of the LSTM
Loss = Callable[[], torch.Tensor]


class Images:
    """Ten kinds of clothes; the score is the accuracy on 10,000 images, in percent."""

    decay, clip = 5e-4, None

    def __init__(self, folder: Path | None, scale: Scale) -> None:
        self.train = data.images(folder, "train", 0, scale.images)
        end = 60_000 if folder is None else scale.images + HELD_OUT
        self.held_out = _of_this_rank(data.images(folder, "train", end - HELD_OUT, end))
        self.test = _of_this_rank(
            data.images(folder, "t10k", 0, 10_000 if folder is None else 1000)
        )

    def model(self) -> nn.Module:
        return vgg()

    def epoch(self, model: nn.Module, seed: int) -> Iterator[Loss]:
        x, y = self.train
        for batch in shard(len(y), BATCH // hvd.size(), hvd.rank(), hvd.size(), seed):
            yield lambda b=batch: nn.functional.cross_entropy(model(x[b]), y[b])

    def look(self, model: nn.Module) -> tuple[float, float]:
        """Loss and score on what is held out."""
        return self._measured(model, self.held_out)

    def score(self, model: nn.Module) -> float:
        return self._measured(model, self.test)[1]

    def _measured(self, model: nn.Module, part: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        """Means over ranks, with the mean of their running statistics."""
        running = [b for b in model.buffers() if b.is_floating_point()]
        for buffer, mean in zip(running, hvd.grouped_allreduce(running, name="papers.running")):
            buffer.copy_(mean)
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        for x, y in zip(part[0].split(500), part[1].split(500)):
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, y, reduction="sum")
            right = (scores.argmax(1) == y).sum()
            sums += torch.tensor([loss.item(), right.item(), len(y)], dtype=torch.float64)
        model.train()
        total = hvd.allreduce(sums, name="papers.score", op=hvd.Sum).tolist()
        return total[0] / total[2], 100 * total[1] / total[2]


class Text:
    """The next character of the Bible; the score is the perplexity on its last tenth."""

    decay, clip = 0.0, 1.0
    window, windows = 64, BATCH // 2  # characters; of all ranks together

    def __init__(self, folder: Path | None, scale: Scale) -> None:
        characters = data.text(folder)
        cut = len(characters) * 9 // 10
        self.train, rest = characters[:cut], characters[cut:]
        each = self.window + 1
        windows = rest[: len(rest) // each * each].view(-1, each)
        spread = windows[:: max(1, len(windows) // 600)][:600]
        self.held_out, self.test = _of_this_rank((spread[0::6],)), _of_this_rank((spread[1:],))
        self.steps = scale.images // BATCH

    def model(self) -> nn.Module:
        return CharacterModel(WIDTH)

    def epoch(self, model: nn.Module, seed: int) -> Iterator[Loss]:
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        each = self.windows // hvd.size()
        for _ in range(self.steps):
            starts = torch.randint(0, len(self.train) - self.window, (each,), generator=generator)
            windows = torch.stack([self.train[s : s + self.window + 1] for s in starts.tolist()])
            yield lambda w=windows: loss_of(model, w)

    def look(self, model: nn.Module) -> tuple[float, float]:
        return self._measured(model, self.held_out[0])

    def score(self, model: nn.Module) -> float:
        return self._measured(model, self.test[0])[1]

    def _measured(self, model: nn.Module, windows: torch.Tensor) -> tuple[float, float]:
        sums = torch.tensor([loss_of(model, windows) * len(windows), len(windows)])
        total = hvd.allreduce(sums.double(), name="papers.score", op=hvd.Sum).tolist()
        return total[0] / total[1], math.exp(total[0] / total[1])


class Transformer(Text):
    """The same text and a small GPT; the score is the loss on the last tenth, in nats."""

    decay = 0.01
    window, windows = 32, BATCH // 4
    embeddings = 0.02  # standard deviation

    def model(self) -> nn.Module:
        model = GPT(words=ALPHABET, length=self.window)
        nn.init.normal_(model.words.weight, std=self.embeddings)
        nn.init.normal_(model.places.weight, std=self.embeddings)
        return model

    def score(self, model: nn.Module) -> float:
        return self._measured(model, self.test[0])[0]


class WideTransformer(Transformer):
    """Transformer with embeddings as PyTorch initializes them."""

    embeddings = 1.0


MOMENTUM = {"sgd": 0.9, "plain": 0.0}
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
TASKS: dict[str, Any] = {
    "images": Images,
    "text": Text,
    "transformer": Transformer,
    "transformer-1": WideTransformer,
}


def _of_this_rank(part: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x[hvd.rank() :: hvd.size()] for x in part)


def run(row: Row, scale: Scale, seed: int, task: Any) -> Result:
    """Trains; the same result on all ranks.

    Ratios and bytes are means over ranks, of the whole run and of its last phase; `by_rank` has
    those of the last phase, `lost` the median of it, `sent` rank 0's element ratio between looks,
    `behind` how many times a gradient's norm rank 0 keeps at the end.
    """
    torch.manual_seed(seed)
    model = task.model()
    tracker = hvd.track_moments(model) if row.moments else None
    compressor = eval(row.compressor.format(*row.lengths(scale)), vars(hvd_gradcomp))
    watch = WATCHES[row.watch](model, scale.steps) if row.watch else None
    parameters = model.parameters()
    plain = (
        OPTIMIZERS[row.optimizer](parameters, lr=row.rate, weight_decay=task.decay)
        if row.optimizer in OPTIMIZERS
        else torch.optim.SGD(
            parameters, lr=row.rate, momentum=MOMENTUM[row.optimizer], weight_decay=task.decay
        )
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hook = PowerSGDHook(model, row.hook_rank) if row.hook_rank else None
    if hook is not None:
        optimizer, forward, stats = plain, hook.model, hook.stats
    elif row.local or row.momenta:
        wrap = hvd.LocalSteps if row.local else hvd.MomentumExchange
        how = eval(f"dict({row.local or row.momenta})", vars(hvd_gradcomp))
        optimizer = wrap(plain, model.named_parameters(), compression=compressor, **how)
        forward, stats = model, partial(hvd.compression_stats, optimizer)
    else:
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), compression=compressor
        )
        forward, stats = model, partial(hvd.compression_stats, optimizer)
    corrected = None
    if row.schedule == "corrected":
        corrected = hvd.EGCScheduler(optimizer, patience=1, t=0.1, min_lr=row.rate / 100)
    halved = {scale.steps * part // 5 for part in range(1, 5)} if row.schedule == "halved" else {}

    ends = {*itertools.accumulate(row.lengths(scale))}
    looked = 0.0  # seconds of the processor
    marks = [(stats(), time.process_time())]
    curve, looks, lost, sent = [], [], [], []
    step, recent, seen, begin = 0, 0.0, marks[0][0], time.perf_counter()
    every = max(1, scale.steps // NOTES)
    for epoch in range(scale.epochs):
        for loss_now in task.epoch(forward, 1000 * seed + epoch):
            if step in halved:
                for group in optimizer.param_groups:
                    group["lr"] /= 2
            if row.schedule == "cosine":
                for group in optimizer.param_groups:
                    group["lr"] = row.rate * cosine(step, scale.steps)
            if watch is not None:
                watch.before(step, loss_now)
            optimizer.zero_grad()
            loss = loss_now()
            loss.backward()
            if watch is not None:
                watch.after(step)
            if task.clip is not None and row.optimizer != "plain":  # a sign has no norm to clip
                nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            step, recent = step + 1, recent + loss.item()
            if step % every == 0:
                curve.append([step, recent / every])
                recent = 0.0
                if step > max(ends, default=0):
                    lost.extend(stats().losses.values())
            if step in ends:
                marks.append((stats(), time.process_time() - looked))
            if step % max(1, scale.steps // LOOKS) == 0:
                before = time.process_time()
                with torch.no_grad():
                    looks.append([step, *task.look(model)])
                now = stats()
                sent.append([step, (now - seen).element_ratio])
                seen = now
                looked += time.process_time() - before
                if corrected is not None:
                    corrected.step(looks[-1][1])
    marks.append((stats(), time.process_time() - looked))
    if row.local:
        optimizer.exchange()
    if tracker is not None:
        tracker.remove()
    if hook is not None:
        hook.close()
    with torch.no_grad():
        score = task.score(model)
    whole = marks[-1][0]
    spans = [late[0] - early[0] for early, late in zip(marks, marks[1:])]
    cpu = [
        1e3 * (late[1] - early[1]) / span.steps
        for (early, late), span in zip(zip(marks, marks[1:]), spans)
    ]
    used = time.process_time() - marks[0][1]
    counts = torch.tensor(
        [whole.elements_sent, whole.bytes_sent, spans[-1].bytes_sent, used, *cpu],
        dtype=torch.float64,
    )
    table = hvd.allgather(counts[None], name="papers.sent").tolist()
    columns = [*zip(*table)]
    mean = [sum(column) / hvd.size() for column in columns]
    last = spans[-1]
    return _rounded(
        {
            "score": score,
            "element_ratio": whole.elements / mean[0],
            "ratio": whole.bytes_dense / mean[1],
            "late_ratio": last.bytes_dense / mean[2],
            "by_rank": [last.bytes_dense / sent for sent in columns[2]],
            "bytes": mean[1],
            "bytes_of_all": sum(columns[1]),
            "behind": marks[-1][0].residual_ratio,
            "lost": sorted(lost)[len(lost) // 2] if lost else None,
            "cpu_s": sum(columns[3]),
            "cpu_ms": mean[4:],
            "seconds": time.perf_counter() - begin,
            "parameters": whole.elements // whole.steps,
            "rate": optimizer.param_groups[0]["lr"],
            "curve": curve,
            "looks": looks,
            "sent": sent,
            "seen": watch.result() if watch is not None else None,
        }
    )


def cosine(step: int, steps: int) -> float:
    """Return the factor of the rate: linear warm-up for a tenth of the steps, cosine to a tenth.

    >>> [round(cosine(step, 100), 2) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def _rounded(value: Any) -> Any:
    """Five digits, which is more than is known."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
