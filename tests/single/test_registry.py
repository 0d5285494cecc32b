"""Methods by name: their numbers, clashes, and what other packages declare."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import metadata

import pytest

from hvd_gradcomp import StromCompressor
from hvd_gradcomp.core import registry
from tests.methods import CLASSES


def named(name: str) -> type:
    """A method of that name, as a module of another package would define it."""
    return type(name, (StromCompressor,), {"__module__": f"of_{name}"})


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test defines is known to no other."""
    monkeypatch.setattr(registry, "_known", registry.known())


def test_methods_have_numbers_by_one_rule():
    methods = {name: cls.algorithm for name, cls in registry.known().items()}
    assert {cls.__name__ for cls in CLASSES} <= methods.keys()
    assert len({*methods.values()}) == len(methods)
    for name, number in methods.items():
        assert number == registry.number_of(name) < 1 << 16
    assert named("SteadyCompressor").algorithm == registry.number_of("SteadyCompressor")


def test_two_names_with_one_number_are_an_error_that_names_both():
    first = named("SteadyCompressor")
    name = next(
        name
        for name in map("Other{}".format, range(1_000_000))
        if registry.number_of(name) == first.algorithm
    )
    with pytest.raises(TypeError) as raised:
        named(name)
    assert str(raised.value) == (
        f"of_{name}.{name} cannot be defined beside of_SteadyCompressor.SteadyCompressor, which "
        f"has the same number on the wire, {first.algorithm}, by its name: give one of them "
        "another name, or import only one of them"
    )
    assert name not in registry.known()


def test_a_name_that_another_class_has_is_an_error():
    with pytest.raises(TypeError, match=r"of_StromC.* beside hvd_gradcomp\.al.* the same name: "):
        named("StromCompressor")


def test_a_class_that_is_defined_once_more_replaces_the_first():
    first, second = named("SteadyCompressor"), named("SteadyCompressor")
    assert registry.find("SteadyCompressor") is second is not first

    @dataclass(frozen=True)
    class WithoutDict(StromCompressor):  # which `slots=True` makes twice
        pass

    again = type(WithoutDict)(WithoutDict.__name__, WithoutDict.__bases__, dict(vars(WithoutDict)))
    assert registry.find("WithoutDict") is again


def test_a_family_has_no_number():
    assert {"WordCompressor", "MomentumCorrected", "Keeping"}.isdisjoint(registry.known())


DEMANDING = """
from dataclasses import dataclass, field
from hvd_gradcomp import StromCompressor

@dataclass(frozen=True)
class DemandingCompressor(StromCompressor):
    tau: float = field()
"""


def test_one_without_defaults_is_used_as_it_is_written(tmp_path, monkeypatch, caplog):
    """Only its short name has no meaning, and says so."""
    (tmp_path / "of_demanding.py").write_text(DEMANDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = metadata.EntryPoint("demanding", "of_demanding:DemandingCompressor", registry.GROUP)
    monkeypatch.setattr(registry, "declared", lambda: {"demanding": point})
    with caplog.at_level(logging.WARNING, "hvd_gradcomp"):
        assert registry.find("DemandingCompressor")(tau=0.5).tau == 0.5
        assert not caplog.records
        assert registry.load("demanding") is None
    (record,) = caplog.records
    assert "is left out: TypeError" in record.getMessage()
