"""The manifests of docker/kubernetes name what there is. `tests.kubernetes` has their schemas."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.kubernetes import manifests

pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]


def containers(node):
    """Everything in a manifest that has an image."""
    if isinstance(node, dict):
        if "image" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from containers(each)


@pytest.mark.parametrize("name", ["mpijob.yaml", "trainjob.yaml"])
def test_containers_run_our_image_and_what_is_in_it(name):
    listed = list(containers(manifests()[name]))
    assert {each["image"] for each in listed} == {"hvd-gradcomp:cpu"}
    words = [word for each in listed for word in [*each["command"], *each["args"]]]
    (module,) = [word for word in words if word.startswith("examples.")]
    assert importlib.util.find_spec(module), module
    limits = [each.get("resources", each.get("resourcesPerNode")) for each in listed]
    assert all(each["limits"].keys() == {"cpu", "memory"} for each in limits)


def test_ssh_has_one_port_and_the_user_of_the_image():
    spec = manifests()["mpijob.yaml"]["spec"]
    launcher, worker = containers(spec["mpiReplicaSpecs"])
    (arguments,) = [e["value"] for e in launcher["env"] if e["name"] == "OMPI_MCA_plm_rsh_args"]
    (port,) = [each["containerPort"] for each in worker["ports"]]
    assert f"-p {port}" in arguments and str(port) in worker["command"]
    home = spec["sshAuthMountPath"]
    assert f"-oHostKey={home}/id_rsa" in worker["args"]
    assert home.rpartition("/")[0] in (ROOT / "docker" / "image.sh").read_text()
    ranks = launcher["command"][launcher["command"].index("-np") + 1]
    assert int(ranks) == spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]


def test_the_program_without_horovod_is_that_of_its_page():
    page = (ROOT / "docs" / "tutorial" / "without-horovod.md").read_text()
    (program,) = re.findall(r":caption: digits\.py\n\n(.*?)```", page, re.DOTALL)
    assert (ROOT / "examples/pytorch/without_horovod.py").read_text().endswith(program)
