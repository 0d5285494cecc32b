"""Parts of `LocalSteps`, of one rank.

rounds       sends and applies what the schedule says; the global parameters
fragment     parameters that are exchanged together, and their global copies
outer        the optimizer over the global parameters
averaging    means over ranks: gradients in the warm-up, buffers
comparison   compares what the ranks are about to exchange
progress     counts steps and rounds
"""
