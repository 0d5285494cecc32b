"""Checkpoints of all ranks, for all frontends.

files           written and read by all ranks together, or by none
schema          description of an exchange, and what does not fit it
reducer_state   tensors of an exchange: consolidated over ranks, and restored
"""
