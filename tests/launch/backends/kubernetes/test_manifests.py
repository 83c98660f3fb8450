"""Manifests: valid by the published schemas, and what they start is a job that trains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner

from farandole.cli import commands
from farandole.errors import UserError
from tests.support.trained import SCRIPT, trained_ranks

if TYPE_CHECKING:
    from conftest import Sandbox

SCHEMAS = Path(__file__).parent / "schemas"
BASIC = ("--on", "kubernetes", "--image", "registry.example/train:1")
FULL = (
    *BASIC,
    *("--nodes", "3", "--per-node", "2", "--cpus", "4", "--gpus", "2", "--memory", "16Gi"),
    *("--shm", "2Gi", "--volume", "results:/app/runs", "--volume", "data:/data"),
    *("--namespace", "team", "--sync", "local:every=4", "--seed", "7", "--grace", "90"),
    *("--name", "resnet-50", "--restarts", "2", "--trace", "trace.json"),
)


def written(*arguments: str) -> list[dict[str, Any]]:
    """The objects of the manifest that the command writes."""
    done = CliRunner().invoke(commands, ["run", *arguments])
    if done.exception is not None:
        raise done.exception
    return list(yaml.safe_load_all(done.stdout))


def check_schema(thing: dict[str, Any]) -> None:
    from jsonschema import Draft7Validator
    from referencing import Registry
    from referencing.jsonschema import DRAFT7

    files = {"kubernetes": "kubernetes-1.31.json", "kubeflow": "pytorchjob-1.9.json"}
    contents = {key: json.loads((SCHEMAS / name).read_text()) for key, name in files.items()}
    registry = Registry().with_resources(
        (key, DRAFT7.create_resource(content)) for key, content in contents.items()
    )
    where = {
        "Service": "kubernetes#/definitions/io.k8s.api.core.v1.Service",
        "Job": "kubernetes#/definitions/io.k8s.api.batch.v1.Job",
        "PyTorchJob": "kubeflow#/definitions/KubeflowOrgV1PyTorchJob",
    }
    Draft7Validator({"$ref": where[thing["kind"]]}, registry=registry).validate(thing)


@pytest.mark.needs("jsonschema")
@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
@pytest.mark.parametrize(
    "options", [BASIC, FULL, (*BASIC, "--nodes", "2", "--token-secret", "a/b")]
)
def test_they_follow_the_published_schemas(kind: str, options: Sequence[str]) -> None:
    things = written(*options, "--kind", kind, "train.py", "--lr", "0.1")
    assert [thing["kind"] for thing in things] == (
        ["Service", "Job"] if kind == "job" else ["PyTorchJob"]
    )
    for thing in things:
        check_schema(thing)


@pytest.mark.needs("jsonschema")
def test_the_schemas_refuse_what_is_wrong() -> None:
    from jsonschema import ValidationError

    _, job = written(*BASIC, "train.py")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["python"]
    with pytest.raises(ValidationError, match="comand"):
        check_schema(job)


def test_what_was_asked_for_is_in_it() -> None:
    service, job = written(*FULL, "train.py", "--cost", "$(PRICE) $5")
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (3, 3, 6)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == "resnet-50"
    assert pod["terminationGracePeriodSeconds"] == 100
    (container,) = pod["containers"]
    assert container["command"] == [
        *("torchrun", "--nnodes=3", "--nproc-per-node=2", "--node-rank=$(NODE_RANK)"),
        *("--master-addr=resnet-50-0.resnet-50", "--master-port=29500"),
        *("train.py", "--cost", "$$(PRICE) $$5"),
    ]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["FARANDOLE_SYNC"] == "local:every=4"
    assert (variables["FARANDOLE_NAME"], variables["FARANDOLE_SEED"]) == ("resnet-50", "7")
    assert (variables["FARANDOLE_GRACE"], variables["FARANDOLE_TRACE"]) == ("90", "trace.json")
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    assert {each["mountPath"] for each in container["volumeMounts"]} == {
        *("/dev/shm", "/app/runs", "/data")
    }


def test_a_pytorchjob_has_a_master_and_workers() -> None:
    (job,) = written(*FULL, "--kind", "pytorchjob", "train.py")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Master": 1, "Worker": 2}
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # where the operator sets its variables
        assert container["command"] == ["torchrun", "--nnodes=3", "--nproc-per-node=2", "train.py"]
    (alone,) = written(*BASIC, "--kind", "pytorchjob", "train.py")
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_it_is_written_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    assert written(*BASIC, "--output", str(path), "train.py") == []
    assert [each["kind"] for each in yaml.safe_load_all(path.read_text())] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "kubernetes", "train.py"), "--image is missing"),
        ((*BASIC, "--kind", "pod", "train.py"), "--kind pod: choose one of job, pytorchjob"),
        ((*BASIC, "--memory", "lots", "train.py"), "--memory lots: write a quantity"),
        ((*BASIC, "--name", "My_Run", "train.py"), "--name 'My_Run' cannot be the name of a Job"),
        ((*BASIC, "--name", "x" * 53, "train.py"), "use at most 52"),
        ((*BASIC, "--namespace", "A", "train.py"), "--namespace 'A'"),
        ((*BASIC, "--volume", "results", "train.py"), "--volume results: write CLAIM:PATH"),
        ((*BASIC, "--volume", "a:/dev/shm", "train.py"), "/dev/shm is taken"),
        ((*BASIC, "--token-secret", "a b", "train.py"), "--token-secret a b: write NAME"),
        (
            (*BASIC, "--nodes", "2", "--per-node", "2", "--token-secret", "a", "train.py"),
            "started by torchrun, whose store asks for no token",
        ),
        ((*BASIC, "-n", "4", "train.py"), "as in --nodes 1 --per-node 4"),
        ((*BASIC, "--nodes", "0", "train.py"), "--nodes 0: give 1 or more"),
        ((*BASIC, "--cpus", "0", "train.py"), "--cpus 0"),
        ((*BASIC, "--stall", "9", "train.py"), "--stall is carried out by Farandole's own"),
        ((*BASIC, "--servers", "2", "train.py"), "--servers 2 under --on kubernetes: start"),
        ((*BASIC, "--partition", "a", "train.py"), "it is for --on slurm"),
        ((*BASIC, "--sync", "alreduce", "train.py"), "there is no strategy 'alreduce'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: Sequence[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        written(*arguments)


def started(sandbox: Sandbox, options: Sequence[str], nodes: int, port: str) -> str:
    """Runs each pod's command with its variables, as the kubelet does, and returns the output.

    What cannot be had here is replaced: the Secret, and the name of the first pod.
    """
    _, job = written(*BASIC, "--nodes", str(nodes), *options, str(SCRIPT), "$(HOME)")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    first = f"{job['metadata']['name']}-0.{job['metadata']['name']}"
    pods = []
    for index in range(nodes):
        known = {"fieldRef": str(index), "secretKeyRef": "0123456789abcdef" * 4}
        variables = {
            each["name"]: each["value"] if "value" in each else known[next(iter(each["valueFrom"]))]
            for each in container["env"]
        }
        if "MASTER_ADDR" in variables:
            assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (first, "29500")
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pods.append(variables)
    words = [expanded(word, pods[0]) for word in container["command"]]
    if words[0] == "python":
        ends = sandbox.by_hand(pods, *words[1:])
    else:
        assert f"--master-addr={first}" in words
        here = [
            word.replace(first, "127.0.0.1").replace("=29500", f"={port}") for word in words[1:]
        ]
        ends = [sandbox.fork("-m", "torch.distributed.run", *here, **pods[0])]
    assert not any(end.returncode for end in ends), [end.stderr for end in ends]
    return "".join(end.stdout for end in ends)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it: `$(NAME)` is a variable, and `$$` a dollar sign."""
    return re.sub(
        r"\$(?:\$|\((\w+)\))", lambda found: variables[found[1]] if found[1] else "$", text
    )


def test_its_pods_train_together(sandbox: Sandbox, free_port: str) -> None:
    options = ("--token-secret", "token", "--seed", "7", "--name", "pods")
    for facts in trained_ranks(started(sandbox, options, 2, free_port), 2):
        assert (facts["name"], facts["seed"]) == ("pods", 7)
        assert facts["arguments"] == ["$(HOME)"]


def test_several_workers_of_a_pod_train_together(sandbox: Sandbox, free_port: str) -> None:
    output = started(sandbox, ("--per-node", "2"), 1, free_port)
    assert [facts["local"] for facts in trained_ranks(output, 2)] == [[0, 2], [1, 2]]
