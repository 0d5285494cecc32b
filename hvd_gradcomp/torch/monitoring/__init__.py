"""Looks into an exchange.

inspection     statistics, descriptions, `verify` and `retrain` of whatever exchanges
stats_writer   statistics of each step, to writers
probing        `Probe`
"""
