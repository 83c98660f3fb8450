"""The end of a run: its parts are closed in order, and what the script forgot is said."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.train.checkpoint.run_saving import RunSaving
from farandole.train.choosing.choices import Choices
from farandole.train.loaders import RunLoaders
from farandole.train.passes import Passes
from farandole.train.run_metrics import RunMetrics
from farandole.train.run_parts.naming import RunName
from farandole.train.session import Session


@dataclass(frozen=True)
class Closing:
    """Closes what a run has opened. The folder of a run that wrote nothing goes last."""

    session: Session
    passes: Passes
    loaders: RunLoaders
    choices: Choices
    metrics: RunMetrics
    saving: RunSaving
    name: RunName

    def close(self) -> None:
        session, passes = self.session, self.passes
        passes.close()
        if passes.preemption is not None:
            passes.preemption.close()
        if passes.automatic is not None:
            passes.automatic.close()
            self._note_missing_checkpoints(has_begun=passes.automatic.has_begun)
        if session.bar is not None:
            session.bar.end()
        session.models.close()
        self.choices.close()
        self._note_missing_loader()
        self.metrics.close()
        try:
            self.saving.close()
        finally:
            self.name.release()

    def _note_missing_checkpoints(self, *, has_begun: bool) -> None:
        if len(self.session.models) and not has_begun:
            self.session.print(
                "note: no checkpoint was saved: no training batch came from run.loader. Call "
                "run.end_step() after each step."
            )

    def _note_missing_loader(self) -> None:
        trained = len(self.session.models) and self.metrics.has_begun
        dealt = len(self.loaders) > 0 or self.session.reads_elsewhere
        if trained and not dealt and self.session.size > 1:
            self.session.print(
                "note: no batch came from run.loader, so every rank saw what it loaded itself"
            )
