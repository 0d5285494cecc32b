"""Looking at a training without touching it.

stats, reports   what was sent, as numbers and as lines
probe            the papers' own analyses of gradients
verify           whether replicas are still equal
"""
