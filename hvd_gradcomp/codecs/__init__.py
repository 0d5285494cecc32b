"""Families of codecs: local mathematics that several algorithms share.

threshold, topk           sparse methods: a test for each element; the k largest
sparse                    base of both
quantized, linear         a few bits for every element; codes that can be summed
compaction, topk_select   elements that pass a test; the k largest, without sorting a layer
quantizers, values        codes of values: of elements; of what a sparse method sends
indices, elias_fano       codes of indices; the code of ascending numbers
owners                    exchange of sparse elements by ranks that own regions of a bucket
factors                   layers as matrices, and their thin factors
momentum                  momentum correction for delayed gradients
clipping                  local gradient clipping
principal_components,
autoencoder               models that the learning methods fit
deterministic_sum         sums that are bit-identical everywhere
"""
