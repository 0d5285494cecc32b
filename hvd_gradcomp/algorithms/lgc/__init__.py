"""LGC (Abrahamyan, Chen, Bekoulis, Deligiannis 2021): an autoencoder for what top-k selects.

    whole       full_steps: gradients as they are
    train       train_steps: top-k values travel, and one rank trains the autoencoder on them
    compressed  codes travel instead of values

Two patterns. *Ring-allreduce* (`ring`): one rank after the other, drawn at random, says which
elements; codes of all ranks are added up on the way, and everybody decodes the mean. *Parameter
server* (`server`): one worker sends a code, all send an innovation, and the master has a decoder
for each of them.

    settings    parameters, which layers, and how many bytes travel
    compressor  the public class: the state, and the phases
    vectors     what both patterns do with the elements that are selected
    ring        Algorithm 2
    server      Algorithm 1
    training    of the autoencoder, on one rank
"""

from hvd_gradcomp.algorithms.lgc.compressor import LGCCompressor
from hvd_gradcomp.algorithms.lgc.settings import LGCState

__all__ = ["LGCCompressor", "LGCState"]
