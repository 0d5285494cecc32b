"""LGC (Abrahamyan, Chen, Bekoulis, Deligiannis 2021): an autoencoder for top-k values.

    whole       full_steps: uncompressed gradients
    train       train_steps: top-k values travel, and one rank trains the autoencoder on them
    compressed  codes travel instead of values

Two patterns. *Ring-allreduce* (`ring`): each step a randomly drawn leader chooses the elements; the
codes of all ranks are allreduced, and every rank decodes the mean. *Parameter server* (`server`):
one worker sends a code, all send an innovation, and the master has a decoder for each worker.

    settings    parameters, choice of layers, and bytes sent
    compressor  the public class: the state, and the phases
    vectors     operations of both patterns on the selected elements
    ring        Algorithm 2
    server      Algorithm 1
    training    training of the autoencoder, on one rank
"""

from hvd_gradcomp.algorithms.lgc.compressor import LGCCompressor
from hvd_gradcomp.algorithms.lgc.settings import LGCState

__all__ = ["LGCCompressor", "LGCState"]
