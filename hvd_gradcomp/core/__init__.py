"""The one noun and the one verb, and what every method shares.

aggregator   `Compressor`: `init` and `aggregate`
protocols    what a compressor may do besides
composite    compressors made of others
wire         header, checksum, and the parts of a body
ladder       how much room a payload has
exchanges    how payloads meet: patterns of communication
"""
