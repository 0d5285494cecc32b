"""Modules that own parameters. Optimizers know no modules, so all live objects are searched."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import torch


def owners_of(
    parameters: Sequence[torch.nn.Parameter],
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Yield each live module that has one of these parameters, with the parameter.

    The search inspects types, not objects: some lazy objects load when inspected.
    """
    wanted = {id(p) for p in parameters}
    for module in gc.get_objects() if wanted else ():
        if issubclass(type(module), torch.nn.Module):
            for p in module.__dict__.get("_parameters", {}).values():
                if id(p) in wanted:
                    yield module, p
