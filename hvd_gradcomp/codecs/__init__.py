"""Families of codecs: local mathematics that several algorithms share.

words, largest        a rule for each element; the k largest
sparse                what these two have in common
quantized, linear     a few bits for every element; codes that may be added up
selection, exact      the elements that a rule wants; the k largest, no layer sorted
quantizers, indices   codes of values, and of places
momentum              its correction, for what is sent late
pca, autoencoder      what the methods that learn learn
sums                  the same to the bit wherever they are formed
"""
