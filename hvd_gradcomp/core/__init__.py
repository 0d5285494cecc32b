"""What all rooms share, without a tensor.

collectives      the collectives that a program may request, as values
layout, layers, row_groups   positions of a model's layers in a bucket, and their roles
cost_model       bytes and time of an exchange
registry         methods by name
validate, suggestions        checks of arguments, and the nearest known name
installation, version        what is installed, and what is missing
"""
