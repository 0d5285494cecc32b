"""Compressors and the requests that they make: what every method and every frontend shares.

compressor       `Compressor`: `init` and `aggregate`
protocols        optional hooks of a compressor
composite        compressors made of other compressors
collectives      the collectives that a program may request, as values
patterns         communication patterns: generators over these collectives
wire             header, checksum and parts of a payload
capacity         how many elements a payload has room for, and how that room grows
layout, layers, row_groups   where a model's layers lie in a bucket, and what they are
cost_model       bytes and time of an exchange
registry         methods by name
validate         checks of arguments
installation, version        what is installed, and what is missing
"""
