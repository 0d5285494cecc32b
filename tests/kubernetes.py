"""Checks docker/kubernetes against the schemas that the operators publish.

python -m tests.kubernetes kubeflow.org_mpijobs.yaml trainer.kubeflow.org_trainjobs.yaml

Arguments are the CustomResourceDefinitions, as they are in manifests/base of kubeflow/mpi-operator
and in manifests/base/crds of kubeflow/trainer. What a schema does not know is an error here, which
an API server would drop in silence. Needs jsonschema (pip install jsonschema).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "docker" / "kubernetes"


def manifests() -> dict[str, dict[str, Any]]:
    """Our manifests by file name."""
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}


def closed(schema: Any) -> Any:
    """A structural schema as JSON Schema that allows nothing unknown."""
    if not isinstance(schema, dict):
        return schema
    known = {k: v for k, v in schema.items() if not k.startswith("x-") and k != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        known.pop("pattern", None)
        known["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        known["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            known["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            known[key] = closed(schema[key])
    return known


def schema_of(definitions: list[dict[str, Any]], manifest: dict[str, Any]) -> dict[str, Any]:
    """The schema of a manifest's kind and version."""
    group, _, version = manifest["apiVersion"].partition("/")
    for one in definitions:
        spec = one["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, manifest["kind"]):
            for each in spec["versions"]:
                if each["name"] == version:
                    return closed(each["schema"]["openAPIV3Schema"])
    raise SystemExit(f"no schema of {manifest['apiVersion']} {manifest['kind']} is given")


def errors(definitions: list[dict[str, Any]]) -> Iterator[str]:
    """Errors, by file and place."""
    from jsonschema import Draft7Validator

    for name, manifest in manifests().items():
        schema = schema_of(definitions, manifest)
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
        for error in Draft7Validator(schema).iter_errors(manifest):
            yield f"{name}: {error.json_path}: {error.message}"


def main(*paths: str) -> int:
    faults = list(errors([yaml.safe_load(Path(path).read_text()) for path in paths]))
    print("\n".join(faults) or f"{', '.join(manifests())}: as their schemas say")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
