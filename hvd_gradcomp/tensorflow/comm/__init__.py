"""Transport for TensorFlow's tensors.

horovod           Horovod's collectives, eager and in graphs
stall_inspector   finds ranks that wait for different collectives
round_clock       numbers of steps that ranks submit without waiting
"""
