"""Plans made before anything is sent: which layer goes to which method, and whether that pays.

assignment, configuration   partitions, in code and as text
description                 what a compressor will do to a model, as a table
worth                       warnings where compression does not pay
"""
