"""Monitoring of a training.

stats, reports    statistics of exchanges, and writers for them
probe             entropy, mutual information and densities of gradients
verify            comparison of replicas
"""
