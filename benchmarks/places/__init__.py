"""Time of a step between two hosts, by the place to train: DDP, FSDP2, trainers, TensorFlow."""
