"""Looking at a training without touching it.

stats, reports    what was sent, as numbers and as lines
probe, sampling   the papers' own analyses of gradients, and what they look at
verify            whether replicas are still equal
"""
