"""What a script does that is right on one worker and hardly what it wants on several: a note, once.

What takes a comparison of ranks comes at the end of a training pass, where they meet anyway.
"""

from __future__ import annotations

from farandole.train.session import Session


class Hints:
    """Of one rank of a run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.evaluations = 0  # passes over test data that this rank has read to the end
        self._told: set[str] = set()

    def after_pass(self) -> None:
        """*Together.*"""
        self._compare_buffers()
        self._compare_evaluations()

    def tell_of_shared_samples(self) -> None:
        self._tell(
            "samples",
            "a pass that is read with gradients enabled counts as training, and several workers "
            "read the same samples in its last step: a script that counts them here counts them "
            "several times. To evaluate, put the loop over the loader under torch.no_grad(), or "
            "pass training=False to run.loader.",
        )

    def _compare_buffers(self) -> None:
        apart = self._session.models.buffers_apart(self._session.replicas)
        if apart:
            shown = ", ".join(map(repr, apart[:3])) + ", …" * (len(apart) > 3)
            self._tell(
                "buffers",
                f"the buffers {shown} differ between ranks. Under --sync {self._session.strategy} "
                "each rank goes on with its own, and rank 0's are saved. If they are learned, as "
                "averages of what a rank has seen, bring them together after each epoch: "
                "buffer.copy_(run.mean(buffer)).",
            )

    def _compare_evaluations(self) -> None:
        session = self._session
        comes_late = session.most_workers is not None or session.group.transport.may_join_late
        if session.size == 1 or comes_late:  # who comes late has missed some
            return
        counts = session.group.gather_json(self.evaluations)
        most, least = max(counts), min(counts)
        if most != least:
            self._tell(
                "evaluations",
                f"rank {counts.index(most)} has evaluated {most} times on batches of run.loader, "
                f"rank {counts.index(least)} {least} times. Each rank reads its share only, a part "
                "of the samples. Evaluate on all ranks and average by run.mean, or read a "
                "DataLoader on one rank.",
            )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._session.print(f"note: {text}")
