"""Steps of each rank alone, and exchanges of tensors between them.

local_steps         `LocalSteps`; `runtime/local_rounds.py` runs its rounds
momentum_exchange   `MomentumExchange`
wrapped_optimizer   base of both
wrapped_c10d        both over `torch.distributed`
wrapped_fsdp        both of what `fully_shard` has sharded
tensor_exchange     an exchange of tensors that are no gradients
fragment            parameters that are exchanged together, and their global copies
outer               the optimizer over the global parameters
averaging, warmup   dense means over ranks: of buffers, and of gradients in the warm-up
ranks               the comparison of ranks before an exchange
sharded_checkpoint  `fsdp.Checkpoint`, for `torch.distributed.checkpoint`
sharding            shards of a model, of which a rank exchanges its own
round_clock         numbers of steps that ranks submit without waiting
fixed_variance      Adam's second moment, kept
max_norm            embeddings that a forward changes
"""
