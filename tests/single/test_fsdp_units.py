"""Units of FSDP2, in the forms in which versions of PyTorch keep them."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest

from hvd_gradcomp.torch.hooks import fsdp_units

TRAINED = Namespace(sharded_param=Namespace(requires_grad=True))
GROUP = Namespace(_module_fqn="layers.0", fsdp_params=[TRAINED])


@pytest.mark.parametrize("kept", [{"_fsdp_param_group": GROUP}, {"_fsdp_param_groups": [GROUP]}])
@pytest.mark.parametrize("none", [{"_fsdp_param_group": None}, {"_fsdp_param_groups": []}])
def test_units_of_older_and_newer_states(kept, none):
    states = [Namespace(**kept), Namespace(**none)]
    root = Namespace(_state_ctx=Namespace(all_states=states))
    model = Namespace(_get_fsdp_state=lambda: root)
    assert fsdp_units.left_out(model, []) == ["layers.0"]
    assert fsdp_units.left_out(model, [Namespace(group=GROUP)]) == []
    modules = [Namespace(_get_fsdp_state=lambda state=state: state) for state in states]
    assert [fsdp_units.groups_of(module) for module in modules] == [[GROUP], []]
