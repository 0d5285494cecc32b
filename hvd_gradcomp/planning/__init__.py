"""Plans made before the first exchange: assignment of layers to compressors, and its payoff.

announcement                line that says what begins
assignment, configuration   partitions, in code and as text
description                 table of a compressor's plan for a model
methods                     what commands compare: compressors, local steps, momenta
worth                       warnings if compression does not pay
"""
