"""Compressors and the collectives that they request, shared by all methods and frontends.

compressor       `Compressor`: `init` and `aggregate`
composite        compressors made of other compressors
collectives      the collectives that a program may request, as values
patterns         communication patterns: generators over these collectives
wire             header, checksum and parts of a payload
capacity         capacity levels of a payload, and when they change
layout, layers, row_groups   positions of a model's layers in a bucket, and their roles
cost_model       bytes and time of an exchange
registry         methods by name
validate         checks of arguments
installation, version        what is installed, and what is missing
"""
