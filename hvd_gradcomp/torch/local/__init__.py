"""Parts of `LocalSteps`, of one rank.

rounds       sends and applies what the schedule says; the global parameters
fragment     parameters that are exchanged together, and their global copies
outer        the optimizer over the global parameters
averaging    dense means over ranks, of buffers and of gradients in the warm-up
comparison   compares what the ranks are about to exchange
progress     counts steps and rounds
"""
