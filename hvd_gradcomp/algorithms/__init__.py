"""Algorithms: one file for each paper, or a package if a file would be too long.

sparse, threshold, quantized, low_rank   by what travels
lgc, gradiveq   methods that learn
combined        methods made of other methods; `schedule` is EGC's learning-rate correction
dense           without compression, and in half precision
"""
