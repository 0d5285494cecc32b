"""The images and the workflow, as far as it goes without a build: do files name each other?"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))
SCRIPTS = [*sorted(ROOT.glob("docker/*.sh")), ROOT / "hvd_gradcomp/cli/build-horovod.sh"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def instructions(path):
    """(instruction, arguments), continued lines joined."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def named(path):
    return path.name


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_an_image_is_multi_stage_pinned_and_runs_as_a_user(path):
    steps = instructions(path)
    bases = [argument for name, argument in steps if name == "ARG" and "IMAGE=" in argument]
    assert any(base.startswith("BASE_IMAGE=") for base in bases)
    assert all(re.search(r":\w", base) and "latest" not in base for base in bases)
    stages = [argument for name, argument in steps if name == "FROM"]
    assert stages[0].endswith(" AS build")
    assert stages[-1] == "${BASE_IMAGE}"
    last = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    assert ("USER", "horovod") in last
    assert any(name == "HEALTHCHECK" and '"hvd-gradcomp", "doctor"' in text for name, text in last)
    assert not any(name == "RUN" and "pip install" in text for name, text in last)


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_what_an_image_copies_exists_and_is_sent_to_the_builder(path):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    for name, argument in instructions(path):
        if name != "COPY" or argument.startswith("--from"):
            continue
        for source in argument.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed, source


def test_both_images_take_the_same_steps():
    """What differs is what is set, not what is done; and where CUDA comes from."""
    cpu, gpu = (
        [
            (name, text.replace("docker/gpu.txt ", ""))
            for name, text in instructions(path)
            if name in ("RUN", "COPY", "USER", "ENTRYPOINT")
        ]
        for path in DOCKERFILES
    )
    assert cpu == gpu


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_a_script_is_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_what_is_run_by_name_may_be_executed():
    run = " ".join(text for path in DOCKERFILES for name, text in instructions(path))
    for path in SCRIPTS:
        if re.search(rf"(docker|hvd_gradcomp)/{path.name}", run):
            assert path.stat().st_mode & 0o111, path


def test_the_cluster_of_compose():
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services, folder = compose["services"], ROOT / "docker"
    assert services["worker"]["scale"] == 2
    assert services["driver"]["depends_on"] == ["worker"]
    for service in services.values():
        build = service["build"]
        assert (folder / build["context"] / build["dockerfile"]).resolve().is_file()
        assert service["networks"] == list(compose["networks"])
        assert [volume.split(":")[0] for volume in service["volumes"]] == list(compose["volumes"])
        assert service["command"][0] in ("driver", "worker")


def test_the_workflow_calls_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    called = set()
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert re.search(r"@v\d+$", step.get("uses", "@v1"))
            called |= set(re.findall(r"^make ([a-z -]+)$", step.get("run", ""), re.MULTILINE))
    assert called == {"check", "test", "images", "test-image"}
    assert called <= TARGETS


def test_the_gpu_image_has_what_triton_compiles_with():
    """Without it no kernel can be launched, and PyTorch goes by plain ops."""
    path = ROOT / "docker/gpu.Dockerfile"
    last = path.read_text().split("FROM ")[-1]
    setting = last.index("ARG HOROVOD_GPU_OPERATIONS=NCCL\n")
    assert setting < last.index("image.sh system")
    script = (ROOT / "docker/image.sh").read_text()
    system = script[script.index("    system)") :]
    assert "compiler=(gcc libc6-dev python3-dev)" in system
    assert '"${compiler[@]}"' in system
