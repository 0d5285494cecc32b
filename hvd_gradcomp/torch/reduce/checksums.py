"""Hashes of parameters and replicated state, computed on the tensors' own device."""

from __future__ import annotations

import functools

import torch

from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.torch.reduce.reducer import Reducer


def check(reducer: Reducer) -> None:
    """Compare parameters and replicated state over the ranks of a reducer.

    Raises:
        DivergedError: on all ranks, if they differ.
    """
    parameters: dict[str, torch.Tensor] = {}
    for bucket in reducer.buckets:
        parameters.update(zip(bucket.layout.names, bucket.parameters))
    names = [name for name, _, _ in reducer.planner.layers]
    tensors = [(f"parameter {name}", parameters[name].detach()) for name in names]
    tensors += [(f"parameter {name}", p.detach()) for name, p in reducer.beside]
    for place, bucket in enumerate(reducer.buckets):
        tensors += verify.replicated(place, bucket.compressor, bucket.layout, bucket.state)
    if not tensors:
        return  # nothing trains, on any rank
    device = tensors[0][1].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies of state to the host may be pending
    row = torch.stack([_digest(x).to(device) for _, x in tensors])
    process_set = reducer.participants.process_set
    names = [name for name, _ in tensors]
    if reducer.participants.place is None:
        digests = reducer.transport.gather_rows(row.cpu()).tolist()
    else:  # a rank has only the state of buckets that it leads
        by_name = dict(zip(names, row.tolist()))
        everybody = reducer.transport.gather_objects(by_name, dict[str, int], "verify")
        names = list(dict.fromkeys(name for one in everybody for name in one))
        digests = [[one.get(name) for name in names] for one in everybody]
    ranks = process_set.ranks or range(process_set.size())
    verify.compare(names, digests, ranks, reducer.steps)


def _digest(x: torch.Tensor) -> torch.Tensor:
    data = x.contiguous().reshape(-1)
    if data.data_ptr() % 4:  # a view into a larger half-precision tensor
        data = data.clone()
    return verify.digest(TorchOps(x.device), data.view(torch.uint8), _weights(x.device))


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    return verify.weights(TorchOps(device))
