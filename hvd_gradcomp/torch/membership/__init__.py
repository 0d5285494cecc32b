"""Ranks that come and go without Horovod.

rendezvous    who takes part, by a store
ddp_elastic   `ddp.Elastic`
"""
