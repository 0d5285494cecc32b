"""The parts of an exchange that depend neither on a framework nor on a communication library.

    program_runner    steps a program, and the branches that it switches to
    participants      who takes part, and who compresses for a host
    collectives       submits what a program requests to a transport, by name, and counts its bytes
    config_check      compares the configuration of all ranks before the first exchange
    hierarchy         dense allreduce inside a host, compressed exchange between hosts
    elastic           who takes part in an elastic run
    stall_inspector   finds ranks that wait for each other
    typed_json        messages between ranks beside tensors
    naming, unique_names   the names of collectives
    stats             totals that `compression_stats` reports
    errors            explains what Horovod and torch.distributed raise

A frontend supplies a `Transport` of five collectives and keeps the tensors. There are four:
`torch/comm/horovod.py`, `torch/comm/c10d.py`, `tensorflow/comm.py`, and that of `testing.World`, in
memory.
"""
