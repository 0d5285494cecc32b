"""Exchange behind `DistributedDataParallel` and `fully_shard`; their API is in ddp.py and fsdp.py.

hook_compression   base of the states that users hold
hook_exchange      base of the exchanges
ddp_hook, ddp_bucket         of DistributedDataParallel
fsdp_exchange, fsdp_units    of fully_shard
setup_check        settings that ranks compare when a hook is made
"""
