"""Measurements and predictions of exchanges, for `hvd-gradcomp bench` and `advise`.

job               the ranks and what travels between them; over_c10d and over_horovod have them
measure           times exchanges of a model's gradients on PyTorch
models            models to measure with
training          trains a model by any method, for `compare`
recommend         predicts steps from measurements, and recommends a method
advice            recommendation of the package, one table for all texts
fewer_exchanges   recommends local steps: how many, and which compressor
"""
