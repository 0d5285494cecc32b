"""What is trained over Horovod and without, and has to come to the same."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 6


class Model(nn.Module):
    """Three layers, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 60), nn.Linear(60, 40)
        self.third, self.unused = nn.Linear(40, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def loss(model, step, rank):
    """Of a rank's batch in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    y = torch.randn(8, 3, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def vector(model):
    """All parameters."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
