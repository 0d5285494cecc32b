"""Methods that send some elements: the largest, or a random choice.

sparse_gd, gradient_dropping, dgc, egc   the largest of each layer, or of the model
scalecom, random_k      the same elements on all ranks: a leader's choice, a random one
oktopk                  exchanged by owners of regions
chunked_topk, demo      the largest of each chunk: of gradients, of momentum's components
"""
