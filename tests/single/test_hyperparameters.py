"""Compressors are values: checked when made, printed as made, compared by what they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hvd_gradcomp
from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.layout import Layout
from tests.methods import CLASSES, EVERY, LEARNED, LINEAR, WORDS


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_constructible_without_arguments(cls):
    assert eval(repr(cls()), vars(hvd_gradcomp)) == cls()


@pytest.mark.parametrize("compressor", EVERY + LEARNED, ids=repr)
def test_a_value(compressor):
    again = eval(str(compressor), vars(hvd_gradcomp))
    assert again == compressor and hash(again) == hash(compressor)
    assert pickle.loads(pickle.dumps(compressor)) == compressor
    assert copy.deepcopy(compressor) == compressor
    with pytest.raises(AttributeError):
        compressor.alpha = 3


def test_different_settings_are_different_values():
    assert VarianceCompressor(alpha=1) != VarianceCompressor(alpha=2)
    assert len({StromCompressor(), StromCompressor(tau=0.1), StromCompressor(tau=0.2)}) == 2


def test_algorithm_numbers_are_unique():
    assert len({cls.algorithm for cls in CLASSES}) == len(CLASSES)


BAD = [0, -1, float("nan"), float("inf"), "2", None, True]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (VarianceCompressor, "alpha"),
        (VarianceCompressor, "zeta"),
        (HybridCompressor, "tau"),
        (HybridCompressor, "alpha"),
        (HybridCompressor, "zeta"),
        (StromCompressor, "tau"),
        (SparseGDCompressor, "density"),
        (GradientDroppingCompressor, "ratio"),
        (DGCCompressor, "density"),
        (EGCCompressor, "K"),
        (EGCCompressor, "bins"),
        (EGCCompressor, "entropy_interval"),
        (ScaleComCompressor, "density"),
        (ScaleComCompressor, "beta"),
        (QSGDCompressor, "bucket_size"),
        (TernGradCompressor, "clip"),
    ],
)
def test_wrong_numbers_are_named(cls, name, value):
    with pytest.raises(ValueError, match=f"{cls.__name__}: {name} must be .* got"):
        cls(**{name: value})


def test_wrong_choices_are_named():
    with pytest.raises(ValueError, match="moments must be one of 'auto', 'sample'"):
        VarianceCompressor(moments="batch")
    with pytest.raises(ValueError, match="zeta must be a number in"):
        VarianceCompressor(zeta=1.5)
    with pytest.raises(ValueError, match="feedback_rounding must be True or False"):
        VarianceCompressor(feedback_rounding=1)


def test_settings_of_the_baselines_are_checked():
    for bits in (0, 1, 5, 16, 4.5, "4"):
        with pytest.raises(ValueError, match="bits must be one of 2, 3, 4, 8, got"):
            QSGDCompressor(bits=bits)
    with pytest.raises(ValueError, match="norm must be one of 'max', 'l2'"):
        QSGDCompressor(norm="l1")
    with pytest.raises(ValueError, match="exchange must be one of 'auto', 'allgather', 'two_shot'"):
        OneBitCompressor(exchange="ring")
    with pytest.raises(ValueError, match="index_coding must be one of 'elias_fano', 'int32', got"):
        SparseGDCompressor(index_coding="gzip")
    for density in (1.5, -0.1):
        with pytest.raises(ValueError, match=r"density must be a number in \(0, 1\]"):
            DGCCompressor(density=density)
    with pytest.raises(ValueError, match="ratio must be a number in"):
        GradientDroppingCompressor(ratio=1.0)
    for momentum in (-0.1, 1.0, "0.9"):
        with pytest.raises(ValueError, match="momentum must be a number in"):
            EGCCompressor(momentum=momentum)
    with pytest.raises(ValueError, match="nesterov needs a momentum above 0"):
        DGCCompressor(momentum=0.0, nesterov=True)
    with pytest.raises(ValueError, match="clip_norm must be a number in"):
        DGCCompressor(clip_norm=0)
    with pytest.raises(ValueError, match="warmup_epochs needs steps_per_epoch"):
        DGCCompressor(warmup_epochs=4)
    with pytest.raises(ValueError, match="warmup must be a number in"):
        DGCCompressor(warmup_steps=10, warmup=(0.5, 2.0))
    with pytest.raises(ValueError, match="seed must be a whole number"):
        TernGradCompressor(seed=-1)


@pytest.mark.parametrize("alpha", [1e-9, 0.5, 1, 2, 1e9])
def test_alpha_is_any_positive_number(alpha):
    assert VarianceCompressor(alpha=alpha).alpha == alpha


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_stock_horovod_is_told_which_import_to_use(compressor):
    import tensorflow as tf

    with pytest.raises(TypeError, match=r"import hvd_gradcomp\.torch as hvd"):
        compressor.compress(torch.ones(3))
    with pytest.raises(TypeError, match=r"import hvd_gradcomp\.tensorflow as hvd"):
        compressor.compress(tf.ones(3))


@pytest.mark.parametrize("compressor", LINEAR, ids=repr)
def test_linear_compressors_serve_stock_horovod(compressor):
    import tensorflow as tf

    for x in (torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9).double()):
        code, context = compressor.compress(x)
        assert compressor.decompress(code, context).dtype == x.dtype
    code, context = compressor.compress(tf.linspace(-1.0, 1.0, 9))
    assert compressor.decompress(code, context).dtype == tf.float32


def test_names_of_the_suite():
    for name in ("NoneCompressor", "FP16Compressor"):
        assert name in hvd_gradcomp.__all__
    assert NoneCompressor() != FP16Compressor()


def test_a_layer_that_no_index_reaches_is_named():
    largest = 1 << 28
    VarianceCompressor().check(Layout(("table",), ((largest - 1,),)))
    StromCompressor().check(Layout(("table",), ((largest,),)))
    with pytest.raises(ValueError, match=r"a bucket of table has \d+ elements; Variance"):
        VarianceCompressor().check(Layout(("table",), ((largest,),)))
