"""`farandole schedule`: what it shows, draws and refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from farandole.cli import commands
from farandole.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "pipeline_schedules.md"


def schedule(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["schedule", *arguments], env={"COLUMNS": "100"})


def shown(*arguments: str) -> list[str]:
    result = schedule(*arguments)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_the_page_shows_what_the_command_prints() -> None:
    text = PAGE.read_text()
    (command,) = re.findall(r"^farandole schedule (.*)$", text, re.MULTILINE)
    assert "```text\n{}\n```".format("\n".join(shown(*command.split()))) in text


def test_every_option_is_on_the_page() -> None:
    options = set(re.findall(r"--[a-z]+", schedule("-h").output)) - {"--help"}
    assert len(options) == 5
    assert all(f"\n| `{option} " in PAGE.read_text() for option in options)


@pytest.mark.parametrize(
    ("layout", "first_line"),
    [
        ("stages=1", "1f1b: 1 stage(s) on 1 rank(s), 1 micro-batch(es)"),
        ("stages=2,schedule=layer", "layer: 2 stage(s) on 2 rank(s), 1 micro-batch(es)"),
        (
            "stages=4,microbatches=4,schedule=gems",
            "gems of layer: 4 stage(s) on 4 rank(s), 4 micro-batch(es)",
        ),
        (
            "stages=6,microbatches=4,schedule=interleaved,chunks=3",
            "interleaved: 6 stage(s) on 2 rank(s), 4 micro-batch(es)",
        ),
        (
            "stages=2,microbatches=3,schedule=2bw",
            "2bw: 2 stage(s) on 2 rank(s), 18 micro-batch(es)",
        ),
        (
            "stages=2,schedule=pipedream,stash=false,replicas=2+1",
            "pipedream: 2 stage(s) on 3 rank(s), 6 micro-batch(es)",
        ),
    ],
)
def test_layouts(layout: str, first_line: str) -> None:
    assert shown(layout)[0] == first_line


def test_ranks_of_tiles() -> None:
    assert shown("stages=2,tiles=1x2")[-3:] == [
        "grid: 1x2 tiles × 2 stages × 1 replica, 4 ranks",
        "  stage 0  ranks 0 1",
        "  stage 1  ranks 2 3",
    ]


def test_costs_of_single_stages() -> None:
    lines = shown("stages=2", "--forward", "1+3", "--backward", "2", "--transfer", "0.5")
    assert "rank 0  F0          B0---|" not in lines
    assert lines[-1] == "9 s; 5 s if nobody waited; idle: 55.6 % of all ranks' time"
    assert lines[-3].split() == ["1", "1", "1", "1", "44.4", "%"]


def test_steps_of_a_stream() -> None:
    lines = shown("stages=3,schedule=pipedream", "--steps", "2")
    assert "rank 2        F0 B0---|F1 B1---|" in lines
    assert "F2" not in "".join(lines)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_picture(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"drawn{ending}"
    assert shown("stages=2,microbatches=2", "--plot", str(path))[-1] == f"drawn: {path}"
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stages=auto"], "stages=auto is found by measuring a model"),
        (["stages=2,schedule=1f2b"], "Did you mean '1f1b'?"),
        (["stages=2", "--steps", "3"], "--steps 3: each step of 1f1b ends before the next begins"),
        (["stages=2,schedule=pipedream", "--steps", "0"], "0 steps; give at least 1"),
        (["stages=2", "--forward", "fast"], "--forward fast: give seconds"),
        (["stages=2", "--backward", "1+2+3"], "--backward 1+2+3: 3 numbers for 2 stages"),
        (["stages=2", "--forward", "nan"], "a cost of nan seconds"),
        (["stages=2", "--transfer", "-1"], "a cost of -1 seconds"),
        (["stages=2", "--plot", "out.pdf"], "out.pdf: a timeline is drawn as .png or .svg"),
        (["stages=2", "--plot", "no-such-folder/out.png"], "in a folder that exists"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str) -> None:
    result = schedule(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert result.output == "", "before anything is shown"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from farandole.cli import commands\n"
        "print(CliRunner().invoke(commands, ['schedule', '-h']).output)\n"
        "print({'torch', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr
    assert "zero-bubble, gems, pipedream, 2bw." in done.stdout
