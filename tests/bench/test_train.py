"""`farandole bench train`: real workers at tiny sizes, the arithmetic alone, and bad input."""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import farandole as fd
from farandole.bench import throughput
from farandole.bench.ends import finish
from farandole.bench.throughput import Bench, Workload
from farandole.cli import commands
from farandole.doctor.checks import check_compiler
from farandole.errors import FarandoleError, LaunchError, UserError
from farandole.launch.launcher import Outcome
from farandole.models import build
from farandole.options import format_options, parse_options
from farandole.testing import run_world
from farandole.worker.failure import Failure

bench = importlib.import_module("farandole.cli.bench")  # not the command of that name
Cli = Callable[..., subprocess.CompletedProcess[str]]

# Real processes


def test_two_workers_print_and_write_what_they_measured(
    farandole_cli: Cli, readme_command: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """By the command of the README, and more options."""
    sync = "allreduce:bucket_mib=0.1"
    done = farandole_cli(
        *readme_command("bench train"), "--image-size", "8", "--warmup-batches", "1",
        "--batches-per-iteration", "2", "--channels-last", "--bare", "--sync", sync,
        "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())

    rates = found["images_per_second_per_worker"]
    assert len(rates["iterations"]) == found["settings"]["iterations"] == 3
    assert found["settings"]["batch_size"] == 32
    assert rates["mean"] == pytest.approx(statistics.fmean(rates["iterations"]))
    assert rates["ci"] == pytest.approx(1.96 * statistics.pstdev(rates["iterations"]))
    assert found["images_per_second_total"]["mean"] == pytest.approx(2 * rates["mean"])
    parameters = build("small_cnn", image_size=8).parameters()
    bytes_per_step = sum(p.numel() * 4 for p in parameters)  # a ring of two sends it once
    # Of the timed steps, of ours alone, and what each bucket carries beside the gradients: a flag
    # for each parameter, a note of each rank.
    assert found["bytes_sent_per_worker"] == pytest.approx(3 * 2 * bytes_per_step, abs=400)
    assert 0 < found["waited_seconds"] < 3 * 2 * 32 / min(rates["iterations"])
    assert found["peak_memory_bytes"] > 50 * 2**20
    assert max(found["peak_memory_bytes_by_rank"]) == found["peak_memory_bytes"]
    assert len(found["peak_memory_bytes_by_rank"]) == found["workers"]
    assert found["settings"]["sync"] == sync
    assert found["settings"]["image_size"] == 8
    assert found["settings"]["channels_last"] is True
    assert found["workers"] == 2
    assert found["device"].startswith("CPU")
    assert found["versions"]["torch"] == torch.__version__
    bare = found["bare_images_per_second_per_worker"]["iterations"]
    pairs = zip(rates["iterations"], bare, strict=True)
    assert found["ratio_to_bare"] == pytest.approx(statistics.median(a / b for a, b in pairs))

    lines = done.stdout.splitlines()
    assert lines[0] == "Model: small_cnn, images 1×8×8"
    assert lines[2] == f"Workers: 2, {sync}"
    shown = [float(line.split()[2]) for line in lines if line.startswith("Iter #")]
    assert shown == pytest.approx(rates["iterations"], abs=0.06)
    assert f"Img/sec per worker: {rates['mean']:.1f} ± {rates['ci']:.1f}" in lines
    total = found["images_per_second_total"]
    assert f"Total img/sec on 2 worker(s): {total['mean']:.1f} ± {total['ci']:.1f}" in lines
    assert lines[-1] == f"Ratio to a bare PyTorch loop: {found['ratio_to_bare']:.4f}"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "and nothing else"


def test_compiled_and_alone(sandbox: Any) -> None:
    compiler = check_compiler(gpu=False)
    if compiler.status != "ok" and os.environ.get("FARANDOLE_TEST_REQUIRE") != "all":
        pytest.skip(f"{compiler.value}: {compiler.hint}")
    cache = sandbox.temporary / "inductor"
    done = sandbox.fork(
        "-m", "farandole.bench.throughput", format_options(small(compile=True)),
        TORCHINDUCTOR_CACHE_DIR=str(cache),
        TORCHINDUCTOR_COMPILE_THREADS="1",  # no pool of processes for a few small kernels,
        TORCHINDUCTOR_VEC_ISA_OK="0",  # and no vector code in them: both are built sooner so
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Total img/sec on 1 worker\(s\): [\d.]+ ±", done.stdout)
    assert list(cache.rglob("*.so")), "something was compiled"


# The measurement, in this process


@pytest.fixture
def flags() -> Iterator[None]:
    """Puts back what a benchmark sets for its whole process."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = "tf32"


def small(**changes: Any) -> Workload:
    options: dict[str, Any] = {
        "model": "mlp", "image_size": 4, "batch_size": 2, "warmup_batches": 1,
        "batches_per_iteration": 1, "iterations": 4,
    }  # fmt: skip
    return Workload(**(options | changes))


@pytest.mark.usefixtures("flags")
def test_sides_take_turns_and_the_ratio_is_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[torch.nn.Module] = []
    fake_rates = iter([90.0, 100.0, 200.0, 100.0, 50.0, 100.0, 100.0, 80.0])

    def rate(bench: Bench, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        models.append(model)
        bench.train(model, optimizer, 1)
        return next(fake_rates)

    monkeypatch.setattr(Bench, "rate", rate)
    (found,) = run_world(1, lambda run: throughput.measure(run, small(bare=True)), folder=tmp_path)
    ours, bare = models[0], models[1]
    assert ours is not bare
    assert models == [ours, bare, bare, ours, ours, bare, bare, ours]
    assert found["images_per_second_per_worker"]["iterations"] == [90.0, 100.0, 50.0, 80.0]
    assert found["bare_images_per_second_per_worker"]["iterations"] == [100.0, 200.0, 100.0, 100.0]
    assert found["ratio_to_bare"] == pytest.approx((0.5 + 0.8) / 2)


@pytest.mark.usefixtures("flags")
def test_every_batch_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[None] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda optimizer: steps.append(None))
    run_world(
        1,
        lambda run: throughput.measure(
            run, small(warmup_batches=3, batches_per_iteration=5, iterations=2, precision="bf16")
        ),
        folder=tmp_path,
    )
    assert len(steps) == 3 + 5 * 2


@pytest.mark.usefixtures("flags")
def test_workers_rates_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(bench: Bench, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        bench.train(model, optimizer, 1)
        return 10.0 if fd.current().rank == 0 else 30.0

    monkeypatch.setattr(Bench, "rate", rate)
    found = run_world(2, lambda run: throughput.measure(run, small()), folder=tmp_path)
    for rank in range(2):
        assert found[rank]["images_per_second_per_worker"]["mean"] == 20.0
        assert found[rank]["images_per_second_total"]["mean"] == 40.0


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize(
    ("precision", "matmul", "convolution"),
    [("fp32", "highest", "ieee"), ("tf32", "high", "tf32")],
)
def test_fp32_is_fp32_and_tf32_is_tf32(
    tmp_path: Path, precision: Any, matmul: str, convolution: str
) -> None:
    run_world(1, lambda run: throughput.measure(run, small(precision=precision)), folder=tmp_path)
    # Read by both of PyTorch's interfaces: torch.compile asks the older one, and it must answer.
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    assert torch.backends.cudnn.conv.fp32_precision == convolution


def test_channels_last_holds_for_model_and_images() -> None:
    workload = Workload(model="small_cnn", batch_size=2, channels_last=True)
    images, _ = workload.batch("cpu")
    weights = [p for p in workload.network().parameters() if p.dim() == 4 and p.shape[1] > 1]
    assert weights
    for tensor in (images, *weights):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("flags")
def test_figures_are_shown_even_if_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FarandoleError, match=r"out\.json could not be written"):
        throughput.main([format_options(small()), str(tmp_path / "gone" / "out.json")])
    assert "Img/sec per worker:" in capsys.readouterr().out


def test_out_of_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(run: object, workload: Workload) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(throughput, "measure", too_much)
    with pytest.raises(
        FarandoleError, match=r"mlp with 2 images per worker .* smaller --batch-size\.$"
    ):
        throughput.main([format_options(small())])
    monkeypatch.setenv("FARANDOLE_PER_GPU", "2")
    monkeypatch.setattr(throughput, "init", lambda **_: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(throughput, "device_name", str)
    with pytest.raises(FarandoleError, match=r"-size, or fewer workers a GPU: --per-gpu 1\.$"):
        throughput.main([format_options(small())])


def test_another_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: object, workload: Workload) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(throughput, "measure", fail)
    with pytest.raises(RuntimeError, match="no luck"):
        throughput.main([format_options(small())])


def test_what_graphs_and_a_fused_step_are_asked_for_by(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    for workload in (small(compile=True), small(compile=True, cuda_graphs=True)):
        _, optimizer = throughput.Bench(workload, torch.device("cpu")).fresh()
        assert not optimizer.defaults["fused"]
    assert asked == [None, "reduce-overhead"]
    model, optimizer = throughput.Bench(small(fused=True), torch.device("cpu")).fresh()
    assert optimizer.defaults["fused"]
    model(torch.zeros(2, *small().image_shape)).sum().backward()
    optimizer.step()


def test_the_workload_survives_its_text_form() -> None:
    for workload in (Workload(), small(compile=True, bare=True, precision="bf16")):
        assert parse_options(Workload, format_options(workload), what="test") == workload


# Bad input is refused before any worker starts


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> BaseException | None:
    def no_launch(job: object) -> None:
        pytest.fail(f"workers were started: {job}")

    monkeypatch.setattr("farandole.launch.launcher.launch", no_launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return CliRunner().invoke(commands, ["bench", "train", *arguments]).exception


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-n 0", "-n 0"),
        ("--model resnet5", "Did you mean 'resnet50'?"),
        ("--model alexnet --image-size 8", "at least 63"),
        ("--model resnet18 --image-size 8 --batch-size 1", "larger --batch-size"),
        ("--batch-size 0", "--batch-size 0: give 1 or more"),
        ("--iterations 0", "--iterations 0: give 1 or more"),
        ("--batches-per-iteration 0", "--batches-per-iteration 0"),
        ("--warmup-batches -1", "--warmup-batches -1: give 0 or more"),
        ("--model mlp --precision tf32", "NVIDIA"),
        ("--model mlp --compile --cuda-graphs", "--cuda-graphs is for NVIDIA GPUs"),
        ("--model mlp --cuda-graphs", "add --compile"),
        ("--model mlp --per-gpu 2 -H localhost:3", "--per-gpu 2 and hosts (localhost:3)"),
        ("--model mlp --per-gpu 2 -n 1,2", "--per-gpu 2 is for one measurement"),
        ("--model mlp --sync alreduce", "Did you mean 'allreduce'?"),
        ("--model mlp --json /no-such-folder/out.json", "/no-such-folder: No such file"),
        ("--model mlp --json /", "--json / is not a file"),
        ("--model mlp --json /dev/null", "--json /dev/null is not a file"),
        ("--model mlp --json /proc/out.json", "--json /proc/out.json cannot be written"),
    ],
)
def test_bad_input(monkeypatch: pytest.MonkeyPatch, arguments: str, complaint: str) -> None:
    monkeypatch.setenv("CXX", "true")  # any program: the compiler is not at issue here
    error = invoke(monkeypatch, *arguments.split())
    assert isinstance(error, UserError)
    assert complaint in str(error)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    error = invoke(monkeypatch, "--model", "mlp", "--compile")
    assert isinstance(error, UserError)
    assert "no no-such-compiler. Try: apt install g++" in str(error)


def test_a_gpu_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    with pytest.raises(UserError, match=r"8\.0 \(Ampere\) or later; Tesla V100 has 7\.0"):
        bench._check_tf32()


def test_the_old_file_stays_until_the_new_one_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "out.json"
    old.write_text("old")
    error = invoke(monkeypatch, "--model", "mlp", "--batch-size", "0", "--json", str(old))
    assert isinstance(error, UserError)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


# The end


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Failure(1, 1, "Traceback…\nValueError: no luck\n", 5), "failed: ValueError: no luck"),
        (Failure(1, -9, "", None), "was killed by SIGKILL"),
        (Failure(1, 3, "", None), "failed: exit code 3"),
    ],
)
def test_a_worker_that_fails_is_named(failure: Failure, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        finish(Outcome(failure, (1,), logs=Path("/tmp/logs")))
    assert str(caught.value).splitlines() == [
        f"the benchmark failed: rank 1 {said}",
        "Every rank's output is in /tmp/logs.",
    ]


def test_stopping_it_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        finish(Outcome(stopped_by="SIGINT"))
    assert caught.value.code == 130
    assert "no worker is left" in capsys.readouterr().err
