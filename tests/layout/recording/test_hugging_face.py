"""Hugging Face's models, as they are, in stages: cut at their layers, with the plain gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.errors import StageError
from farandole.layout import parse_layout
from farandole.layout.arguments import arguments_of
from farandole.layout.partition.blocks import Sample, blocks_of
from farandole.testing import run_world
from farandole.train import Run
from tests.layout.models import Recorder, assert_close, sgd, tensors_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = 40


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=16,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
        model = transformers.LlamaForCausalLM(config)
    return model.double()


def batch_of(rows: int, length: int, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, 3 + row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plainly(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], Any, Any]:
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    recorder = Recorder(model, optimizer)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, recorder.steps, tensors_of(model)


def trained(
    model: nn.Module, batches: list[dict[str, Tensor]], text: str, folder: Path, **options: Any
) -> list[Any]:
    layout = parse_layout(text)
    models = [copy.deepcopy(model) for _ in range(layout.ranks)]

    def body(run: Run) -> Any:
        model = models[run.rank]
        trainer = run.trainer(model, None, sgd, layout=layout, sample=batches[0], **options)
        recorder = Recorder(model, trainer.optimizer)
        losses = [trainer.step(batch).item() for batch in batches]
        return losses, recorder.steps, tensors_of(model)

    return run_world(layout.ranks, body, folder=folder)


def assert_as_plain(found: list[Any], expected: Any, atol: float = 1e-6) -> None:
    """Its loss is computed in single precision, whatever the model's is: so are sums of losses."""
    losses, gradients, weights = expected
    assert {name for rank in found for name in rank[2]} == set(weights)
    for own_losses, own_gradients, own_weights in found:
        torch.testing.assert_close(own_losses, losses, rtol=1e-6, atol=0)
        for ours, theirs in zip([*own_gradients, own_weights], [*gradients, weights], strict=True):
            for name, value in ours.items():
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_they_are_cut_at_their_layers(kind: str) -> None:
    model = model_of(kind)
    blocks = blocks_of(model, sample=Sample(arguments_of(batch_of(2, 6))))
    path = "transformer.h" if kind == "gpt2" else "model.layers"
    for number in range(4):
        assert any(block.name.startswith(f"{path}.{number}.") for block in blocks)
    counts = [sum(each.numel() for each in block.module.parameters()) for block in blocks]
    assert max(counts) < 0.3 * sum(counts)


@pytest.mark.parametrize("text", ["stages=2", "stages=2,microbatches=2", "stages=4"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_they_train_as_the_plain_model(kind: str, text: str, tmp_path: Path) -> None:
    model = model_of(kind)
    batches = [batch_of(4, 6), batch_of(3, 6), batch_of(4, 9)]
    atol = 1e-6 if "microbatches" in text else 1e-10
    assert_as_plain(trained(model, batches, text, tmp_path), plainly(model, batches), atol)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padding_is_exact_or_refused(kind: str, tmp_path: Path) -> None:
    model, text = model_of(kind), "stages=2,microbatches=2"
    batches = [batch_of(4, 6, padded=True), batch_of(5, 6, padded=True)]
    with pytest.raises(StageError, match="loss_weight"):
        trained(model, batches, text, tmp_path / "refused")

    def counted(batch: dict[str, Tensor], _: None) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    found = trained(model, batches, text, tmp_path / "exact", loss_weight=counted)
    assert_as_plain(found, plainly(model, batches))


def test_predictions(tmp_path: Path) -> None:
    model, batch = model_of("gpt2"), batch_of(4, 6)

    def predicted(use_cache: bool) -> list[Any]:
        models = [copy.deepcopy(model) for _ in range(2)]
        for each in models:
            each.config.use_cache = use_cache  # type: ignore[union-attr]

        def body(run: Run) -> Any:
            layout = parse_layout("stages=2,microbatches=2")
            trainer = run.trainer(models[run.rank], None, sgd, layout=layout, sample=batch)
            return trainer.predict(batch)

        return run_world(2, body, folder=tmp_path / str(use_cache))

    with pytest.raises(StageError, match=r"config.use_cache = False"):
        predicted(True)
    expected = model.eval()(**batch)
    for found in predicted(False):
        assert_close(found.logits, expected.logits.detach())
