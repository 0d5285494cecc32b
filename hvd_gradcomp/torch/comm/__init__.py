"""Transports for PyTorch tensors.

horovod             Horovod's asynchronous collectives
c10d                `torch.distributed`
hosts               the hosts of a process group
mesh                the groups of a DeviceMesh whose last dimension has the shards of a model
recorded            Horovod's own collectives, recorded for the stall inspector
broadcast_objects   objects and parameters, broadcast by Horovod
"""
