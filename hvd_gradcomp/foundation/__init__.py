"""What all else stands on: values and rules that know no tensor and no framework.

layout, layers, bands   where a model's layers lie in a bucket
collectives             what a program may ask for, as values
cost                    what an exchange moves, and the time it takes
registry                methods by name
validate                what is refused when it is given
installation, version   what is here, and what is missing
"""
