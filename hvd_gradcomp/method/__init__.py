"""Compression methods in general: what a method is, and what it is made of.

compressor   `Compressor`: `init` and `aggregate`
learned      hooks of methods that learn
handover     hooks of methods that hand over what they keep
composite    compressors made of other compressors
patterns     communication patterns: generators over collectives
wire         header, checksum and parts of a payload
capacity     capacity levels of a payload, and when they change
"""
