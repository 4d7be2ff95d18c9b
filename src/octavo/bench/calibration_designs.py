"""Which batches a calibration runs, on CPUs and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Designs:
    """What to run. ``contexts`` are prompts of decoding rows; rows times context stay within
    ``max_tokens``. ``prompts`` run alone, ``beside`` next to ``beside_rows`` decoding ones."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    max_tokens: int
    prompts: tuple[int, ...]
    beside: tuple[int, ...]
    beside_rows: int = 8
    decode_steps: int = 12
    rounds: int = 3
    warm_rounds: int = 0

    def scaled(self, max_rows: int, max_length: int) -> Designs:
        """Within what an engine takes."""
        longest = max_length - self.decode_steps * 4
        return replace(
            self,
            rows=tuple(n for n in self.rows if n <= max_rows),
            contexts=tuple(n for n in self.contexts if n <= longest),
            prompts=tuple(n for n in self.prompts if n <= longest),
            beside=tuple(n for n in self.beside if n <= longest),
            beside_rows=min(self.beside_rows, max(max_rows - 1, 1)),
        )


CPU = Designs(
    rows=(1, 2, 4, 8, 16, 32, 64),
    contexts=(32, 256, 1024),
    max_tokens=8192,
    prompts=(8, 32, 64, 128, 256, 512, 1024, 2048),
    beside=(16, 64, 256),
)
CUDA = Designs(
    rows=(1, 8, 32, 64, 128, 256, 512),
    contexts=(128, 512, 1024, 8192, 32768),
    # Enough for 256 rows of 512: what many rows read must not be told from few long ones alone.
    max_tokens=132_000,
    prompts=(64, 256, 512, 1024, 2048, 8192, 32768),
    beside=(64, 512, 2048),
    beside_rows=64,
    rounds=1,
    # The first use of a kind of step compiles, the second captures.
    warm_rounds=2,
)
