"""GradiVeQ (Yu et al. 2018): a linear projection that commutes with the sum over ranks.

settings    parameters, which layers, and how many bytes travel
compressor  the public class: the phases of a cycle
slices      of a layer, so that gradients of one input lie together
basis       samples of the ranks' mean, and their principal components, computed by one rank
projection  coefficients, whose sum over ranks is all that the ranks exchange, and back
stock       a basis that is set, inside stock Horovod
"""

from hvd_gradcomp.algorithms.gradiveq.compressor import GradiVeQCompressor
from hvd_gradcomp.algorithms.gradiveq.settings import GradiVeQState

__all__ = ["GradiVeQCompressor", "GradiVeQState"]
