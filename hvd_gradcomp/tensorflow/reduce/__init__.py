"""Exchange of gradients, the same for the tape and for Keras.

reducer          gradients in, reduced gradients out, in a graph
registry         the reducers of a process
exchange         traces a step of the exchange
buckets          which variables share a bucket, and their state
gradients, sparse_rows   gradients as they come, and those that have rows alone
options          options that tape and optimizers have
counters         counters that are variables
step_sync        messages by which ranks agree on a step
rivals           other exchanges of the same variables
checksums        checksums of replicas
"""
