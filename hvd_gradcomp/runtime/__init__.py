"""What every exchange is made of, whatever framework it runs in and whatever moves its bytes.

    stack       steps a program, and the branches that it switches to
    seat        who takes part, and who compresses for a host
    dispatch    hands what a program asks for to a transport, by its name, and counts it
    totals      what `stats` reports, from buckets and counters
    handshake   what ranks compare before the first exchange
    hierarchy   dense inside a host, compressed between hosts
    membership  who takes part in an elastic run
    messages    what ranks tell each other beside tensors
    names, timeline             what all that travels is called
    failures                    what it means when Horovod fails
    deadlock                    ranks that wait for each other find that out

A frontend gives a `Transport` of five collectives and keeps the tensors. There are four:
`torch/lending.py` (Horovod, by handles), `torch/process_groups.py` (`torch.distributed`),
`tensorflow/tracing.py` (Horovod, in a graph), and that of `testing.World`, in memory.
"""
