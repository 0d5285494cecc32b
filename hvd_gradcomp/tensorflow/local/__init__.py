"""Parts of `LocalSteps` on TensorFlow; `runtime/local_rounds.py` runs the rounds with them.

fragments      variables that are exchanged together, and their global copies
averaging      dense means over ranks, of buffers and of gradients in the warm-up
rank_channel   the comparison of ranks before an exchange
"""
