"""Second moments of per-sample gradients, computed during backward.

tracker       observes forward and backward of the tracked layers
rules         per-sample gradients of each function
sample_axis   which axis of an activation counts samples
sources       where the moments of a gradient come from
dynamo        keeps torch.compile out of code that must run eagerly
"""
