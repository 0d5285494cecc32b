"""What a compressor may do beside `init` and `aggregate`: small protocols, a method or two each.

Whoever asks calls the function beside the protocol. It has the answer for a compressor that lacks
the method, so nobody asks of which class a compressor is. A user's class takes part in a protocol
by having its method; there is nothing to derive from.

reporting  what was sent, kept and lost
learning   what is learned from gradients, and by whom
resizing   what depends on how many ranks exchange
carrying   what one method hands to another: a residual, a velocity, the optimizer's momentum
layering   which layers a method is for
stock      what stock Horovod calls
"""
