"""As much of torchvision as Horovod's examples use, where the real one cannot be had."""
