"""Runs one of Horovod's examples as it is, on made-up images instead of a download.

`torchvision` is a stand-in beside this file; Keras's MNIST comes from here.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np


def images() -> str:
    """A file as Keras's MNIST is one, of the size of a test."""
    random = np.random.default_rng(0)
    path = Path("mnist.npz").resolve()
    labels = random.integers(10, size=512)
    noise = random.integers(80, size=(512, 28, 28))
    noise[np.arange(512), 2 * labels + 4] += 170
    noise, labels = noise.astype(np.uint8), labels.astype(np.uint8)
    if not path.exists():
        part = path.with_suffix(f".{random.bit_generator.random_raw()}.{id(path)}.npz")
        np.savez(part, x_train=noise, y_train=labels, x_test=noise[:128], y_test=labels[:128])
        part.rename(path)
    return str(path)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if "keras" in Path(sys.argv[0]).read_text():
        import keras.src.datasets.mnist as mnist

        mnist.get_file = lambda *arguments, **options: images()
    runpy.run_path(sys.argv[0], run_name="__main__")
