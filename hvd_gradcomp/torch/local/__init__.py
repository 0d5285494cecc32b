"""Parts of `LocalSteps` on PyTorch; `runtime/local_rounds.py` runs the rounds with them.

fragment     parameters that are exchanged together, and their global copies
outer        the optimizer over the global parameters
averaging    dense means over ranks, of buffers and of gradients in the warm-up
ranks        the comparison of ranks before an exchange
max_norm     embeddings that a forward changes
"""
