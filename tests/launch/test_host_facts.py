"""What a host says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farandole
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host, script_of


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "shared").touch()
    files = JobFiles(str(tmp_path), "train.py", ("key",), (str(tmp_path / "shared"),))
    facts = facts_of_this_host(files)
    assert HostFacts.from_json(facts.to_json()) == facts
    assert (facts.torch, facts.farandole) == (torch.__version__, farandole.__version__)
    assert facts.missing == ["key"]
    assert facts.cores >= 1
    (tmp_path / "train.py").write_text("2")
    (tmp_path / "shared").unlink()
    again = facts_of_this_host(files)
    assert again.missing == ["key", str(tmp_path / "shared")]
    assert None is not again.script != facts.script
    gone = facts_of_this_host(JobFiles(str(tmp_path / "gone"), "train.py"))
    assert (gone.folder_exists, gone.script) == (False, None)


def test_gpus_that_the_user_hides() -> None:
    assert facts_of_this_host(JobFiles("/"), {"CUDA_VISIBLE_DEVICES": ""}).gpus == 0


def test_a_host_of_another_version() -> None:
    with pytest.raises(ValueError, match="HostFacts has the fields python, torch, "):
        HostFacts.from_json(b'{"python": "3.11.2"}')


def test_which_file_is_the_script() -> None:
    assert script_of("/usr/bin/python3", ["train.py", "--lr", "1"]) == "train.py"
    assert script_of("/usr/bin/python3", ["/other/train.py"]) == "/other/train.py"
    assert script_of("/usr/bin/python3", ["-m", "train"]) is None
    assert script_of("/bin/sh", ["train.sh"]) is None
