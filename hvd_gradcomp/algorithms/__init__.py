"""Algorithms: one file for each paper, or a package if a file would be too long.

`wrappers` composes compressors; `schedule` is EGC's learning-rate correction.
"""
