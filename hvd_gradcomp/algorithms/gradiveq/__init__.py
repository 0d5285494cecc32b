"""GradiVeQ (Yu et al. 2018): a linear projection that commutes with the sum over ranks.

compressor  the public class: parameters, choice of layers, and the phases of a cycle
state       what a rank keeps
slices      cuts of a layer that keep the gradients of one input together, and the bytes sent
basis       samples of the mean gradient, and their principal components
projection  projection to coefficients, which are summed over ranks, and back
stock       a fixed basis for stock Horovod
"""

from hvd_gradcomp.algorithms.gradiveq.compressor import GradiVeQCompressor
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState

__all__ = ["GradiVeQCompressor", "GradiVeQState"]
