"""Modules that own parameters. Optimizers know no modules, so all live objects are searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvd_gradcomp.runtime.live_objects import live_callables


def owners_of(
    parameters: Sequence[torch.nn.Parameter],
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Yield each live module that has one of these parameters, with the parameter."""
    wanted = {id(p) for p in parameters}
    for module in live_callables(torch.nn.Module) if wanted else ():
        for p in module.__dict__.get("_parameters", {}).values():
            if id(p) in wanted:
                yield module, p
