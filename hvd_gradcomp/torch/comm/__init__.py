"""Transports for PyTorch tensors.

horovod             Horovod's asynchronous collectives
c10d                `torch.distributed`
hosts               the hosts of a process group
recorded            Horovod's own collectives, recorded for the stall inspector
broadcast_objects   objects and parameters, broadcast by Horovod
"""
