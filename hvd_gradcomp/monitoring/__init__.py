"""Monitoring of a training.

stats, reports    statistics of exchanges, and writers for them
probe, sampling   the papers' analyses of gradients, and the elements that they sample
verify            comparison of replicas
"""
