"""Transports for PyTorch tensors.

backend    the protocol that they have
horovod    Horovod's asynchronous collectives
c10d       `torch.distributed`
recorded   Horovod's own collectives, recorded for the stall inspector
"""
