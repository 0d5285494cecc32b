"""Drop-in for `horovod.torch`: the distributed optimizer, and what saves and broadcasts it.

optimizer, optimizer_mixin   `DistributedOptimizer`
grad_synchronizer   a step of it: gradients in, reduced gradients out
autograd_hooks      calls it during backward
late_grads          gradients that arrive after their exchange
uneven_inputs       `join`
checkpoint          `save_checkpoint` and `load_checkpoint`
broadcast_state     `broadcast_optimizer_state`
lr_scheduler        EGC's schedule
wrapped_horovod     `LocalSteps` and `MomentumExchange` over Horovod
"""
