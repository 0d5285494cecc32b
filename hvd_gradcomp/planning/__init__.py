"""Before anything is sent: which layer goes to which method, and whether that pays.

assignment, configuration   partitions, in code and as text
description                 what a compressor will do to a model, as a table
worth, advice               whether compression pays, and which
models                      models to measure with
"""
