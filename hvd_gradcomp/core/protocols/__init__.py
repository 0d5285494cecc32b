"""Optional hooks of a compressor beside `init` and `aggregate`: small protocols.

Callers use the function beside each protocol. It has a default for compressors that lack the
method, so no caller asks for a compressor's class. A user's class implements a protocol by having
its method; there is nothing to derive from.

reporting  what was sent, kept and lost
learning   what is learned from gradients, and by which rank
resizing   what depends on the number of ranks
carrying   what one method hands to another: a residual, a velocity, the optimizer's momentum
layering   which layers a method is for
stock      the interface that stock Horovod calls
"""
