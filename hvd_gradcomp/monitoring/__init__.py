"""Monitoring of a training.

stats, reports    what was sent, as numbers and as lines
probe, sampling   the papers' analyses of gradients, and the elements that they look at
verify            compares the replicas
"""
