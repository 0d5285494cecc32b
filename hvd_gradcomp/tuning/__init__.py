"""Measurements and predictions of exchanges, for `hvd-gradcomp bench` and `advise`.

measure           times exchanges of a model's gradients on PyTorch
models            models to measure with
recommend         predicts steps from measurements, and recommends a method
fewer_exchanges   recommends local steps: how many, and which compressor
"""
