"""The algorithms: one paper, one file, or one package where a file would be too long.

`wrappers` makes compressors of others; `schedule` is EGC's correction of the learning rate.
"""
