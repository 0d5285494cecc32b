"""LGC (Abrahamyan, Chen, Bekoulis, Deligiannis 2021): an autoencoder for top-k values.

    whole       full_steps: uncompressed gradients
    train       train_steps: top-k values travel, and one rank trains the autoencoder on them
    compressed  codes travel instead of values

Two patterns. *Ring-allreduce* (`ring`): each step a randomly drawn leader chooses the elements; the
codes of all ranks are allreduced, and every rank decodes the mean. *Parameter server* (`server`):
one worker sends a code, all send an innovation, and the master has a decoder for each worker.

    compressor  the public class: parameters, choice of layers, and phases
    state       what a rank keeps
    vectors     the selected elements: how both patterns select, keep and normalize them
    ring        Algorithm 2, and the loss of its training
    server      Algorithm 1, and the losses of its training
    training    training of the autoencoder, on one rank
"""

from hvd_gradcomp.algorithms.lgc.compressor import LGCCompressor
from hvd_gradcomp.algorithms.lgc.state import LGCState

__all__ = ["LGCCompressor", "LGCState"]
