"""What passes with stock Horovod and not with this package: deliberate refusals, nothing else."""

REFUSED: dict[str, str] = {}
