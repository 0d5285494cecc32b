"""Handwritten digits over `DistributedDataParallel`: docs/tutorial/without-horovod.md's program.

torchrun --standalone --nproc-per-node 2 -m examples.pytorch.without_horovod
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import VarianceCompressor
from hvd_gradcomp.torch import ddp

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
test = torch.arange(len(labels)) % 5 == 0

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
ddp.track_moments(model)
model = DistributedDataParallel(model)
state = ddp.compress(model, VarianceCompressor(alpha=2.0))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)

for epoch in range(10):
    order = torch.randperm(int((~test).sum()), generator=torch.Generator().manual_seed(epoch))
    for batch in order[: len(order) // (32 * size) * 32 * size].view(-1, size, 32)[:, rank]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[~test][batch]), labels[~test][batch])
        loss.backward()
        optimizer.step()

if rank == 0:
    with torch.no_grad():
        correct = model.module(images[test]).argmax(1) == labels[test]
    stats = state.stats()
    print(f"accuracy {100 * correct.float().mean():.1f} %")
    print(f"{stats.bytes_dense:,} bytes of gradient, {stats.bytes_sent:,} sent")
dist.destroy_process_group()
