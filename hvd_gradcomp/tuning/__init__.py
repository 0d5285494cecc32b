"""Measurements and predictions of exchanges, for `hvd-gradcomp bench` and `advise`.

measure   times exchanges of a model's gradients on PyTorch
models    models to measure with
advice    predicts steps from measurements, and recommends a method
"""
