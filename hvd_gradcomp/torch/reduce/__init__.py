"""Exchange of gradients, the same for all entry points on PyTorch.

reducer          gradients in, reduced gradients out
reducer_state    its state: saved, loaded, kept for the way back, adapted to other ranks
bucketing, bucket   which parameters share a bucket, and one bucket's state
sources          where second moments come from
backend          what a transport has to have
momentum         momentum that a compressor takes over from an optimizer
sparse_grads     sparse gradients, which are gathered
options          options that all entry points have
claims           who exchanges which parameters
step_sync        messages by which ranks agree on a step
checksums        checksums of replicas
"""
