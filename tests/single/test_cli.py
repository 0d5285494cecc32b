"""The command line: help, and what it says of bad input; what it measures is in tests/parallel."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from hvd_gradcomp import NoneCompressor, StromCompressor, VarianceCompressor, models
from hvd_gradcomp.cli import COMMANDS, main, options
from tests.methods import CLASSES


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments), prog_name="hvd-gradcomp")
    return result.exit_code, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    code, text = said(command, "--help")
    assert code == 0
    assert command in said("--help")[1]
    assert "hvd-gradcomp" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "-c", "NoSuchCompressor()"), "NoSuchCompressor"),
        (("bench", "-c", "1 + 1"), "is no compressor"),
        (("bench", "-c", "QSGDCompressor(bits=99)"), "bits"),
        (("bench", "-m", "resnet51"), "there are resnet50, vgg16, bert-base, lstm"),
        (("bench", "-m", "no_such_module:factory"), "no module 'no_such_module'"),
        (("bench", "-m", "json:factory"), "has no 'factory'"),
        (("bench", "-m", "builtins:dict"), "has to return a torch.nn.Module"),
        (("bench", "-r", "0"), "0 is not in the range"),
        (("advise",), "--bandwidth"),
        (("advise", "--bandwidth", "0"), "0"),
        (("compare", "json:dumps"), "no generator function"),
        (("compare", "train"), "module:function"),
    ],
)
def test_bad_input_is_named(arguments, words):
    code, text = said(*arguments)
    assert code == 2, text
    assert words in " ".join(text.split())


def test_a_compressor_is_written_as_in_python():
    assert options.chosen(["VarianceCompressor(alpha=2)"]) == [VarianceCompressor(alpha=2)]


def test_a_short_name_has_usual_settings_for_the_size_of_the_gradients():
    assert options.chosen(["strom"], 0.01) == [StromCompressor(tau=0.191)]


def test_every_method_is_usual():
    assert {type(one) for one in options.usual().values()} == set(CLASSES) - {NoneCompressor}


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("resnet50", 25_557_032),
        ("vgg16", 138_357_544),
        ("bert-base", 108_890_112),
        ("lstm", 66_034_000),
    ],
)
def test_models_have_their_papers_sizes(name, elements):
    module = models.load(name, shapes_only=True).module
    assert sum(p.numel() for p in module.parameters()) == elements


def test_a_built_in_model_can_be_trained():
    model = models.load("resnet50", batch_size=1)
    model.module.eval()  # a batch of one has no variance
    model.loss().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.module.parameters())
