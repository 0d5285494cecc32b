"""PyTorch's own parts, as far as an exchange has to do with them.

amp                  GradScaler and what it has scaled
autograd_callbacks   the end of a backward
ddp_reduction        the reduction of DistributedDataParallel, found and switched off
dynamo               code that compilers must not trace
inference            state is made outside of `torch.inference_mode`
schedule_free        optimizers that train other parameters than those to evaluate
dcp                  values that `torch.distributed.checkpoint` saves a rank
owners               the modules that own parameters
safetensors_file     checkpoints as safetensors
shards               this rank's parts of sharded tensors
"""
