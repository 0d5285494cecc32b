"""The parts of an exchange that depend neither on a framework nor on a communication library.

    program_runner    steps a program and the branches that it switches to; which ranks take part;
                      submits a program's collectives to a transport by name and counts the bytes
    driver            runs exchanges side by side until all are done
    config_check      compares the configuration of all ranks before the first exchange
    step_header       the row of integers that ranks compare before they act
    hierarchy         dense allreduce inside a host, compressed exchange between hosts
    elastic           membership of an elastic run
    local_rounds      local steps: when ranks exchange what, and what becomes of it
    exchange_state    what ranks of local steps compare before they exchange
    round_clock       when a round ends whose ranks make different numbers of steps
    stall_inspector   finds ranks that wait for each other
    live_objects      searches the process for objects of a type
    typed_json        messages between ranks beside tensors
    naming, unique_names   the names of collectives
    stats             totals that `compression_stats` reports
    errors            explains what Horovod and torch.distributed raise

A frontend supplies a `Transport` with five collectives and keeps the tensors. There are four:
`torch/comm/horovod.py`, `torch/comm/c10d.py`, `tensorflow/comm/horovod.py`, and the in-memory
transport of `testing.World`.
"""
