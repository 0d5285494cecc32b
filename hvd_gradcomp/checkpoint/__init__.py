"""Checkpoint files of all ranks; the frontends write their tensors."""
