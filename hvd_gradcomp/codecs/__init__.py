"""Families of codecs: local mathematics that several algorithms share.

threshold, topk           sparse methods: a test for each element; the k largest
sparse                    base of both
quantized, linear         a few bits for every element; codes that can be summed
compaction, topk_select   elements that pass a test; the k largest, without sorting a layer
quantizers, indices       codes of values, and of indices
momentum                  momentum correction for delayed gradients
clipping                  local gradient clipping
low_rank, autoencoder     models that the learning methods fit
deterministic_sum         sums that are bit-identical everywhere
"""
